"""Rule: the data are not normalized."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ..config.rules import RuleBase
from .rule import WEIGHTED, Bounds, Firing, LocatedRule
from .step_rows import Chosen, Location, StepRows

NORMALIZATION = re.compile("BatchNorm|InstanceNorm")


class InputNotNormalizedRule(RuleBase):
    """The input of the first layer with weights has a mean far from zero, or a large `std`, at the first recorded step.

    SageMaker Debugger (NotNormalizedInput) has 0.2 for the mean, which images with values from 0 to 1 exceed. The mean of values from
    -1 to 1 does not count: they are scaled, and torchvision's `ToTensor` returns images in this form. Neither does the input of a
    convolution that a batch or instance normalization follows: its output is that of normalized data (Ioffe and Szegedy 2015), and so
    are its updates.
    """

    mean: Annotated[float, Field(gt=0)] = Field(3.0, description="|mean| exceeds this many times the std.")
    std: Annotated[float, Field(gt=0)] = Field(10.0, description="The std exceeds this number.")


class InputNotNormalized(LocatedRule[InputNotNormalizedRule], name="input_not_normalized"):
    saved = ("done",)
    what = "input not normalized"
    stage = "setup"
    evidence = "std"
    advice = "Subtract the mean of the data and divide by its standard deviation."
    requires = "the input (kind: forward_pre) of the first layer with weights, with mean, std and abs_max, such as hooks=inputs"
    statistics = ("mean", "std", "abs_max")

    def __init__(self, spec: InputNotNormalizedRule) -> None:
        super().__init__(spec)
        self._done = False

    def selects(self, location: Location) -> bool:
        return location.role == "input" and location.module_type in WEIGHTED and location.phase == "train"

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        if self._done:
            return
        self._done = True
        if rows.step:
            return
        mean, std, largest = (float(chosen.values(rows.column(name), self.merge)[0]) for name in self.statistics)
        where = chosen.locations[0]
        if where.module_type.startswith("Conv") and NORMALIZATION.search(_next_module(rows, where.layer)):
            return
        if std > self.spec.std:
            yield Firing(f"std {std:.4g}, above {self.spec.std:g}", std, self.spec.std, where)
        elif abs(mean) > self.spec.mean * std > 0 and not largest <= 1:  # a constant input is not data
            bound = self.spec.mean * std
            text = f"mean {mean:.4g} with std {std:.4g}: more than {self.spec.mean:g} times the std"
            yield Firing(text, abs(mean), bound, where)

    def bounds(self) -> Bounds | None:
        return Bounds("mean") if self._done else None


def _next_module(rows: StepRows, layer: str) -> str:
    """Return the type of the module whose output is recorded after that of a layer; empty without one."""
    outputs = [each for each in rows.layout.locations if each.is_output]
    at = next((number for number, each in enumerate(outputs) if each.layer == layer), len(outputs))
    around = [layer[:end] for end, letter in enumerate(layer) if letter == "."]  # the modules that contain the layer
    return next((each.module_type for each in outputs[at:] if each.layer not in (layer, "", *around)), "")
