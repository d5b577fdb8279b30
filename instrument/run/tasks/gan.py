"""Wasserstein GAN with gradient penalty."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .base import Outcome, inputs_of


class WassersteinGAN:
    """A critic and a generator, trained together: WGAN-GP (Gulrajani et al. 2017).

    The model has the modules `generator`, from noise [N, latent] to samples, and `critic`, from samples to scores.
    The critic's loss, equation 3 of the paper, is

        mean critic(fake) - mean critic(real) + penalty * mean (|gradient of critic at a mixture| - 1)^2

    and the generator's is -mean critic(fake), formed with the critic's parameters held still. Their sum is one loss:
    each of the two gets the gradient of its own part. They are trained by an optimizer each
    (`optimizer=generator_and_critic`), or by a single one. Both make a step with every batch, where the paper's generator
    makes one in five.

    Args:
        latent: Size of the noise.
        penalty: The weight of the gradient penalty; the paper's is 10.
    """

    def __init__(self, latent: int = 16, penalty: float = 10.0) -> None:
        if penalty < 0:
            raise ValueError(f"penalty has to be 0 or more, not {penalty}")
        self.latent = latent
        self.penalty = penalty

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """The loss of a batch of real samples [N, ...]; targets beside them are not looked at."""
        real = inputs_of(batch)
        generator, critic = model.get_submodule("generator"), model.get_submodule("critic")
        fake = generator(torch.randn(len(real), self.latent, device=real.device, dtype=real.dtype))
        loss = critic(fake.detach()).mean() - critic(real).mean()
        if torch.is_grad_enabled():  # an evaluation has no gradients: it forms no penalty, and trains no generator
            loss = loss + self.penalty * gradient_penalty(critic, real, fake.detach())
            with held_still(critic):
                loss = loss - critic(fake).mean()
        return Outcome(loss, len(real))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """mean (|gradient of the critic's score| - 1)^2, at points drawn evenly between real and fake samples."""
    share = torch.rand(len(real), *[1] * (real.dim() - 1), device=real.device, dtype=real.dtype)
    mixture = (share * real + (1 - share) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixture).sum(), mixture, create_graph=True)
    norms: Tensor = gradient.flatten(1).norm(dim=1)
    return (norms - 1).square().mean()


@contextmanager
def held_still(module: nn.Module) -> Iterator[None]:
    """What is computed inside passes gradients through a module, and none to its parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
