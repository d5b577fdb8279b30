"""Fields that all hook specs share: modules, kind, tensor and schedule."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ..fields.field_types import (
    Count,
    Dimension,
    Glob,
    Globs,
    Heads,
    Index,
    IndexList,
    Indices,
    Number,
    Selection,
    UnknownNameError,
)
from ..fields.globs import matches
from ..fields.registry import Registry
from ..tables.kinds import ATTENTION_FUNCTIONS, ATTENTION_ROLES, COLLECTIVES, KINDS, Kind
from ..tables.statistics import statistic_of
from .schedule import Condition, Phase, Schedule, When


def _known_kind(name: str) -> str:
    if name not in KINDS:
        raise UnknownNameError("kind", name, tuple(KINDS))
    return name


KindName = Annotated[
    str, AfterValidator(_known_kind), Field(json_schema_extra=lambda schema: schema.update(enum=[*KINDS]))
]


def parse_slice(text: str) -> tuple[slice | int, ...]:
    """Convert a text such as `"0:4, :, ::2"`, with or without brackets, to the index of a tensor.

    Raise a ValueError if it is not a comma-separated list of integers and `start:stop:step`.
    """
    parts: list[slice | int] = []
    for part in re.sub(r"^\s*\[(.*)\]\s*$", r"\1", text).split(","):
        if not re.fullmatch(r"\s*(-?\d+|-?\d*\s*:\s*-?\d*(\s*:\s*\d*)?)\s*", part):
            raise ValueError(f"{part.strip()!r} is not a slice such as '0:4, :, ::2'")
        if ":" not in part:
            parts.append(int(part))
            continue
        bounds = [int(number) if number.strip() else None for number in part.split(":")]
        if len(bounds) == 3 and bounds[2] == 0:
            raise ValueError("the step of a slice must not be 0")
        parts.append(slice(*bounds))
    return tuple(parts)


def _slice_text(value: Any) -> Any:
    if isinstance(value, list | tuple):
        raise ValueError("must be text: put the slice, with its brackets, in quotes")
    if isinstance(value, str):
        parse_slice(value)
    return value


SliceText = Annotated[str, BeforeValidator(_slice_text)]
"""A slice in NumPy notation, as text."""


def _call_text(value: Any) -> Any:
    text = str(value)
    if not re.fullmatch(r"[\d:]+", text) or not _range_of(text):
        raise ValueError(f"{text!r} selects no calls: it must be one call, such as 0, or a range such as '10:20'")
    return text


def _range_of(text: str) -> range:
    (part,) = parse_slice(text)
    return range(part, part + 1) if isinstance(part, int) else range(sys.maxsize)[part]


CallRange = Annotated[str, BeforeValidator(_call_text, json_schema_input_type=int | str)]
"""Calls of a module within a micro-step, as text: one, or a range in NumPy notation."""


SELECTION = ("units", "heads", "positions", "samples", "slice")
"""The fields that select elements of a tensor."""


Misfit = tuple[str, str, str]
"""A field that does not fit a tensor: its name, the problem up to the name of the tensor, and what is allowed."""


def dimension_misfits(field: str, dims: Sequence[int], count: int) -> Iterator[Misfit]:
    """Yield the problems of a field that names dimensions of a tensor with `count` dimensions."""
    allowed = f"{-count} to {count - 1}" if count else f"no {field!r}: a scalar has no dimensions"
    for dim in dims:
        if not -count <= dim < count:
            yield field, f"dim {dim} is out of range for", allowed
    if len({dim % max(1, count) for dim in dims}) < len(dims):
        yield field, "the same dimension is given twice for", allowed


def implementation(name: str) -> Any:
    """Import an object of `instrument.actions`, which imports torch: `record:Record`."""
    return resolve_name(f"instrument.actions.{name}")


class HookBase(Selection):
    """The fields that all hook specs share. Each action adds its own."""

    needs_value: ClassVar[bool] = False  # whether the action requires the tensor that a gradient belongs to
    uses_parameters: ClassVar[bool] = False  # whether a hook on the loss gets the parameters of its layers
    if TYPE_CHECKING:
        action: str

    name: str = Field("", description="The name of the hook: its key in the mapping. An item of a list can set it.")
    kind: KindName = Field(description="The hook point; see the table of hook kinds.")
    role: str | None = Field(None, description="Which tensors of the kind. The default is the kind's first role.")
    path: Glob | None = Field(
        None,
        description="Glob on the path of a tensor: '0', 'logits', '1.*' in a nested value, 'add.0.1' in a call of a function. The "
        "default is all tensors.",
    )
    functions: Globs = Field(
        (),
        description="For function kinds: globs on names of torch functions: softmax, 'add*'. Roles attention and scores have a default. "
        "For kind collective: globs on names of operations: all_reduce, 'all_*'. The default is all operations.",
    )
    own: bool = Field(
        False,
        description="For function kinds: only calls that the module's own forward makes, without those in its submodules.",
    )
    fraction: Annotated[Number, Field(gt=0, le=1)] = Field(
        1.0, description="For kind collective: act on this fraction of the tensors, drawn with the seed of the run."
    )
    ranks: Annotated[tuple[Index, ...], Field(min_length=1)] | None = Field(
        None, description="For kind collective: act only in the processes with these ranks."
    )
    prepend: bool = Field(False, description="Run before all hooks that the module already has.")
    always_call: bool = Field(False, description="For forward: also run if the module's forward raises an error.")
    every: Count = Field(1, description="Run at every N-th step, counted from start.")
    start: Index = Field(0, description="The first step.")
    stop: Count | None = Field(None, description="The step after the last one.")
    steps: tuple[Index, ...] | None = Field(
        None, min_length=1, description="These steps only. Cannot be combined with every, start or stop."
    )
    when: When | None = Field(
        None,
        description="Act only where a condition on the tensor holds, {stat: l2, above: 10, times: median}, or in the step after the rule "
        "of this name fired.",
    )
    keep_as: str | None = Field(
        None,
        pattern=r"^[A-Za-z_]\w*$",
        description="Keep the tensor until the step ends, after the action: a hook function finds it in `context.tensors`.",
    )
    units: Indices | None = Field(
        None,
        description="Act only on these units: channels of an image, features of a vector or of a sequence element, rows of a "
        "parameter. Negative indices count from the end, here and below.",
    )
    unit_dim: Dimension | None = Field(
        None,
        description="The dimension of the units, for 'units', dead_fraction, 'spectrum', and functions with vectors. The default depends "
        "on the layer.",
    )
    heads: Heads | None = Field(
        None,
        description="Act only on these attention heads: {of: 12, take: [5]} divides the last dimension into 12 heads, as in the input of "
        "the output projection.",
    )
    positions: Indices | None = Field(
        None, description="Act only on these positions of a sequence: dimension 1 of batch-first tensors [N, T, ...]."
    )
    samples: IndexList | None = Field(
        None, description="Act only on the samples of the batch at these indices of dimension 0."
    )
    slice: SliceText | None = Field(
        None,
        description="Act only on this slice, in NumPy notation: '0:4, :, ::2' or '[:, -1, 64:128]'. Cannot be combined with "
        "other selections.",
    )
    calls: CallRange | None = Field(
        None,
        description="Act only in these calls of the module within a micro-step, counted from 0: one, such as 0, or a range, such as "
        "'10:20' or '1:'. In a generation with a cache, call k computes the k-th new token.",
    )
    phase: Phase = Field(
        "train",
        description="Run in training steps (train), in evaluations (eval), on the probe batch (probe), in the rollouts of a loop "
        "(rollout), or in mode: forward (forward, the default there).",
    )

    @property
    def schedule(self) -> Schedule:
        steps = None if self.steps is None else frozenset(self.steps)
        return Schedule(every=self.every, start=self.start, stop=self.stop, steps=steps, phase=self.phase)

    @property
    def call_range(self) -> range | None:
        """The calls of a module in which this hook acts; None for all."""
        return None if self.calls is None else _range_of(self.calls)

    @property
    def definition(self) -> Kind:
        return KINDS[self.kind]

    @property
    def condition(self) -> Condition | None:
        """The condition on the tensor; None if the hook has none, or follows a rule."""
        return self.when if isinstance(self.when, Condition) else None

    @property
    def follows(self) -> str | None:
        """The rule that turns the hook on for one step; None if the hook does not wait for a rule."""
        return self.when if isinstance(self.when, str) else None

    @property
    def tensor_role(self) -> str:
        return self.role or self.definition.roles[0]

    @property
    def selection(self) -> tuple[str, ...]:
        """The fields that select elements of the tensor; empty if the hook acts on the complete tensor."""
        given = [(name, getattr(self, name)) for name in SELECTION]
        return tuple(name for name, value in given if value is not None and not isinstance(value, int))

    @property
    def _uses_units(self) -> bool:
        return False

    def build(self, rows: Any, archive: Any) -> Any:
        """Return the action of this spec, an `instrument.actions.base.Action`.

        Args:
            rows: An `instrument.actions.base.Rows`: receives the rows of the action.
            archive: An `instrument.actions.base.Archive`: provides the tensors of other runs.

        Raises:
            ConfigError: A custom function cannot be imported or cannot be called with its arguments, or the tensors
                of another run cannot be found.
        """
        raise NotImplementedError

    def misfits(self, shape: Sequence[int], complete: Sequence[int]) -> Iterator[Misfit]:  # noqa: ARG002
        """Yield the fields that do not fit a tensor, given the shapes of the selected part and of the complete tensor."""
        yield from ()

    @model_validator(mode="after")
    def _validate_combinations(self) -> HookBase:
        if problem := next(self._problems(), None):
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with the combination of fields. Subclasses add theirs."""
        yield from self._problems_of_elements()
        if self.condition is not None:
            yield from self._problems_of_statistics([self.condition.stat], "stat {} of 'when'")
        yield from self._problems_of_schedule()
        yield from self._problems_of_kind()

    def _problems_of_elements(self) -> Iterator[str]:
        others = [name for name in self.selection if name != "slice"]
        if self.slice is not None and others:
            yield f"'slice' cannot be combined with {' and '.join(map(repr, others))}"
        if self.selection and self.definition.family == "loss":
            yield f"{self.selection[0]!r} selects elements, but the loss is one number"
        if self.definition.family != "module":
            for name in ("samples", "positions"):
                if name in self.selection:
                    yield f"{name!r} requires a batch, which the tensors of kind {self.kind} do not have"
            if self.heads is not None:
                yield "'heads' requires the tensors of a module: select rows with 'units', and columns with 'slice'"
        is_of_units = self.condition is not None and self.condition.stat == "dead_fraction"
        if self.unit_dim is not None and self.units is None and not (self._uses_units or is_of_units):
            yield "'unit_dim' requires 'units', dead_fraction in 'stats', 'spectrum', or a function of units"

    def _has(self, statistic: str) -> bool:
        only = statistic_of(statistic).only
        return not only or (self.kind, self.tensor_role) in only

    def _problems_of_statistics(self, names: Iterable[str], what: str) -> Iterator[str]:
        for name in names:
            if not self._has(name):
                where = " or ".join(f"kind {kind}, role {role}" for kind, role in statistic_of(name).only)
                given = f"this hook has kind {self.kind}, role {self.tensor_role}"
                yield f"{what.format(name)} requires {where}; {given}"

    def _problems_of_schedule(self) -> Iterator[str]:
        if self.stop is not None and self.stop <= self.start:
            yield f"stop ({self.stop}) must be larger than start ({self.start}): the window is [start, stop)"
        if self.steps is not None and {"every", "start", "stop"} & self.model_fields_set:
            yield "'steps' cannot be combined with every, start or stop"
        if self.phase in ("eval", "rollout") and self.definition.gradient:
            yield f"kind {self.kind} requires gradients, which phase {self.phase} does not compute"
        if self.phase in ("forward", "probe") and self.definition.frequency in ("step", "occasion"):
            makes_step = self.definition.frequency == "step"
            missing = "an optimizer step" if makes_step else "a state dict that is saved or loaded"
            fix = "; parameter_grad_micro sees the gradients of parameters without a step" if makes_step else ""
            yield f"kind {self.kind} requires {missing}, which phase {self.phase} does not have{fix}"

    def _problems_of_kind(self) -> Iterator[str]:
        kind = self.definition
        if self.role is not None and not kind.has_role(self.role):
            yield f"kind {kind.name} has no role {self.role!r}; its roles are {', '.join(kind.roles)}"
        of_attention = kind.of_functions and self.tensor_role in ATTENTION_ROLES
        for pattern in self.functions if of_attention else ():
            if not any(matches(pattern, function) for function in ATTENTION_FUNCTIONS):
                yield f"{pattern!r} matches no function with role {self.role}; these are {', '.join(ATTENTION_FUNCTIONS)}, the default"
        if kind.of_functions and not self.functions and not of_attention:
            yield f"kind {kind.name} requires 'functions': globs on names of torch functions, such as softmax"
        if not kind.of_functions and (self.own or (self.functions and kind.name != "collective")):
            yield f"'functions' and 'own' require kind function or function_grad, not {kind.name}"
        yield from self._problems_of_collective()
        if self.prepend and (kind.family != "module" or kind.of_functions):
            yield f"'prepend' requires a kind of module hook; PyTorch does not support it for kind {kind.name}"
        if self.always_call and kind.name != "forward":
            yield f"'always_call' requires kind forward; PyTorch does not support it for kind {kind.name}"
        if self.calls is not None and (kind.family != "module" or kind.gradient):
            yield f"'calls' requires kind forward_pre, forward or function, not {self.kind}"
        if self.keep_as is not None and self.tensor_role == "change":
            yield "'keep_as' requires a tensor of the module; role change is computed from two, without a graph"
        if self.params and kind.family == "module":
            yield f"'params' requires a kind with parameters; the tensors of kind {kind.name} belong to a module call"
        if self.path is not None and kind.family not in ("module", "collective"):
            yield f"'path' selects tensors in the inputs and outputs of modules; for kind {kind.name} use 'params'"

    def _problems_of_collective(self) -> Iterator[str]:
        if self.kind != "collective":
            if given := {"fraction", "ranks"} & self.model_fields_set:
                yield f"{min(given)!r} requires kind collective, not {self.kind}"
            return
        for name in ("layers", "exclude", "types", "structure", "params", "units"):
            if getattr(self, name):
                yield f"{name!r} requires modules or parameters; kind collective has 'functions', 'path' and 'slice'"
        for pattern in self.functions:
            if not any(matches(pattern, operation) for operation in COLLECTIVES):
                yield f"{pattern!r} matches no collective operation; these are {', '.join(COLLECTIVES)}"


class ObservationSpec(HookBase):
    """A hook that changes nothing: it records, prints or calls a function."""


class InterventionSpec(HookBase):
    """A hook that changes the tensor it sees."""

    # Whether a sparse tensor can be changed by its entries alone: zeros stay zeros, and positions do not matter.
    entrywise: ClassVar[bool] = False

    def build(self, rows: Any, archive: Any) -> Any:
        """Return the action, which checks and records what `function` returns."""
        return implementation("intervention:Intervention")(implementation("intervention:Modify")(self, archive), rows)

    def function(self, archive: Any) -> Any:  # noqa: ARG002
        """Return the function that changes a tensor: `change`, or one that is prepared once."""
        return self.change

    def change(self, tensor: Any, context: Any) -> Any:
        """Return the new tensor, same shape and dtype. The given one must not be modified in place.

        Args:
            tensor: The tensor.
            context: The call, an `instrument.Context`.
        """
        raise NotImplementedError

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        kind = self.definition
        if not kind.can_change(self.tensor_role):
            others = [other for other in KINDS.values() if other.of_functions == kind.of_functions]
            can = [kind.name for kind in others if kind.can_change(self.tensor_role) and kind.family != "collective"]
            hint = f"; {' and '.join(can)} can" if can else ""
            if self.tensor_role in ATTENTION_ROLES:
                hint = "; with functions: softmax, role output changes the weights, and role input the scores"
            yield f"kind {kind.name} cannot change role {self.tensor_role}{hint}"


ACTIONS: Registry[type[HookBase]] = Registry(
    "actions",
    "action",
    folder="instrument.actions.builtin",
    check=lambda entry: None if issubclass(entry, HookBase) else "is not a subclass of HookBase",
)
