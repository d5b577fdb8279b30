"""A model in stages over the dimension `pp`, trained with a schedule of `torch.distributed.pipelining`.

Each process has the modules of one stage. It calls the complete model with the same batch as the other stages, so that any
model can be split: modules of other stages return zeros, and the first layer of the stage gets the tensor that the previous
stage sent instead of its input. The input of the first layer of the next stage is sent there. A micro-batch of the schedule is a
micro-step of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from ...config.parallel import PipelineConfig
from ...errors import ConfigError, InstrumentError, Problem, first_line, user_code_location
from ...plan.hook_plan import HookPlan, Site, no_such_layer
from ...plan.modules import Layers
from ...plan.shape_inference import without_side_effects
from ...runtime.own_operations import own_collectives
from ...tasks import Outcome
from ...values.nested import join_arguments, map_tensors, split_arguments, to_device
from ..loader import LoadedBatch

WHERE = "train.parallel.pipeline.split"
Loss = Callable[[], Tensor | None]


@dataclass
class _Trace:
    """What one pass of the complete model shows."""

    loss: Tensor
    sent: list[Tensor]  # for each stage but the last one, the tensor that it sends
    stages: dict[int, set[int]]  # the stages in which the calls of a module end, by the `id` of the module
    # The size of dimension 0 of the first input of a module, and its output with tensors on the meta device, by the `id` of the module.
    outputs: dict[int, tuple[int, Any]]
    # The stages whose output depends on a parameter, by the `id` of the parameter.
    users: dict[int, set[int]] = field(default_factory=dict)


def _first_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, Tensor]:
    """Return the first tensor of the arguments of a call, and its index or name."""
    given = join_arguments(args, kwargs)
    return next((name, value) for name, value in given.items() if isinstance(value, Tensor))


def _length(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the size of dimension 0 of the first tensor of the arguments; 1 without one."""
    return next((len(each) for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.dim()), 1)


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name, _ = _first_tensor(args, kwargs)
    return split_arguments({**join_arguments(args, kwargs), name: tensor}, len(args))


def _trace(model: nn.Module, split: Sequence[str], starts: Sequence[nn.Module], loss: Loss) -> _Trace:
    """Run the model once, with the inputs of the first layers of the stages cut from the graph."""
    sent: list[Tensor] = []
    stages: dict[int, set[int]] = {}
    outputs: dict[int, tuple[int, Any]] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if len(sent) == len(starts) or module is not starts[len(sent)]:
            return None
        sent.append(_first_tensor(args, kwargs)[1])
        return _replaced(args, kwargs, sent[-1].detach().requires_grad_())

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        stages.setdefault(id(module), set()).add(len(sent))
        outputs[id(module)] = _length(args, kwargs), map_tensors(output, lambda _, tensor: tensor.detach().to("meta"))

    # Both passes are in the block: leaving it restores buffers in place.
    with ExitStack() as hooks, without_side_effects(model, training=False), torch.enable_grad():
        for module in model.modules():
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave, with_kwargs=True).remove)
        value = loss()
        if value is None or len(sent) < len(starts):
            message = "the layers are not called, in this order, with a tensor as first argument"
            raise ConfigError(Problem(WHERE, message, [*split], fix="name layers in the order of their calls"))
        trace = _Trace(value, sent, stages, outputs)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for stage, output in enumerate([*sent, value]):
            if not output.requires_grad:
                continue
            ones = torch.ones_like(output)
            gradients = torch.autograd.grad(output, trained, ones, retain_graph=True, allow_unused=True)
            for parameter, gradient in zip(trained, gradients, strict=True):
                if gradient is not None:
                    trace.users.setdefault(id(parameter), set()).add(stage)
    return trace


def starts_of(layers: Layers, split: Sequence[str]) -> list[nn.Module]:
    """Return the layers at which stages begin. Raise ConfigError if one does not exist."""
    named = {name: layer.module for layer in layers for name in layer.names}
    if missing := [name for name in split if name not in named]:
        raise ConfigError(no_such_layer(missing[0], layers, WHERE))
    return [named[name] for name in split]


class Pipeline:
    """The stage of this process.

    Args:
        model: The model. Parameters of other stages are removed from it: they are empty and not trained.
        group: The processes of the dimension `pp`, in the order of the stages.
        loss: Computes the loss of a batch with this model: a scalar.

    Raises:
        ConfigError: A layer does not exist, or the model cannot be split there.
    """

    def __init__(self, model: nn.Module, config: PipelineConfig, group: Any, loss: Loss) -> None:
        self.group, self.stage, self.stages = group, dist.get_rank(group), dist.get_world_size(group)
        self.is_last = self.stage == self.stages - 1
        self._schedule_type: Any = ScheduleGPipe if config.schedule == "gpipe" else Schedule1F1B
        self._schedule: Any = None
        self._received: Tensor | None = None
        self._sent = torch.empty(0)
        layers = Layers.of(model)
        starts = starts_of(layers, config.split)
        trace = _trace(model, config.split, starts, loss)
        self._edges = [tensor.detach().contiguous().requires_grad_() for tensor in trace.sent]
        self._stage_of = {key: max(ends) for key, ends in trace.stages.items()}
        shared = {id(parent) for layer in layers if layer.module in starts for parent in layers.parents(layer)}
        self._owners = self._find_owners(layers, trace, shared)
        kept = {id(model)}
        for layer in layers:  # a module before the modules in it
            parents = layers.parents(layer)
            is_inside = not parents or id(parents[0]) in kept or id(parents[0]) not in self._stage_of
            if id(layer.module) in shared or self._stage_of.get(id(layer.module), self.stage) == self.stage:
                kept.add(id(layer.module))
            elif is_inside and any(True for _ in layer.module.parameters()):
                self._replace(layer.module, trace.outputs[id(layer.module)])
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is None or self._owners.get(id(parameter), self.stage) == self.stage:
                    continue
                parameter.requires_grad_(False)
                if id(module) not in shared:
                    empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                    module._parameters[name] = nn.Parameter(empty, requires_grad=False)
        if not self.is_last:
            starts[self.stage].register_forward_pre_hook(self._keep_sent, with_kwargs=True)
        if self.stage:
            starts[self.stage - 1].register_forward_pre_hook(self._give_received, with_kwargs=True, prepend=True)
        self._check(model, loss, trace)

    def _find_owners(self, layers: Layers, trace: _Trace, shared: set[int]) -> dict[int, int]:
        owners: dict[int, int] = {}
        for layer in layers:
            for name, parameter in layer.module._parameters.items():
                if parameter is None:
                    continue
                called = trace.stages.get(id(layer.module), set()) if id(layer.module) not in shared else set()
                users = sorted(trace.users.get(id(parameter), set()) | called)
                label = f"{layer.name}.{name}".removeprefix(".")
                if len(users) > 1:
                    message = f"parameter {label} is used in stages {', '.join(map(str, users))}"
                    fix = "split at another layer, or untie shared parameters"
                    raise ConfigError(Problem(WHERE, message, allowed="one stage", fix=fix))
                if users and users[0] and id(layer.module) in shared:
                    message = (
                        f"parameter {label} is used in stage {users[0]}, but its module has layers of several stages"
                    )
                    raise ConfigError(Problem(WHERE, message, fix="move the parameter into a module of its own"))
                owners[id(parameter)] = users[0] if users else 0
        if empty := sorted({*range(self.stages)}.difference(*trace.users.values())):
            message = f"stage {empty[0]} has no trainable parameter"
            raise ConfigError(Problem(WHERE, message, fix="split at other layers"))
        return owners

    def _replace(self, module: nn.Module, traced: tuple[int, Any]) -> None:
        """Let a module of another stage return zeros of the shape of its output, and call no hooks."""
        length, output = traced

        def forward(*args: Any, **kwargs: Any) -> Any:
            given = _length(args, kwargs)

            def zeros(_: str, tensor: Tensor) -> Tensor:
                shape = [*tensor.shape]
                if given != length and shape and shape[0] % length == 0:  # another number of samples
                    shape[0] = shape[0] // length * given
                return torch.zeros(shape, dtype=tensor.dtype, device=self._edges[0].device)

            return map_tensors(output, zeros)

        module.forward = forward
        for each in module.modules():  # so that they are not mistaken for those of the stage in a checkpoint
            each._buffers.update({name: b.new_empty(0) for name, b in each._buffers.items() if b is not None})
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()

    def _keep_sent(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._sent = _first_tensor(args, kwargs)[1].contiguous()

    def _give_received(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        return None if self._received is None else _replaced(args, kwargs, self._received)

    def _check(self, model: nn.Module, loss: Loss, trace: _Trace) -> None:
        """Check that the stage computes from its input what the complete model computes."""
        self._received = self._edges[self.stage - 1] if self.stage else None
        try:
            with without_side_effects(model, training=False), torch.no_grad():
                value = loss()
            expected, found = (trace.loss, value) if self.is_last else (self._edges[self.stage], self._sent)
            assert found is not None, "the complete model had a loss"
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-5)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}{user_code_location(error)}"
            message = (
                f"stage {self.stage} needs more than the input of its first layer: without the other stages, it fails or "
                f"computes something else ({reason})"
            )
            raise ConfigError(Problem(WHERE, message, fix="split at another layer")) from error

    def own_sites(self, plan: HookPlan) -> HookPlan:
        """Return the plan with the hooks of this stage. A module with layers of several stages belongs to the last one of them."""
        return replace(plan, sites=tuple(site for site in plan.sites if self._has(site)))

    def _has(self, site: Site) -> bool:
        family = site.spec.definition.family
        if family == "collective":
            return True
        if family == "loss":
            return self.is_last
        if site.parameter is not None:
            return site.parameter.requires_grad or self._owners.get(id(site.parameter)) == self.stage
        return self._stage_of.get(id(site.layer.module), 0) == self.stage

    def compute_gradients(
        self,
        forward: nn.Module,
        observer: Any,
        micro_batches: Sequence[LoadedBatch],
        targets: Sequence[Any],
        parts: Sequence[Callable[[Tensor], Tensor]],
        device: torch.device,
    ) -> tuple[list[Outcome], list[Tensor]]:
        """Run the forward and backward passes of all micro-batches of a step.

        Args:
            forward: Computes the outcome and the loss of a batch with the model of this process.
            targets: For each micro-batch, its part with the targets for the table `samples`.
            parts: For each micro-batch, a function that weights and scales its loss.

        Returns:
            For each micro-batch, the outcome, and the weighted loss. They are meaningful in the last stage only.
        """
        outcomes: list[Outcome] = []
        losses: list[Tensor] = []

        def run(received: Tensor) -> Tensor:
            self._received = received if self.stage else None
            number = len(outcomes)
            batch = to_device(micro_batches[number].batch, device)
            outcome, loss = forward(batch, observer.loss if self.is_last else lambda loss: loss)
            assert loss is not None, "checked with the first batch"
            outcomes.append(outcome)
            losses.append(parts[number](loss))
            return losses[-1][None] if self.is_last else self._sent

        def at(number: int) -> Any:
            return observer.in_micro_step(number, micro_batches[number].indices, targets[number])

        if self._schedule is None:
            given = self._edges[self.stage - 1] if self.stage else torch.empty(1, device=device)
            returned = torch.empty(1, device=device, requires_grad=True) if self.is_last else self._edges[self.stage]
            stage = _Stage(_StageModule(), self.stage, self.stages, device, given, returned, group=self.group)
            options: Any = {"loss_fn": lambda output, _: output.squeeze(), "scale_grads": False}
            self._schedule = self._schedule_type(stage, len(micro_batches), **options)
        stage = self._schedule._stage
        stage.submod.run, stage.at = run, at
        unused = torch.empty(len(micro_batches), device=device)  # an element is the input or target of a micro-batch
        try:
            self._schedule.step(*() if self.stage else (unused,), target=unused if self.is_last else None)
        except RuntimeError as error:  # the schedule replaces the errors of hooks
            if isinstance(error.__cause__, InstrumentError):
                raise error.__cause__ from None
            raise
        observer.end_micro_step()
        return outcomes, [loss.detach() for loss in losses]

    def call(self, run: Callable[[], Outcome]) -> Outcome:
        edge = self._edges[0]
        if self.stage:
            before = self._edges[self.stage - 1]
            shape = torch.empty(before.dim(), dtype=torch.int64, device=edge.device)
            dist.recv(shape, group=self.group, group_src=self.stage - 1)
            self._received = torch.empty(shape.tolist(), dtype=before.dtype, device=edge.device)
            dist.recv(self._received, group=self.group, group_src=self.stage - 1)
        outcome = run()
        if not self.is_last:
            dist.send(torch.tensor(self._sent.shape, device=edge.device), group=self.group, group_dst=self.stage + 1)
            dist.send(self._sent, group=self.group, group_dst=self.stage + 1)
        return outcome

    @own_collectives()
    def from_last_stage(self, numbers: Tensor) -> Tensor:
        dist.broadcast(numbers, group=self.group, group_src=self.stages - 1)
        return numbers

    @own_collectives()
    def norm(self, norm: Tensor | None) -> Tensor:
        square = torch.zeros((), device=self._edges[0].device) if norm is None else norm.square()
        dist.all_reduce(square, group=self.group)
        return square.sqrt()


class _StageModule(nn.Module):
    run: Callable[[Tensor], Tensor]

    def forward(self, received: Tensor) -> Tensor:
        return self.run(received)


class _Stage(PipelineStage):
    """A stage whose passes run in the micro-step of their micro-batch."""

    at: Callable[[int], Any]

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.at(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with self.at(bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
