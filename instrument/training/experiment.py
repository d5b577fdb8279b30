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
from torch.utils.data import DataLoader

from ..analysis.archive import RunArchive
from ..capture.optimizer_checks import parts_of, require_optimizer
from ..distributed.sharding import in_order, refuse_small_batches
from ..distributed.strategies import Strategy
from ..distributed.unused_parameters import has_idle
from ..errors import ConfigError, Mistake
from ..nested import number_of_samples, to_device
from ..plan.cost import Length
from ..plan.dimension_checks import refuse_misfits
from ..plan.path_checks import refuse_idle_paths
from ..plan.shape_inference import Trial, materialise, try_forward
from ..plan.sites import HookPlan, make_plan, refuse_frozen
from ..spec.config import RunConfig
from ..spec.fields import Target
from ..spec.schedule import Evaluations
from ..targets import build, takes
from ..tasks import Task, check_outcome
from ..tasks.forward import Forward
from .apply import apply_specs, build_module
from .data import Batches, Data, batch_sizes, first_batch, load_data
from .device import choose_device
from .function_checks import FunctionTrial
from .recording_checks import Tried, refuse_unfit_recordings
from .uncompiled import spare_methods, spare_step


@dataclass(frozen=True)
class Experiment:
    """All objects of a run.

    Attributes:
        config: The configuration.
        device: The device of this process.
        data: The slices of the dataset.
        batches: The batches of the training.
        evaluation: The batches of an evaluation.
        task: Computes the loss of a batch.
        model: The model on its device, after the changes of the `apply` section.
        optimizer: The optimizer.
        scheduler: The learning-rate scheduler; None without one.
        scaler: The gradient scaler. It is disabled unless the precision is fp16.
        strategy: How one or several processes train the model.
        callable: The model that the task calls: `model`, or its compiled version.
        trained: The module that computes outcome and loss of a batch, see `Forward`; with several processes, its
            wrapper that reduces the gradients.
        plan: The plan of the hooks.
        trials: The result of shape inference for each phase, `train` and `eval`.
        archive: Reads the recorded tensors of other runs.
    """

    config: RunConfig
    device: torch.device
    data: Data
    batches: Batches
    evaluation: DataLoader[Any]
    task: Task
    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: GradScaler
    strategy: Strategy
    callable: nn.Module
    trained: nn.Module
    plan: HookPlan
    trials: dict[str, Trial]
    archive: RunArchive

    def autocast(self) -> torch.autocast:
        """Return the autocast context of forward passes."""
        return _autocast(self.config.train.precision, self.device)

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """The optimizers that make the steps. `PerModule` contains several."""
        return parts_of(self.optimizer)

    @property
    def steps(self) -> int:
        """The number of optimizer steps of the run."""
        return self.batches.steps

    @property
    def length(self) -> Length:
        """The length of the run."""
        return _length(self.config, self.batches, self.evaluation)


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
    strategy.refuse(config)
    device = choose_device(config.device)
    task: Task = build(config.task, "task")
    model = build_module(config.model, "model")
    data = load_data(config.data)
    refuse_small_batches(data.train, config.train.batch_size, strategy.share, "train.batch_size")
    refuse_small_batches(data.test, config.train.eval_batch_size, strategy.share, "train.eval_batch_size")
    batches = Batches(data.train, config.train, config.seed, strategy.share)
    evaluation = in_order(data.test, config.train.eval_batch_size, strategy.share)

    model.to(device)
    first = to_device(first_batch(data.train, config.train.batch_size, strategy.share), device)
    evaluated = to_device(first_batch(data.test, config.train.eval_batch_size, strategy.share), device)
    materialise(model, partial(_forward, task, model, first))
    apply_specs(config.apply, model)
    _require_trained(config, model)

    plan = make_plan(config.hooks, model)
    refuse_frozen(plan)
    asked = config.train.find_unused_parameters
    functions = FunctionTrial(plan, config.seed)
    trials, idle = _try(
        task, model, first, evaluated, functions, looks_for_idle=strategy.waits_for_all and asked is None
    )
    refuse_idle_paths(plan, trials)
    refuse_misfits(plan, trials)
    archive = RunArchive(strategy.share.size, strategy.share.of)
    in_evaluation = batch_sizes(len(data.test), config.train.eval_batch_size)  # type: ignore[arg-type]
    tried = {
        "train": Tried(trials["train"], number_of_samples(first), batches.sizes),
        "eval": Tried(trials["eval"], number_of_samples(evaluated), lambda _: in_evaluation),
    }
    refuse_unfit_recordings(plan, archive, tried, _length(config, batches, evaluation))
    strategy.refuse_parts(called_whole=id(model) in trials["train"])
    if strategy.shard(model):
        plan = make_plan(config.hooks, model)  # A new plan releases the unsharded parameters.
    plan = replace(plan, tried=True)
    optimizer = _build_optimizer(config.optimizer, model)
    require_optimizer(plan, parts_of(optimizer))
    scheduler = None if config.scheduler is None else _build_scheduler(config.scheduler, optimizer, batches.steps)
    called = _compiled(model) if config.train.compile else model
    trained = strategy.wrap(
        Forward(called, task, partial(_autocast, config.train.precision, device)),
        idle=idle or bool(asked),
    )
    strategy.draw_apart(config.seed)
    return Experiment(
        config=config,
        device=device,
        data=data,
        batches=batches,
        evaluation=evaluation,
        task=task,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=GradScaler(device.type, enabled=config.train.precision == "fp16"),
        strategy=strategy,
        callable=called,
        trained=trained,
        plan=plan,
        trials=trials,
        archive=archive,
    )


def _length(config: RunConfig, batches: Batches, evaluation: DataLoader[Any]) -> Length:
    """Return the length of a run."""
    evaluations = Evaluations(batches.steps, config.train.eval_every)
    return Length(batches.steps, config.train.accumulate, batches.in_epoch, evaluations, len(evaluation))


def _try(
    task: Task, model: nn.Module, batch: Any, evaluated: Any, functions: FunctionTrial, *, looks_for_idle: bool
) -> tuple[dict[str, Trial], bool]:
    """Run shape inference for each phase.

    Args:
        task: The task.
        model: The model.
        batch: The first training batch.
        evaluated: The first evaluation batch.
        functions: Calls the custom hook functions.
        looks_for_idle: Whether to search for parameters without a gradient.

    Returns:
        The result of shape inference for each phase, and whether a parameter gets no gradient (False without a search).
    """
    idle = False

    def forward_and_look() -> None:
        nonlocal idle
        loss = _forward(task, model, batch)
        idle = looks_for_idle and has_idle(model, loss)
        functions.see_loss(loss)
        functions.see_parameters()

    forward = partial(_forward, task, model, evaluated)
    in_training = try_forward(model, forward_and_look, training=True, see=functions.see)
    in_evaluation = try_forward(model, forward, training=False, see=partial(functions.see, phase="eval"))
    return {"train": in_training, "eval": in_evaluation}, idle


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


def _require_trained(config: RunConfig, model: nn.Module) -> None:
    """Check that the model has a trainable parameter.

    Raises:
        ConfigError: The model has no trainable parameter.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            Mistake(
                "model",
                "no parameter trains: the model has none, or 'apply' froze all of them",
                written=config.model.target,
            )
        )


def _build_optimizer(target: Target, model: nn.Module) -> Optimizer:
    """Build the optimizer from its target.

    The target is called with the trainable parameters. If it has a parameter `model` and no parameter `params`, it is
    called with the model.

    Raises:
        ConfigError: The target does not exist, raises an exception, or does not return an optimizer.
    """
    spare_methods()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    names = takes(target.target, "optimizer")
    optimizer = build(target, "optimizer", model if "model" in names and "params" not in names else trained)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(
            Mistake(
                "optimizer",
                f"{target.target} gave a {type(optimizer).__name__}",
                allowed="a torch.optim.Optimizer",
            )
        )
    for each in parts_of(optimizer):
        spare_step(each)
    return optimizer


def _build_scheduler(target: Target, optimizer: Optimizer, steps: int) -> LRScheduler:
    """Build the scheduler from its target.

    The target is called with the optimizer. If it has a parameter `steps`, it also gets the number of steps of the run.

    Raises:
        ConfigError: The target does not exist, raises an exception, or does not return a scheduler that works without a
            metric.
    """
    given = {"steps": steps} if "steps" in takes(target.target, "scheduler") else {}
    scheduler = build(target, "scheduler", optimizer, **given)
    if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            Mistake(
                "scheduler",
                f"{target.target} gave a {type(scheduler).__name__}",
                allowed="a torch.optim.lr_scheduler.LRScheduler that needs no metric to make its step",
            )
        )
    return scheduler
