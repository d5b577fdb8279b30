"""Models and runs for tests of hooks: a module made from a function, specs, steps with hooks, and comparisons of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument


class Calls(nn.Module):
    """A module whose forward pass is a function of its parts and its arguments.

    Args:
        function: The function.
        parts: Modules, parameters or other values: attributes of the module, which are the first arguments.
    """

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function, self.names = function, tuple(parts)
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*[getattr(self, name) for name in self.names], *args, **kwargs)


def record(kind: str, layers: Any = ".", **fields: Any) -> dict[str, Any]:
    """Return the spec of a hook that records statistics."""
    return {"layers": layers, "kind": kind, "action": "record", **fields}


def keep(kind: str, layers: Any = ".", **fields: Any) -> dict[str, Any]:
    """Return the spec of a hook that records full tensors and no statistics."""
    return record(kind, layers, **{"stats": "none", "tensors": True, **fields})


def scale(kind: str, factor: Any, layers: Any = ".", **fields: Any) -> dict[str, Any]:
    """Return the spec of a hook that multiplies tensors by a factor."""
    return {"layers": layers, "kind": kind, "action": "scale", "factor": factor, **fields}


def run_steps(model: nn.Module, hooks: Any, step: Callable[[], object], count: int = 1, **options: Any) -> Any:
    """Run steps of a model with hooks, and return the probe.

    Args:
        model: The model.
        hooks: Specs of the hooks.
        step: Function that runs a step, without its end.
        count: Number of steps.
        options: Further arguments of `instrument.attach`.
    """
    with instrument.attach(model, hooks, **options) as probe:
        for _ in range(count):
            step()
            probe.end_step()
    return probe


def run_step(
    model: nn.Module,
    hooks: Any,
    *args: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    **kwargs: Any,
) -> tuple[Any, Any]:
    """Run one step of a model with hooks. Return its output and the probe.

    Args:
        model: The model.
        hooks: Specs of the hooks.
        args: Arguments of the model.
        loss: Function of the output, such as `torch.sum`, for a backward pass. Default: no backward pass.
        optimizer: Optimizer that makes a step. Default: none.
        kwargs: Keyword arguments of the model.
    """
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        output = model(*args, **kwargs)
        if loss is not None:
            loss(output).backward()
        if optimizer is not None:
            optimizer.step()
        probe.end_step()
    return output, probe


def refused(model: nn.Module, hooks: Any, **options: Any) -> str:
    """Attach hooks that are refused, and return the message.

    Args:
        model: The model.
        hooks: Specs of the hooks.
        options: Further arguments of `instrument.attach`.
    """
    with pytest.raises(instrument.ConfigError) as error, instrument.attach(model, hooks, **options):
        pass
    return str(error.value)


def tensors_by(probe: Any, *columns: str) -> dict[Any, Tensor]:
    """Return the recorded tensors by the value of a column, or by those of several columns, which identify a row."""
    rows = probe.sink.records("tensors")
    keys = [tuple(row[name] for name in columns) if columns[1:] else row[columns[0]] for row in rows]
    assert len(set(keys)) == len(rows)
    return {key: row["values"] for key, row in zip(keys, rows, strict=True)}


def counts(probe: Any) -> list[tuple[int, int]]:
    """Return how often each site of the hooks was expected to fire, and how often it fired."""
    return [(row["expected"], row["fired"]) for row in probe.coverage()]


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return the gradients of the parameters of a model."""
    return [parameter.grad for parameter in model.parameters()]


def assert_equal(found: Iterable[Any], wanted: Iterable[Any]) -> None:
    """Assert that the tensors of two series are equal."""
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def assert_close(found: Iterable[Any], wanted: Iterable[Any], rtol: float, atol: float) -> None:
    """Assert that the tensors of two series are close."""
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)
