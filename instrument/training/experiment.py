"""Preparation of a run: `prepare` builds all objects from the configuration and checks them, without training."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..analysis.tensors_of_earlier_runs import RunArchive
from ..config.experiment import RunConfig
from ..config.record import RecordSpec
from ..config.schedule import Evaluations
from ..errors import ConfigError, Problem, user_code_location
from ..fields.field_types import Target
from ..fields.targets import argument_names, build
from ..plan.cost import Length, firings_of
from ..plan.hook_plan import HookPlan, check_not_frozen, make_plan
from ..plan.shape_inference import InferredCalls, infer_shapes, materialize
from ..plan.tensor_path_checks import check_functions, check_paths
from ..probe.optimizer_checks import check_optimizers, flatten_optimizer
from ..probe.samples import targets_of
from ..rules.requirements import check_rules
from ..tasks import ForwardOnly, Generate, Task, batch_with_targets, call_task, check_outcome
from ..tasks.forward_and_loss import Forward
from ..tasks.model_output import LossOutput, OutputNotice, OutputUnit, captured_outputs, last_output
from ..values.nested import structure, to_device
from .apply import apply_specs, build_module
from .compiled_models import compile_model
from .data import Batches, Data, batch_sizes, build_sampler, first_batch, load_data, loader_options, samples_of
from .device_and_seed import choose_device
from .distributed.batch_sharding import BatchShard, StepBatches, check_batch_size
from .distributed.strategies import Strategy, has_unused_parameters
from .hook_trials import HookTrials, Sizes
from .initial_weights import InitialWeights
from .input_gradients import with_input_gradients
from .loader import LoadedBatch, Loader, LoaderOptions
from .loss_checks import check_loss_of_parts
from .optimizer_fast_import import bypass_compiler_in_methods, bypass_compiler_in_step
from .per_module_optimizers import requires_closure
from .recorded_tensor_checks import PhaseBatches, recording_problems
from .schedulers import LearningRateScale

_TRIED_STEPS = 1000  # of a scheduler, before the run
_ROUNDING = 1e-9  # a learning rate that decreases to 0 may be slightly negative


@dataclass(frozen=True)
class Experiment:
    """All objects of a run.

    Attributes:
        config: The configuration.
        device: The device of this process.
        data: The slices of the dataset.
        batches: The batches of the steps.
        eval_loader: The batches of an evaluation; None in `mode: forward`.
        probe_batch: The probe batch as one micro-batch; None without one.
        length: The length of the run.
        task: Computes the loss of a batch.
        model: The model on its device, after the changes of the `apply` section.
        optimizer: The optimizer; None in `mode: forward`.
        uses_closure: Whether the step of the optimizer requires a closure that computes the gradients, as in LBFGS.
        scheduler: The learning-rate scheduler; None without one.
        scaler: The gradient scaler. It is disabled unless the precision is fp16.
        strategy: How one or several processes train the model.
        called_model: The model that the task calls: `model`, or its compiled version.
        train_module: The module that computes outcome and loss of a batch, see `Forward`; with several processes, its
            wrapper that reduces the gradients.
        plan: The plan of the hooks.
        inferred_by_phase: The result of shape inference for each phase of the run.
        archive: Reads the recorded tensors of other runs.
        weights: The weights that were loaded; None if the model has its initial weights.
        output_notice: Which of several outputs of the model the loss uses; None if this is clear.
        lr_scale: The factor of the learning rates, which can change during the training.
    """

    config: RunConfig
    device: torch.device
    data: Data
    batches: Batches
    eval_loader: Loader | None
    probe_batch: StepBatches | None
    length: Length
    task: Task
    model: nn.Module
    optimizer: Optimizer | None
    uses_closure: bool
    scheduler: LRScheduler | None
    scaler: GradScaler
    strategy: Strategy
    called_model: nn.Module
    train_module: nn.Module
    plan: HookPlan
    inferred_by_phase: dict[str, InferredCalls]
    archive: RunArchive
    weights: InitialWeights | None
    output_notice: OutputNotice | None
    lr_scale: LearningRateScale = field(default_factory=LearningRateScale)

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return _autocast(self.config.train.precision, self.device)

    def batch_with_targets(self, batch: Any) -> Any:
        """Return the part of a batch that has the targets for the table `samples`."""
        return batch_with_targets(self.task, batch)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that make the steps. `PerModule` contains several; `mode: forward` has none."""
        return () if self.optimizer is None else flatten_optimizer(self.optimizer)

    @property
    def steps(self) -> int:
        """The number of steps of the run."""
        return self.batches.steps


def prepare(config: RunConfig, strategy: Strategy | None = None) -> Experiment:
    """Build an experiment from its configuration, and check it.

    Shape inference runs one forward pass per phase. It restores the state of the model and the random states.

    Args:
        strategy: How several processes train the model; all of them call this function. Default: None, a single
            process.

    Raises:
        ConfigError: An object that the configuration names does not exist or cannot be built; a spec matches no module,
            or does not fit the shape of its tensors; the weights to load do not fit the model; or the model has no
            trainable parameter, except in `mode: forward`.
    """
    strategy = strategy or Strategy()
    if problems := strategy.config_problems(config):
        raise ConfigError(*problems)
    device = choose_device(config.device)
    task: Task = build(config.task, "task")
    _check_loss(config, task)
    model = build_module(config.model, "model")
    trains = config.mode == "train"
    data = load_data(config.data, evaluates=trains)
    shard = strategy.batch_shard
    loaders = _Loaders.of(config, data, shard, pins_memory=device.type == "cuda")
    length = loaders.length

    model.to(device)
    first = to_device(loaders.first_batches[config.mode].batch, device)
    materialize(model, partial(_forward, task, model, first, differentiable=trains))
    weights = _load_and_apply(config, model)
    if trains:
        _check_trainable(config, model)

    plan = make_plan(config.hooks, model)
    check_not_frozen(plan)
    find_unused = config.train.find_unused_parameters
    archive = RunArchive(shard.size, shard.indices_of)
    trials = HookTrials(plan, config.seed, archive, length, loaders.sizes())
    inferred_by_phase, has_unused, output_notice = _infer_shapes(
        config,
        task,
        model,
        plan,
        loaders,
        device,
        trials=trials,
        find_unused=trains and strategy.needs_all_gradients and find_unused is None,
    )
    check_functions(plan, inferred_by_phase)
    check_paths(plan, inferred_by_phase)
    recordings = recording_problems(plan, archive, loaders.by_phase(inferred_by_phase), length)
    if of_hooks := {**trials.failures, **recordings, **trials.misfits}:
        raise ConfigError(*(of_hooks[name] for name in plan.specs if name in of_hooks))
    _check_conditions(plan, length)
    _check_rules(config, plan, length)
    if trains or (config.forward.grad and config.forward.of is None):
        check_loss_of_parts(config, task, model, data.train, shard, loaders.options)
    strategy.check_model_call(calls_model=id(model) in inferred_by_phase[config.mode])
    if strategy.shard(model):
        plan = make_plan(config.hooks, model)  # A new plan releases the unsharded parameters.
    plan = replace(plan, shapes_checked=True)
    optimizer = _build_optimizer(config.optimizer, model) if trains else None
    uses_closure = optimizer is not None and requires_closure(optimizer)
    if uses_closure:
        _check_closure(config, optimizer, strategy)
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
        batches=loaders.batches,
        eval_loader=loaders.eval_loader,
        probe_batch=loaders.probe_batch,
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


def _check_conditions(plan: HookPlan, length: Length) -> None:
    """Check that the run is long enough for the conditions of hooks, which require earlier values."""
    problems = []
    for name, spec in plan.specs.items():
        # A module can be called several times in a step. The default also allows short trials of a configuration.
        if spec.definition.family != "parameter" or spec.condition is None:
            continue
        after, times = spec.condition.after, firings_of(spec, length).times
        if "after" in spec.condition.model_fields_set and times <= after:
            message = f"cannot be reached: the hook fires {times:,} times at each parameter"
            problems.append(Problem(f"hooks.{name}.when.after", message, after, fix="reduce 'after'"))
    if problems:
        raise ConfigError(*problems)


def _check_rules(config: RunConfig, plan: HookPlan, length: Length) -> None:
    """Check that the hooks record what the rules read, and that the run is long enough for the rules."""
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


def _check_loss(config: RunConfig, task: Task) -> None:
    """Check that a task without a loss is not used for a training or for gradients of a loss."""
    if not isinstance(task, ForwardOnly | Generate):
        return
    if config.mode == "train":
        message = "this task computes no loss, so it cannot train a model"
        raise ConfigError(Problem("task", message, given=config.task.target, fix="set mode=forward"))
    if config.forward.grad and config.forward.of is None:
        message = "this task computes no loss that has gradients"
        fix = "set forward.grad=false, or forward.of to a part of the model's output"
        raise ConfigError(Problem("forward.grad", message, given=True, fix=fix))


@dataclass(frozen=True)
class _Loaders:
    """The batches of a run. `first_batches`: the batch for shape inference in each phase; the phase of steps is the first one."""

    data: Data
    batches: Batches
    eval_loader: Loader | None
    probe_batch: StepBatches | None
    length: Length
    first_batches: dict[str, LoadedBatch]
    options: LoaderOptions
    shard: BatchShard

    @classmethod
    def of(cls, config: RunConfig, data: Data, shard: BatchShard, *, pins_memory: bool) -> _Loaders:
        """Create the loaders, and check that each process gets samples of every batch."""
        options = loader_options(config.data, config.seed, pins_memory=pins_memory)
        sampler = None if config.data.sampler is None else build_sampler(config.data.sampler, data.train)
        passes = config.forward.passes if config.mode == "forward" else None
        batches = Batches(data.train, config.train, config.seed, shard, options=options, sampler=sampler, passes=passes)
        check_batch_size(batches.length, config.train.batch_size, shard, "train.batch_size")
        first: dict[str, LoadedBatch] = {config.mode: first_batch(data.train, config.train.batch_size, shard, options)}
        eval_loader = probe_batch = None
        if data.test is not None:
            eval_loader = Loader(data.test, config.train.eval_batch_size, shard, options)
            check_batch_size(eval_loader.length, config.train.eval_batch_size, shard, "train.eval_batch_size")
            first["eval"] = first_batch(data.test, config.train.eval_batch_size, shard, options, "data.eval_slice")
        if data.probe is not None:
            samples = len(data.probe)  # type: ignore[arg-type]
            check_batch_size(samples, samples, shard, "data.probe_batch")
            first["probe"] = first_batch(data.probe, samples, shard, options)
            probe_batch = StepBatches()
            probe_batch.add(*first["probe"])
        evaluations = Evaluations(batches.steps, config.train.eval_every)
        eval_batches = 0 if eval_loader is None else len(eval_loader)
        of_epoch = batches.micro_batches_per_epoch
        length = Length(batches.steps, config.train.accumulate, of_epoch, evaluations, eval_batches)
        return cls(data, batches, eval_loader, probe_batch, length, first, options, shard)

    def first_batch(self, phase: str, size: int) -> LoadedBatch:
        """Load a batch with the first samples of a phase."""
        dataset = {"eval": self.data.test, "probe": self.data.probe}.get(phase) or self.data.train
        return first_batch(dataset, size, self.shard, self.options)

    def sizes(self) -> dict[str, Sizes]:
        """Return the sizes of the batches of each phase."""
        mode, *_ = self.first_batches
        sizes: dict[str, Sizes] = {mode: self.batches.sizes}
        if self.eval_loader is not None:
            eval_sizes = batch_sizes(self.eval_loader.length, self.eval_loader.batch_size)
            sizes["eval"] = lambda _: eval_sizes
        if self.data.probe is not None:
            probe_sizes = [len(self.data.probe)]  # type: ignore[arg-type]
            sizes["probe"] = lambda _: probe_sizes
        return sizes

    def by_phase(self, inferred_by_phase: Mapping[str, InferredCalls]) -> dict[str, PhaseBatches]:
        """Return the batches of each phase, given the results of shape inference."""
        mode, *_ = self.first_batches
        ids: dict[str, Callable[[Collection[int]], set[int] | None]] = {
            mode: self.batches.samples_at,
            "eval": lambda _: samples_of(self.data.test),
            "probe": lambda _: samples_of(self.data.probe),
        }
        sizes, batches = self.sizes(), {}
        for phase, inferred in inferred_by_phase.items():
            split = self.data.source["train_split" if phase == mode else "eval_split"]
            samples = self.first_batches[phase].samples
            batches[phase] = PhaseBatches(inferred, samples, sizes[phase], ids[phase], split)
        return batches


def _load_and_apply(config: RunConfig, model: nn.Module) -> InitialWeights | None:
    """Load the initial weights, and apply the changes of the `apply` section."""
    # The checkpoint of a resumed training contains the weights.
    path = config.init_from.path if config.mode == "forward" or config.resume is None else None
    if path is None:
        apply_specs(config.apply, model)
        return None
    weights = InitialWeights(path, strict=config.init_from.strict)
    if not weights.is_of_run:
        weights.load(model)
    apply_specs(config.apply, model)
    if weights.is_of_run:
        weights.load(model)
    weights.compare(model)
    return weights


def _output_unit(config: RunConfig) -> OutputUnit | None:
    """Return the part of the output whose gradients are computed; None for those of the loss."""
    of = config.forward.of if config.mode == "forward" else None
    return None if of is None else OutputUnit(of)


def _infer_shapes(
    config: RunConfig,
    task: Task,
    model: nn.Module,
    plan: HookPlan,
    loaders: _Loaders,
    device: torch.device,
    *,
    trials: HookTrials,
    find_unused: bool,
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
        with trials.on_batch(phase, loaded.total, loaded.indices, is_first=is_first, targets=targets):
            return infer_shapes(
                model,
                partial(forward, phase, to_device(loaded.batch, device), is_first=is_first),
                training=phase == "train",
                observe=trials.on_tensors,
                function_sites=[site for site in plan.sites if site.spec.definition.of_functions],
                observe_function=trials.on_function,
            )

    inferred = {phase: infer(phase, loaded) for phase, loaded in loaders.first_batches.items()}
    for phase, loaded in loaders.first_batches.items():
        smallest = trials.smallest_batch_size(phase)
        if smallest is not None and smallest < loaded.total:
            infer(phase, loaders.first_batch(phase, smallest), is_first=False)
    return inferred, has_unused, notice


def _autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a precision: `fp32` (disabled), `fp16` or `bf16`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def _forward(
    task: Task, model: nn.Module, batch: Any, *, differentiable: bool = True, unit: OutputUnit | None = None
) -> tuple[Tensor | None, OutputNotice | None]:
    """Return the loss of a batch, or the sum of an output unit; and which of several outputs the loss uses, if that is not clear."""
    with captured_outputs(model) as outputs:
        outcome = call_task(task, model, batch, check=partial(check_outcome, differentiable=differentiable))
    if unit is not None:
        return unit.sum_in(last_output(outputs)), None
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
    """Check that a task can select the targets of a batch."""
    try:
        batch_with_targets(task, batch)
    except Exception as error:
        message = f"{type(task).__qualname__}.sample_targets fails{user_code_location(error)}"
        given = f"{type(error).__name__}: {error}; the batch is {structure(batch)}"
        raise ConfigError(Problem("task", message, given=given)) from error


def _check_trainable(config: RunConfig, model: nn.Module) -> None:
    """Check that the model has a trainable parameter."""
    if not any(parameter.requires_grad for parameter in model.parameters()):
        message = "the model has no trainable parameter: it has no parameters, or 'apply' froze all of them"
        fix = "to run it without training, set mode=forward"
        raise ConfigError(Problem("model", message, given=config.model.target, fix=fix))


def _build_optimizer(target: Target, model: nn.Module) -> Optimizer:
    """Build the optimizer from its target."""
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


def _check_closure(config: RunConfig, optimizer: Optimizer | None, strategy: Strategy) -> None:
    """Check that the training supports an optimizer whose step requires a closure."""
    what = f"the step of {type(optimizer).__name__} requires a closure"
    if config.train.precision == "fp16":
        message = f"{what}, which the gradient scaler of PyTorch does not support"
        raise ConfigError(Problem("train.precision", message, "fp16", fix="set train.precision=bf16 or fp32"))
    if strategy.processes is not None:
        message = f"{what}, which works in a single process only"
        raise ConfigError(Problem("optimizer", message, config.optimizer.target, fix="choose another optimizer"))


def _build_scheduler(target: Target, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Build the scheduler from its target."""
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns since the optimizer makes no step
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
