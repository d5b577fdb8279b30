"""Specs of `action: modify`: one per built-in function, and one for custom functions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import SELECTION, InterventionSpec
from .field_types import Count, Dimension, Index, NonNegative, Number, Target, number_to_text

Dimensions = Annotated[tuple[Dimension, ...], Field(min_length=1)]


class ModifySpec(InterventionSpec):
    """Replace the tensor by the result of `fn`."""

    action: Literal["modify"]
    straight_through: bool = Field(
        False, description="Pass the gradient through unchanged (straight-through estimator, Bengio et al. 2013)."
    )

    @model_validator(mode="after")
    def _validate_straight_through(self) -> ModifySpec:
        is_set = self.straight_through and "straight_through" in self.model_fields_set
        if is_set and self.kind not in ("forward", "forward_pre"):
            raise ValueError(
                f"'straight_through' requires kind forward or forward_pre; kind {self.kind} changes no forward value"
            )
        return self


class ZeroSpec(ModifySpec):
    """Replace all values by zero (zero ablation)."""

    fn: Literal["zero"]


class AddSpec(ModifySpec):
    """Add a number."""

    fn: Literal["add"]
    value: Number = Field(description="The number to add to each element.")


class SwapSpec(ModifySpec):
    """Exchange the first half of the samples with the second one; with `samples: [0, 1]`, exchange these two."""

    fn: Literal["swap"]

    @model_validator(mode="after")
    def _validate_swap(self) -> SwapSpec:
        if self.definition.family != "module":
            raise ValueError(f"swap requires a batch, which the tensors of kind {self.kind} do not have")
        if self.slice is not None:
            raise ValueError("swap cannot be combined with 'slice'; use 'samples', 'positions', 'units' or 'heads'")
        return self


class NoiseSpec(ModifySpec):
    """Add Gaussian noise from a separate generator. It depends on the seed, hook, step, layer and call only."""

    fn: Literal["noise"]
    std: NonNegative = Field(description="The standard deviation of the noise, in the unit of the tensor.")
    mean: Number = Field(0.0, description="The mean of the noise.")


class MeanSpec(ModifySpec):
    """Replace values by their mean over dimensions (mean ablation)."""

    fn: Literal["mean"]
    dim: Dimensions | Dimension | None = Field(
        0, description="The dimension or dimensions to average over; null averages over all."
    )


class ResampleSpec(ModifySpec):
    """Replace each sample's values by those of a random sample of the batch (resample ablation)."""

    fn: Literal["resample"]


class ShuffleSpec(ModifySpec):
    """Shuffle the samples of the batch."""

    fn: Literal["shuffle"]


class DropoutSpec(ModifySpec):
    """Set each element to zero with probability p and scale the others by 1 / (1 - p), also in evaluations."""

    fn: Literal["dropout"]
    p: Annotated[Number, Field(ge=0, lt=1)] = Field(description="The probability of zero.")


class QuantizeSpec(ModifySpec):
    """Simulate quantization to a narrow type, scaled by the largest magnitude. The gradient passes through."""

    fn: Literal["quantize"]
    to: Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"] = Field("int8", description="The simulated type.")
    straight_through: bool = Field(True, description="Pass the gradient through unchanged.")


class SignSpec(ModifySpec):
    """Replace each value by its sign: -1, 0 or 1."""

    fn: Literal["sign"]


class NanSpec(ModifySpec):
    """Insert NaN or infinity at random positions, to test error handling."""

    fn: Annotated[Literal["nan"], BeforeValidator(number_to_text)]
    count: Count = Field(1, description="Number of elements to replace.")
    value: Annotated[Literal["nan", "inf", "-inf"], BeforeValidator(number_to_text)] = Field(
        "nan", description="The inserted value."
    )


class PenaltySpec(ModifySpec):
    """Add an l1 or l2 penalty to the loss, or its gradient to a gradient: coefficient * sign(v) for l1, coefficient * v for l2."""

    fn: Literal["l1", "l2"]
    coefficient: NonNegative = Field(description="The weight of the penalty. l2 equals the optimizer's weight_decay.")

    @model_validator(mode="after")
    def _validate_penalty_kind(self) -> PenaltySpec:
        kinds = ("loss", "parameter_grad", "parameter_grad_micro", "post_accumulate_grad", "tensor")
        if self.kind not in kinds:
            raise ValueError(
                f"{self.fn} adds a penalty to the loss, or its gradient to a gradient; "
                f"it requires one of the kinds {', '.join(kinds)}, not {self.kind}"
            )
        return self


class RecordedSpec(ModifySpec):
    """Insert a tensor that another run recorded at the same layer, path, call and batch: all of it, or the selected part (patch).

    With `from_sample`, patch inserts the values of another sample of the same batch.
    """

    fn: Literal["replace", "patch"]
    run: str | None = Field(None, min_length=1, description="The folder of the other run.")
    from_sample: Dimension | None = Field(
        None,
        description="For patch, instead of 'run': the index of the sample of this batch whose values replace those of the others. "
        "Gradients flow to that sample.",
    )
    hook: str | None = Field(
        None, description="The record hook of the other run. Required if several hooks recorded the tensor."
    )
    step: Index | None = Field(None, description="The step in the other run. Default: the current step.")

    @model_validator(mode="after")
    def _validate_patch(self) -> RecordedSpec:
        if self.fn == "patch" and not self.selection:
            raise ValueError(f"patch requires the elements to replace: one of {', '.join(SELECTION)}")
        if self.fn == "replace" and self.selection:
            raise ValueError(f"{self.selection[0]!r} requires fn patch")
        if self.fn == "replace" and self.from_sample is not None:
            raise ValueError("'from_sample' requires fn patch")
        if (self.run is None) == (self.from_sample is None):
            raise ValueError(
                f"{self.fn} requires 'run'" + (" or 'from_sample', and not both" if self.fn == "patch" else "")
            )
        if self.run is None and not self.model_fields_set.isdisjoint({"hook", "step"}):
            raise ValueError("'hook' and 'step' require 'run'")
        if self.from_sample is not None and self.definition.family != "module":
            raise ValueError(f"'from_sample' requires a batch, which the tensors of kind {self.kind} do not have")
        return self


class FunctionSpec(ModifySpec):
    """A custom function, called as `fn(tensor, context)` with the additional arguments of the target. None keeps the tensor."""

    fn: Target


FUNCTIONS: dict[str, type[ModifySpec]] = {
    "zero": ZeroSpec,
    "add": AddSpec,
    "swap": SwapSpec,
    "noise": NoiseSpec,
    "mean": MeanSpec,
    "resample": ResampleSpec,
    "shuffle": ShuffleSpec,
    "dropout": DropoutSpec,
    "quantize": QuantizeSpec,
    "sign": SignSpec,
    "nan": NanSpec,
    "l1": PenaltySpec,
    "l2": PenaltySpec,
    "replace": RecordedSpec,
    "patch": RecordedSpec,
}
