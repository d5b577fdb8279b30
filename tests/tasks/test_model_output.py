"""The tensor of a model's output from which a task computes its loss."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import train_here

import instrument
from instrument import ConfigError
from instrument.tasks import NextToken, Reconstruction, Supervised
from instrument.tasks.model_output import LossOutput

Cli = Callable[..., Any]

TARGETS = torch.tensor([0, 2, 1])
IMAGES = torch.linspace(-1, 1, 12).view(3, 4)


class Logits(NamedTuple):
    """The output of Inception in training mode."""

    logits: Tensor
    aux_logits: Tensor


class Several(nn.Module):
    """A model that returns several tensors in training mode, and optionally one in evaluation mode."""

    def __init__(self, single: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head, self.other, self.single = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 3), single

    def forward(self, images: Tensor) -> Any:
        hidden = self.body(images)
        if self.single and not self.training:
            return self.head(hidden)
        return Logits(self.head(hidden), self.other(hidden))


@pytest.mark.parametrize(("path", "head"), [(None, "head"), ("logits", "head"), ("aux_logits", "other")])
def test_loss_and_gradients_are_those_of_the_chosen_output(path: str | None, head: str) -> None:
    model = Several()
    Supervised(nn.CrossEntropyLoss(), output=path)(model, (IMAGES, TARGETS)).loss.backward()  # type: ignore[union-attr]
    plain = Several()
    F.cross_entropy(getattr(plain, head)(plain.body(IMAGES)), TARGETS).backward()
    for (name, parameter), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), name
        assert expected.grad is None or torch.equal(parameter.grad, expected.grad), name  # type: ignore[arg-type]


def test_all_tasks_select_an_output() -> None:
    values = torch.arange(12.0).view(3, 4)
    second = returns((torch.zeros(3, 4), values))
    assert Reconstruction(nn.MSELoss(), output="1")(second, values).loss == 0
    logits = torch.randn(2, 3, 5)
    tokens = torch.tensor([[1, 4, 0], [2, 2, 3]])
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    outcome = NextToken(output="state.0")(returns({"logits": torch.zeros(2, 3, 5), "state": [logits]}), tokens)
    assert torch.allclose(outcome.loss, expected)  # type: ignore[arg-type]
    last = Supervised(nn.CrossEntropyLoss(), output="0[:, -1]")(returns((logits,)), (tokens, tokens[:, 0]))
    assert torch.equal(last.loss, F.cross_entropy(logits[:, -1], tokens[:, 0]))  # type: ignore[arg-type]


def returns(output: Any) -> nn.Module:
    return Calls(lambda _: output)


def test_single_output_of_the_evaluation_is_used() -> None:
    model, task = Several(single=True), Supervised(nn.CrossEntropyLoss(), output="aux_logits")
    assert torch.equal(task(model, (IMAGES, TARGETS)).loss, F.cross_entropy(model(IMAGES)[1], TARGETS))  # type: ignore[arg-type]
    model.eval()
    assert torch.equal(task(model, (IMAGES, TARGETS)).loss, F.cross_entropy(model(IMAGES), TARGETS))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "output", "allowed"),
    [
        ("logit", Logits(IMAGES, IMAGES), "logits, aux_logits"),
        ("2", (IMAGES, IMAGES), "0, 1"),
        ("1", IMAGES, "the output is a tensor"),
        ("0", "text", "none"),
    ],
)
def test_unknown_path_names_the_allowed_ones(path: str, output: Any, allowed: str) -> None:
    with pytest.raises(ConfigError, match="the model's output has no such tensor") as caught:
        Supervised(nn.CrossEntropyLoss(), output=path)(returns(output), (IMAGES, TARGETS))
    (problem,) = caught.value.problems
    assert (problem.where, problem.given) == ("task.output", path)
    assert allowed in str(caught.value)


@pytest.mark.parametrize("text", ["", "logits[", "0[x]"])
def test_text_that_is_no_path_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a part of the model's output|slice"):
        LossOutput(text)


def test_notice_names_the_outputs_without_gradient() -> None:
    mean, log_var = nn.Linear(4, 4)(IMAGES).chunk(2, 1)  # two results of one operation
    image, leaf = mean * 2, torch.zeros(3, requires_grad=True)
    notice = LossOutput(None).notice((image, mean, log_var, leaf, IMAGES), image.sum())
    assert (
        "the loss uses output '0' of the 5 tensors that the model returns; '2', '3' get no gradient" in notice.message
    )
    assert "or to another one of '0', '1', '2', '3', '4'" in notice.message
    assert notice.severity == "warning"
    with_leaf = LossOutput(None).notice((image, leaf), (image.sum() + leaf.sum()))
    assert (with_leaf.severity, "no gradient" in with_leaf.message) == ("info", False)


@pytest.mark.parametrize("output", [IMAGES, (IMAGES,), {"logits": IMAGES, "name": "x"}, SimpleNamespace(logits=IMAGES)])
def test_single_tensor_has_no_notice(output: Any) -> None:
    assert LossOutput(None).notice(output, torch.ones((), requires_grad=True).sum()) is None


def test_explicit_output_has_no_notice() -> None:
    assert LossOutput("0").notice((IMAGES, IMAGES), torch.ones(())) is None


def vae() -> nn.Module:
    def forward(encoder: nn.Module, decoder: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        mean, log_var = encoder(x.flatten(1)).chunk(2, 1)
        return decoder(mean).view_as(x), mean, log_var

    return Calls(forward, encoder=nn.Linear(64, 8), decoder=nn.Linear(4, 64))


RUN = (
    *("data=digits", "task=autoencoder", "~model", f"+model._target_={__name__}.vae", "train.steps=1"),
    *("train.batch_size=8", "data.slice.stop=8", "data.eval_slice.stop=8"),
)
MESSAGE = "the loss uses output '0' of the 3 tensors that the model returns; '2' gets no gradient from it"


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "more",
    [("hydra.run.dir=out",), ("plan=true",), ("-m", "seed=1,2", "hydra.sweep.dir=out")],
    ids=lambda more: more[0],
)
def test_each_run_reports_once_which_output_the_loss_uses(cli: Cli, more: tuple[str, ...]) -> None:
    answer = cli(*more, *RUN)
    assert answer.code == 0, answer.err
    assert " ".join(answer.out.split()).count(MESSAGE) == (2 if "-m" in more else 1)
    if more[0] == "hydra.run.dir=out":
        assert answer.out.index(MESSAGE) < answer.out.index("step")
        events = instrument.load("out").events
        assert events[["rule", "severity"]].to_numpy().tolist() == [["output", "warning"]]


@pytest.mark.slow
def test_run_with_an_explicit_output_reports_nothing(workdir: Path) -> None:
    assert not len(train_here(workdir / "out", *RUN, "+task.output=0").events)
    with pytest.raises(ConfigError, match=r"task\.output: the model's output has no such tensor"):
        train_here(workdir / "refused", *RUN, "+task.output=3")
