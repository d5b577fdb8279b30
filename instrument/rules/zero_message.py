"""Rule: a process sends or receives only zeros in a collective operation that has other values in other processes."""

from __future__ import annotations

import numpy as np

from ..config.rules import PersistentRule
from .rule import Bounds, Firing, PersistentLocatedRule
from .step_rows import BoolArray, Chosen, Location, StepRows

LEAST_ELEMENTS = 32  # smaller tensors are counts and flags; a decision of this package
READ = {"input": ("all_reduce", "reduce_scatter"), "output": ("all_reduce",)}  # a shard may be zero


class ZeroMessage(PersistentLocatedRule[PersistentRule], name="zero_message"):
    """In an all_reduce or reduce_scatter, a process sends only zeros, but receives other values; or it receives only zeros.

    Possible causes are a lost message, a corrupted buffer, and a process without data, or whose data uses none of the parameters, such
    as those of an expert. Tensors of fewer than 32 elements are not checked, and neither are those of the block `Join`.
    """

    what = "message of zeros"
    stage = "setup"
    advice = "Compare the messages of all processes in this step, and check the device and the network of this process."
    requires = "the input and the output of kind collective with the statistic zero_fraction, such as hooks=messages"
    statistics = ("zero_fraction",)

    def selects(self, location: Location) -> bool:
        return location.kind == "collective"

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        # Each micro-step has a message of the same path.
        zero, least = (chosen.values(rows.column("zero_fraction"), merge) for merge in (np.fmax, np.fmin))
        numel = chosen.values(rows.counts("numel"), np.fmin)
        of_path = {(each.path, each.role): value for each, value in zip(chosen.locations, least, strict=True)}
        other = {"input": "output", "output": "input"}
        zero_of: dict[tuple[str, str], float] = {}
        keys = []
        for each, value in zip(chosen.locations, zero, strict=True):
            # A reduce_scatter of a list sends the tensors reduce_scatter.0.0, reduce_scatter.0.1, ..., and receives reduce_scatter.0.
            path = each.path if (each.path, other[each.role]) in of_path else each.path.rpartition(".")[0]
            keys.append((path, each.role))
            zero_of[keys[-1]] = min(value, zero_of.get(keys[-1], 1.0))
        zero = np.array([zero_of[key] for key in keys])
        others = np.array([of_path.get((path, other[role]), np.nan) for path, role in keys])
        is_read = np.array(
            [
                each.path.startswith(READ[each.role]) and each.path in (path, f"{path}.0")
                for each, (path, _) in zip(chosen.locations, keys, strict=True)
            ]
        )
        held: BoolArray = (zero >= 1) & (others < 1) & is_read & (numel >= LEAST_ELEMENTS)
        return held

    def bounds(self) -> Bounds | None:
        return None if self._any else Bounds("zero_fraction", high=np.nextafter(1.0, 0.0))

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:  # noqa: ARG002
        location = chosen.locations[at]
        text = "sends only zeros, but receives other values" if location.role == "input" else "receives only zeros"
        return Firing(f"this process {text}", 1.0, 1.0, location)
