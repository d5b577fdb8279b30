"""Field types that specs share, and the model they all inherit from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from .globs import compile_glob


class Spec(BaseModel):
    """Frozen, and no field that is not declared is let through."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


class Target(BaseModel):
    """Something importable and its arguments: `{_target_: package.name, argument: value}`, as Hydra writes it."""

    model_config = ConfigDict(extra="allow", frozen=True, populate_by_name=True)

    target: str = Field(alias="_target_", min_length=1, description="The dotted path of a class or function.")

    @model_validator(mode="before")
    @classmethod
    def _by_its_path(cls, value: Any) -> Any:
        """In Python the function or class itself may stand for a target without arguments."""
        return {"_target_": _dotted_path(value)} if callable(value) else value

    def to_config(self) -> dict[str, Any]:
        """The mapping that `hydra.utils.instantiate` takes."""
        return {"_target_": self.target, **(self.model_extra or {})}


def _dotted_path(function: Any) -> str:
    """Where a function or class can be imported from, so that a record of the spec says which one it was."""
    path = f"{getattr(function, '__module__', None)}.{getattr(function, '__qualname__', None)}"
    if "<" in path or "None" in path.split("."):
        raise ValueError("a function has to have a name at the top of its module: no lambda, none inside another one")
    return path


def _glob(pattern: str) -> str:
    compile_glob(pattern)
    return pattern


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _spelled(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("has to be a number, not true or false")
    return value


Glob = Annotated[str, AfterValidator(_glob)]
Globs = Annotated[tuple[Glob, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
# The path of an item is a number to YAML, and a name to us.
Path = Annotated[Glob, BeforeValidator(_spelled, json_schema_input_type=str | int)]
Names = Annotated[tuple[str, ...], BeforeValidator(_listed, json_schema_input_type=str | list[str])]
# Bounds stand beside the type, where the JSON Schema takes them from. Finite they are by the configuration of `Spec`.
Number = Annotated[float, BeforeValidator(_no_bool)]
NonNegative = Annotated[float, Field(ge=0), BeforeValidator(_no_bool)]
LARGEST = 10**12  # more steps, samples or elements than anything has

Count = Annotated[int, Field(ge=1, le=LARGEST), BeforeValidator(_no_bool)]
Index = Annotated[int, Field(ge=0, le=LARGEST), BeforeValidator(_no_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**63), BeforeValidator(_no_bool)]


class Selection(Spec):
    """Which modules, and which of their parameters."""

    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [{"required": ["layers"]}, {"required": ["types"]}, {"properties": {"kind": {"const": "loss"}}}]
        }
    )

    layers: Globs | None = Field(None, min_length=1, description="Globs on module names; '.' is the root.")
    exclude: Globs = Field((), description="Globs on module names, taken away again.")
    types: Names = Field((), description="Class names, short or full; subclasses count.")
    params: Globs = Field((), description="Globs on the parameter's own name: weight, bias.")

    @model_validator(mode="before")
    @classmethod
    def _some_selection(cls, value: Any) -> Any:
        of_the_model = isinstance(value, Mapping) and value.get("kind") == "loss"  # there is one loss
        if isinstance(value, Mapping) and value.get("layers") is None and not value.get("types") and not of_the_model:
            raise ValueError("needs 'layers' (globs on module names), 'types' (class names), or both")
        return value

    @property
    def globs(self) -> tuple[str, ...]:
        """The globs that select; all modules where only `types` was given."""
        return self.layers if self.layers is not None else ("**",)
