"""The type of all hook specs, and the specs of `record`, `print` and `modify`. Importing this module registers these actions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)

from ..errors import Problem
from ..fields.field_types import Count, Dimension, IndexList, Target, UnknownNameError, message_of
from ..fields.registry import Registry
from ..tables.schemas import RESERVED_COLUMNS, TABLES
from ..tables.statistics import ALL, COUNTS, DEFAULT, REGISTERED
from .base import ACTIONS, HookBase, InterventionSpec, ObservationSpec, implementation

HookSpec = HookBase
"""The type of all hook specs."""


class CustomStatistic(Target):
    """A custom statistic: a function of the tensor that returns a number, and the name of its column."""

    name: str = Field("", description="The name of the column. The default is the name of the function.")

    @property
    def column(self) -> str:
        return self.name or self.target.partition(" at ")[0].rpartition(".")[2]

    @model_validator(mode="after")
    def _validate_column(self) -> CustomStatistic:
        if not (self.column.isidentifier() and self.column.isascii()):
            message = "requires a name of letters, digits and underscores: {name: entropy, _target_: ...}"
            raise ValueError(f"{self.target} {message}")
        if self.column.lower() in RESERVED_COLUMNS:
            raise ValueError(f"the tables already have a column {self.column!r}; set another 'name'")
        return self


def names_of_custom_statistics(hooks: Any) -> Iterator[str]:
    """Yield the names of the custom and registered statistics that hooks record. Invalid specs are ignored."""
    specs = hooks.values() if isinstance(hooks, Mapping) else hooks if isinstance(hooks, list) else ()
    for spec in specs:
        stats = spec.get("stats") if isinstance(spec, Mapping) and spec.get("action") == "record" else None
        for item in stats if isinstance(stats, list | tuple) else [stats]:
            if isinstance(item, Mapping):
                with suppress(ValidationError):
                    yield CustomStatistic.model_validate(item).column
            elif isinstance(item, str) and item not in ("default", "all", "none", *ALL):
                yield item  # a registered statistic, which may not be known here


_CUSTOM_SCHEMA = {
    "type": "object",
    "properties": {"_target_": {"type": "string", "minLength": 1}, "name": {"type": "string"}},
    "required": ["_target_"],
}
Statistics = Annotated[
    Literal["default", "all", "none"] | tuple[str | CustomStatistic, ...],
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["default", "all", "none", *ALL]},
                _CUSTOM_SCHEMA,
                {"type": "array", "items": {"anyOf": [{"enum": ["default", *ALL]}, _CUSTOM_SCHEMA]}},
            ]
        }
    ),
]


# The brackets exclude the tags from the keys in messages.
Samples = Annotated[
    Annotated[Count, Tag("[number]")] | Annotated[IndexList, Tag("[list]")],
    Discriminator(lambda value: "[list]" if isinstance(value, list | tuple) else "[number]"),
]


class StatisticsSpec(ObservationSpec):
    """A hook that measures tensors."""

    stats: Statistics = Field(
        "default",
        description="The statistics: default, all, none, or a list of names. 'default' can be an item of the list, and so can a "
        "custom function of the tensor: {_target_: package.function, name: column}. numel, nan_count and inf_count are always added.",
    )

    @field_validator("stats", mode="before")
    @classmethod
    def _parse_statistics(cls, value: Any) -> Any:
        is_custom = callable(value) or isinstance(value, Mapping | CustomStatistic)
        if is_custom or (isinstance(value, str) and value not in ("default", "all", "none")):
            value = [value]
        if not isinstance(value, list | tuple):
            return value
        return tuple(item for given in value for item in _parse_statistic(given))

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if isinstance(self.stats, tuple):
            names = [name for name in self.stats if isinstance(name, str)]
            yield from self._problems_of_statistics(names, "statistic {}")

    @property
    def _uses_units(self) -> bool:
        return not {"dead_fraction", "unit_norm_cv"}.isdisjoint(self.statistics)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The requested statistics and the counts, in column order. `all` gives those of the kind and role."""
        sets = {"default": DEFAULT, "all": ALL, "none": ()}
        requested = sets[self.stats] if isinstance(self.stats, str) else self.stats
        built_in = [name for name in ALL if (name in requested and self._has(name)) or (requested and name in COUNTS)]
        others = [name for name in requested if isinstance(name, str) and name not in ALL]
        return (*built_in, *dict.fromkeys(others))

    @property
    def custom_statistics(self) -> tuple[CustomStatistic, ...]:
        return tuple(item for item in self.stats if isinstance(item, CustomStatistic))


def _parse_statistic(given: Any) -> tuple[str | CustomStatistic, ...]:
    if callable(given) or isinstance(given, Mapping | CustomStatistic):
        try:
            return (CustomStatistic.model_validate(given),)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"]))
            message = message_of(first)
            raise ValueError(f"invalid custom statistic: {place} {message}" if place else message) from None
    if given not in ("default", *ALL) and given not in REGISTERED:
        allowed = ("default", *ALL, *REGISTERED, "or {_target_: package.function}")
        raise UnknownNameError("statistic", str(given), allowed)
    return DEFAULT if given == "default" else (given,)


_fields: Any = {name: (kind, None) for table in TABLES.values() for name, kind in table.fields.items()}
_WithTableFields: Any = create_model("_WithTableFields", __base__=StatisticsSpec, **_fields)


@ACTIONS.register("record")
class RecordSpec(_WithTableFields):
    """Record statistics, quantiles, a histogram, or the values of the tensor. Recording changes nothing."""

    action: Literal["record"]
    tensors: bool = Field(False, description="Also record the values.")
    samples: Samples | None = Field(  # type: ignore[assignment]  # other actions take no number
        None,
        description="A number N: limit the recorded tensors, and a 'slice', to the first N samples (dimension 0). A list: record "
        "only the samples at these indices.",
    )
    keep: Annotated[int, Field(ge=1, le=10_000)] | None = Field(
        None,
        description="Keep the tensors of the last N recorded steps in memory. They are written when the rule of 'when' fires (default: "
        "each rule non_finite), or when the run fails.",
    )
    split_dim: Dimension | None = Field(
        None,
        description="Record the tensor of each index of this dimension on its own, such as each attention head of [N, heads, T, T] with 1. "
        "The index follows the path: 'softmax.0:3'. Other fields apply to the tensor without this dimension.",
    )
    max_elements: Count | None = Field(None, description="Record at most the first N elements of the flattened tensor.")
    dtype: Literal["float16", "bfloat16", "float32", "float64", "int8"] | None = Field(
        None,
        description="Store the values in this dtype, as bytes. int8: 8 bits with a scale for each row of "
        "the last dimension; integers keep their dtype.",
    )

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if not (self.tensors or self.statistics or self.tables or self.keep_as):
            others = ", ".join(name for table in TABLES.values() for name in table.fields)
            yield f"records nothing: 'stats' is none, and none of tensors, keep_as, {others} is requested"
        for table, values in self.tables.items():
            roles = TABLES[table].roles
            is_gradient = self.definition.gradient and not any("grad" in role for role in roles)
            if roles and (self.tensor_role not in roles or is_gradient):
                names = f"{', '.join(roles[:-1])} or {roles[-1]}" if roles[1:] else roles[0]
                names += " of a kind without gradients" * is_gradient
                given = f"this hook has kind {self.kind}, role {self.tensor_role}"
                yield f"{', '.join(values)} requires role {names}; {given}"
        if "position_losses" in self.tables and self.selection:
            yield f"'position_losses' requires the logits of all positions, without {self.selection[0]!r}"
        tensor_options = {"samples", "max_elements", "dtype", "keep"} - {*self.selection} & self.model_fields_set
        if tensor_options and not self.tensors:
            yield f"{', '.join(sorted(tensor_options))} apply to recorded tensors and require 'tensors: true'"
        if self.split_dim is not None and self.definition.family != "module":
            yield f"'split_dim' requires the tensors of a module call, which kind {self.kind} does not have"
        if self.keep is not None and self.condition is not None:
            yield "'keep' requires the name of a rule in 'when'; the rule {watch: HOOK, stat: ..., above: ...} has the same condition"

    @property
    def _uses_units(self) -> bool:
        return super()._uses_units or "spectra" in self.tables

    def build(self, rows: Any, archive: Any) -> Any:  # noqa: ARG002
        return implementation("record:Record")(self, rows)

    @property
    def follows(self) -> str | None:
        """The rule that turns the hook on for one step. A hook that keeps its tensors is always on."""
        return None if self.keep is not None else super().follows

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The further tables that get rows, each with the values of those of its fields that are set."""
        given = {}
        for table in TABLES.values():
            fields = ((name, getattr(self, name)) for name in table.fields)
            if values := {name: value for name, value in fields if value is not None}:
                given[table.name] = values
        return given

    @property
    def readable(self) -> set[str]:
        """The names of the statistics, and of the numbers of other tables that rules read next to them."""
        custom = {custom.column for custom in self.custom_statistics}
        numbers = {number for table in self.tables for number in TABLES[table].numbers if self.statistics}
        return {*self.statistics, *custom, *numbers}


@ACTIONS.register("print")
class PrintSpec(StatisticsSpec):
    """Print one line per tensor: hook, layer, step, shape, dtype, device and statistics."""

    action: Literal["print"]
    stats: Statistics = Field(
        ("mean", "std", "min", "max"),
        description="The printed statistics, as for record. NaN and infinities are always reported.",
    )

    def build(self, rows: Any, archive: Any) -> Any:  # noqa: ARG002
        return implementation("record:Print")(self, rows)


@ACTIONS.register("modify")
class ModifySpec(InterventionSpec):
    """Replace the tensor by the result of `fn`."""

    action: Literal["modify"]
    straight_through: bool = Field(
        False, description="Pass the gradient through unchanged (straight-through estimator, Bengio et al. 2013)."
    )

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        is_set = self.straight_through and "straight_through" in self.model_fields_set
        if is_set and self.kind not in ("forward", "forward_pre", "function"):
            yield f"'straight_through' requires kind forward, forward_pre or function; kind {self.kind} changes no forward value"


FUNCTIONS: Registry[type[ModifySpec]] = Registry(
    "functions",
    "function of modify",
    folder="instrument.actions.builtin",
    check=lambda entry: None if issubclass(entry, ModifySpec) else "is not a subclass of ModifySpec",
)


class FunctionSpec(ModifySpec):
    """A custom function, called as `fn(tensor, context)` with the additional arguments of the target. None keeps the tensor."""

    fn: Target

    needs_value: ClassVar[bool] = True

    def function(self, archive: Any) -> Any:  # noqa: ARG002
        return implementation("custom_functions:custom_function")(self.fn, f"hooks.{self.name}.fn", "tensor", "context")


def describe_action(spec: HookSpec) -> str:
    """Describe the action of a spec in a few words: `record stats, tensors`, `clip norm 1.0`, `modify noise`."""
    if isinstance(spec, RecordSpec):
        further = [name for values in spec.tables.values() for name, value in values.items() if value]
        requested = {"stats": spec.statistics, **dict.fromkeys(further, True), "tensors": spec.tensors}
        return "record " + ", ".join(name for name, value in requested.items() if value)
    if isinstance(spec, PrintSpec):
        shown = [name for name in spec.statistics if name not in COUNTS]
        return "print " + ", ".join([*shown, *(custom.column for custom in spec.custom_statistics)] or ["shape"])
    fields = {"min", "max", "value", "norm", "factor", "fn", "std", "coefficient"}
    arguments = spec.model_dump(include=fields, exclude_none=True, exclude_unset=True, by_alias=True)
    fn = arguments.pop("fn", None)
    parts = [spec.action, fn["_target_"] if isinstance(fn, dict) else fn]
    for key, value in arguments.items():
        parts.append(f"{key} {value:g}" if isinstance(value, int | float) else f"{key} {value}")
    return " ".join(part for part in parts if part)


class Obstacle(NamedTuple):
    """Why a hook cannot be part of a graph of `torch.compile`: the field of its spec, the reason, and the alternative."""

    key: str
    reason: str
    fix: str


def graph_obstacle(spec: HookBase) -> Obstacle | None:
    """Return why a hook breaks the graphs of `torch.compile`; None if it does not."""
    if spec.definition.family != "module":
        return None
    if spec.definition.of_functions:
        return Obstacle("kind", "compiled code calls no functions", "hook the modules instead")
    if (spec.kind, spec.tensor_role) == ("tensor", "input"):
        fix = "use 'kind: full_backward' with 'role: grad_input', the contribution of the module"
        return Obstacle("role", "the gradient of an input is complete only outside of the module", fix)
    if spec.tensor_role == "change":
        return Obstacle("role", "a graph does not keep the input of the module", "record the output")
    if spec.keep_as is not None and not spec.definition.gradient:
        return Obstacle(
            "keep_as", "a kept tensor keeps its autograd graph, and compiled code has none", "remove 'keep_as'"
        )
    return None


def graph_problems(name: str, spec: HookBase, fix: str) -> Iterator[Problem]:
    """Yield the problem of a hook that breaks graphs, where they must not break. `fix` allows that; hooks on functions never run there."""
    if (obstacle := graph_obstacle(spec)) is not None:
        given = spec.kind if obstacle.key == "kind" else getattr(spec, obstacle.key)
        fixes = obstacle.fix if spec.definition.of_functions else f"{obstacle.fix}, or {fix}"
        message = f"breaks the graphs of torch.compile: {obstacle.reason}"
        yield Problem(f"hooks.{name}.{obstacle.key}", message, given=given, fix=fixes)
