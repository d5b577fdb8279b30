"""Field types that specs share, their base models, and the messages of validation errors in the words of this package."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from .globs import compile_glob

TARGET = "{_target_: package.name, argument: value}"
"""The notation of a target, for messages."""
_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}


class Spec(BaseModel):
    """A frozen model that does not allow undeclared fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)


class Target(BaseModel):
    """A class or function to import and its arguments, in the notation of Hydra: `{_target_: package.name, argument: value}`."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, defer_build=True)

    target: str = Field(alias="_target_", min_length=1, description="The dotted path of a class or function to import.")
    _function: Callable[..., Any] | None = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _from_callable(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Accept any callable, alone or as `_target_`, for specs in Python."""
        given = {"_target_": value} if callable(value) else value
        function = given.get("_target_") if isinstance(given, Mapping) else None
        if not callable(function):
            return validate(given)
        target = validate({**given, "_target_": describe_callable(function)})
        target._function = function
        return target

    @property
    def function(self) -> Callable[..., Any] | None:
        """The callable that a spec in Python contains; None if `target` has to be imported."""
        return self._function

    def to_config(self) -> dict[str, Any]:
        """Return the mapping that `hydra.utils.instantiate` accepts."""
        return {"_target_": self.target, **(self.model_extra or {})}


def nested_values(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the key and the value of everything in a part of a configuration, containers before their entries."""
    yield where, value
    entries: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        entries = ((f"{where}.{key}", item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        entries = ((f"{where}[{i}]", item) for i, item in enumerate(value))
    for key, item in entries:
        yield from nested_values(item, key)


def describe_callable(function: Any) -> str:
    """Describe a callable, so that the recorded spec identifies it. The text is the same in each process.

    Returns:
        The import path of a function or class at the top level of a module; `<lambda> at file.py:12` for a lambda or a nested
        function; the class for other objects.
    """
    if isinstance(function, partial):
        return f"partial of {describe_callable(function.func)}"
    name = getattr(function, "__qualname__", None)
    if name is None:
        return f"object of {describe_callable(type(function))}"
    if "<" not in name:
        return f"{function.__module__}.{name}" if getattr(function, "__module__", None) else str(name)
    code = getattr(function, "__code__", None)
    location = "" if code is None else f" at {Path(code.co_filename).name}:{code.co_firstlineno}"
    return f"{str(name).rpartition('.')[2]}{location}"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


def number_to_text(value: Any) -> Any:
    """Convert a name that YAML reads as a number to text: the item `0` of a list, or the function `nan`.

    Finite floats are ambiguous (`1.10`) and stay numbers.
    """
    is_name = isinstance(value, int) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_name and not isinstance(value, bool) else value


def _unique(indices: tuple[int, ...]) -> tuple[int, ...]:
    repeated = [index for index in indices if indices.count(index) > 1]
    if repeated:
        raise ValueError(f"the index {repeated[0]} is given twice")
    return indices


def _reject_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("must be a number, not true or false")
    return value


Name = Annotated[str, BeforeValidator(number_to_text, json_schema_input_type=str | int)]
Glob = Annotated[Name, AfterValidator(lambda pattern: compile_glob(pattern) and pattern)]
Globs = Annotated[tuple[Glob, ...], BeforeValidator(_as_list, json_schema_input_type=str | int | list[str | int])]
Names = Annotated[tuple[str, ...], BeforeValidator(_as_list, json_schema_input_type=str | list[str])]
# Bounds are next to the type, where the JSON Schema reads them. `Spec` forbids NaN and infinity.
Number = Annotated[float, BeforeValidator(_reject_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_reject_bool)]
LARGEST = 10**12  # an upper bound for steps, samples and elements

Count = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_reject_bool)]
Index = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_reject_bool)]
Dimension = Annotated[int, BeforeValidator(_reject_bool)]
IndexList = Annotated[tuple[Dimension, ...], Field(min_length=1), AfterValidator(_unique)]
"""Different indices along a dimension. Negative ones count from the end."""
Indices = Annotated[IndexList, BeforeValidator(_as_list, json_schema_input_type=int | list[int])]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_reject_bool)]


class Heads(Spec):
    """Attention heads: the last dimension consists of `of` heads of the same size."""

    of: Count = Field(description="The number of heads in the last dimension.")
    take: Indices = Field(description="The indices of the selected heads.")


StructureName = Literal["block", "attention", "mlp", "norm", "embedding", "head", "router", "experts", "model"]
STRUCTURES: dict[StructureName, str] = {
    "block": "a residual block: a repeated module that contains an attention",
    "attention": "nn.MultiheadAttention, or a module with projections to queries, keys and values",
    "mlp": "the feed-forward part of a block",
    "norm": "LayerNorm, RMSNorm, or a similar module",
    "embedding": "nn.Embedding with more than one row",
    "head": "the projection to classes or to the vocabulary after the blocks",
    "router": "a projection with one output per expert next to the experts",
    "experts": "modules of the same class, or parameters [experts, ., .], with a router",
    "model": "the whole model; the outermost called modules of a ModuleList or ModuleDict",
}
"""The parts of a transformer that `structure` finds. `instrument.plan.structure` has the rules."""


class Selection(Spec):
    """Which modules, and which of their parameters."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [
                {"required": ["layers"]},
                {"required": ["types"]},
                {"required": ["structure"]},
                {"properties": {"kind": {"enum": ["loss", "collective"]}}},
            ]
        }
    )

    layers: Globs | None = Field(None, min_length=1, description="Globs on module names; '.' is the root module.")
    exclude: Globs = Field((), description="Globs on module names to exclude.")
    types: Names = Field((), description="Globs on class names of modules, short or full. Subclasses match.")
    structure: Annotated[
        tuple[StructureName, ...], BeforeValidator(_as_list, json_schema_input_type=StructureName | list[StructureName])
    ] = Field(
        (),
        description="Parts of a transformer, found by the structure of the model: block (residual block), attention, mlp, norm, "
        "embedding, head (projection to classes or to the vocabulary), router, experts; or the whole model. 'layers' and 'types' "
        "restrict them.",
    )
    optional: bool = Field(
        False,
        description="Leave the spec out, instead of raising an error, if the model has no such 'structure'. For kind function, also do not "
        "warn if none of the functions is called.",
    )
    params: Globs = Field(
        (),
        description="Globs on parameter names within the module: weight, bias. `weight` includes the parameters of its parametrizations.",
    )

    @model_validator(mode="after")
    def _validate_selection(self) -> Self:
        is_of_run = getattr(self, "kind", None) in ("loss", "collective")  # of no module
        if self.layers is None and not (self.types or self.structure or is_of_run):
            raise ValueError(
                "requires 'layers' (globs on module names), 'types' (class names) or 'structure' (parts of a transformer)"
            )
        if self.optional and not self.structure:
            raise ValueError("'optional' requires 'structure'")
        return self

    @property
    def globs(self) -> tuple[str, ...]:
        """The selecting globs; all modules without `layers`."""
        return self.layers if self.layers is not None else ("**",)


DEFAULT_LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
DEFAULT_BINS, MAX_BINS = 64, 4096


def _numbers(default: tuple[float, ...], value: Any) -> Any:
    if isinstance(value, bool):
        return default if value else None
    return (value,) if isinstance(value, int | float) else value


_SORTED = AfterValidator(lambda numbers: numbers and tuple(sorted(set(numbers))))
_Level = Annotated[float, Field(ge=0.0, le=1.0)]
Levels = Annotated[
    tuple[_Level, ...] | None,
    Field(
        min_length=1,
        max_length=1000,
        description=f"Levels of the quantiles to record, from 0 to 1; true: {', '.join(map(str, DEFAULT_LEVELS))}.",
    ),
    BeforeValidator(
        partial(_numbers, DEFAULT_LEVELS),
        json_schema_input_type=bool | _Level | Annotated[list[_Level], Field(min_length=1)],
    ),
    _SORTED,
]


Edges = Annotated[
    tuple[Annotated[int, Field(ge=0, le=LARGEST)], ...] | None,
    Field(
        min_length=1,
        max_length=10_000,
        description="Record the cross entropy of a language model by position, from its logits [N, T, classes] and the targets of the "
        "batch: the first position of each bin, ascending; true: 0, 1, 2, 4, 8, ..., 131072.",
    ),
    BeforeValidator(
        partial(_numbers, (0, *(2**power for power in range(18)))),
        json_schema_input_type=bool | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)],
    ),
    _SORTED,
]
_Bins = Annotated[int, Field(ge=2, le=MAX_BINS)]
Bins = Annotated[
    _Bins | None,
    Field(description=f"Number of equal bins between minimum and maximum; true: {DEFAULT_BINS}."),
    BeforeValidator(
        lambda value: (DEFAULT_BINS if value else None) if isinstance(value, bool) else value,
        json_schema_input_type=bool | _Bins,
    ),
]


def message_of(item: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, to follow its key: `must be an integer`."""
    text: str = _MESSAGES.get(item["type"], item["msg"])
    return re.sub(r"^(?:Input|String) should ", "must ", text.removeprefix("Value error, "))


class UnknownNameError(ValueError):
    """A name that is not in a fixed set. It carries the set, so that the message can suggest similar names."""

    def __init__(self, what: str, name: str, allowed: tuple[str, ...]) -> None:
        self.what, self.name, self.allowed = what, name, allowed
        super().__init__(f"unknown {what} {name!r}")


def is_misspelled(name: str, options: Sequence[str]) -> bool:
    """Return whether a name that can be chosen freely is probably a misspelled one of these options.

    A name that contains an option, such as `loss_2` for `loss`, is not a misspelling.
    """
    return not any(each in name for each in options) and bool(difflib.get_close_matches(name, options, 1, 0.85))
