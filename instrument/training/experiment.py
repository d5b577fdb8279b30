"""Preparation of a run: `prepare` builds all objects from the configuration and checks them, without training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..analysis.tensors_of_earlier_runs import RunArchive
from ..capture.optimizer_checks import check_optimizers, flatten_optimizer
from ..distributed.batch_sharding import IndexedLoader, check_batch_size, sequential_loader
from ..distributed.strategies import Strategy
from ..distributed.unused_parameters import has_unused_parameters
from ..errors import ConfigError, Problem
from ..nested import number_of_samples, to_device
from ..plan.cost import Length
from ..plan.dimension_checks import check_shapes
from ..plan.hook_plan import HookPlan, check_not_frozen, make_plan
from ..plan.shape_inference import InferredCalls, infer_shapes, materialize
from ..plan.tensor_path_checks import check_paths
from ..spec.config import RunConfig
from ..spec.field_types import Target
from ..spec.schedule import Evaluations
from ..targets import argument_names, build
from ..tasks import Task, check_outcome
from ..tasks.forward_and_loss import Forward
from .apply import apply_specs, build_module
from .data import Batches, Data, batch_sizes, first_batch, load_data
from .device_and_seed import choose_device
from .function_trials import FunctionCheck
from .hook_batch_checks import PhaseBatches, check_batch_shapes
from .optimizer_fast_import import bypass_compiler_in_methods, bypass_compiler_in_step
from .per_module_optimizers import requires_closure


@dataclass(frozen=True)
class Experiment:
    """All objects of a run.

    Attributes:
        config: The configuration.
        device: The device of this process.
        data: The slices of the dataset.
        batches: The batches of the training.
        eval_loader: The batches of an evaluation, each with the dataset indices of its samples.
        task: Computes the loss of a batch.
        model: The model on its device, after the changes of the `apply` section.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler; None without one.
        scaler: The gradient scaler. It is disabled unless the precision is fp16.
        strategy: How one or several processes train the model.
        called_model: The model that the task calls: `model`, or its compiled version.
        train_module: The module that computes outcome and loss of a batch, see `Forward`; with several processes, its
            wrapper that reduces the gradients.
        plan: The plan of the hooks.
        inferred_by_phase: The result of shape inference for each phase, `train` and `eval`.
        archive: Reads the recorded tensors of other runs.
    """

    config: RunConfig
    device: torch.device
    data: Data
    batches: Batches
    eval_loader: IndexedLoader
    task: Task
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: GradScaler
    strategy: Strategy
    called_model: nn.Module
    train_module: nn.Module
    plan: HookPlan
    inferred_by_phase: dict[str, InferredCalls]
    archive: RunArchive

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return _autocast(self.config.train.precision, self.device)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that make the steps. `PerModule` contains several."""
        return flatten_optimizer(self.optimizer)

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the run."""
        return self.batches.steps

    @property
    def length(self) -> Length:
        """The length of the run."""
        return _length(self.config, self.batches, self.eval_loader)


def prepare(config: RunConfig, strategy: Strategy | None = None) -> Experiment:
    """Build an experiment from its configuration, and check it.

    Shape inference runs one forward pass per phase. It restores the state of the model and the random states.

    Args:
        config: The configuration.
        strategy: How several processes train the model; all of them call this function. Default: None, a single
            process.

    Returns:
        The experiment, ready to train.

    Raises:
        ConfigError: An object that the configuration names does not exist or cannot be built; a spec matches no module,
            or does not fit the shape of its tensors; or the model has no trainable parameter.
    """
    strategy = strategy or Strategy()
    strategy.check_config(config)
    device = choose_device(config.device)
    task: Task = build(config.task, "task")
    model = build_module(config.model, "model")
    data = load_data(config.data)
    check_batch_size(data.train, config.train.batch_size, strategy.batch_shard, "train.batch_size")
    check_batch_size(data.test, config.train.eval_batch_size, strategy.batch_shard, "train.eval_batch_size")
    batches = Batches(data.train, config.train, config.seed, strategy.batch_shard)
    sequential = sequential_loader(data.test, config.train.eval_batch_size, strategy.batch_shard)
    eval_loader = IndexedLoader(sequential, data.test.indices)

    model.to(device)
    train_batch = to_device(first_batch(data.train, config.train.batch_size, strategy.batch_shard), device)
    eval_batch = to_device(first_batch(data.test, config.train.eval_batch_size, strategy.batch_shard), device)
    materialize(model, partial(_forward, task, model, train_batch))
    apply_specs(config.apply, model)
    _check_trainable(config, model)

    plan = make_plan(config.hooks, model)
    check_not_frozen(plan)
    find_unused = config.train.find_unused_parameters
    functions = FunctionCheck(plan, config.seed)
    inferred_by_phase, has_unused = _infer_shapes(
        task,
        model,
        train_batch,
        eval_batch,
        functions,
        find_unused=strategy.needs_all_gradients and find_unused is None,
    )
    archive = RunArchive(strategy.batch_shard.size, strategy.batch_shard.indices_of)
    samples = {"train": number_of_samples(train_batch), "eval": number_of_samples(eval_batch)}
    _check_shapes(config, plan, archive, inferred_by_phase, samples, batches=batches, eval_loader=eval_loader)
    strategy.check_model_call(calls_model=id(model) in inferred_by_phase["train"])
    if strategy.shard(model):
        plan = make_plan(config.hooks, model)  # A new plan releases the unsharded parameters.
    plan = replace(plan, shapes_checked=True)
    optimizer = _build_optimizer(config.optimizer, model)
    check_optimizers(plan, flatten_optimizer(optimizer))
    scheduler = None if config.scheduler is None else _build_scheduler(config.scheduler, optimizer, batches.steps)
    called_model = _compiled(model) if config.train.compile else model
    train_module = strategy.wrap(
        Forward(called_model, task, partial(_autocast, config.train.precision, device)),
        has_unused=has_unused or bool(find_unused),
    )
    strategy.seed_ranks(config.seed)
    return Experiment(
        config=config,
        device=device,
        data=data,
        batches=batches,
        eval_loader=eval_loader,
        task=task,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=GradScaler(device.type, enabled=config.train.precision == "fp16"),
        strategy=strategy,
        called_model=called_model,
        train_module=train_module,
        plan=plan,
        inferred_by_phase=inferred_by_phase,
        archive=archive,
    )


def _check_shapes(
    config: RunConfig,
    plan: HookPlan,
    archive: RunArchive,
    inferred_by_phase: dict[str, InferredCalls],
    samples: dict[str, int],
    *,
    batches: Batches,
    eval_loader: IndexedLoader,
) -> None:
    """Check that the specs fit the tensors of all batches.

    Args:
        config: The configuration.
        plan: The plan.
        archive: Reads the recorded tensors of other runs.
        inferred_by_phase: The result of shape inference for each phase, `train` and `eval`.
        samples: The number of samples in the batch of each trial.
        batches: The training batches.
        eval_loader: The evaluation batches.

    Raises:
        ConfigError: A spec does not fit the shape of its tensors, or names a path that no tensor has.
    """
    check_paths(plan, inferred_by_phase)
    check_shapes(plan, inferred_by_phase)
    sizes = batch_sizes(len(eval_loader.indices), config.train.eval_batch_size)
    batches_by_phase = {
        "train": PhaseBatches(inferred_by_phase["train"], samples["train"], batches.sizes),
        "eval": PhaseBatches(inferred_by_phase["eval"], samples["eval"], lambda _: sizes),
    }
    check_batch_shapes(plan, archive, batches_by_phase, _length(config, batches, eval_loader))


def _length(config: RunConfig, batches: Batches, eval_loader: IndexedLoader) -> Length:
    """Return the length of a run."""
    evaluations = Evaluations(batches.steps, config.train.eval_every)
    return Length(
        batches.steps, config.train.accumulate, batches.micro_batches_per_epoch, evaluations, len(eval_loader)
    )


def _infer_shapes(
    task: Task, model: nn.Module, train_batch: Any, eval_batch: Any, functions: FunctionCheck, *, find_unused: bool
) -> tuple[dict[str, InferredCalls], bool]:
    """Run shape inference for each phase.

    Args:
        task: The task.
        model: The model.
        train_batch: The first training batch.
        eval_batch: The first evaluation batch.
        functions: Calls the custom hook functions.
        find_unused: Whether to search for parameters without a gradient.

    Returns:
        The result of shape inference for each phase, and whether a parameter gets no gradient (False without a search).
    """
    has_unused = False

    def forward_and_check() -> None:
        nonlocal has_unused
        loss = _forward(task, model, train_batch)
        has_unused = find_unused and has_unused_parameters(model, loss)
        functions.check_loss(loss)
        functions.check_parameters()

    forward = partial(_forward, task, model, eval_batch)
    in_training = infer_shapes(model, forward_and_check, training=True, observe=functions.check_tensors)
    in_evaluation = infer_shapes(model, forward, training=False, observe=partial(functions.check_tensors, phase="eval"))
    return {"train": in_training, "eval": in_evaluation}, has_unused


def _autocast(precision: str, device: torch.device) -> torch.autocast:
    """Return the autocast context of a precision: `fp32` (disabled), `fp16` or `bf16`."""
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=precision != "fp32")


def _compiled(model: nn.Module) -> nn.Module:
    """Return the compiled model."""
    # The compiler runs at the first call, after hooks are attached. Reset it first, because its cache may contain
    # the compiled model of a previous job of a sweep.
    torch.compiler.reset()
    return torch.compile(model)  # type: ignore[return-value]


def _forward(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of a batch, after a check of the task's outcome."""
    outcome = task(model, batch)
    check_outcome(outcome)
    return outcome.loss


def _check_trainable(config: RunConfig, model: nn.Module) -> None:
    """Check that the model has a trainable parameter.

    Raises:
        ConfigError: The model has no trainable parameter.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            Problem(
                "model",
                "the model has no trainable parameter: it has no parameters, or 'apply' froze all of them",
                given=config.model.target,
            )
        )


def _build_optimizer(target: Target, model: nn.Module) -> Optimizer:
    """Build the optimizer from its target.

    The target is called with the trainable parameters. If it has a parameter `model` and no parameter `params`, it is
    called with the model.

    Raises:
        ConfigError: The target does not exist, raises an exception, or does not return an optimizer; or the step of the
            optimizer requires a closure, as in LBFGS.
    """
    bypass_compiler_in_methods()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = argument_names(target.target, "optimizer")
    optimizer = build(target, "optimizer", model if "model" in names and "params" not in names else trainable)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            Problem(
                "optimizer",
                f"must be a torch.optim.Optimizer, but {target.target} returned {type(optimizer).__name__}",
            )
        )
    for each in flatten_optimizer(optimizer):
        if requires_closure(each):
            message = f"the step of {type(each).__name__} requires a closure, and the training loop of this package passes none"
            fix = "choose another optimizer, or attach the hooks in your own loop with instrument.attach"
            raise ConfigError(Problem("optimizer", message, given=target.target, fix=fix))
        bypass_compiler_in_step(each)
    return optimizer


def _build_scheduler(target: Target, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Build the scheduler from its target.

    The target is called with the optimizer. If it has a parameter `steps`, it also gets the number of steps of the run.

    Raises:
        ConfigError: The target does not exist, raises an exception, or does not return a scheduler that works without a
            metric.
    """
    arguments = {"steps": steps} if "steps" in argument_names(target.target, "scheduler") else {}
    scheduler = build(target, "scheduler", optimizer, **arguments)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            Problem(
                "scheduler",
                "must be a torch.optim.lr_scheduler.LRScheduler whose step requires no metric, "
                f"but {target.target} returned {type(scheduler).__name__}",
            )
        )
    return scheduler
