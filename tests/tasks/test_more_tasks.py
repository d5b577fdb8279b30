"""Reconstruction, next-token and Wasserstein GAN tasks: losses against formulas, and their experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hook_runs import Calls
from torch import nn
from torch.nn import functional as F
from training_runs import train_here

from instrument import ConfigError
from instrument.plan.shape_inference import infer_shapes
from instrument.tasks import NextToken, Reconstruction, Supervised, Task, WassersteinGAN
from instrument.tasks.base import mean_loss
from instrument.tasks.gan import gradient_penalty
from instrument.training.datasets import english
from instrument.training.models import DenseGAN, TinyGPT

TOKENS, CLASS = torch.tensor([[1, 2, 3], [3, 2, 1]]), torch.tensor([0, 1])


def test_autoencoder_loss_compares_output_and_input() -> None:
    model, batch = nn.Linear(4, 4), torch.randn(3, 4)
    for given in (batch, [batch, torch.zeros(3)]):
        outcome = Reconstruction(nn.MSELoss())(model, given)
        assert torch.equal(outcome.loss, F.mse_loss(model(batch), batch))
        assert outcome.correct is None
    with pytest.raises(ValueError, match=r"the output has shape \[3, 2\], but the input has shape \[3, 4\]"):
        Reconstruction(nn.MSELoss())(nn.Linear(4, 2), batch)


def test_next_token_is_predicted_from_the_position_before() -> None:
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    table = nn.Embedding(4, 4)
    outcome = NextToken()(table, tokens)
    expected = sum(F.cross_entropy(table(tokens[:, i]), tokens[:, i + 1]) for i in range(2)) / 2
    torch.testing.assert_close(outcome.loss, expected)
    with torch.no_grad():
        table.weight.copy_(torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 1, 0]]))
    correct = NextToken()(table, tokens).correct
    assert correct.item() == pytest.approx(1.0 + 0.5)  # both tokens of 1-2-3, and the first of 3-2-1


def test_next_token_uses_the_targets_of_a_pair() -> None:
    tokens = torch.tensor([[1, 2, 3], [3, 2, 1]])
    table = nn.Embedding(4, 4)
    alone, pair = NextToken()(table, [tokens]), NextToken()(table, [tokens[:, :-1], tokens[:, 1:]])
    assert torch.equal(pair.loss, alone.loss)
    targets = torch.tensor([[0, 0, 0], [0, 0, 0]])
    assert torch.equal(
        NextToken()(table, (tokens, targets)).loss, F.cross_entropy(table(tokens).flatten(0, 1), targets.flatten())
    )
    targets[0, 1:] = -100
    with torch.no_grad():
        table.weight.copy_(torch.eye(4))
    targets[1] = torch.tensor([3, 2, 0])
    outcome = NextToken()(table, (tokens, targets))
    assert outcome.correct.item() / outcome.samples == pytest.approx(2 / 4)  # of four targets that are not ignored


def test_reconstruction_weights_elements_of_sequences_equally() -> None:
    batches = [torch.randn(2, 5), torch.randn(4, 3)]
    model, task = nn.Tanh(), Reconstruction(nn.MSELoss())
    loss = mean_loss([task(model, batch) for batch in batches], [task.number_of_terms(batch) for batch in batches])
    errors = torch.cat([(batch.tanh() - batch).square().flatten() for batch in batches])
    torch.testing.assert_close(loss, errors.mean())


def test_next_token_with_one_target_per_prompt_uses_the_last_position() -> None:
    tokens, targets = torch.tensor([[1, 2, 3], [3, 2, 1], [0, 0, 2]]), torch.tensor([0, 1, -100])
    table = nn.Embedding(4, 4)
    outcome = NextToken()(table, (tokens, targets))
    torch.testing.assert_close(outcome.loss, F.cross_entropy(table(tokens[:2, -1]), targets[:2]))
    hits = (table(tokens[:2, -1]).argmax(-1) == targets[:2]).sum()
    assert outcome.correct.item() == pytest.approx(hits.item() / 2 * 3)
    assert NextToken().number_of_terms((tokens, targets)) == 2


@pytest.mark.parametrize(
    "batch", [(TOKENS, CLASS[:1]), (TOKENS, TOKENS[:, 1:]), TOKENS[:, :1], (TOKENS,) * 3, {"ids": TOKENS}]
)
def test_next_token_refuses_invalid_shapes(batch: object) -> None:
    task, model = NextToken(), nn.Embedding(4, 4)
    with pytest.raises(ConfigError, match=r"task: .*\n.*given    (ValueError: targets|TypeError: the)"):
        infer_shapes(model, lambda: task(model, batch), training=True)


@pytest.mark.parametrize(
    "task", [Reconstruction(nn.MSELoss()), Supervised(nn.MSELoss()), NextToken(), WassersteinGAN()]
)
def test_batch_for_another_task_is_refused(task: Task) -> None:
    with pytest.raises(TypeError, match=r"set task=huggingface, which .* or write a custom task"):
        task(nn.Identity(), {"a": torch.zeros(2, 3), "b": torch.zeros(2)})


def test_two_samples_without_targets_are_refused() -> None:
    with pytest.raises(TypeError, match=r"the batch is a Tensor of 2, .* a pair \(inputs, targets\)"):
        Supervised(nn.MSELoss())(nn.Identity(), torch.zeros(2, 3))


def test_language_model_does_not_depend_on_later_tokens() -> None:
    torch.manual_seed(0)
    model = TinyGPT(length=8).eval()
    tokens = torch.randint(128, (1, 8))
    other = tokens.clone()
    other[0, 5:] = 7
    assert torch.allclose(model(tokens)[0, :5], model(other)[0, :5], atol=1e-6)


def test_text_dataset_has_windows_in_two_splits() -> None:
    train, test = english("train", 32), english("test", 32)
    assert len(train) > 5 * len(test) > 0
    assert train[0].shape == (32,)
    assert all(int(train[i].min()) >= 0 and int(train[i].max()) < 128 for i in range(len(train)))


def test_gradient_penalty_matches_the_paper() -> None:
    """For the score |x|^2 / 2, whose gradient is x."""
    score = Calls(lambda samples: samples.square().sum(1) / 2)
    torch.manual_seed(1)
    real, fake = torch.randn(6, 3), torch.randn(6, 3)
    torch.manual_seed(2)
    penalty = gradient_penalty(score, real, fake)
    torch.manual_seed(2)
    weight = torch.rand(6, 1)
    mixture = weight * real + (1 - weight) * fake
    torch.testing.assert_close(penalty, (mixture.norm(dim=1) - 1).square().mean())


def test_generator_and_critic_get_gradients_of_their_own_loss() -> None:
    torch.manual_seed(0)
    model = DenseGAN(image=(1, 4, 4), width=8)
    real = torch.randn(5, 1, 4, 4)
    fake = model.generator(torch.randn(5, 16))
    critic_loss = model.critic(fake.detach()).mean() - model.critic(real).mean()
    critic_loss = critic_loss + 3.0 * gradient_penalty(model.critic, real, fake.detach())
    critic = torch.autograd.grad(critic_loss, list(model.critic.parameters()), allow_unused=True)
    generator = torch.autograd.grad(-model.critic(fake).mean(), list(model.generator.parameters()))
    torch.manual_seed(0)
    trained = DenseGAN(image=(1, 4, 4), width=8)
    WassersteinGAN(penalty=3.0)(trained, [torch.randn(5, 1, 4, 4)]).loss.backward()
    ours = {name: parameter.grad for name, parameter in trained.named_parameters()}
    expected = {
        f"generator.{name}": g for (name, _), g in zip(model.generator.named_parameters(), generator, strict=True)
    }
    expected |= {f"critic.{name}": g for (name, _), g in zip(model.critic.named_parameters(), critic, strict=True)}
    for name, gradient in expected.items():
        if gradient is not None:
            torch.testing.assert_close(ours[name], gradient)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["autoencoder", "language", "wgan_gp"])
def test_experiment_runs(workdir: Path, name: str) -> None:
    run = train_here(workdir / "out", f"+exp={name}", "train.steps=3")
    assert not run.coverage.query("fired < expected").size
    assert run.metrics.loss.notna().all()
