"""Kind `function` on the operators of Python's signs: each has a row, and recording leaves all results bit-identical."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls
from torch import Tensor

import instrument


def assign(x: Tensor, value: Tensor) -> Tensor:
    x = x.clone()
    x[1] = value
    return x


def in_place(function: Callable[[Any, Any], Any]) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, other: function(x.clone(), other)


FLOATS = torch.tensor([[1.5, -2.0], [0.5, 3.0]])
INTEGERS = torch.tensor([[5, 2], [1, 3]])
ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul"]
BITS = ["and_", "or_", "xor", "lshift", "rshift"]
IN_PLACE = [f"i{name.rstrip('_')}" for name in [*ARITHMETIC[:-1], *BITS]]
COMPARISONS = ["eq", "ne", "lt", "le", "gt", "ge"]
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        name: (getattr(operator, name), (FLOATS, FLOATS.abs()))
        for name in [*ARITHMETIC, *COMPARISONS]
        if name != "floordiv"
    },
    **{name: (getattr(operator, name), (INTEGERS, INTEGERS)) for name in ["floordiv", *BITS]},
    **{f"{name}_number": (getattr(operator, name), (INTEGERS, 2)) for name in [*ARITHMETIC[:-1], *BITS, *COMPARISONS]},
    **{f"reflected_{name}": (getattr(operator, name), (2, INTEGERS)) for name in [*ARITHMETIC[:-1], *BITS]},
    **{
        name: (
            in_place(getattr(operator, name)),
            (FLOATS.abs() if name[1:] in ARITHMETIC and name != "ifloordiv" else INTEGERS, 2),
        )
        for name in IN_PLACE
    },
    **{name: (getattr(operator, name), (FLOATS,)) for name in ("abs", "neg", "pos")},
    "invert": (operator.invert, (INTEGERS,)),
    "index": (operator.getitem, (FLOATS, 1)),
    "assignment": (assign, (FLOATS, FLOATS[0])),
}


def results(function: Callable[..., Any], args: tuple[Any, ...], *, record: bool) -> tuple[list[Any], list[str]]:
    """Return the output, the gradients and the random state, and the paths of the recorded rows."""
    torch.manual_seed(0)
    args = tuple(
        arg.detach().clone().requires_grad_(arg.is_floating_point()) if isinstance(arg, Tensor) else arg for arg in args
    )
    hooks = {
        kind: {"layers": ".", "kind": kind, "functions": "*", "action": "record"}
        for kind in ("function", "function_grad")
    }
    model, paths = Calls(function), []

    def run() -> list[Any]:
        output = model(*args)
        if output.requires_grad:
            output.sum().backward()
        gradients = [arg.grad for arg in args if isinstance(arg, Tensor) and arg.grad is not None]
        return [output.detach(), *gradients, torch.get_rng_state()]

    if not record:
        return run(), paths
    with instrument.attach(model, hooks, rules=None) as probe:
        values = run()
        probe.end_step()
    rows = probe.stats
    return values, list(rows[rows.kind == "function"].path)


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", CASES)
def test_recorded_operator_computes_the_same_and_has_a_row(name: str) -> None:
    expected, _ = results(*CASES[name], record=False)
    values, paths = results(*CASES[name], record=True)
    assert len(values) == len(expected)
    for value, right in zip(values, expected, strict=True):
        assert value.dtype == right.dtype
        torch.testing.assert_close(value, right, rtol=0, atol=0, equal_nan=True)
    assert paths
    if name in ("pow", "pow_number"):
        assert "pow.0" in paths
