"""Rule: the initialization lets the outputs shrink or grow from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field

from ..config.rules import RuleBase
from .rule import WEIGHTED, Bounds, Firing, LocatedRule
from .step_rows import Chosen, FloatArray, Location, StepRows

SAME = 1e-4  # relative difference of two std that are equal except for rounding
MULTIPLE = 0.5  # of its input that a block adds
NORMALIZED = 0.01  # the largest difference from 1 of the `rms` of a block that ends with a normalization
LARGEST = 700.0  # the largest logarithm of a factor


class PoorInitializationRule(RuleBase):
    """At the first step, the `std` of outputs grows or shrinks with depth by orders of magnitude, or all weights of a layer are equal.

    Units with equal weights have equal gradients, and stay equal (Goodfellow et al. 2016, Deep Learning, section 8.4). The weights
    after the first update are the initial ones plus the update, so that equal ones have the `std` of the update. Weights that are zero
    are a usual start of some layers, but not of more than half of them: they pass no gradient to the layers before.

    A good initialization keeps the variance from layer to layer (He et al. 2015, https://arxiv.org/abs/1502.01852). A bad one changes
    it by about the same factor in each layer with weights: the logarithm of the `std` is a line over the index of the layer. The factor
    from the first layer to the last one is that of the line with the least squares. PyTorch's default shrinks the `std` to about a third
    per layer, so that only a far larger factor is reported. Some layers with small outputs are usual, such as the last ones of residual
    branches (Zhang et al. 2019, https://arxiv.org/abs/1901.09321), and hardly change the line.

    With `branch_ratio` and `input_cosine` of the changes of blocks, such as `hooks=transformer`, it is also reported if most blocks
    add at least half of their input, and less of anything else, such as a residual connection that is applied twice (He et al. 2016,
    https://arxiv.org/abs/1603.05027, section 3.1, for the exponential growth of scaled shortcuts). What new weights compute is nearly
    orthogonal to the input. The part of it along the input is small relative to the rest, although it can be a multiple of a small input,
    such as embeddings before branches that normalize. Blocks whose outputs have an `rms` of 1 do not count: they end with a
    normalization, which scales small embeddings.

    The first loss of a classifier is also reported if it is more than three times that of a uniform prediction of its K classes, and more
    than 3 above it: log(K) (Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/, "verify loss @ init").
    Logits that are multiplied by a number after the last layer, such as the inverse of a temperature, are not compared.
    """

    factor: Annotated[float, Field(gt=1)] = Field(
        1e4, description="The factor by which the std grows or shrinks from the first layer to the last one."
    )


class PoorInitialization(LocatedRule[PoorInitializationRule], name="poor_initialization"):
    saved = ("done",)
    relation = "constant_prediction"
    what = "poor initialization"
    stage = "setup"
    evidence = "std"
    advice = "Initialize with apply: {action: init, fn: kaiming_normal_}, or add normalization layers."
    requires = (
        "the outputs (kind: forward) of layers with weights with the statistics mean and std, such as hooks=activations"
    )
    statistics = ("mean", "std")
    further_statistics = ("branch_ratio", "input_cosine", "rms")

    def __init__(self, spec: PoorInitializationRule) -> None:
        super().__init__(spec)
        self._done = False

    def selects(self, location: Location) -> bool:
        is_weight = location.kind == "step_post" and location.role in ("param", "update") and not location.is_of_bias
        is_weight = is_weight and location.layer not in self.frozen_layers
        is_read = (location.is_first_output or is_weight) and location.module_type in WEIGHTED
        return (is_read or location.role == "change") and location.phase == "train"

    def update(self, rows: StepRows) -> Iterator[Firing]:
        for row in rows.relations:
            if row.relation == self.relation and row.holds is False:
                yield Firing(row.text, row.value)
        yield from super().update(rows)

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        if self._done:
            return
        self._done = True
        if rows.step == 0:  # a later step is not the initialization
            mean, std = (chosen.values(rows.column(name), self.merge) for name in self.statistics)
            yield from self._check_outputs(std, chosen)
            numel = chosen.values(rows.counts("numel"), self.merge)
            yield from self._check_weights(mean, np.where(numel > 1, std, np.nan), chosen)
            yield from self._check_blocks(rows, chosen)

    def _check_outputs(self, std: FloatArray, chosen: Chosen) -> Iterator[Firing]:
        outputs = np.flatnonzero([location.is_output for location in chosen.locations] & (std > 0) & (std < np.inf))
        if len(outputs) < 2:
            return
        slope, _ = np.polyfit(np.arange(len(outputs)), np.log(std[outputs]), 1)
        factor = float(np.exp(min(abs(slope) * (len(outputs) - 1), LARGEST)))
        if factor > self.spec.factor:
            rising = np.sign(slope) * np.log(std[outputs])
            # The two layers with the largest change in this direction.
            end = int((rising - np.minimum.accumulate(rising)).argmax())
            first, last = outputs[rising[: end + 1].argmin()], outputs[end]
            text = (
                f"std {std[last]:.2g}, but {std[first]:.2g} in {chosen.locations[first].layer or '.'}: from layer to layer, outputs "
                f"{('shrink', 'grow')[int(slope > 0)]} by a factor above {self.spec.factor:g} in all"
            )
            yield Firing(text, factor, self.spec.factor, chosen.locations[last])

    def _check_blocks(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        ratio, cosine = (chosen.values(rows.column(name), self.merge) for name in ("branch_ratio", "input_cosine"))
        near_1 = abs(rows.column("rms") - 1) < NORMALIZED
        normalized = {
            at.layer for at, is_near in zip(rows.layout.locations, near_1, strict=True) if is_near and at.is_output
        }
        ratio = np.where([at.layer in normalized for at in chosen.locations], np.nan, ratio)
        sine = np.sqrt(np.maximum(1 - cosine**2, 0))
        length = cosine + np.sqrt(np.maximum(ratio**2 - sine**2, 0))  # of the output, relative to the input
        along, across = length * cosine - 1, length * sine  # the parts of the change
        scaled = np.flatnonzero((along > MULTIPLE) & (along > across))
        blocks = np.count_nonzero(~np.isnan(ratio))
        if 2 * len(scaled) > blocks:
            at = int(scaled[0])
            text = (
                f"a multiple of the input is added by {len(scaled)} of {blocks} blocks: the change is {ratio[at]:.3g} times the "
                f"input, and the cosine of input and output is {cosine[at]:.3g}"
            )
            yield Firing(text, float(along[at]), MULTIPLE, chosen.locations[at])

    @staticmethod
    def _check_weights(mean: FloatArray, std: FloatArray, chosen: Chosen) -> Iterator[Firing]:
        """Report weights that were all equal before the first update, and zeros in more than half of the matrices after it."""
        updates = {(at.layer, at.path): i for i, at in enumerate(chosen.locations) if at.role == "update"}
        weights = [at for at, location in enumerate(chosen.locations) if location.role == "param"]
        zeros = [at for at in weights if mean[at] == std[at] == 0]
        if 2 * len(zeros) > len(weights):
            yield Firing(f"{len(zeros)} of {len(weights)} weights are zero", 0.0, None, chosen.locations[zeros[0]])
        for after, location in enumerate(chosen.locations):
            update = updates.get((location.layer, location.path))
            if location.role != "param" or update is None:
                continue
            initial = abs(mean[after] - mean[update])
            if initial > std[update] and abs(std[after] - std[update]) < SAME * initial:
                text = f"all of its weights are {mean[after] - mean[update]:.3g}"
                yield Firing(text, initial, None, location)

    def bounds(self) -> Bounds | None:
        return Bounds("mean") if self._done else None
