"""The callback for Lightning: accumulation, clipping, sanity check, evaluations, checkpoints and exceptions."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from clipped_gradients import check_recorded, keep_gradients
from hook_runs import assert_equal
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


def fit(module: nn.Module, *callbacks: Any, data: Any = None, ckpt_path: Path | None = None, **more: Any) -> Any:
    import lightning.pytorch as L

    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    settings = {"max_epochs": 1, "accelerator": "cpu", **dict.fromkeys(quiet, False)}
    trainer = L.Trainer(callbacks=[each for each in callbacks if each is not None], **{**settings, **more})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, *(loaders() if data is None else data), ckpt_path=ckpt_path, weights_only=False)
    return trainer


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(32, 4, generator=generator), torch.randint(3, (32,), generator=generator))
    return DataLoader(data, 4), DataLoader(data, 8)


@pytest.fixture(scope="module")
def recorded() -> tuple[nn.Module, LightningCallback]:
    """A trained module, and the callback that recorded its training."""
    from lightning_models import Logging

    module, callback = Logging(), callback_of()
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
    pairs = zip(recorded[0].losses[::2], recorded[0].losses[1::2], strict=True)
    losses = [(first + second) / 2 for first, second in pairs]
    with torch.no_grad():
        inputs, targets = loaders()[1].dataset[:]
        losses.append(nn.functional.cross_entropy(recorded[0](inputs), targets).item())
    metrics = callback.probe.sink.frame("metrics")
    assert metrics.phase.tolist() == [*["train"] * 4, "eval"]
    assert metrics.loss.tolist() == pytest.approx(losses, rel=1e-6)
    assert (metrics.seconds > 0).all()


def test_validation_without_a_loss_does_not_repeat_that_of_an_earlier_one() -> None:
    from lightning_models import Logging

    callback = callback_of()
    fit(Logging(), callback, max_epochs=3)
    metrics = callback.probe.sink.frame("metrics")
    assert metrics[metrics.phase == "eval"].step.tolist() == [8, 24]


def test_losses_of_several_data_loaders_are_custom_metrics() -> None:
    from lightning_models import Logging

    module, callback, (training, validation) = Logging(), callback_of(), loaders()
    logged = fit(module, callback, data=(training, [validation, DataLoader(validation.dataset, 32)])).callback_metrics
    (row,) = [row for row in callback.probe.sink.records("metrics") if row["phase"] == "eval"]
    names = ("dataloader_idx_0", "dataloader_idx_1")
    assert row["custom"] == {f"loss_{name}": logged[f"val_loss/{name}"].item() for name in names}
    assert row["step"] == 8
    assert row["loss"] is None


def test_validation_does_not_repeat_the_loss_of_a_data_loader_that_logs_none() -> None:
    from lightning_models import Module

    class FirstLoader(Module):
        """Logs the loss of the second data loader in the first epoch only."""

        def validation_step(self, batch: list[Any], index: int, dataloader_idx: int = 0) -> None:
            if dataloader_idx == 0 or self.current_epoch == 0:
                self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    callback, (training, validation) = callback_of(), loaders()
    fit(FirstLoader(), callback, data=(training, [validation, validation]), max_epochs=2)
    rows = [row["custom"] for row in callback.probe.sink.records("metrics") if row["phase"] == "eval"]
    assert [[*row] for row in rows] == [["loss_dataloader_idx_0", "loss_dataloader_idx_1"], ["loss_dataloader_idx_0"]]


def test_loss_is_that_of_the_batches_of_the_step_that_have_one() -> None:
    callback, module = callback_of(), module_of(fail_at=1)
    with pytest.raises(ValueError, match="a bug"):
        fit(module, callback, accumulate_grad_batches=2)
    make_step = type(module).training_step
    module.fail_at, module.losses = None, []
    skipping = lambda self, batch, index: None if index in (3, 4) else make_step(self, batch, index)  # noqa: E731
    module.__class__ = type("Skipping", (type(module),), {"training_step": skipping})
    fit(module, callback, accumulate_grad_batches=2, limit_train_batches=6)
    first, second, third, sixth = module.losses
    expected = [(first + second) / 2, third, sixth]
    assert callback.probe.sink.frame("metrics").loss.tolist() == pytest.approx(expected, rel=1e-6)


def test_recording_keeps_weights_bit_identical(recorded: tuple[nn.Module, LightningCallback]) -> None:
    baseline = module_of()
    fit(baseline, None, accumulate_grad_batches=2, gradient_clip_val=0.01)
    assert_equal(recorded[0].parameters(), baseline.parameters())


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
    assert_equal(recorded.parameters(), baseline.parameters())
    counts = {(row["hook"], row["layer"]): (row["expected"], row["fired"]) for row in callback.probe.coverage()}
    for hook in hooks:
        assert [counts[hook, layer] for layer in ("net.0", "net.2", "critic")] == [(4, 4), (4, 4), (8, 8)]
    assert callback.probe.warnings == []
    assert [row["step"] for row in callback.probe.sink.records("metrics")] == list(range(8))
    stats = callback.probe.sink.frame("stats").query("hook == 'update'")
    assert (stats.l2 > 0).all()


@pytest.mark.slow
def test_rule_stops_the_trainer_and_saves_a_checkpoint(tmp_path: Path) -> None:
    rule = {"watch": "raw", "stat": "l2", "above": 0.0, "for": 2, "then": ["checkpoint", "stop"]}
    callback = callback_of(rules={"ever": rule}, out=tmp_path / "run")
    fit(module_of(), callback)
    assert callback.probe.step == 2
    assert instrument.load(tmp_path / "run").info["status"] == "stopped"
    assert (tmp_path / "run" / "checkpoints" / "step-00000002.ckpt").is_file()


CALLS: dict[str, Any] = {
    "train": {"layers": "net", "kind": "forward", "action": "record"},
    "eval": {"layers": "net", "kind": "forward", "action": "record", "phase": "eval"},
    "gradient": {"layers": "net", "kind": "full_backward", "role": "grad_output", "action": "record"},
}


def calls_of(stats: Any) -> Counter[tuple[str, int]]:
    return Counter(zip(stats.hook, stats.step, strict=True))


def evaluate(module: Any, call: Callable[[torch.Tensor], object]) -> None:
    """Evaluate as in a loop of your own."""
    module.eval()
    with torch.no_grad():
        call(torch.zeros(2, 4))
    module.train()


def call_without_gradients(module: Any) -> None:
    with torch.no_grad():
        module.net(torch.zeros(2, 4))


def evaluation(event: str, action: Callable[[Any], None]) -> Any:
    """Return a callback that evaluates once, in the second step or in the first epoch."""
    from lightning.pytorch.callbacks import Callback

    callback = Callback()

    def run(trainer: Any, module: Any, *_: Any) -> None:
        if trainer.global_step in (2, 8):
            action(module)

    setattr(callback, event, run)
    return callback


NOTHING = ("on_train_end", lambda module: None)
EVALUATIONS: dict[str, tuple[str, Callable[[Any], None], dict[str, Any]]] = {
    "sanity check": (*NOTHING, {"num_sanity_val_steps": 2}),
    "within an epoch": (*NOTHING, {"val_check_interval": 3, "max_epochs": 2}),
    "between micro-batches": (*NOTHING, {"val_check_interval": 3, "accumulate_grad_batches": 2}),
    "own loop after a batch": ("on_train_batch_end", lambda module: evaluate(module, module.net), {}),
    "own loop before a batch": ("on_train_batch_start", lambda module: evaluate(module, module.net), {}),
    "own loop after an epoch": ("on_train_epoch_end", lambda module: evaluate(module, module), {}),
    "own loop at the end": ("on_train_end", lambda module: evaluate(module, module.net), {}),
    "own loop before the step of the optimizer": (
        "on_before_optimizer_step",
        lambda module: evaluate(module, module),
        {},
    ),
    "own loop before the backward pass": ("on_before_backward", lambda module: evaluate(module, module.net), {}),
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("case", EVALUATIONS)
def test_phase_is_the_mode_of_the_module(case: str) -> None:
    event, action, settings = EVALUATIONS[case]
    module, callback = module_of(), callback_of(CALLS, rules=None)
    seen: Counter[tuple[str, int]] = Counter()

    def count(net: nn.Module, *_: Any) -> None:
        if not module.trainer.sanity_checking:
            seen["train" if net.training else "eval", module.trainer.global_step] += 1

    module.net.register_forward_hook(count)
    fit(module, callback, evaluation(event, action), **settings)
    stats = callback.probe.stats
    assert calls_of(stats[stats.hook != "gradient"]) == seen
    gradients = dict(stats[stats.hook == "gradient"].groupby("step").size())
    assert gradients == {step: number for (hook, step), number in seen.items() if hook == "train"}
    assert set(stats.phase[stats.hook == "gradient"]) == {"train"}
    assert callback.probe.metrics.phase.unique().tolist() == ["train"]
    assert not any(row["cause"] for row in callback.probe.coverage())
    assert callback.probe.warnings == []


def test_evaluation_in_training_mode_is_an_evaluation() -> None:
    module, callback = module_of(), callback_of(CALLS, rules=None)
    module.on_validation_model_eval = lambda: None  # as for Monte Carlo dropout
    fit(module, callback, evaluation("on_train_batch_end", call_without_gradients), num_sanity_val_steps=0)
    stats = callback.probe.stats
    assert calls_of(stats.query("hook == 'eval'")) == {("eval", 2): 1, ("eval", 8): 4 + 1}
    assert calls_of(stats.query("hook == 'train'")) == {("train", step): 1 for step in range(8)}


@pytest.mark.spread(1)
@pytest.mark.parametrize("part", ["", "net"], ids=["module", "part"])
def test_training_in_evaluation_mode_is_training(part: str) -> None:
    module, callback = module_of(), callback_of(CALLS, rules=None)
    module.get_submodule(part).eval()
    fit(module, callback)
    assert not module.net.training
    stats = callback.probe.stats
    assert calls_of(stats.query("hook == 'train'")) == {("train", step): 1 for step in range(8)}
    assert calls_of(stats.query("hook == 'eval'")) == {("eval", 8): 4}


def test_parameter_grad_is_before_the_clip_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    hooks = {name: {**HOOKS[name], "tensors": True} for name in ("raw", "used")}
    module, callback = module_of(), callback_of(hooks, rules=None)
    complete = keep_gradients(module)
    fit(module, callback, accumulate_grad_batches=2, gradient_clip_val=0.05)
    check_recorded(callback.probe, 3, complete, 0.05)
    (event,) = callback.probe.events.query("rule == 'clipping'").message
    assert "gradient_clip_val=0.05" in event
    assert "before the clip" in event
    assert event in capsys.readouterr().out


def test_clip_of_the_module_is_reported() -> None:
    from lightning_models import Module

    class Clipped(Module):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
            self.clip_gradients(optimizer, 0.05, "value")

    callback = callback_of(HOOKS, rules=None)
    fit(Clipped(), callback)
    (event,) = callback.probe.events.query("rule == 'clipping'").message
    assert "configure_gradient_clipping" in event
    stats = callback.probe.stats.groupby("hook").abs_max.max()
    assert stats["raw"] > 0.05
    assert stats["used"] == pytest.approx(0.05)


def test_training_without_clips_has_no_event_nor_later_rows() -> None:
    module, callback = module_of(), callback_of(HOOKS, rules=None)
    trainer = fit(module, callback)
    assert not len(callback.probe.events)
    rows = len(callback.probe.stats)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.validate(module, loaders()[1])
    assert len(callback.probe.stats) == rows > 0


def test_rule_sees_gradients_before_the_clip() -> None:
    from lightning_models import Module

    class Explosive(Module):
        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            return super().training_step(batch, index) * (1e6 if index == 5 else 1.0)

    rule = {"rule": "exploding_gradient", "after": 3}
    callback = callback_of({"raw": HOOKS["raw"]}, rules={"exploding_gradient": rule})
    fit(Explosive(), callback, gradient_clip_val=0.5)
    assert callback.probe.events.query("rule == 'exploding_gradient'").step.unique().tolist() == [5]


@pytest.mark.slow
@pytest.mark.parametrize("at", ["the end of an epoch", "the middle of an epoch"])
def test_steps_and_epochs_continue_after_a_checkpoint(at: str, tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = ModelCheckpoint(tmp_path, "first", every_n_train_steps=5)
    first = fit(module_of(), saving, enable_checkpointing=True)
    if at == "the end of an epoch":
        first.save_checkpoint(tmp_path / "first.ckpt")
    hooks = {**CALLS, "late": {**CALLS["train"], "start": 10, "every": 4}}
    module, callback = module_of(), callback_of(hooks, out=tmp_path / "run")
    seen = []
    module.net.register_forward_hook(
        lambda net, *_: seen.append([module.global_step, module.current_epoch]) if net.training else None
    )
    fit(module, callback, ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    run = instrument.load(tmp_path / "run")
    assert seen[0] == ([8, 1] if at == "the end of an epoch" else [5, 0])
    assert seen[-1] == [15, 1]
    assert run.stats.query("hook == 'train'")[["step", "epoch"]].values.tolist() == seen
    assert run.stats.query("hook == 'late'").step.tolist() == [10, 14]
    assert run.metrics.step.tolist() == [step for step, _ in seen]
    counts = {row["hook"]: (row["expected"], row["fired"]) for row in callback.probe.coverage()}
    assert counts["train"] == (len(seen), len(seen))
    assert counts["late"] == (2, 2)
    assert callback.probe.warnings == []


def test_steps_of_several_optimizers_continue_after_a_checkpoint(tmp_path: Path) -> None:
    from lightning_models import Gan

    fit(Gan()).save_checkpoint(tmp_path / "first.ckpt")
    callback = callback_of({"weights": {**RECORD, "kind": "step_post", "role": "param"}}, rules=None)
    fit(Gan(), callback, ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert callback.probe.metrics.step.tolist() == list(range(8, 16))


def test_second_training_is_refused_or_replaces_the_run(tmp_path: Path) -> None:
    module, callback = module_of(), callback_of(CALLS, rules=None, out=tmp_path / "run")
    fit(module, callback)
    with pytest.raises(instrument.ConfigError, match="already contains a run"):
        fit(module, callback)
    started = instrument.load(tmp_path / "run").metrics
    assert started.step.tolist() == list(range(8))
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in module.modules())
    fit(module, callback_of(CALLS, rules=None, out=tmp_path / "run", overwrite=True))
    run = instrument.load(tmp_path / "run")
    assert run.metrics.step.tolist() == list(range(8))
    assert run.metrics.loss.tolist() != started.loss.tolist()


@pytest.mark.slow
def test_batch_size_finder_is_not_recorded(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import BatchSizeFinder

    module, callback = module_of(), callback_of(CALLS, rules=None)
    module.batch_size = 4
    module.train_dataloader = lambda: DataLoader(loaders()[0].dataset, module.batch_size)
    module.val_dataloader = lambda: loaders()[1]
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=1)
    trainer = fit(module, callback, finder, data=(), default_root_dir=tmp_path)
    steps = callback.probe.metrics.step.tolist()
    assert steps == list(range(trainer.global_step))
    assert callback.probe.stats.query("hook == 'train'").step.tolist() == steps


def test_several_callbacks_record_the_same_rows() -> None:
    one, other = callback_of({**CALLS, **HOOKS}, rules=None), callback_of({**CALLS, **HOOKS}, rules=None)
    fit(module_of(), one, other, gradient_clip_val=0.01)
    columns = ["hook", "step", "micro_step", "phase", "layer", "path", "call", "l2"]
    assert one.probe.stats[columns].equals(other.probe.stats[columns])
    assert not any(row["cause"] for callback in (one, other) for row in callback.probe.coverage())


def test_entry_point_adds_the_callback_if_hooks_are_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning reads the entry points of installed packages, such as this one."""
    import lightning.pytorch as L

    from instrument.integrations.lightning import LightningCallback

    monkeypatch.delenv("INSTRUMENT_HOOKS", raising=False)
    assert not any(isinstance(each, LightningCallback) for each in L.Trainer(logger=False, accelerator="cpu").callbacks)
    (tmp_path / "hooks.yaml").write_text("outputs: {layers: net.0, kind: forward, action: record}")
    monkeypatch.setenv("INSTRUMENT_HOOKS", str(tmp_path / "hooks.yaml"))
    monkeypatch.setenv("INSTRUMENT_OUT", str(tmp_path / "run"))
    fit(module_of())
    assert instrument.load(tmp_path / "run").stats.step.tolist() == [*range(8)]
