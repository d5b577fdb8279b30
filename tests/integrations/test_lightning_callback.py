"""The callback for Lightning: accumulation, clipping, sanity check, evaluations and exceptions."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import instrument

if TYPE_CHECKING:
    from instrument.integrations.lightning import LightningCallback

RECORD = {"layers": "**", "action": "record"}
HOOKS: dict[str, Any] = {
    "raw": {**RECORD, "kind": "parameter_grad"},
    "used": {**RECORD, "kind": "step_post", "role": "param_grad"},
    "micro": {**RECORD, "kind": "parameter_grad_micro"},
    "outputs": {**RECORD, "layers": "net.*", "kind": "forward"},
    "evaluated": {**RECORD, "layers": "net.*", "kind": "forward", "phase": "eval"},
}


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    pytest.importorskip("lightning.pytorch")


def module_of(fail_at: int | None = None) -> nn.Module:
    from lightning_models import Module

    return Module(fail_at)


def callback_of(hooks: dict[str, Any] = HOOKS, **more: Any) -> LightningCallback:
    from instrument.integrations.lightning import LightningCallback

    return LightningCallback(hooks, **more)


def fit(module: nn.Module, callback: LightningCallback | None, **more: Any) -> None:
    import lightning.pytorch as L

    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randint(3, (32,), generator=generator))
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        **more,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, DataLoader(data, 4), DataLoader(data, 8))


@pytest.fixture(scope="module")
def recorded() -> tuple[nn.Module, LightningCallback]:
    """A trained module, and the callback that recorded its training."""
    module, callback = module_of(), callback_of()
    fit(module, callback, accumulate_grad_batches=2, gradient_clip_val=0.01)
    return module, callback


def test_steps_micro_steps_clipping_and_evaluations_are_recorded(recorded: tuple[nn.Module, LightningCallback]) -> None:
    callback = recorded[1]
    stats = callback.probe.sink.frame("stats")
    assert sorted(stats[stats.hook == "raw"].step.unique()) == [0, 1, 2, 3]
    assert stats[stats.hook == "micro"].groupby("step").micro_step.unique().map(list).tolist() == [[0, 1]] * 4
    used = stats[stats.hook == "used"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    raw = stats[stats.hook == "raw"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    assert used.tolist() == pytest.approx([0.01] * 4, rel=1e-3)
    assert (raw > 0.02).all()
    evaluated = stats[stats.hook == "evaluated"]
    assert evaluated.step.unique().tolist() == [4]  # without the sanity check before training
    assert evaluated.micro_step.unique().tolist() == [0, 1, 2, 3]
    assert not any(row["cause"] for row in callback.probe.coverage())
    assert len(callback.probe.sink.rows["metrics"]) == 4


def test_recording_keeps_weights_bit_identical(recorded: tuple[nn.Module, LightningCallback]) -> None:
    baseline = module_of()
    fit(baseline, None, accumulate_grad_batches=2, gradient_clip_val=0.01)
    for ours, theirs in zip(recorded[0].parameters(), baseline.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_exception_removes_hooks_and_leaves_a_readable_run(tmp_path: Path) -> None:
    module = module_of(fail_at=3)
    with pytest.raises(ValueError, match="a bug of the user's"):
        fit(module, callback_of(out=tmp_path / "run"))
    run = instrument.load(tmp_path / "run")
    assert run.info["status"] == "failed"
    assert run.stats.step.max() == 2
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any(parameter._backward_hooks for parameter in module.parameters())


def test_several_optimizers_are_recorded_at_their_own_steps() -> None:
    hooks = {
        "gradient": {"layers": ["net.*", "critic"], "action": "record", "kind": "parameter_grad"},
        "update": {"layers": ["net.*", "critic"], "action": "record", "kind": "step_post", "role": "update"},
    }
    from lightning_models import Gan

    baseline, recorded, callback = Gan(), Gan(), callback_of(hooks)
    fit(baseline, None)
    fit(recorded, callback)
    for ours, theirs in zip(recorded.parameters(), baseline.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    counts = {(row["hook"], row["layer"]): (row["expected"], row["fired"]) for row in callback.probe.coverage()}
    for hook in hooks:
        assert [counts[hook, layer] for layer in ("net.0", "net.2", "critic")] == [(4, 4), (4, 4), (8, 8)]
    assert callback.probe.warnings == []
    assert [row["step"] for row in callback.probe.sink.records("metrics")] == list(range(8))
    stats = callback.probe.sink.frame("stats").query("hook == 'update'")
    assert (stats.l2 > 0).all()


@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
def test_rule_stops_the_trainer_and_saves_a_checkpoint(tmp_path: Path) -> None:
    rule = {"watch": "raw", "stat": "l2", "above": 0.0, "for": 2, "then": ["checkpoint", "stop"]}
    callback = callback_of(rules={"ever": rule}, out=tmp_path / "run")
    fit(module_of(), callback)
    assert callback.probe.step == 2
    assert instrument.load(tmp_path / "run").info["status"] == "stopped"
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.ckpt").is_file()
