"""Preparation of a run: `prepare` builds all objects from the configuration and checks them, without training."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from ..analysis.tensors_of_earlier_runs import RunArchive
from ..config.experiment import RunConfig
from ..config.hook_specs import RecordSpec
from ..config.schedule import Evaluations
from ..errors import ConfigError, Problem, raise_problems, user_code_location
from ..fields.field_types import Target
from ..fields.targets import argument_names, build
from ..plan.cost import Length
from ..plan.hook_plan import HookPlan, check_not_frozen, make_plan
from ..plan.shape_inference import InferredCalls, infer_shapes, materialize
from ..plan.tensor_checks import check_functions, check_paths
from ..probe.optimizer_checks import check_optimizers, flatten_optimizer
from ..probe.probe import Probe
from ..probe.samples import targets_of
from ..rules.requirements import check_references, check_rules
from ..tables.sink_interface import Sink
from ..tasks import Task
from ..tasks.base import batch_with_targets, call_task, check_outcome
from ..tasks.model_output import (
    Forward,
    LossOutput,
    OutputNotice,
    OutputUnit,
    captured_outputs,
    with_input_gradients,
)
from ..values.nested import structure, to_device
from .apply import apply_specs, build_module
from .checks import check_loss_of_parts, recording_problems
from .compiler import bypass_compiler_in_methods, bypass_compiler_in_step, compile_model
from .data import Data, build_sampler, load_data, loader_options
from .distributed.strategies import Strategy, has_unused_parameters
from .environment import choose_device
from .hook_trials import SMALLER_BATCH_FIX, HookTrials
from .initial_weights import InitialWeights
from .loader import (
    Batches,
    LoadedBatch,
    Loader,
    LoaderOptions,
    PhaseBatches,
    batch_sizes,
    check_batch_size,
    first_batch,
    samples_of,
)
from .per_module_optimizers import requires_closure
from .schedulers import LearningRateScale

_TRIED_STEPS = 1000  # of a scheduler, before the run
_ROUNDING = 1e-9  # a learning rate that decreases to 0 may be slightly negative


@dataclass(frozen=True)
class Experiment:
    """All objects of a run."""

    config: RunConfig
    device: torch.device
    data: Data
    batches: Batches
    eval_loader: Loader | None  # the batches of an evaluation; None in `mode: forward`
    probe_batch: LoadedBatch | None
    length: Length
    task: Task
    model: nn.Module
    optimizer: Optimizer | None
    uses_closure: bool  # whether the step of the optimizer requires a closure that computes the gradients, as in LBFGS
    scheduler: LRScheduler | None
    scaler: GradScaler  # disabled unless the precision is fp16
    strategy: Strategy
    called_model: nn.Module  # the model that the task calls: `model`, or its compiled version
    # The module that computes outcome and loss of a batch, see `Forward`; with several processes, its wrapper that reduces the gradients.
    train_module: nn.Module
    plan: HookPlan
    inferred_by_phase: dict[str, InferredCalls]
    archive: RunArchive
    weights: InitialWeights | None  # the weights that were loaded; None if the model has its initial weights
    output_notice: OutputNotice | None  # which of several outputs of the model the loss uses; None if this is clear
    lr_scale: LearningRateScale = field(default_factory=LearningRateScale)  # can change during the training

    def autocast(self) -> torch.autocast:
        return _autocast(self.config.train.precision, self.device)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that make the steps. `PerModule` contains several; `mode: forward` has none."""
        return () if self.optimizer is None else flatten_optimizer(self.optimizer)

    @property
    def steps(self) -> int:
        return self.batches.steps

    def probe(self, sink: Sink, **options: Any) -> Probe:
        """Return a probe with the hooks of the run; further arguments are those of `Probe`."""
        seed = self.config.seed
        return Probe(self.plan, sink, optimizer=self.optimizers, scaler=self.scaler, seed=seed, **options)


def prepare(config: RunConfig, strategy: Strategy | None = None) -> Experiment:
    """Build an experiment from its configuration, and check it. With several processes, all of them call this function.

    Shape inference runs one forward pass per phase. It restores the state of the model and the random states.

    Raises:
        ConfigError: An object that the configuration names does not exist or cannot be built; a spec matches no module,
            or does not fit the shape of its tensors; the weights to load do not fit the model; or the model has no
            trainable parameter, except in `mode: forward`.
    """
    strategy = strategy or Strategy(config.train.parallel)
    raise_problems(strategy.config_problems(config))
    device = choose_device(config.device)
    task: Task = build(config.task, "task")
    model = build_module(config.model, "model")
    trains = config.mode == "train"
    data = load_data(config.data, evaluates=trains)
    shard = strategy.batch_shard
    options = loader_options(config.data, config.seed, pins_memory=device.type == "cuda", shard=shard)
    batches, eval_loader, phases = _load_batches(config, data, options)
    strategy.check_batches(batches)
    length = Length(
        batches.steps,
        config.train.accumulate,
        batches.micro_batches_per_epoch,
        Evaluations(batches.steps, config.train.eval_every),
        0 if eval_loader is None else len(eval_loader),
    )

    model.to(device)
    first = to_device(phases[config.mode].first.batch, device)
    materialize(model, partial(_forward, task, model, first, differentiable=trains))
    weights = _load_and_apply(config, model)

    plan = make_plan(config.hooks, model)
    check_not_frozen(plan)
    find_unused = config.train.find_unused_parameters
    archive = RunArchive(shard.size, shard.indices_of)
    trials = HookTrials(plan, config.seed, archive, length, phases)
    searches_unused = trains and strategy.needs_all_gradients and find_unused is None
    inferred_by_phase, has_unused, output_notice = _infer_shapes(config, task, model, device, trials, searches_unused)
    check_functions(plan, inferred_by_phase)
    check_paths(plan, inferred_by_phase)
    recordings = recording_problems(trials, inferred_by_phase)
    if of_hooks := {**trials.failures, **recordings, **trials.misfits}:
        raise ConfigError(*(of_hooks[name] for name in plan.specs if name in of_hooks))
    _check_rules(config, plan, length)
    if trains or (config.forward.grad and config.forward.of is None):
        check_loss_of_parts(config, task, model, data.train, options)
    strategy.check_model_call(calls_model=id(model) in inferred_by_phase[config.mode])
    if strategy.shard(model, lambda: _forward(task, model, first, differentiable=False)[0]):
        plan = make_plan(config.hooks, model)  # A new plan releases the unsharded parameters.
    plan = replace(strategy.own_sites(plan), shapes_checked=True)
    optimizer = _build_optimizer(config.optimizer, model) if trains else None
    uses_closure = optimizer is not None and _uses_closure(config, optimizer, strategy)
    check_optimizers(plan, () if optimizer is None else flatten_optimizer(optimizer))
    scheduler = None
    if optimizer is not None and config.scheduler is not None:
        scheduler = _build_scheduler(config.scheduler, optimizer, length.steps)
    called_model = model if config.train.compile is None else compile_model(model, config.train.compile)
    forward = Forward(called_model, task, partial(_autocast, config.train.precision, device), _output_unit(config))
    train_module = strategy.wrap(forward, has_unused=has_unused or bool(find_unused)) if trains else forward
    strategy.seed_ranks(config.seed)
    return Experiment(
        config=config,
        device=device,
        data=data,
        batches=batches,
        eval_loader=eval_loader,
        probe_batch=phases["probe"].first if "probe" in phases else None,
        length=length,
        task=task,
        model=model,
        optimizer=optimizer,
        uses_closure=uses_closure,
        scheduler=scheduler,
        scaler=GradScaler(device.type, enabled=trains and config.train.precision == "fp16"),
        strategy=strategy,
        called_model=called_model,
        train_module=train_module,
        plan=plan,
        inferred_by_phase=inferred_by_phase,
        archive=archive,
        weights=weights,
        output_notice=output_notice,
    )


def _check_rules(config: RunConfig, plan: HookPlan, length: Length) -> None:
    records = [spec for spec in plan.specs.values() if isinstance(spec, RecordSpec)]
    records_tensors = any(spec.tensors and spec.keep is None for spec in records)
    evaluations = len(length.evaluations.regular) + (length.steps not in length.evaluations.regular)
    check_rules(
        config.rules,
        plan.specs,
        has_targets=config.data.ids == "all" or records_tensors,
        evaluations=evaluations if config.mode == "train" else 0,
        steps=length.steps,
    )
    check_references(config.rules, plan.specs, [(site.spec.name, site.layer.name) for site in plan.sites])


def _load_batches(
    config: RunConfig, data: Data, options: LoaderOptions
) -> tuple[Batches, Loader | None, dict[str, PhaseBatches]]:
    """Return the batches of the steps, those of an evaluation, and those by phase, that of the steps first.

    Each process must get samples of every batch.
    """

    def of_phase(
        dataset: Dataset[Any],
        size: int,
        sizes: Callable[[int], Sequence[int]],
        ids: Callable[[Collection[int]], set[int] | None] | None = None,
        *,
        where: str = "data.eval_slice",
        split: str = "eval_split",
    ) -> PhaseBatches:
        load = partial(first_batch, dataset, options=options, where=where)
        return PhaseBatches(load(size), load, sizes, ids or (lambda _: samples_of(dataset)), data.source[split])

    sampler = None if config.data.sampler is None else build_sampler(config.data.sampler, data.train)
    passes = config.forward.passes if config.mode == "forward" else None
    size, eval_size, shard = config.train.batch_size, config.train.eval_batch_size, options.shard
    batches = Batches(data.train, config.train, options, sampler=sampler, passes=passes)
    check_batch_size(batches.length, size, shard, "train.batch_size")
    of_steps = of_phase(data.train, size, batches.sizes, batches.samples_at, where="data.slice", split="train_split")
    phases: dict[str, PhaseBatches] = {config.mode: of_steps}
    eval_loader = None
    if data.test is not None:
        eval_loader = Loader(data.test, eval_size, options)
        eval_sizes = batch_sizes(eval_loader.length, eval_size)
        check_batch_size(eval_loader.length, eval_size, shard, "train.eval_batch_size")
        phases["eval"] = of_phase(data.test, eval_size, lambda _: eval_sizes)
    if data.probe is not None:
        samples = len(data.probe)  # type: ignore[arg-type]
        check_batch_size(samples, samples, shard, "data.probe_batch")
        phases["probe"] = of_phase(data.probe, samples, lambda _: [samples])
    return batches, eval_loader, phases


def _load_and_apply(config: RunConfig, model: nn.Module) -> InitialWeights | None:
    """Load the initial weights, and apply the changes of the `apply` section, which must leave a parameter to train."""
    # The checkpoint of a resumed training contains the weights.
    path = config.init_from.path if config.mode == "forward" or config.resume is None else None
    weights = None if path is None else InitialWeights(path, strict=config.init_from.strict)
    if weights is not None and not weights.is_of_run:
        weights.load(model)
    apply_specs(config.apply, model)
    if weights is not None and weights.is_of_run:
        weights.load(model)
    if config.mode == "train" and not any(parameter.requires_grad for parameter in model.parameters()):
        message = "the model has no trainable parameter: it has no parameters, or 'apply' froze all of them"
        fix = "to run it without training, set mode=forward"
        raise ConfigError(Problem("model", message, given=config.model.target, fix=fix))
    return weights


def _output_unit(config: RunConfig) -> OutputUnit | None:
    of = config.forward.of if config.mode == "forward" else None
    return None if of is None else OutputUnit(of)


def _infer_shapes(
    config: RunConfig, task: Task, model: nn.Module, device: torch.device, trials: HookTrials, find_unused: bool
) -> tuple[dict[str, InferredCalls], bool, OutputNotice | None]:
    """Run shape inference for each phase: on its first batch, and on its smallest batch, if that is smaller."""
    has_unused = False
    notice: OutputNotice | None = None

    def forward(phase: str, batch: Any, *, is_first: bool) -> None:
        nonlocal has_unused, notice
        needs_gradients = phase != "forward" or config.forward.grad
        if phase in ("forward", "probe") and needs_gradients:
            batch = with_input_gradients(batch)
        unit = _output_unit(config)
        differentiable = needs_gradients and phase != "eval" and unit is None
        with torch.set_grad_enabled(needs_gradients):
            loss, output_notice = _forward(task, model, batch, differentiable=differentiable, unit=unit)
        if loss is not None:
            trials.on_loss(loss)
        if not is_first:
            return
        _check_target_selection(task, batch)
        if phase == config.mode:
            notice = output_notice
            has_unused = loss is not None and find_unused and has_unused_parameters(model, loss)
        trials.on_parameters()

    def infer(phase: str, loaded: LoadedBatch, *, is_first: bool = True) -> InferredCalls:
        targets = _targets(task, loaded.batch)
        with trials.on_batch(phase, loaded, is_first=is_first, targets=targets):
            return infer_shapes(
                model,
                partial(forward, phase, to_device(loaded.batch, device), is_first=is_first),
                training=phase == "train",
                observe=trials.on_tensors,
                function_sites=trials.function_sites,
                observe_function=trials.on_function,
            )

    inferred = {phase: infer(phase, batches.first) for phase, batches in trials.phases.items()}
    for phase, batches in trials.phases.items():
        smallest, clean = trials.smallest_batch_size(phase), config.forward.from_sample
        if smallest is not None and clean is not None and smallest <= max(clean, 1):
            message = "the smallest batch lacks this clean sample or a corrupted one"
            allowed = f"the batch has {smallest} samples"
            raise ConfigError(Problem("forward.from_sample", message, clean, allowed, fix=SMALLER_BATCH_FIX))
        if smallest is not None and smallest < batches.first.total:
            infer(phase, batches.load(smallest), is_first=False)
    return inferred, has_unused, notice


def _autocast(precision: str, device: torch.device) -> torch.autocast:
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def _forward(
    task: Task, model: nn.Module, batch: Any, *, differentiable: bool = True, unit: OutputUnit | None = None
) -> tuple[Tensor | None, OutputNotice | None]:
    """Return the loss of a batch, or the sum of an output unit; and which of several outputs the loss uses, if that is not clear."""
    with captured_outputs(model) as outputs:
        outcome = call_task(task, model, batch, check=partial(check_outcome, differentiable=differentiable))
    if unit is not None:
        return unit.sum_in(outputs), None
    choice = getattr(task, "output", None)
    if not isinstance(choice, LossOutput) or not outputs or outcome.loss is None:
        return outcome.loss, None
    return outcome.loss, choice.notice(outputs[-1], outcome.loss)


def _targets(task: Task, batch: Any) -> Tensor | None:
    """Return the targets of a batch; None if there are none. `_check_target_selection` reports errors, after those of the model."""
    try:
        return targets_of(batch_with_targets(task, batch))
    except Exception:
        return None


def _check_target_selection(task: Task, batch: Any) -> None:
    try:
        batch_with_targets(task, batch)
    except Exception as error:
        message = f"{type(task).__qualname__}.sample_targets fails{user_code_location(error)}"
        given = f"{type(error).__name__}: {error}; the batch is {structure(batch)}"
        raise ConfigError(Problem("task", message, given=given)) from error


def _build_optimizer(target: Target, model: nn.Module) -> Optimizer:
    bypass_compiler_in_methods()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = argument_names(target.target, "optimizer")
    optimizer = build(target, "optimizer", model if "model" in names and "params" not in names else trainable)
    if not isinstance(optimizer, Optimizer):
        message = f"must be a torch.optim.Optimizer, but {target.target} returned {type(optimizer).__name__}"
        raise ConfigError(Problem("optimizer", message))
    for each in flatten_optimizer(optimizer):
        bypass_compiler_in_step(each)
    return optimizer


def _uses_closure(config: RunConfig, optimizer: Optimizer, strategy: Strategy) -> bool:
    if not requires_closure(optimizer):
        return False
    what = f"the step of {type(optimizer).__name__} requires a closure"
    if config.train.precision == "fp16":
        message = f"{what}, which the gradient scaler of PyTorch does not support"
        raise ConfigError(Problem("train.precision", message, "fp16", fix="set train.precision=bf16 or fp32"))
    if strategy.processes is not None:
        message = f"{what}, which works in a single process only"
        raise ConfigError(Problem("optimizer", message, config.optimizer.target, fix="choose another optimizer"))
    return True


def _build_scheduler(target: Target, optimizer: Optimizer, steps: int) -> LRScheduler:
    arguments = {"steps": steps} if "steps" in argument_names(target.target, "scheduler") else {}
    scheduler = build(target, "scheduler", optimizer, **arguments)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        message = "must be a torch.optim.lr_scheduler.LRScheduler whose step requires no metric"
        raise ConfigError(Problem("scheduler", f"{message}, but {target.target} returned {type(scheduler).__name__}"))
    _check_learning_rates(scheduler, target.target, steps)
    return scheduler


def _check_learning_rates(scheduler: LRScheduler, name: str, steps: int) -> None:
    """Make the first steps of a copy of a scheduler, which has its own learning rates."""
    parameters = (parameter for group in scheduler.optimizer.param_groups for parameter in group["params"])
    try:
        copied = copy.deepcopy(scheduler, {id(parameter): parameter for parameter in parameters})
    except Exception:  # custom code that cannot be copied
        return
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns since the optimizer makes no step
        for step in range(1, min(steps, _TRIED_STEPS) + 1):
            try:
                copied.step()
            except Exception as error:
                message = f"step {step} of {name} raises {type(error).__name__}: {error}{user_code_location(error)}"
                raise ConfigError(Problem("scheduler", message)) from error
            for lr in map(float, copied.get_last_lr()):
                if not math.isfinite(lr) or lr < -_ROUNDING:
                    message = f"{name} sets a learning rate that is negative or not finite, after step {step}"
                    raise ConfigError(Problem("scheduler", message, given=f"{lr:.6g}"))
