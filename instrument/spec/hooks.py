"""What a hook spec can say: the fields that all have, and the fields of each action."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from .fields import Count, Glob, Index, NonNegative, Number, Selection, Target
from .kinds import KINDS, Kind
from .schedule import Phase, Schedule
from .statistics import ALL, DEFAULT

KindName = Literal[
    "forward_pre",
    "forward",
    "full_backward_pre",
    "full_backward",
    "tensor",
    "parameter_grad",
    "post_accumulate_grad",
    "step_post",
]

Statistics = Annotated[
    Literal["default", "all", "none"] | tuple[str, ...],
    WithJsonSchema(
        {"anyOf": [{"enum": ["default", "all", "none", *ALL]}, {"type": "array", "items": {"enum": list(ALL)}}]}
    ),
]


class HookBase(Selection):
    """Where, when and at which tensor; each action adds its own fields."""

    name: str = Field("", description="The key in the mapping; an item of a list may give its own.")
    kind: KindName = Field(description="Where PyTorch lets us in.")
    role: str | None = Field(None, description="Which of the kind's tensors; the kind's first where it is not said.")
    path: Glob | None = Field(None, description="Which tensor of a nested value: '0', 'logits', '1.*'; all without it.")
    via: Literal["tensor", "module"] = Field(
        "tensor", description="Tensor hooks, or PyTorch's own module hooks, for full_backward*."
    )
    every: Count = Field(1, description="Every N-th step from start on.")
    start: Index = Field(0, description="The first step at which it is due.")
    stop: Count | None = Field(None, description="The first step at which it is due no more.")
    steps: tuple[Index, ...] | None = Field(
        None, min_length=1, description="These steps, in place of every, start and stop."
    )
    phase: Phase = Field("train", description="In training steps, or in evaluations.")

    @property
    def schedule(self) -> Schedule:
        """When this hook is due."""
        steps = None if self.steps is None else frozenset(self.steps)
        return Schedule(every=self.every, start=self.start, stop=self.stop, steps=steps, phase=self.phase)

    @property
    def definition(self) -> Kind:
        """The definition of this hook's kind."""
        return KINDS[self.kind]

    @property
    def tensor_role(self) -> str:
        """The role, spelled out."""
        return self.role or self.definition.roles[0]

    @model_validator(mode="after")
    def _schedule_is_possible(self) -> HookBase:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(
                f"stop ({self.stop}) has to be larger than start ({self.start}): the window is [start, stop)"
            )
        if self.steps is not None and {"every", "start", "stop"} & self.model_fields_set:
            raise ValueError("'steps' stands alone: it cannot be joined with every, start or stop")
        if self.phase == "eval" and self.definition.gradient:
            raise ValueError(f"kind {self.kind} needs gradients, and there are none in phase eval")
        return self

    @model_validator(mode="after")
    def _kind_has_it(self) -> HookBase:
        kind = self.definition
        if self.role is not None and not kind.has_role(self.role):
            raise ValueError(f"kind {kind.name} has no role {self.role!r}; it has {', '.join(kind.roles)}")
        if self.via == "module" and kind.name not in ("full_backward", "full_backward_pre"):
            raise ValueError("'via: module' is for full_backward and full_backward_pre")
        if self.params and kind.family == "module":
            raise ValueError(f"'params' is for kinds that see parameters; kind {kind.name} sees a module's tensors")
        if self.path is not None and kind.family != "module":
            raise ValueError(f"'path' picks inside a module's values; for kind {kind.name} use 'params'")
        return self


class Intervention(HookBase):
    """A hook that changes the tensor it sees."""

    @model_validator(mode="after")
    def _role_can_be_changed(self) -> Intervention:
        kind = self.definition
        if self.tensor_role not in kind.changes:
            better = [name for name, other in KINDS.items() if self.tensor_role in other.changes]
            hint = f"; {' and '.join(better)} can" if better else ""
            raise ValueError(f"kind {kind.name} cannot change role {self.tensor_role}{hint}")
        return self


class RecordSpec(HookBase):
    """Write down statistics of the tensor, the tensor itself, or both. Changes nothing."""

    action: Literal["record"]
    stats: Statistics = Field("default", description="Which statistics.")
    tensors: bool = Field(False, description="Whether the values are kept too.")
    samples: Count | None = Field(None, description="Keep the first N along dimension 0.")
    slice: str | None = Field(None, description="Keep this part, in NumPy's notation: '0:4, :, ::2'.")
    max_elements: Count | None = Field(None, description="Keep no more than the first N elements, flat.")
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = Field(
        None, description="Convert before keeping."
    )

    @field_validator("stats", mode="before")
    @classmethod
    def _known_statistics(cls, value: Any) -> Any:
        if isinstance(value, str) and value not in ("default", "all", "none"):
            value = [value]
        for name in value if isinstance(value, list | tuple) else ():
            if name not in ALL:
                raise UnknownNameError("statistic", str(name), ALL)
        return value

    @field_validator("slice")
    @classmethod
    def _slice_reads(cls, value: str | None) -> str | None:
        if value is not None:
            parse_slice(value)
        return value

    @model_validator(mode="after")
    def _records_something(self) -> RecordSpec:
        if not self.tensors and not self.statistics:
            raise ValueError("records nothing: 'stats' is none and 'tensors' is false")
        cuts = {"samples", "slice", "max_elements", "dtype"} & self.model_fields_set
        if cuts and not self.tensors:
            raise ValueError(f"{', '.join(sorted(cuts))} cut recorded tensors: say 'tensors: true' too")
        return self

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names asked for, in the order of the columns."""
        asked = {"default": DEFAULT, "all": ALL, "none": ()}[self.stats] if isinstance(self.stats, str) else self.stats
        return tuple(name for name in ALL if name in asked)


class ClipSpec(Intervention):
    """Keep the values, or their norm, within a bound: one of min/max, value, norm."""

    action: Literal["clip"]
    min: Number | None = Field(None, description="No value below this.")
    max: Number | None = Field(None, description="No value above this.")
    value: NonNegative | None = Field(None, description="No value outside [-value, value].")
    norm: NonNegative | None = Field(None, description="No norm above this.")
    ord: Annotated[float, Field(ge=0)] = Field(
        2.0, description="The order of the norm; .inf for the largest value.", allow_inf_nan=True
    )
    scope: Literal["tensor", "sample", "all"] | None = Field(
        None,
        description="What one norm is of: a tensor, one sample of it (dimension 0), or all tensors that the spec "
        "matches. Without it: all for parameter_grad, as clip_grad_norm_ does; tensor elsewhere.",
    )

    @model_validator(mode="after")
    def _one_bound(self) -> ClipSpec:
        ways = [
            name
            for name, given in (("min/max", (self.min, self.max)), ("value", (self.value,)), ("norm", (self.norm,)))
            if any(x is not None for x in given)
        ]
        if len(ways) != 1:
            raise ValueError(f"needs one of min/max, value, norm; it has {' and '.join(ways) or 'none'}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if self.norm is None and {"ord", "scope"} & self.model_fields_set:
            raise ValueError("'ord' and 'scope' belong to 'norm'")
        if self.scope == "all" and self.kind != "parameter_grad":
            raise ValueError("'scope: all' needs all tensors at once, which only kind parameter_grad has")
        if self.scope == "sample" and self.definition.family != "module":
            raise ValueError(f"'scope: sample' needs a batch dimension, which kind {self.kind} does not have")
        return self

    @property
    def norm_scope(self) -> Literal["tensor", "sample", "all"]:
        """The scope, spelled out."""
        return self.scope or ("all" if self.kind == "parameter_grad" else "tensor")


class ScaleSpec(Intervention):
    """Multiply by a number."""

    action: Literal["scale"]
    factor: Number = Field(description="What it is multiplied by.")


class ModifySpec(Intervention):
    """Put another tensor in its place; `fn` says how."""

    action: Literal["modify"]


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
    dim: tuple[int, ...] | int | None = Field(0, description="The dimensions averaged over; null is all of them.")


class SignSpec(ModifySpec):
    """The sign of each value: -1, 0 or 1."""

    fn: Literal["sign"]


class PenaltySpec(ModifySpec):
    """Add a penalty's gradient to a gradient: coefficient * sign(v) for l1, coefficient * v for l2."""

    fn: Literal["l1", "l2"]
    coefficient: NonNegative = Field(description="The penalty's weight; l2 is then what optimizers call weight_decay.")

    @model_validator(mode="after")
    def _has_a_value(self) -> PenaltySpec:
        if self.kind not in ("parameter_grad", "post_accumulate_grad", "tensor"):
            raise ValueError(
                f"{self.fn} adds to a gradient the gradient of a penalty on its tensor; kinds "
                f"parameter_grad, post_accumulate_grad and tensor can, {self.kind} cannot"
            )
        return self


class FunctionSpec(ModifySpec):
    """A function of one's own, called as `fn(tensor, context)` with the further arguments of the target."""

    fn: Target


HookSpec = RecordSpec | ClipSpec | ScaleSpec | ZeroSpec | NoiseSpec | MeanSpec | SignSpec | PenaltySpec | FunctionSpec

ACTIONS: dict[str, type[HookBase]] = {"record": RecordSpec, "clip": ClipSpec, "scale": ScaleSpec, "modify": ModifySpec}
FUNCTIONS: dict[str, type[ModifySpec]] = {
    "zero": ZeroSpec,
    "noise": NoiseSpec,
    "mean": MeanSpec,
    "sign": SignSpec,
    "l1": PenaltySpec,
    "l2": PenaltySpec,
}


class UnknownNameError(ValueError):
    """A name that is none of a fixed set; it carries the set, so that the message can show the nearest."""

    def __init__(self, what: str, name: str, allowed: tuple[str, ...]) -> None:
        self.what, self.name, self.allowed = what, name, allowed
        super().__init__(f"unknown {what} {name!r}")


def parse_slice(text: str) -> tuple[slice | int, ...]:
    """`"0:4, :, ::2"` as the tuple that indexes a tensor.

    Raises:
        ValueError: It is not a list of integers and `start:stop:step` between commas.
    """
    parts: list[slice | int] = []
    for part in text.split(","):
        if not re.fullmatch(r"\s*(-?\d+|-?\d*\s*:\s*-?\d*(\s*:\s*\d*)?)\s*", part):
            raise ValueError(f"{part.strip()!r} is no slice; write '0:4, :, ::2'")
        if ":" not in part:
            parts.append(int(part))
            continue
        bounds = [int(number) if number.strip() else None for number in part.split(":")]
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError("a slice's step cannot be 0")
        parts.append(slice(*bounds))
    return tuple(parts)
