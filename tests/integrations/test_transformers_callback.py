"""The callback for the Trainer of transformers: accumulation, clipping, evaluations and exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import instrument
from instrument.nested import number_of_samples, to_device

if TYPE_CHECKING:
    from instrument.integrations.transformers import TransformersCallback

RECORD = {"layers": "**", "action": "record"}
HOOKS: dict[str, Any] = {
    "used": {**RECORD, "kind": "parameter_grad"},
    "sums": {**RECORD, "kind": "post_accumulate_grad"},
    "outputs": {**RECORD, "layers": "transformer.h.*", "kind": "forward"},
    "evaluated": {**RECORD, "layers": "transformer.h.*", "kind": "forward", "phase": "eval"},
}


@pytest.fixture(autouse=True, scope="module")
def offline() -> Iterator[None]:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        yield


def callback_of(**more: Any) -> TransformersCallback:
    from instrument.integrations.transformers import TransformersCallback

    return TransformersCallback(HOOKS, **more)


def model_of(fail_at: int | None = None) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    size = {"n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size, bos_token_id=0, eos_token_id=1))
    if fail_at is not None:
        calls = iter(range(1000))

        def fail(*_: object) -> None:
            if next(calls) == fail_at:
                raise ValueError("a bug of the user's")

        model.register_forward_pre_hook(fail)
    return model  # type: ignore[no-any-return]


def train(model: nn.Module, folder: Path, callback: TransformersCallback | None) -> None:
    import transformers

    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 6), generator=generator)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "trainer"),
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.01,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    callbacks = [] if callback is None else [callback]
    transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks).train()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, TransformersCallback]:
    """A trained model, and the callback that recorded its training."""
    model = model_of()
    with callback_of() as callback:
        train(model, tmp_path_factory.mktemp("recorded"), callback)
    return model, callback


def test_steps_micro_steps_clipping_and_evaluations_are_recorded(
    recorded: tuple[nn.Module, TransformersCallback],
) -> None:
    callback = recorded[1]
    stats = callback.probe.sink.frame("stats")
    assert stats[stats.hook == "sums"].groupby("step").micro_step.unique().map(list).tolist() == [[0, 1]] * 3
    norm = stats[stats.hook == "used"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    assert norm.tolist() == pytest.approx([0.01] * 3, rel=1e-2)  # the Trainer has clipped them
    evaluated = stats[stats.hook == "evaluated"]
    assert evaluated.step.unique().tolist() == [2, 3]  # every second step, and at the end
    assert evaluated.micro_step.unique().tolist() == [0, 1]
    assert not any(row["cause"] for row in callback.probe.coverage())


def test_recording_keeps_weights_bit_identical(
    tmp_path: Path, recorded: tuple[nn.Module, TransformersCallback]
) -> None:
    baseline = model_of()
    train(baseline, tmp_path, None)
    for ours, theirs in zip(recorded[0].parameters(), baseline.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_exception_removes_hooks_and_leaves_a_readable_run(tmp_path: Path) -> None:
    model = model_of(fail_at=4)
    with (
        pytest.raises(ValueError, match="a bug of the user's"),
        callback_of(out=tmp_path / "run") as hooks,
    ):
        train(model, tmp_path, hooks)
    run = instrument.load(tmp_path / "run")
    assert run.info["status"] == "failed"
    assert run.metrics.step.tolist() == [0, 1]
    assert not any(part._forward_hooks for part in model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_batch_encoding_is_counted_and_moved() -> None:
    from transformers import BatchEncoding

    batch = BatchEncoding({"input_ids": torch.zeros(4, 3), "labels": torch.zeros(4)})
    assert number_of_samples(batch) == 4
    moved = to_device(batch, torch.device("meta"))
    assert isinstance(moved, BatchEncoding)
    assert moved["labels"].device.type == "meta"


@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
def test_rule_stops_the_trainer_and_saves_a_checkpoint(tmp_path: Path) -> None:
    rule = {"watch": "sums", "stat": "l2", "above": 0.0, "for": 2, "then": ["checkpoint", "stop"]}
    callback = callback_of(rules={"ever": rule}, out=tmp_path / "run")
    train(model_of(), tmp_path, callback)
    assert callback.probe.step == 2
    assert instrument.load(tmp_path / "run").info["status"] == "stopped"
    assert (tmp_path / "trainer" / "checkpoint-2").is_dir()
