"""The forward pass and the loss of a batch, and the part of a model's output that gives the loss or the gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config.base import parse_slice
from ..config.experiment import OUTPUT_UNIT, output_unit_text
from ..errors import ConfigError, Problem, similar_names
from ..formatting import shorten
from ..values.nested import iter_tensors, map_tensors, shape_of
from .base import Outcome, Task, call_task

MAX_PATHS = 8  # in a message
WHERE = "forward.of"


class OutputNotice(NamedTuple):
    """A notice about a model that returns several tensors. `severity`: `warning` if some of them get no gradient, otherwise `info`."""

    message: str
    severity: str


class LossOutput:
    """The choice of one tensor of the output of a model."""

    def __init__(self, text: str | None) -> None:  # its path, with an optional slice; None for `main_output`
        self.unit = None if text is None else OutputUnit(output_unit_text(str(text)), "task.output")

    def of(self, model: nn.Module, output: Any) -> Tensor:
        """Return the tensor. In evaluation mode, a model may return only one tensor, such as Inception: then this one.

        Raises:
            ConfigError: The output has no tensor at the chosen path.
            TypeError: No path is chosen, and the output has no main tensor.
        """
        if self.unit is None or (isinstance(output, Tensor) and not model.training):
            return main_output(output)
        return self.unit.part_of(output)

    def notice(self, output: Any, loss: Tensor) -> OutputNotice | None:
        """Return a notice about the outputs that a loss does not use; None for a single tensor, or a chosen path."""
        tensors = dict(iter_tensors(output))
        if self.unit is not None or len(tensors) < 2:
            return None
        main = main_output(output)
        used = next((path for path, tensor in tensors.items() if tensor is main), None)
        if used is None:  # It is not an entry, but computed by the output.
            return None
        unused = [path for path, tensor in tensors.items() if tensor.requires_grad]
        if loss.requires_grad and unused:
            having = [tensors[path] for path in unused]
            gradients = torch.autograd.grad(loss, having, retain_graph=True, allow_unused=True)
            unused = [path for path, gradient in zip(unused, gradients, strict=True) if gradient is None]
        all_paths, without_gradient = (shorten([*map(repr, paths)], MAX_PATHS) for paths in (tensors, unused))
        message = f"the loss uses output {used!r} of the {len(tensors)} tensors that the model returns"
        if loss.requires_grad and unused:
            message += f"; {without_gradient} {'gets' if len(unused) == 1 else 'get'} no gradient from it"
        message += f"; set task.output to {used!r} to confirm this, or to another one of {all_paths}"
        return OutputNotice(message, "warning" if loss.requires_grad and unused else "info")


def main_output(output: Any) -> Tensor:
    """Return the tensor from which the loss is computed.

    Args:
        output: The output of a model: a tensor, a mapping or object with `logits`, a mapping with `out` (the
            segmentation models of torchvision), or a tuple or list whose first element is a tensor.

    Raises:
        TypeError: The output has none of these forms.
    """
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out") if isinstance(output, Mapping) else ():
        if isinstance(output.get(name), Tensor):
            return output[name]  # type: ignore[no-any-return]
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(
        f"the model returned {type(output).__name__}, which has no main output: return a tensor, an object with `logits`, "
        "or a tuple or list whose first element is a tensor"
    )


@dataclass(frozen=True)
class OutputUnit:
    """A part of a model's output: its text, such as `logits[:, 3]` or `[:, 3]`, and the key of the configuration."""

    text: str
    where: str = WHERE

    def sum_in(self, outputs: Sequence[Any]) -> Tensor:
        """Return the sum of the part over all of its elements, a scalar, in the last of the outputs of the calls of the model.

        Raises:
            ConfigError: There is no such output or tensor, or the slice is outside of its shape or empty.
        """
        if not outputs:
            message = "the task does not call the model itself, but only submodules of it"
            raise ConfigError(Problem(WHERE, message, fix="remove forward.of to compute the gradients of the loss"))
        part = self.part_of(outputs[-1])
        if not part.requires_grad:
            message = "this part of the output depends on no floating-point input and on no trainable parameter"
            raise ConfigError(Problem(self.where, message, self.text))
        return part.sum()

    def part_of(self, output: Any) -> Tensor:
        """Return the part as a tensor; see `sum_in`."""
        match = OUTPUT_UNIT.fullmatch(self.text)
        assert match is not None, "validated with the configuration"
        path, tensors = match["path"].strip(), dict(iter_tensors(output))
        if path not in tensors:
            names = [name or "(the output is a tensor: '[:, 3]')" for name in tensors]
            message = "the model's output has no such tensor"
            raise ConfigError(Problem(self.where, message, self.text, names or "none", similar_names(path, tensors)))
        tensor = tensors[path]
        try:
            part = tensor if match["slice"] is None else tensor[parse_slice(match["slice"])]
        except IndexError as error:
            message = f"the slice is outside of the tensor of shape {[*shape_of(tensor)]}: {error}"
            raise ConfigError(Problem(self.where, message, self.text)) from None
        if not part.numel():
            message = f"the slice selects no element of the tensor of shape {[*shape_of(tensor)]}"
            raise ConfigError(Problem(self.where, message, self.text))
        return part


@contextmanager
def captured_outputs(model: nn.Module) -> Iterator[list[Any]]:
    outputs: list[Any] = []
    with model.register_forward_hook(lambda _, __, output: outputs.append(output)):
        yield outputs


class Forward(nn.Module):
    """A module that runs a task on a model and applies the loss hooks.

    The wrappers that reduce gradients over processes need one module that computes the complete loss. It includes
    submodules that the task calls directly, and penalties that hooks add to the loss.
    """

    task: Task

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: Callable[[], AbstractContextManager[Any]],
        unit: OutputUnit | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "task", task)  # Not registered, because the parameters of a task are not trained.
        self.precision = precision  # returns the autocast context of the task
        self.unit = unit  # of the output of the model's last call; replaces the loss in the backward pass

    def forward(self, batch: Any, loss_hook: Callable[[Tensor], Tensor]) -> tuple[Outcome, Tensor | None]:
        """Compute the outcome of a batch and the loss for the backward pass.

        Args:
            loss_hook: Called with the loss, or the sum of the output unit; returns the scalar that replaces it.

        Returns:
            The outcome of the task, and the scalar that `loss_hook` returned; None if the outcome has no loss.
        """
        if self.unit is None:
            with self.precision():
                outcome = call_task(self.task, self.model, batch)
            return outcome, None if outcome.loss is None else loss_hook(outcome.loss)
        with captured_outputs(self.model) as outputs, self.precision():
            outcome = call_task(self.task, self.model, batch)
        return outcome, loss_hook(self.unit.sum_in(outputs))


def with_input_gradients(batch: Any, scale: float = 1.0) -> Any:
    """Return a batch whose floating-point tensors, times a factor, require a gradient.

    The last item of a tuple or list, the targets, is unchanged. The tensors are copies, and no leaves of the graph, so that a model
    may change them in place.
    """

    def prepared(path: str, tensor: Tensor) -> Tensor:  # noqa: ARG001
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return tensor
        return (tensor if scale == 1.0 else tensor * scale).detach().requires_grad_().clone()

    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields") and len(batch) > 1:
        *inputs, targets = batch
        return type(batch)([*(map_tensors(each, prepared) for each in inputs), targets])
    return map_tensors(batch, prepared)
