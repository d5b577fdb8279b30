"""The keys that a configuration can contain, according to the fields of its sections and specs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import get_args, get_origin

from pydantic import BaseModel

from ..fields.field_types import Target
from . import apply
from .base import ACTIONS, HookBase
from .experiment import TRACKERS, RunConfig
from .hook_specs import FUNCTIONS, FunctionSpec
from .rules import RULES, CustomRule, WatchRule


def fields_of(model: type[BaseModel]) -> list[str]:
    """Return the fields of a section or spec as they are written in YAML, for specs without `name`, which is their key."""
    return [field.alias or name for name, field in model.model_fields.items() if name != "name" or model is RunConfig]


def fields_below(path: Sequence[str]) -> tuple[str, ...]:
    """Return the fields that are allowed below a key of a run's configuration; for a spec, those of every action.

    Empty if the key is not a section or allows any argument.
    """
    if len(path) == 2 and path[0] in ("hooks", "apply", "rules"):
        return fields_of_specs(path[0])
    in_spec = len(path) > 2 and path[0] == "hooks"
    model = model_at(HookBase, path[2:]) if in_spec else model_at(RunConfig, path)
    installed = TRACKERS if [*path] == ["sink"] else ()
    return () if model is None or issubclass(model, Target) else tuple(dict.fromkeys([*fields_of(model), *installed]))


@cache
def fields_of_specs(name: str) -> tuple[str, ...]:
    """Return the fields of all specs of `hooks`, `apply` or `rules`, for all actions."""
    if name == "rules":
        return _unique_fields([*(rule.fields for rule in RULES.values()), WatchRule, CustomRule], [])
    if name == "apply":
        arguments = [argument for names in apply.INIT_FUNCTIONS.values() for argument in names]
        return _unique_fields(apply.ACTIONS.values(), arguments)
    return _unique_fields([*ACTIONS.values(), *FUNCTIONS.values(), FunctionSpec], ["fn"])


def _unique_fields(models: Iterable[type[BaseModel]], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys([name for model in models for name in fields_of(model)] + [*more]))


def model_at(model: type[BaseModel], path: Sequence[str]) -> type[BaseModel] | None:
    """Return the model of a nested section or of a mapping's value, starting from another model; None if it does not exist."""
    parts = iter(path)
    for part in parts:
        field = model.model_fields.get(part)
        annotation = None if field is None else field.annotation
        if get_origin(annotation) is dict and next(parts, None) is not None:
            annotation = get_args(annotation)[1]
        inner = next(models_in(annotation), None)
        if inner is None:
            return None
        model = inner
    return model


def models_in(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the models in the type of a field, without those of a mapping's values."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) is not dict:
        for part in get_args(annotation):
            yield from models_in(part)
