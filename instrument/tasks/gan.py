"""Task for Wasserstein GANs with gradient penalty."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from .base import Outcome, inputs_of


class WassersteinGAN:
    """The joint loss of a generator and a critic: WGAN-GP (Gulrajani et al. 2017).

    A batch contains real samples [N, ...], or is a tuple or list (samples, ...), whose further elements are ignored.
    The model has a submodule `generator`, which maps noise [N, latent] to samples, and a submodule `critic`, which maps
    samples to scores. The loss of the critic is equation 3 of the paper:

        mean critic(fake) - mean critic(real) + penalty * mean (|gradient of critic at a mixture| - 1)^2

    The loss of the generator is -mean critic(fake), computed without gradients for the parameters of the critic. The
    task returns the sum of both losses, so each submodule gets the gradient of its own loss. Train them with one
    optimizer each (`optimizer=generator_and_critic`) or with a single optimizer. Both make a step for each batch. In
    the paper, the generator makes one step per five steps of the critic.

    In an evaluation without gradients, the loss contains only the first two terms.

    Args:
        latent: The number of features of the noise. Default: 16.
        penalty: The weight of the gradient penalty. Default: 10, as in the paper.

    Raises:
        ValueError: `penalty` is negative.
    """

    def __init__(self, latent: int = 16, penalty: float = 10.0) -> None:
        if penalty < 0:
            raise ValueError(f"penalty must be at least 0, got {penalty}")
        self.latent = latent
        self.penalty = penalty

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Raises:
            TypeError: The samples are not a tensor.
            AttributeError: The model has no submodule `generator` or `critic`.
        """
        real = inputs_of(batch)
        generator, critic = model.get_submodule("generator"), model.get_submodule("critic")
        fake = generator(torch.randn(len(real), self.latent, device=real.device, dtype=real.dtype))
        loss = critic(fake.detach()).mean() - critic(real).mean()
        if torch.is_grad_enabled():  # An evaluation has no gradients, which the penalty requires.
            loss = loss + self.penalty * gradient_penalty(critic, real, fake.detach())
            fixed = {name: parameter.detach() for name, parameter in critic.named_parameters()}
            loss = loss - functional_call(critic, fixed, fake).mean()
        return Outcome(loss, len(real))


def gradient_penalty(critic: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
    """Return mean (|gradient of the critic's score| - 1)^2 at random points between real and fake samples.

    The points are uniformly distributed on the lines between pairs of samples (Gulrajani et al. 2017, section 4).

    Args:
        critic: Maps samples [N, ...] to scores.
        real: Real samples [N, ...].
        fake: Fake samples of the same shape.

    Returns:
        A scalar that can be differentiated with respect to the parameters of the critic.
    """
    weight = torch.rand(len(real), *[1] * (real.dim() - 1), device=real.device, dtype=real.dtype)
    mixture = (weight * real + (1 - weight) * fake).requires_grad_()
    (gradient,) = torch.autograd.grad(critic(mixture).sum(), mixture, create_graph=True)
    norms: Tensor = gradient.flatten(1).norm(dim=1)
    return (norms - 1).square().mean()
