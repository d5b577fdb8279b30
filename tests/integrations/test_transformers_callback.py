"""The callback for the Trainer of transformers: accumulation, clipping, evaluations, restarts and exceptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from clipped_gradients import check_recorded, keep_gradients
from hook_runs import assert_equal
from tiers import tiered
from torch import nn

import instrument
from instrument.values.nested import number_of_samples, to_device

if TYPE_CHECKING:
    from instrument.integrations.transformers import TransformersCallback

RECORD = {"layers": "**", "action": "record"}
HOOKS: dict[str, Any] = {
    "raw": {**RECORD, "kind": "parameter_grad"},
    "used": {**RECORD, "kind": "step_post", "role": "param_grad"},
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
        # Before each training, the Trainer would collect garbage, and thereby visit everything that was imported.
        patch.setattr("accelerate.utils.memory.clear_device_cache", lambda **options: None)
        yield


def callback_of(hooks: dict[str, Any] = HOOKS, **more: Any) -> TransformersCallback:
    from instrument.integrations.transformers import TransformersCallback

    return TransformersCallback(hooks, **more)


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
    generator = torch.Generator().manual_seed(0)
    data = [{"input_ids": row, "labels": row} for row in torch.randint(32, (16, 6), generator=generator)]
    sizes = {"gradient_accumulation_steps": 2, "per_device_eval_batch_size": 8, "max_steps": 3, "max_grad_norm": 0.01}
    sets = {"train_dataset": data, "eval_dataset": data}
    callbacks = [] if callback is None else [callback]
    trainer_of(model, folder, callbacks, eval_strategy="steps", eval_steps=2, **sizes, **sets).train()


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
    used = stats[stats.hook == "used"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    raw = stats[stats.hook == "raw"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    assert used.tolist() == pytest.approx([0.01] * 3, rel=1e-2)  # the Trainer has clipped them
    assert (raw > 0.1).all()
    assert stats[stats.hook.isin(["raw", "used"])].micro_step.unique().tolist() == [1]
    evaluated = stats[stats.hook == "evaluated"]
    assert evaluated.step.unique().tolist() == [2, 3]  # every second step, and at the end
    assert evaluated.micro_step.unique().tolist() == [0, 1]
    assert not any(row["cause"] for row in callback.probe.coverage())


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, {"label_smoothing_factor": 0.1}])
def test_loss_is_the_one_that_the_trainer_logs(more: dict[str, Any], tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in torch.arange(96).view(16, 6) % 32]
    logged = {"logging_strategy": "steps", "logging_steps": 1, "gradient_accumulation_steps": 2, "max_steps": 3}
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "eval_dataset": data}
    with callback_of() as callback:
        trainer = trainer_of(model_of(), tmp_path, [callback], train_dataset=data, **logged, **evaluated, **more)
        trainer.train()
    losses, evaluated = (
        [row[name] for row in trainer.state.log_history if name in row] for name in ("loss", "eval_loss")
    )
    assert (len(set(losses)), len(set(evaluated))) == (3, 2)
    metrics = callback.probe.sink.frame("metrics")
    assert metrics[metrics.phase == "train"].loss.tolist() == pytest.approx(losses, rel=1e-6)
    rows = metrics[metrics.phase == "eval"]
    assert (rows.step.tolist(), rows.loss.tolist()) == ([2, 3], pytest.approx(evaluated, rel=1e-6))


def test_losses_of_several_evaluation_sets_are_custom_metrics(tmp_path: Path) -> None:
    sets = {"a": rows_of(4), "2-b²": rows_of(6)[4:]}
    with callback_of(CALLS) as callback:
        trainer = trainer_of(Small(), tmp_path, [callback], eval_strategy="steps", eval_steps=2, eval_dataset=sets)
        trainer.train()
    logged = [
        (row["step"], row.get("eval_a_loss"), row.get("eval_2-b²_loss"))
        for row in trainer.state.log_history
        if "eval_a_loss" in row or "eval_2-b²_loss" in row
    ]
    metrics = callback.probe.sink.records("metrics")
    rows = [row for row in metrics if row["phase"] == "eval"]
    assert [(row["step"], row["custom"].get("loss_a"), row["custom"].get("loss_2_b_")) for row in rows] == logged
    assert len(logged) == 4
    assert all(row["loss"] is None and row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize(("prefix", "name"), [("test", "loss_test"), ("evaluation", "loss_evaluation")])
def test_loss_of_an_evaluation_with_another_prefix_has_its_name(prefix: str, name: str, tmp_path: Path) -> None:
    with callback_of(CALLS) as callback:
        evaluator = Evaluator("on_step_end", lambda own: own.trainer.evaluate(metric_key_prefix=prefix))
        evaluator.trainer = trainer = trainer_of(Small(), tmp_path, [callback, evaluator])
        trainer.train()
    rows = [row for row in callback.probe.sink.records("metrics") if row["phase"] == "eval"]
    assert [[*row["custom"]] for row in rows] == [[name]]


@pytest.mark.slow
def test_custom_evaluation_may_pass_other_metrics(tmp_path: Path) -> None:
    data = [{"input_ids": row, "labels": row} for row in torch.arange(48).view(8, 6) % 32]
    sets = {"train_dataset": data, "eval_dataset": data}
    with callback_of() as callback:
        trainer = trainer_of(model_of(), tmp_path, [callback], eval_strategy="steps", eval_steps=1, max_steps=2, **sets)

        def evaluate(*_: object, **__: object) -> dict[str, float]:
            trainer.evaluation_loop(trainer.get_eval_dataloader(), "")
            trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"eval_loss": 1.0})
            return {"eval_loss": 1.0}

        trainer.evaluate = evaluate
        trainer.train()
    assert callback.probe.sink.frame("metrics").phase.tolist() == ["train", "train"]  # `seconds` is unknown


def test_recording_keeps_weights_bit_identical(
    tmp_path: Path, recorded: tuple[nn.Module, TransformersCallback]
) -> None:
    baseline = model_of()
    train(baseline, tmp_path, None)
    assert_equal(recorded[0].parameters(), baseline.parameters())


@pytest.mark.slow
def test_exception_removes_hooks_and_leaves_a_readable_run(tmp_path: Path) -> None:
    model = model_of(fail_at=4)
    with pytest.raises(ValueError, match="a bug of the user's"), callback_of(out=tmp_path / "run") as hooks:
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


@pytest.mark.slow
def test_rule_stops_the_trainer_and_saves_a_checkpoint(tmp_path: Path) -> None:
    rule = {"watch": "sums", "stat": "l2", "above": 0.0, "for": 2, "then": ["checkpoint", "stop"]}
    callback = callback_of(rules={"ever": rule}, out=tmp_path / "run")
    train(model_of(), tmp_path, callback)
    assert callback.probe.step == 2
    assert instrument.load(tmp_path / "run").info["status"] == "stopped"
    assert (tmp_path / "trainer" / "checkpoint-2").is_dir()


CALLS: dict[str, Any] = {
    "train": {"layers": "head", "kind": "forward", "action": "record"},
    "eval": {"layers": "head", "kind": "forward", "action": "record", "phase": "eval"},
}
GRADIENTS: dict[str, Any] = {
    "raw": {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": ["l2"], "tensors": True},
    "pre": {"layers": "**", "kind": "step_pre", "role": "param_grad", "action": "record", "stats": ["l2"]},
    "used": {"layers": "**", "kind": "step_post", "role": "param_grad", "action": "record", "tensors": True},
}


class Small(nn.Module):
    """A classifier with the interface of a model of transformers.

    Attributes:
        factors: The factor of the loss at some calls.
        largest_batch: A larger batch runs out of memory in training mode, at the call with index `fails_at`.
    """

    def __init__(self, fails_at: int = 0, largest_batch: int = 100) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.drop, self.head = nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 3)
        self.fails_at, self.largest_batch, self.calls = fails_at, largest_batch, 0
        self.factors: dict[int, float] = {}

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            if len(inputs) > self.largest_batch and self.calls == self.fails_at:
                self.calls = 0
                raise RuntimeError("CUDA out of memory.")
            self.calls += 1
        logits = self.head(self.drop(torch.relu(self.body(inputs))))
        loss = nn.functional.cross_entropy(logits, labels) * self.factors.get(self.calls, 1.0)
        return {"loss": loss, "logits": logits}


def rows_of(count: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"inputs": torch.randn(4, generator=generator), "labels": torch.randint(3, (), generator=generator)}
        for _ in range(count)
    ]


def trainer_of(model: nn.Module, folder: Path, callbacks: list[Any], **more: Any) -> Any:
    import transformers

    settings: dict[str, Any] = {
        "max_steps": 4,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    sets = {name: more.pop(name, rows_of(size)) for name, size in (("train_dataset", 8), ("eval_dataset", 4))}
    arguments = transformers.TrainingArguments(output_dir=str(folder / "trainer"), **{**settings, **more})
    return transformers.Trainer(model, arguments, callbacks=callbacks, **sets)


def calls_of(stats: Any) -> Counter[tuple[str, int]]:
    return Counter(zip(stats.hook, stats.step, strict=True))


class Evaluator:
    """Evaluates in a callback of the Trainer."""

    def __new__(cls, event: str, evaluate: Callable[[Any], Any]) -> Any:
        from transformers import TrainerCallback

        callback = TrainerCallback()

        def run(args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 2:
                evaluate(callback)

        setattr(callback, event, run)
        return callback


def evaluate(callback: Any) -> None:
    callback.trainer.evaluate()


def predict(callback: Any) -> None:
    callback.trainer.predict(rows_of(6))


def set_evaluation(value: bool) -> Callable[[Any], None]:
    return lambda callback: setattr(callback.trainer.control, "should_evaluate", value)


def call_without_gradients(callback: Any) -> None:
    """Call the model in training mode, as to estimate the statistics of batch normalization."""
    with torch.no_grad():
        callback.trainer.model(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))


STEPS = {"eval_strategy": "steps", "eval_steps": 2}
EVALUATIONS: dict[str, tuple[str, Callable[[Any], Any] | None, dict[str, Any]]] = {
    "several sets": ("on_step_end", None, {**STEPS, "eval_dataset": {"a": rows_of(4), "b": rows_of(6)}}),
    "before the training": ("on_step_end", None, {**STEPS, "eval_on_start": True}),
    "at the end of epochs": ("on_step_end", None, {"eval_strategy": "epoch", "max_steps": 8}),
    "evaluate at the end of a step": ("on_step_end", evaluate, {}),
    "evaluate before the step of the optimizer": ("on_pre_optimizer_step", evaluate, {}),
    "evaluate at the beginning of a step": ("on_step_begin", evaluate, {}),
    "evaluate between micro-batches": ("on_substep_end", evaluate, {"gradient_accumulation_steps": 2}),
    "predict": ("on_step_end", predict, {}),
    "predict at the end of an epoch": ("on_epoch_end", predict, {"max_steps": 8}),
    "request": ("on_step_end", set_evaluation(True), {"eval_strategy": "steps", "eval_steps": 3}),
    "refusal": ("on_step_end", set_evaluation(False), STEPS),
}
# One of each kind: a strategy, a call at each of the events of a step, a prediction, and a changed request.
QUICK_EVALUATIONS = (
    *("several sets", "at the end of epochs", "evaluate before the step of the optimizer"),
    *("evaluate between micro-batches", "predict", "refusal"),
)


@pytest.mark.slow
@pytest.mark.combinations
@pytest.mark.parametrize("before", [True, False], ids=["earlier callback", "later callback"])
@pytest.mark.parametrize("case", tiered(EVALUATIONS, QUICK_EVALUATIONS))
def test_phase_is_the_mode_of_the_model(case: str, before: bool, tmp_path: Path) -> None:
    event, action, settings = EVALUATIONS[case]
    hooks = {**CALLS, "gradient": {**CALLS["train"], "kind": "full_backward", "role": "grad_output"}}
    hooks["step"] = {**CALLS["train"], "kind": "parameter_grad", "params": "bias"}
    hooks["model"] = {**CALLS["eval"], "layers": "."}
    model, callback = Small(), callback_of(hooks, rules=None)
    evaluator = Evaluator(event, action or (lambda callback: None))
    trainer = trainer_of(model, tmp_path, [evaluator, callback] if before else [callback, evaluator], **settings)
    evaluator.trainer = trainer
    seen: Counter[tuple[str, int]] = Counter()

    def count(module: nn.Module, *_: Any) -> None:
        seen["train" if module.training else "eval", trainer.state.global_step] += 1

    model.head.register_forward_hook(count)
    with callback:
        trainer.train()
    stats = callback.probe.stats
    assert calls_of(stats[stats.hook.isin(CALLS)]) == seen
    evaluated = {step: number for (hook, step), number in seen.items() if hook == "eval"}
    outputs = stats[(stats.hook == "model") & (stats.path == "logits")]
    assert dict(outputs.groupby("step").size()) == evaluated
    trained = {step: number for (hook, step), number in seen.items() if hook == "train"}
    assert dict(stats[stats.hook == "gradient"].groupby("step").size()) == trained
    assert dict(stats[stats.hook == "step"].groupby("step").size()) == dict.fromkeys(trained, 1)
    steps = callback.probe.metrics.groupby("phase").step.unique().map(list)
    assert steps["train"] == [*trained]
    is_in_step = event in ("on_pre_optimizer_step", "on_substep_end") or (event == "on_step_begin" and not before)
    is_logged = {"eval_loss", "eval_a_loss"}.intersection
    logged = [row["step"] for row in trainer.state.log_history if is_logged(row) and not is_in_step]
    assert steps.get("eval", []) == logged
    evaluations = stats[stats.hook == "eval"]
    assert not evaluations.duplicated(["step", "micro_step", "call"]).any()
    coverage = callback.probe.coverage()
    assert not any(row["cause"] for row in coverage if evaluated or row["hook"] not in ("eval", "model"))


@pytest.mark.slow
def test_call_without_gradients_between_steps_is_no_training(tmp_path: Path) -> None:
    callback, evaluator = callback_of(CALLS, rules=None), Evaluator("on_step_end", call_without_gradients)
    evaluator.trainer = trainer_of(Small(), tmp_path, [evaluator, callback])
    with callback:
        evaluator.trainer.train()
    assert calls_of(callback.probe.stats) == {("train", step): 1 for step in range(4)} | {("eval", 2): 1}


@pytest.mark.spread(1)
@pytest.mark.parametrize("order", ["before", "after"])
def test_evaluation_within_a_step_interrupts_the_training(order: str, tmp_path: Path) -> None:
    hooks = {**CALLS, "gradient": {**CALLS["train"], "kind": "full_backward", "role": "grad_output"}}
    callback = callback_of(hooks, rules=None)
    trainer = trainer_of(Small(), tmp_path, [callback])
    compute_loss = trainer.compute_loss

    def compute(model: nn.Module, inputs: Any, *rest: Any, **more: Any) -> Any:
        loss = compute_loss(model, inputs, *rest, **more) if order == "after" else None
        model.eval()
        with torch.no_grad():
            model(**inputs)
        model.train()
        return compute_loss(model, inputs, *rest, **more) if loss is None else loss

    trainer.compute_loss = compute
    with callback:
        trainer.train()
    stats = callback.probe.stats
    assert calls_of(stats) == {(hook, step): 1 for hook in hooks for step in range(4)}
    assert set(stats.phase[stats.hook == "gradient"]) == {"train"}
    assert {(row["expected"], row["fired"], row["cause"]) for row in callback.probe.coverage()} == {(4, 4, "")}


@pytest.mark.slow
def test_evaluation_after_the_training_is_not_recorded(tmp_path: Path) -> None:
    with callback_of(CALLS, rules=None) as callback:
        trainer = trainer_of(Small(), tmp_path, [callback])
        trainer.train()
        trainer.evaluate()
        trainer.predict(rows_of(2))
    assert calls_of(callback.probe.stats) == {("train", step): 1 for step in range(4)}


@pytest.mark.slow
def test_phase_of_the_user_is_kept(tmp_path: Path) -> None:
    hooks = {**CALLS, "probe": {**CALLS["train"], "phase": "probe"}}
    callback = callback_of(hooks, rules=None)

    def run_probe(_: Any) -> None:
        with callback.probe.in_phase("probe"):
            callback.probe.plan.layers.model(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))["loss"].backward()

    with callback:
        trainer_of(Small(), tmp_path, [callback, Evaluator("on_step_end", run_probe)]).train()
    assert calls_of(callback.probe.stats) == {("train", step): 1 for step in range(4)} | {("probe", 2): 1}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_parameter_grad_is_before_the_clip_of_the_trainer(
    accumulate: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, original = Small(), torch.nn.utils.clip_grad_norm_
    complete = keep_gradients(model)
    with callback_of(GRADIENTS, rules=None) as callback:
        trainer_of(
            model, tmp_path, [callback], max_steps=3, gradient_accumulation_steps=accumulate, max_grad_norm=0.05
        ).train()
    assert torch.nn.utils.clip_grad_norm_ is original
    check_recorded(callback.probe, 2, complete, 0.05)
    stats = callback.probe.stats
    norms = [stats[stats.hook == hook].l2.tolist() for hook in ("raw", "pre")]
    assert norms[0] == norms[1]
    (event,) = callback.probe.events.query("rule == 'clipping'").message
    assert "max_grad_norm=0.05" in event
    assert "before the clip" in event
    assert event in capsys.readouterr().out


@pytest.mark.slow
def test_unclipped_gradients_need_no_event(tmp_path: Path) -> None:
    with callback_of(GRADIENTS, rules=None) as callback:
        trainer_of(Small(), tmp_path, [callback], max_grad_norm=0.0).train()
    tensors = callback.probe.tensors()
    raw, used = ([*tensors["values"][tensors.hook == hook]] for hook in ("raw", "used"))
    assert len(raw) == len(used) == 16
    assert all((one == other).all() for one, other in zip(raw, used, strict=True))
    assert not len(callback.probe.events)


def test_clip_that_is_not_observed_is_reported(tmp_path: Path) -> None:
    callback = callback_of(GRADIENTS, rules=None)
    trainer = trainer_of(Small(), tmp_path, [callback], max_grad_norm=0.01)

    def clip(model: nn.Module) -> torch.Tensor:
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.01, norm)
        return norm

    trainer._clip_grad_norm = clip
    with callback:
        trainer.train()
    stats = callback.probe.stats
    norms = stats[stats.hook == "raw"].groupby("step").l2.apply(lambda norms: (norms**2).sum() ** 0.5)
    assert norms.tolist() == pytest.approx([0.01] * 4, rel=1e-3)
    (warning,) = (message for message in callback.probe.warnings if "after the clip" in message)
    assert warning


@pytest.mark.slow
def test_rule_sees_gradients_before_the_clip(tmp_path: Path) -> None:
    model = Small()
    model.factors = {6: 1e6}
    rule = {"rule": "exploding_gradient", "after": 3}
    with callback_of({"raw": GRADIENTS["raw"]}, rules={"exploding_gradient": rule}) as callback:
        trainer_of(model, tmp_path, [callback], max_steps=6).train()
    assert callback.probe.events.query("rule == 'exploding_gradient'").step.unique().tolist() == [5]


@pytest.mark.slow
def test_steps_and_epochs_continue_after_a_checkpoint(tmp_path: Path) -> None:
    settings = {"max_steps": 8, "save_strategy": "steps", "save_steps": 3}
    trainer_of(Small(), tmp_path, [], **settings).train()
    hooks = {**CALLS, "late": {**CALLS["train"], "start": 5, "every": 2}, "first": {**CALLS["train"], "steps": [0]}}
    seen = []
    with callback_of(hooks) as callback:
        model = Small()
        trainer = trainer_of(model, tmp_path, [callback], **settings)
        model.head.register_forward_hook(lambda *_: seen.append([trainer.state.global_step, int(trainer.state.epoch)]))
        trainer.train(resume_from_checkpoint=str(tmp_path / "trainer" / "checkpoint-3"))
    stats = callback.probe.stats
    assert seen == [[3, 0], [4, 1], [5, 1], [6, 1], [7, 1]]  # four batches in an epoch
    assert stats.query("hook == 'train'")[["step", "epoch"]].values.tolist() == seen
    assert stats.query("hook == 'late'").step.tolist() == [5, 7]
    assert callback.probe.metrics.step.tolist() == [3, 4, 5, 6, 7]
    counts = {row["hook"]: (row["expected"], row["fired"]) for row in callback.probe.coverage()}
    assert counts == {"train": (5, 5), "late": (2, 2), "first": (0, 0), "eval": (0, 0)}
    assert {*callback.probe.events.rule} == {"clipping", "coverage"}  # no rule for the first step


@pytest.mark.slow
def test_epoch_that_is_ended_early_counts_as_an_epoch(tmp_path: Path) -> None:
    evaluator = Evaluator("on_step_end", lambda each: setattr(each.trainer.control, "should_epoch_stop", True))
    with callback_of(CALLS, rules=None) as callback:
        evaluator.trainer = trainer_of(Small(), tmp_path, [callback, evaluator], max_steps=5)
        evaluator.trainer.train()
    assert callback.probe.stats.epoch.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(("fails_at", "where"), [(2, "folder"), pytest.param(0, "memory", marks=pytest.mark.slow)])
def test_auto_find_batch_size_discards_the_failed_attempt(fails_at: int, where: str, tmp_path: Path) -> None:
    model = Small(fails_at, largest_batch=7)
    out = None if where == "memory" else tmp_path / "run"
    with callback_of(CALLS, rules=None, out=out) as callback:
        trainer_of(
            model, tmp_path, [callback], auto_find_batch_size=True, per_device_train_batch_size=8, max_steps=3
        ).train()
    run = callback.probe.run
    assert run.stats.step.tolist() == run.metrics.step.tolist() == [0, 1, 2]
    assert run.stats.numel.tolist()[0] < 8 * 3
    (message,) = run.events.query("rule == 'restarted'").message
    assert f"with batch size 8, it ran out of memory after {fails_at} steps" in message
    assert run.info["status"] == "done"
    assert {(row["hook"], row["expected"], row["fired"]) for row in callback.probe.coverage()} == {
        ("train", 3, 3),
        ("eval", 0, 0),
    }
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_second_training_is_refused_or_replaces_the_run(tmp_path: Path) -> None:
    model, callback = Small(), callback_of(CALLS, rules=None, out=tmp_path / "run")
    trainer = trainer_of(model, tmp_path, [callback], max_steps=2)
    trainer.train()
    with callback, pytest.raises(instrument.ConfigError, match="already contains a run"):
        trainer.train()
    assert instrument.load(tmp_path / "run").stats.step.tolist() == [0, 1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    callback = callback_of(CALLS, rules=None, out=tmp_path / "run", overwrite=True)
    for steps in (2, 1):
        trainer_of(Small(), tmp_path, [callback], max_steps=steps).train()
        assert instrument.load(tmp_path / "run").stats.step.tolist() == [*range(steps)]


def test_training_after_an_error_attaches_once(tmp_path: Path) -> None:
    model, original = Small(fails_at=1, largest_batch=1), torch.nn.utils.clip_grad_norm_
    callback = callback_of(CALLS, rules=None)
    trainer = trainer_of(model, tmp_path, [callback])
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    failed, model.largest_batch = callback.probe, 100
    trainer.train()
    assert failed.run.info["status"] == "failed"
    assert failed.stats.step.tolist() == [0]
    assert callback.probe.stats.step.tolist() == [0, 1, 2, 3]
    assert torch.nn.utils.clip_grad_norm_ is original


@pytest.mark.slow
def test_several_callbacks_record_the_same_rows(tmp_path: Path) -> None:
    one, other = callback_of({**CALLS, **GRADIENTS}, rules=None), callback_of({**CALLS, **GRADIENTS}, rules=None)
    original = torch.nn.utils.clip_grad_norm_
    with one, other:
        trainer_of(Small(), tmp_path, [one, other], max_grad_norm=0.01, eval_strategy="epoch").train()
    columns = ["hook", "step", "phase", "layer", "path", "l2"]
    assert one.probe.stats[columns].equals(other.probe.stats[columns])
    assert len(one.probe.stats) == 4 + 2 + 3 * 16
    assert torch.nn.utils.clip_grad_norm_ is original


def test_callback_is_selected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import instrument.integrations.transformers

    assert "instrument" in instrument.integrations.transformers.INTEGRATION_TO_CALLBACK
    (tmp_path / "hooks.yaml").write_text("train: {layers: head, kind: forward, action: record}")
    monkeypatch.setenv("INSTRUMENT_HOOKS", str(tmp_path / "hooks.yaml"))
    monkeypatch.setenv("INSTRUMENT_OUT", str(tmp_path / "run"))
    trainer_of(Small(), tmp_path, [], report_to="instrument").train()
    run = instrument.load(tmp_path / "run")
    assert (run.info["status"], run.stats.step.tolist()) == ("done", [0, 1, 2, 3])
    monkeypatch.delenv("INSTRUMENT_HOOKS")
    with pytest.raises(
        instrument.ConfigError, match=r"(?s)INSTRUMENT_HOOKS: no hooks.*transformer.*fix +INSTRUMENT_HOOKS="
    ):
        trainer_of(Small(), tmp_path, [], report_to="instrument")
