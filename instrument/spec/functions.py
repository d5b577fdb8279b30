"""What `action: modify` can say: one spec a built-in function, and one for functions of the user's own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import Intervention, SliceText
from .fields import Count, Dimension, Index, NonNegative, Number, Target, spelled

Dimensions = Annotated[tuple[Dimension, ...], Field(min_length=1)]


class ModifySpec(Intervention):
    """Put another tensor in its place; `fn` says how."""

    action: Literal["modify"]
    straight_through: bool = Field(
        False, description="Let the gradient pass as if the function were not there (Bengio et al. 2013)."
    )

    @model_validator(mode="after")
    def _passes_a_gradient(self) -> ModifySpec:
        asked = self.straight_through and "straight_through" in self.model_fields_set
        if asked and self.kind not in ("forward", "forward_pre"):
            raise ValueError(
                f"'straight_through' is about the gradient of a changed value; kind {self.kind} changes none"
            )
        return self


class ZeroSpec(ModifySpec):
    """All zeros."""

    fn: Literal["zero"]


class NoiseSpec(ModifySpec):
    """Add Gaussian noise from a generator of its own, the same for the same seed, hook, step, layer and call."""

    fn: Literal["noise"]
    std: NonNegative = Field(description="The noise's standard deviation, in the tensor's unit.")
    mean: Number = Field(0.0, description="The noise's mean.")


class MeanSpec(ModifySpec):
    """The mean over some dimensions in place of each value (mean ablation)."""

    fn: Literal["mean"]
    dim: Dimensions | Dimension | None = Field(0, description="The dimensions averaged over; null is all of them.")


class ResampleSpec(ModifySpec):
    """Each sample's tensor replaced by that of a sample drawn at random from the batch (resample ablation)."""

    fn: Literal["resample"]


class ShuffleSpec(ModifySpec):
    """The batch's samples in a random order."""

    fn: Literal["shuffle"]


class DropoutSpec(ModifySpec):
    """Zero each element with probability p and scale the others by 1 / (1 - p), in evaluations too."""

    fn: Literal["dropout"]
    p: Annotated[Number, Field(ge=0, lt=1)] = Field(description="The probability.")


class QuantizeSpec(ModifySpec):
    """Round to what a narrow type can hold, scaled so that the largest magnitude fits; the gradient passes through."""

    fn: Literal["quantize"]
    to: Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"] = Field(
        "int8", description="The type that is simulated."
    )
    straight_through: bool = Field(True, description="Let the gradient pass as if there were no rounding.")


class SignSpec(ModifySpec):
    """The sign of each value: -1, 0 or 1."""

    fn: Literal["sign"]


class NanSpec(ModifySpec):
    """Put NaN, or another bad value, at random places: a fire drill."""

    fn: Annotated[Literal["nan"], BeforeValidator(spelled)]
    count: Count = Field(1, description="How many elements.")
    value: Annotated[Literal["nan", "inf", "-inf"], BeforeValidator(spelled)] = Field(
        "nan", description="What is put there."
    )


class PenaltySpec(ModifySpec):
    """Add a penalty to the loss, or its gradient to a gradient: coefficient * sign(v) for l1, coefficient * v for l2."""

    fn: Literal["l1", "l2"]
    coefficient: NonNegative = Field(description="The penalty's weight; l2 is then what optimizers call weight_decay.")

    @model_validator(mode="after")
    def _has_a_value(self) -> PenaltySpec:
        kinds = ("loss", "parameter_grad", "parameter_grad_micro", "post_accumulate_grad", "tensor")
        if self.kind not in kinds:
            raise ValueError(
                f"{self.fn} adds a penalty to the loss, or its gradient to a gradient; "
                f"kinds {', '.join(kinds)} can, {self.kind} cannot"
            )
        return self


class RecordedSpec(ModifySpec):
    """A tensor recorded in another run, at the same layer, path, call and batch: all of it (replace), or a part (patch)."""

    fn: Literal["replace", "patch"]
    run: str = Field(min_length=1, description="The folder of that run.")
    hook: str | None = Field(None, description="The record hook that kept it; needed where several did.")
    step: Index | None = Field(None, description="The step at which it was kept; the step that is running without it.")
    slice: SliceText | None = Field(
        None, description="For patch: the part that is put in, in NumPy's notation: ':, 0:4'."
    )

    @model_validator(mode="after")
    def _a_part_or_all(self) -> RecordedSpec:
        if (self.fn == "patch") != (self.slice is not None):
            raise ValueError(
                "patch needs 'slice', the part that is put in" if self.fn == "patch" else "'slice' is for patch"
            )
        return self


class FunctionSpec(ModifySpec):
    """A function of one's own, called as `fn(tensor, context)` with the further arguments of the target."""

    fn: Target


FUNCTIONS: dict[str, type[ModifySpec]] = {
    "zero": ZeroSpec,
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
