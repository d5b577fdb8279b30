"""A part of a model's output, such as `logits[:, 3]`: for gradients of it, or for the loss of a task."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..errors import ConfigError, Problem, similar_names
from ..nested import iter_tensors, shape_of
from ..spec.base import parse_slice
from ..spec.config import OUTPUT_UNIT

WHERE = "forward.of"


@dataclass(frozen=True)
class OutputUnit:
    """A part of a model's output.

    Attributes:
        text: The text of the configuration, such as `logits[:, 3]` or `[:, 3]`.
        where: The key of the configuration, for messages.
    """

    text: str
    where: str = WHERE

    def sum_in(self, output: Any) -> Tensor:
        """Return the sum of the part over all of its elements: a scalar.

        Args:
            output: The output of the model: a tensor, or nested tensors.

        Raises:
            ConfigError: The output has no tensor at this path, or the slice is outside of its shape or empty.
        """
        part = self.part_of(output)
        if not part.requires_grad:
            message = "this part of the output depends on no floating-point input and on no trainable parameter"
            raise ConfigError(Problem(self.where, message, self.text))
        return part.sum()

    def part_of(self, output: Any) -> Tensor:
        """Return the part as a tensor.

        Args:
            output: The output of the model: a tensor, or nested tensors.

        Raises:
            ConfigError: The output has no tensor at this path, or the slice is outside of its shape or empty.
        """
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
    """Capture the output of each call of a model in a `with` block.

    Yields:
        The outputs in the order of the calls.
    """
    outputs: list[Any] = []
    handle = model.register_forward_hook(lambda _, __, output: outputs.append(output))
    try:
        yield outputs
    finally:
        handle.remove()


def last_output(outputs: list[Any]) -> Any:
    """Return the output of the last call of a model.

    Raises:
        ConfigError: The model was not called.
    """
    if not outputs:
        message = "the task does not call the model itself, but only submodules of it"
        raise ConfigError(Problem(WHERE, message, fix="remove forward.of to compute the gradients of the loss"))
    return outputs[-1]
