"""The hooks in Lightning's Trainer: accumulation, clipping, sanity validation, evaluations, an exception."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import instrument

L = pytest.importorskip("lightning.pytorch")
from instrument.integrations.lightning import LightningCallback  # noqa: E402

RECORD = {"layers": "**", "action": "record"}
HOOKS: dict[str, Any] = {
    "raw": {**RECORD, "kind": "parameter_grad"},
    "used": {**RECORD, "kind": "step_post", "role": "param_grad"},
    "micro": {**RECORD, "kind": "parameter_grad_micro"},
    "outputs": {**RECORD, "layers": "net.*", "kind": "forward"},
    "evaluated": {**RECORD, "layers": "net.*", "kind": "forward", "phase": "eval"},
}


class Module(L.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.fail_at = fail_at

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == self.fail_at:
            raise ValueError("a bug of the user's")
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Module, callback: LightningCallback | None, **more: Any) -> None:
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


def test_steps_micro_steps_clipping_and_evaluations_are_told_right() -> None:
    callback = LightningCallback(HOOKS)
    fit(Module(), callback, accumulate_grad_batches=2, gradient_clip_val=0.01)
    stats = callback.probe.sink.frame("stats")
    assert sorted(stats[stats.hook == "raw"].step.unique()) == [0, 1, 2, 3]
    assert stats[stats.hook == "micro"].groupby("step").micro_step.unique().map(list).tolist() == [[0, 1]] * 4
    used = stats[stats.hook == "used"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    raw = stats[stats.hook == "raw"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    assert used.tolist() == pytest.approx([0.01] * 4, rel=1e-3)
    assert (raw > 0.02).all()
    evaluated = stats[stats.hook == "evaluated"]
    assert evaluated.step.unique().tolist() == [4]  # none of the sanity check before training
    assert evaluated.micro_step.unique().tolist() == [0, 1, 2, 3]
    assert not any(row["cause"] for row in callback.probe.coverage())
    assert len(callback.probe.sink.rows["metrics"]) == 4


def test_recording_changes_no_weight() -> None:
    bare, seen = Module(), Module()
    fit(bare, None, accumulate_grad_batches=2, gradient_clip_val=0.01)
    fit(seen, LightningCallback(HOOKS), accumulate_grad_batches=2, gradient_clip_val=0.01)
    for ours, theirs in zip(seen.parameters(), bare.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_exception_leaves_no_hook_and_a_run_that_can_be_read(tmp_path: Path) -> None:
    module = Module(fail_at=3)
    with pytest.raises(ValueError, match="a bug of the user's"):
        fit(module, LightningCallback(HOOKS, out=tmp_path / "run"))
    run = instrument.load(tmp_path / "run")
    assert run.info["status"] == "failed"
    assert run.stats.step.max() == 2
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    assert not any(parameter._backward_hooks for parameter in module.parameters())
