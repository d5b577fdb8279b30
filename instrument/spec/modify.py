"""Specs of `action: modify`: one per built-in function, and one for custom functions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from .base import SELECTION, InterventionSpec
from .field_types import Count, Dimension, Index, NonNegative, Number, Target, number_to_text

_VECTOR = "A .npy or .safetensors file with a vector of shape"
_KEY = "The name of the tensor in a .safetensors file that has several."
_LAYER = "The layer whose recorded tensors are used. The default is the layer that the hook changes."
_HOOK = "The record hook of the run. Required if several hooks recorded the tensors."
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
        if is_set and self.kind not in ("forward", "forward_pre", "function"):
            raise ValueError(
                f"'straight_through' requires kind forward, forward_pre or function; kind {self.kind} changes no forward value"
            )
        return self


class ZeroSpec(ModifySpec):
    """Replace all values by zero (zero ablation)."""

    fn: Literal["zero"]


class _UnitsSpec(ModifySpec):
    """A function that acts along the units."""

    @property
    def _uses_units(self) -> bool:
        return True


class AddSpec(_UnitsSpec):
    """Add a number, or a vector with one number per unit: from a file, or the mean of one run minus that of another (steering)."""

    fn: Literal["add"]
    value: Number | None = Field(None, description="The number to add to each element.")
    vector: str | None = Field(None, min_length=1, description=f"{_VECTOR} [units] to add.")
    key: str | None = Field(None, description=_KEY)
    plus: str | None = Field(
        None, min_length=1, description="The folder of a run. The mean of its recorded tensors per unit is added."
    )
    minus: str | None = Field(
        None, min_length=1, description="The folder of a run. The mean of its recorded tensors per unit is subtracted."
    )
    scale: Number = Field(1.0, description="The factor of the number or vector.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    @model_validator(mode="after")
    def _validate_source(self) -> AddSpec:
        given = [self.value is not None, self.vector is not None, self.plus is not None or self.minus is not None]
        if sum(given) != 1 or (self.plus is None) != (self.minus is None):
            raise ValueError("requires exactly one of value, vector, and both plus and minus")
        _check_source(self, "plus")
        return self

    @property
    def sources(self) -> dict[str, str]:
        """The folders of runs, by field."""
        return {} if self.plus is None or self.minus is None else {"plus": self.plus, "minus": self.minus}


class ProjectSpec(_UnitsSpec):
    """Remove the part of the values along directions of the units (project_out), or keep only that part (project_onto)."""

    fn: Literal["project_out", "project_onto"]
    vector: str | None = Field(
        None, min_length=1, description=f"{_VECTOR} [units] or [directions, units]. Their lengths do not matter."
    )
    key: str | None = Field(None, description=_KEY)
    run: str | None = Field(
        None,
        min_length=1,
        description="The folder of a run. The directions are the principal components of its recorded tensors.",
    )
    components: Count | None = Field(None, description="The number of principal components. Default: 1.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    @model_validator(mode="after")
    def _validate_source(self) -> ProjectSpec:
        if (self.vector is None) == (self.run is None):
            raise ValueError("requires exactly one of vector and run")
        _check_source(self, "run")
        return self

    @property
    def sources(self) -> dict[str, str]:
        """The folder of the run, by field."""
        return {} if self.run is None else {"run": self.run}


class MeanAblateSpec(_UnitsSpec):
    """Replace the values of each unit by its mean over the recorded tensors of another run. No gradient flows through it."""

    fn: Literal["mean_ablate"]
    run: str = Field(min_length=1, description="The folder of the run.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    @property
    def sources(self) -> dict[str, str]:
        """The folder of the run, by field."""
        return {"run": self.run}


def _check_source(spec: AddSpec | ProjectSpec, run: str) -> None:
    """Raise a ValueError if fields of files and runs are mixed."""
    of_run = [name for name in ("layer", "hook", "components") if getattr(spec, name, None) is not None]
    if of_run and not spec.sources:
        raise ValueError(f"{of_run[0]!r} requires {run!r}")
    if spec.key is not None and spec.vector is None:
        raise ValueError("'key' requires 'vector'")


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
    """Insert a tensor that another run recorded at the same layer, path, call, phase and batch: all of it, or the selected part (patch).

    With `match: id`, each sample gets the values that were recorded for it, in any batch. With `from_sample`, patch inserts the
    values of another sample of the same batch.
    """

    fn: Literal["replace", "patch"]
    run: str | None = Field(None, min_length=1, description="The folder of the other run.")
    from_sample: Dimension | None = Field(
        None,
        description="For patch, instead of 'run': the index of the sample of this batch whose values replace those of the others. "
        "Gradients flow to that sample.",
    )
    hook: str | None = Field(
        None,
        description="The record hook of the other run. Required if several hooks recorded the tensor, and to use tensors of another "
        "phase.",
    )
    step: Index | None = Field(
        None, description="The step in the other run. Default: the current step; with `match: id`, all steps."
    )
    match: Literal["batch", "id"] = Field(
        "batch",
        description="Which recorded values are used: those of the same batch of the same step (batch), or for each sample those of "
        "the sample with the same id (id). Batch size and order may differ then.",
    )

    @model_validator(mode="after")
    def _validate_match(self) -> RecordedSpec:
        if self.match == "id" and self.run is None:
            raise ValueError("'match' requires 'run'")
        if self.match == "id" and self.definition.family != "module":
            raise ValueError(f"'match: id' requires a batch, which the tensors of kind {self.kind} do not have")
        return self

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
    together: bool = Field(
        False,
        description="Call the function once with all tensors of a call of the module or function: `fn(tensors, context)` gets a dict "
        "by path, and returns a dict with those that change.",
    )

    @model_validator(mode="after")
    def _validate_together(self) -> FunctionSpec:
        if self.together and self.condition is not None:
            raise ValueError("'together' passes several tensors, but the condition of 'when' is about each tensor")
        kinds = ("forward_pre", "forward", "full_backward_pre", "full_backward", "function", "function_grad")
        if self.together and self.kind not in kinds:
            hint = f"requires one of the kinds {', '.join(kinds)}"
            if self.kind != "tensor":
                raise ValueError(f"'together' {hint}; a site of kind {self.kind} has one tensor")
            kind = "full_backward" if self.tensor_role == "input" else "full_backward_pre"
            raise ValueError(f"'together' {hint}; for the gradients of each {self.tensor_role}, use {kind}")
        return self


FUNCTIONS: dict[str, type[ModifySpec]] = {
    "zero": ZeroSpec,
    "add": AddSpec,
    "project_out": ProjectSpec,
    "project_onto": ProjectSpec,
    "mean_ablate": MeanAblateSpec,
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
