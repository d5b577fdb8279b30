"""Field types that specs share, and their base models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from .globs import compile_glob


class Spec(BaseModel):
    """Frozen, and no field that is not declared is let through."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False, defer_build=True)


class Target(BaseModel):
    """Something importable and its arguments: `{_target_: package.name, argument: value}`, as Hydra writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True, defer_build=True)

    target: str = Field(alias="_target_", min_length=1, description="The dotted path of a class or function to import.")

    @model_validator(mode="before")
    @classmethod
    def _by_its_path(cls, value: Any) -> Any:
        """Accept a function or class instead of a target without arguments, for specs in Python."""
        return {"_target_": _dotted_path(value)} if callable(value) else value

    def to_config(self) -> dict[str, Any]:
        """Return the mapping that `hydra.utils.instantiate` accepts."""
        return {"_target_": self.target, **(self.model_extra or {})}


def _dotted_path(function: Any) -> str:
    """Return the import path of a function or class, so that the recorded spec identifies it."""
    path = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    if "<" in path or "None" in path.split("."):
        raise ValueError("a function has to have a name at the top of its module: no lambda, none inside another one")
    return path


def _glob(pattern: str) -> str:
    compile_glob(pattern)
    return pattern


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int | float) else value


def spelled(value: Any) -> Any:
    """Convert a name that YAML reads as a number to text: the item `0` of a list, or the function `nan`.

    Finite floats are ambiguous (`1.10`) and stay numbers.
    """
    is_name = isinstance(value, int) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_name and not isinstance(value, bool) else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("has to be a number, not true or false")
    return value


Name = Annotated[str, BeforeValidator(spelled, json_schema_input_type=str | int)]
Glob = Annotated[Name, AfterValidator(_glob)]
Globs = Annotated[tuple[Glob, ...], BeforeValidator(_listed, json_schema_input_type=str | int | list[str | int])]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
# Bounds are next to the type, where the JSON Schema reads them. `Spec` forbids NaN and infinity.
Number = Annotated[float, BeforeValidator(_no_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_no_bool)]
LARGEST = 10**12  # an upper bound for steps, samples and elements

Count = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_no_bool)]
Index = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_no_bool)]
Dimension = Annotated[int, BeforeValidator(_no_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_no_bool)]


class Selection(Spec):
    """Which modules, and which of their parameters."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["layers"]}, {"required": ["types"]}, {"properties": {"kind": {"const": "loss"}}}]
        }
    )

    layers: Globs | None = Field(None, min_length=1, description="Globs on module names; '.' is the root module.")
    exclude: Globs = Field((), description="Globs on module names to exclude.")
    types: Names = Field((), description="Class names of modules, short or full. Subclasses match.")
    params: Globs = Field((), description="Globs on parameter names within the module: weight, bias.")

    @model_validator(mode="wrap")
    @classmethod
    def _some_selection(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        of_the_model = isinstance(value, Mapping) and value.get("kind") == "loss"  # there is one loss per model
        if not isinstance(value, Mapping) or value.get("layers") is not None or value.get("types") or of_the_model:
            return validate(value)
        problem = PydanticCustomError(
            "no_selection", "needs 'layers' (globs on module names), 'types' (class names), or both"
        )
        found: list[InitErrorDetails] = [{"type": problem, "loc": (), "input": value}]
        try:
            validate({**value, "layers": "**"})
        except ValidationError as error:  # an unknown field may be a misspelled 'layers'
            found += [
                {"type": item["type"], "loc": item["loc"], "input": item["input"], "ctx": item.get("ctx", {})}
                for item in error.errors()
            ]
        raise ValidationError.from_exception_data(cls.__name__, found)

    @property
    def globs(self) -> tuple[str, ...]:
        """The selecting globs; all modules if only `types` is given."""
        return self.layers if self.layers is not None else ("**",)
