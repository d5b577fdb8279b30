"""The tasks `huggingface` and `loss_dict`: losses, labels, weights, accuracy and errors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hook_runs import Calls
from state_comparison import identical
from torch import Tensor, nn
from torch.nn import functional as F

from instrument.tasks import ForwardOnly, HuggingFace, LossDict, Outcome
from instrument.tasks.base import accuracy, call_task, check_outcome, mean_loss

INPUTS, CLASSES = torch.randn(4, 3), torch.tensor([0, 1, 1, -100])
TOKENS = torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]])


class Logits(nn.Module):
    """A model without a loss. Its logits are its inputs, times a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.given = labels
        return {"logits": inputs * self.scale}


class TableForCausalLM(Logits):
    """A language model without a loss, whose name says that labels are shifted."""


def tiny_gpt() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config).eval()


@pytest.mark.parametrize("batch_type", ["dict", "BatchEncoding"])
def test_loss_of_the_model_is_used(batch_type: str) -> None:
    from transformers import BatchEncoding

    model, labels = tiny_gpt(), TOKENS.clone()
    labels[0, 2:] = -100
    batch: Any = {"input_ids": TOKENS, "labels": labels}
    if batch_type == "BatchEncoding":
        batch = BatchEncoding(batch)
    task = HuggingFace()
    outcome = task(model, batch)
    logits = model(input_ids=TOKENS).logits[:, :-1]
    torch.testing.assert_close(outcome.loss, F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten()))
    assert task.number_of_terms(batch) == 4  # labels 1 and 1 to 3, without the first of each row
    hits = (logits.argmax(-1) == labels[:, 1:]).sum().item()
    assert outcome.correct.item() == pytest.approx(hits / 4 * 2)
    assert outcome.samples == 2


def test_cross_entropy_is_computed_for_a_model_without_a_loss() -> None:
    model, batch = Logits(), {"inputs": INPUTS, "labels": CLASSES}
    task = HuggingFace()
    outcome = task(model, batch)
    torch.testing.assert_close(outcome.loss, F.cross_entropy(INPUTS, CLASSES))
    assert (outcome.samples, task.number_of_terms(batch)) == (4, 3)
    assert torch.equal(model.given, CLASSES)
    assert outcome.correct.item() == pytest.approx((INPUTS.argmax(1) == CLASSES).sum().item() / 3 * 4)


class OwnLoss(Logits):
    """A model that computes the mean loss itself, as those of Transformers."""

    def forward(self, inputs: Tensor, labels: Tensor) -> Any:
        logits = super().forward(inputs)["logits"]
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("model", [Logits, OwnLoss])
def test_batch_without_counted_labels_has_the_loss_zero(model: type[nn.Module]) -> None:
    batch = {"inputs": INPUTS, "labels": torch.full((4,), -100)}
    called = model()
    outcome = HuggingFace()(called, batch)
    assert outcome.loss.item() == 0.0
    outcome.loss.backward()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in called.parameters())
    assert HuggingFace().number_of_terms(batch) == 0


@pytest.mark.parametrize(
    ("model", "given", "shifted"), [(Logits, None, False), (TableForCausalLM, None, True), (Logits, True, True)]
)
def test_labels_of_language_models_are_shifted(model: type[Logits], given: bool | None, shifted: bool) -> None:
    logits, labels = torch.randn(2, 4, 5), TOKENS
    batch = {"inputs": logits, "labels": labels}
    task = HuggingFace(shift=given)
    outcome = task(model(), batch)
    expected = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
    torch.testing.assert_close(outcome.loss, F.cross_entropy(expected[0].flatten(0, 1), expected[1].flatten()))
    assert task.number_of_terms(batch) == (6 if shifted else 8)


def test_custom_loss_replaces_that_of_the_model() -> None:
    model, targets = Logits(), torch.randn(4, 3)
    batch = {"inputs": INPUTS, "target": targets}
    task = HuggingFace(loss=nn.MSELoss(), labels="target")
    outcome = task(model, batch)
    assert torch.equal(outcome.loss, F.mse_loss(INPUTS, targets))
    assert model.given is None
    assert outcome.correct is None
    assert task.number_of_terms(batch) == 4


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((INPUTS, CLASSES), r"the batch is \(float32 \[4, 3\], int64 \[4\]\), but this task passes the entries"),
        ({"inputs": INPUTS}, r"no loss \(dict with \{'logits': float32 \[4, 3\]\}\), and the batch has no entry 'labels'"),
        ({"inputs": INPUTS, "labels": CLASSES[:3]}, r"labels are int64 \[3\] and logits float32 \[4, 3\]; set the argument"),
        ({"inputs": INPUTS, "labels": INPUTS}, r"labels are float32 \[4, 3\] and logits"),
    ],
)  # fmt: skip
def test_unsuitable_batch_is_named(batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call_task(HuggingFace(), Logits(), batch)
    assert caught.value.__notes__[0].startswith("task instrument.tasks.keywords.HuggingFace, batch ")


def test_evaluation_without_labels_has_no_loss() -> None:
    outcome = HuggingFace()(Logits().eval(), {"inputs": INPUTS})
    assert outcome == Outcome(None, 4)


def test_output_without_logits_is_named() -> None:
    with pytest.raises(ValueError, match="and the output has no logits"):
        HuggingFace()(lambda **batch: SimpleNamespace(hidden=INPUTS), {"labels": CLASSES})  # type: ignore[arg-type]


def detector() -> nn.Module:
    """Return a model that returns losses in training and predictions in evaluations."""

    def forward(scale: Tensor, images: list[Tensor], targets: list[dict[str, Tensor]]) -> Any:
        if not model.training:
            return [{"boxes": target["boxes"]} for target in targets]
        return {"box": scale * 2.0, "class": scale * len(images)}

    model = Calls(forward, scale=nn.Parameter(torch.ones(())))
    return model


DETECTION = ([torch.zeros(3, 8, 8), torch.zeros(3, 4, 4), torch.zeros(3, 4, 4)], [{"boxes": torch.zeros(2, 4)}] * 3)


@pytest.mark.parametrize(("weights", "expected"), [(None, 5.0), ({"class": 2.0}, 6.0)])
@pytest.mark.parametrize("named", [False, True])
def test_losses_are_summed(weights: dict[str, float] | None, expected: float, named: bool) -> None:
    batch = dict(zip(("images", "targets"), DETECTION, strict=True)) if named else DETECTION
    outcome = LossDict(weights)(detector(), batch)
    check_outcome(outcome)
    assert outcome.loss.item() == expected
    assert outcome.samples == 3


def test_evaluation_without_losses_has_no_loss() -> None:
    outcome = LossDict()(detector().eval(), DETECTION)
    assert outcome == Outcome(None, 3)
    check_outcome(outcome, differentiable=False)
    assert mean_loss([outcome, Outcome(torch.ones(()), 1)], [1, 1]) is None
    assert accuracy([outcome]) is None
    with pytest.raises(TypeError, match="returned no loss, but its gradients are required"):
        check_outcome(outcome)


def test_invalid_losses_are_named() -> None:
    with pytest.raises(ValueError, match="the model returns no loss mask; its losses are box, class"):
        LossDict({"mask": 1.0})(detector(), DETECTION)
    with pytest.raises(TypeError, match=r"must return a dict of scalar losses, but returned float32 \[4, 3\]"):
        LossDict()(nn.Bilinear(3, 3, 3), (INPUTS, INPUTS))


@pytest.mark.parametrize(
    ("batch", "given", "samples"),
    [
        (INPUTS, (INPUTS,), 4),
        ((INPUTS, INPUTS[:1]), (INPUTS,), 4),
        ([INPUTS, INPUTS[:1]], (INPUTS,), 4),
        ({"pixels": INPUTS, "labels": INPUTS[:1]}, {"pixels": INPUTS}, 4),
        ([[INPUTS[0], INPUTS[1]], [{}, {}]], ([INPUTS[0], INPUTS[1]],), 2),
    ],
)
def test_forward_only_calls_the_model_with_the_inputs(batch: Any, given: Any, samples: int) -> None:
    kept: list[Any] = []
    outcome = ForwardOnly()(Calls(lambda *args, **kwargs: kept.append(args or kwargs)), batch)
    assert identical(kept, [given])
    assert (outcome.loss, outcome.samples, outcome.correct) == (None, samples, None)
