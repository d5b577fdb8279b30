"""Preparation of a run: `Experiment` builds all objects from the configuration and checks them, without training."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
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
from ..plan.hook_plan import check_not_frozen, make_plan
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
from .data import build_sampler, load_data, loader_options
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


class Experiment:
    """All objects of a run, built from its configuration and checked, without training. With several processes, all of them build it.

    Shape inference runs one forward pass per phase. It restores the state of the model and the random states.

    Raises:
        ConfigError: An object that the configuration names does not exist or cannot be built; a spec matches no module,
            or does not fit the shape of its tensors; the weights to load do not fit the model; or the model has no
            trainable parameter, except in `mode: forward`.
    """

    def __init__(self, config: RunConfig, strategy: Strategy | None = None) -> None:
        self.config = config
        self.strategy = strategy = strategy or Strategy(config.train.parallel)
        raise_problems(strategy.config_problems(config))
        self.device = choose_device(config.device)
        self.autocast = partial(_autocast, config.train.precision, self.device)
        self.task: Task = build(config.task, "task")
        self.model = model = build_module(config.model, "model")
        trains = config.mode == "train"
        self.data = load_data(config.data, evaluates=trains)
        pins_memory = self.device.type == "cuda"
        options = loader_options(config.data, config.seed, pins_memory=pins_memory, shard=strategy.batch_shard)
        phases = self._load_batches(options)
        self.probe_batch = phases["probe"].first if "probe" in phases else None
        strategy.check_batches(self.batches)
        self.operator_steps = range(0)  # the steps in which every operator is recorded; set by a replay
        self.length = Length(
            self.steps,
            config.train.accumulate,
            self.batches.micro_batches_per_epoch,
            Evaluations(self.steps, config.train.eval_every),
            0 if self.eval_loader is None else len(self.eval_loader),
        )

        model.to(self.device)
        first = to_device(phases[config.mode].first.batch, self.device)
        materialize(model, partial(_forward, self.task, model, first, differentiable=trains))
        self.weights = _load_and_apply(config, model)  # None if the model has its initial weights

        self.plan = make_plan(config.hooks, model)
        check_not_frozen(self.plan)
        self.archive = RunArchive(strategy.batch_shard.size, strategy.batch_shard.indices_of)
        self.output_notice: OutputNotice | None = None  # which of several outputs of the model the loss uses
        self._has_unused = bool(config.train.find_unused_parameters)
        self.inferred_by_phase = self._check_hooks(phases)
        self._check_rules()
        if trains or (config.forward.grad and config.forward.of is None):
            check_loss_of_parts(config, self.task, model, self.data.train, options)
        strategy.check_model_call(calls_model=id(model) in self.inferred_by_phase[config.mode])
        if strategy.shard(model, lambda: _forward(self.task, model, first, differentiable=False)[0]):
            self.plan = make_plan(config.hooks, model)  # A new plan releases the unsharded parameters.
        self.plan = replace(strategy.own_sites(self.plan), shapes_checked=True)
        self.optimizer = _build_optimizer(config.optimizer, model) if trains else None
        # Whether the step of the optimizer requires a closure that computes the gradients, as in LBFGS.
        self.uses_closure = self.optimizer is not None and _uses_closure(config, self.optimizer, strategy)
        check_optimizers(self.plan, self.optimizers)
        self.scheduler: LRScheduler | None = None
        if self.optimizer is not None and config.scheduler is not None:
            self.scheduler = _build_scheduler(config.scheduler, self.optimizer, self.steps)
        self.lr_scale = LearningRateScale()  # can change during the training
        self.scaler = GradScaler(self.device.type, enabled=trains and config.train.precision == "fp16")
        # The model that the task calls.
        self.called_model = model if config.train.compile is None else compile_model(model, config.train.compile)
        # It computes outcome and loss of a batch; with several processes, its wrapper reduces the gradients.
        self.train_module: nn.Module = Forward(self.called_model, self.task, self.autocast, self._output_unit)
        if trains:
            self.train_module = strategy.wrap(self.train_module, has_unused=self._has_unused)
        strategy.seed_ranks(config.seed)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that make the steps. `PerModule` contains several; `mode: forward` has none."""
        return () if self.optimizer is None else flatten_optimizer(self.optimizer)

    @property
    def steps(self) -> int:
        return self.batches.steps

    @property
    def _output_unit(self) -> OutputUnit | None:
        of = self.config.forward.of if self.config.mode == "forward" else None
        return None if of is None else OutputUnit(of)

    def probe(self, sink: Sink, **options: Any) -> Probe:
        """Return a probe with the hooks of the run; further arguments are those of `Probe`."""
        seed = self.config.seed
        return Probe(self.plan, sink, optimizer=self.optimizers, scaler=self.scaler, seed=seed, **options)

    def _check_rules(self) -> None:
        config, plan, length = self.config, self.plan, self.length
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

    def _load_batches(self, options: LoaderOptions) -> dict[str, PhaseBatches]:
        """Set the batches of the steps and those of an evaluation. Return those by phase, that of the steps first.

        Each process must get samples of every batch.
        """
        config, data = self.config, self.data

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
        self.batches = batches = Batches(data.train, config.train, options, sampler=sampler, passes=passes)
        check_batch_size(batches.length, size, shard, "train.batch_size")
        at_steps = of_phase(
            data.train, size, batches.sizes, batches.samples_at, where="data.slice", split="train_split"
        )
        phases = {str(config.mode): at_steps}
        self.eval_loader: Loader | None = None  # None in `mode: forward`
        if data.test is not None:
            self.eval_loader = loader = Loader(data.test, eval_size, options)
            eval_sizes = batch_sizes(loader.length, eval_size)
            check_batch_size(loader.length, eval_size, shard, "train.eval_batch_size")
            phases["eval"] = of_phase(data.test, eval_size, lambda _: eval_sizes)
        if data.probe is not None:
            samples = len(data.probe)  # type: ignore[arg-type]
            check_batch_size(samples, samples, shard, "data.probe_batch")
            phases["probe"] = of_phase(data.probe, samples, lambda _: [samples])
        return phases

    def _check_hooks(self, phases: Mapping[str, PhaseBatches]) -> dict[str, InferredCalls]:
        """Run shape inference for each phase, on its first batch, and on its smallest one if that is smaller. Check the hooks with it."""
        plan = self.plan
        trials = HookTrials(plan, self.config.seed, self.archive, self.length, phases)
        inferred = {phase: self._infer(trials, phase, batches.first) for phase, batches in phases.items()}
        for phase, batches in phases.items():
            smallest, clean = trials.smallest_batch_size(phase), self.config.forward.from_sample
            if smallest is not None and clean is not None and smallest <= max(clean, 1):
                message = "the smallest batch lacks this clean sample or a corrupted one"
                allowed = f"the batch has {smallest} samples"
                raise ConfigError(Problem("forward.from_sample", message, clean, allowed, fix=SMALLER_BATCH_FIX))
            if smallest is not None and smallest < batches.first.total:
                self._infer(trials, phase, batches.load(smallest), is_first=False)
        check_functions(plan, inferred)
        check_paths(plan, inferred)
        of_hooks = {**trials.failures, **recording_problems(trials, inferred), **trials.misfits}
        raise_problems([of_hooks[name] for name in plan.specs if name in of_hooks])
        return inferred

    def _infer(self, trials: HookTrials, phase: str, loaded: LoadedBatch, *, is_first: bool = True) -> InferredCalls:
        config, task, model = self.config, self.task, self.model
        needs_gradients = phase != "forward" or config.forward.grad
        on_device = to_device(loaded.batch, self.device)

        def forward() -> None:
            batch, unit = on_device, self._output_unit
            if phase in ("forward", "probe") and needs_gradients:
                batch = with_input_gradients(batch)
            differentiable = needs_gradients and phase != "eval" and unit is None
            with torch.set_grad_enabled(needs_gradients):
                loss, notice = _forward(task, model, batch, differentiable=differentiable, unit=unit)
            if loss is not None:
                trials.on_loss(loss)
            if not is_first:
                return
            _check_target_selection(task, batch)
            if phase == config.mode:
                self.output_notice = notice
                is_unknown = config.train.find_unused_parameters is None and self.strategy.needs_all_gradients
                if phase == "train" and is_unknown and loss is not None:
                    self._has_unused = has_unused_parameters(model, loss)
            trials.on_parameters()

        with trials.on_batch(phase, loaded, is_first=is_first, targets=_targets(task, loaded.batch)):
            return infer_shapes(
                model,
                forward,
                training=phase == "train",
                observe=trials.on_tensors,
                function_sites=trials.function_sites,
                observe_function=trials.on_function,
            )


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
