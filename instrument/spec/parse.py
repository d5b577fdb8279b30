"""Conversion of plain mappings to specs. All problems of a file are reported at once, with the keys of the file."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, Mistake, nearest
from . import apply as apply_specs
from . import hooks as hook_specs
from .apply import ApplySpec
from .base import UnknownNameError
from .budget import BudgetConfig
from .config import RunConfig
from .fields import spelled
from .functions import FUNCTIONS, FunctionSpec
from .hooks import HookSpec
from .keys import fields_of, fields_of_specs, model_at

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_config(raw: Mapping[str, Any]) -> RunConfig:
    """Validate the complete configuration of a run.

    Args:
        raw: Plain mappings, lists and values, with resolved interpolations.

    Returns:
        The configuration.

    Raises:
        ConfigError: It is invalid. The error contains every problem.
    """
    mistakes: list[Mistake] = []
    parsed = {}
    for section, parse in (("hooks", parse_hooks), ("apply", parse_apply)):
        try:
            parsed[section] = parse(raw.get(section))
        except ConfigError as error:
            mistakes += error.mistakes
    if not raw.get("model"):
        mistakes.append(
            Mistake(
                "model",
                "no model was chosen",
                allowed="model=mnist_cnn or another of conf/model, or model: {_target_: package.Class, ...} of your own",
            )
        )
    if not raw.get("data"):
        mistakes.append(
            Mistake(
                "data",
                "no dataset was chosen",
                allowed="data=mnist or another of conf/data, or data.dataset: {_target_: ...} of your own",
            )
        )
    for section in ("optimizer", "scheduler"):
        mistakes += _not_finite(raw.get(section), section)
    missing = {mistake.where for mistake in mistakes}
    rest = {key: value for key, value in raw.items() if key not in ("hooks", "apply")}
    try:
        config = RunConfig.model_validate({**rest, **parsed})
    except ValidationError as error:
        mistakes += [mistake for mistake in _mistakes(error, "", RunConfig) if mistake.where not in missing]
    if mistakes:
        raise ConfigError(*mistakes)
    return config


def _not_finite(value: Any, where: str) -> Iterable[Mistake]:
    """Yield a problem for every NaN or infinite number in a section.

    PyTorch's optimizers and schedulers accept most of them.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _not_finite(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _not_finite(item, f"{where}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        yield Mistake(where, "has to be finite", written=value, allowed="a finite number")


def parse_budget(raw: Mapping[str, Any] | None) -> BudgetConfig | None:
    """Validate the budget; None stays None.

    Raises:
        ConfigError: It is invalid.
    """
    return None if raw is None else _build(BudgetConfig, dict(raw), "budget")


def parse_hooks(raw: Any) -> dict[str, HookSpec]:
    """Convert a mapping from names to hook specs, or a list of hook specs. Null entries are ignored.

    Returns:
        The specs by name.

    Raises:
        ConfigError: A spec is invalid. The error contains every problem.
    """
    return _parse_section("hooks", raw, _hook_class)


def parse_apply(raw: Any) -> dict[str, ApplySpec]:
    """Convert a mapping from names to apply specs, or a list of apply specs. Null entries are ignored.

    Returns:
        The specs by name.

    Raises:
        ConfigError: A spec is invalid. The error contains every problem.
    """
    return _parse_section("apply", raw, _apply_class)


def _parse_section(section: str, raw: Any, choose: Callable[[Mapping[str, Any], str], Any]) -> dict[str, Any]:
    specs: dict[str, Any] = {}
    mistakes: list[Mistake] = []
    for name, value in _named(section, raw):
        where = f"{section}.{name}"
        try:
            if not isinstance(name, str):
                raise ConfigError(Mistake(section, _not_a_word(name), written=name, allowed="the name in quotes"))
            if not NAME.fullmatch(name):
                raise ConfigError(Mistake(section, "a name has to be letters, digits and underscores", written=name))
            if not isinstance(value, Mapping):
                raise ConfigError(Mistake(where, "has to be a mapping", written=value))
            if value.get("name") not in (None, "", name):
                raise ConfigError(
                    Mistake(f"{where}.name", "a spec in a mapping is named by its key", written=value["name"])
                )
            if name in specs:
                raise ConfigError(Mistake(where, "this name is used twice; names have to differ"))
            specs[name] = _build(_chosen(section, choose, value, where), {**value, "name": name}, where)
        except ConfigError as error:
            mistakes += error.mistakes
    if mistakes:
        raise ConfigError(*mistakes)
    return specs


def _chosen(
    section: str, choose: Callable[[Mapping[str, Any], str], Any], value: Mapping[str, Any], where: str
) -> type[BaseModel]:
    """Return the model of a spec. If its action is unknown, fields that no action has are reported too."""
    try:
        model: type[BaseModel] = choose(value, where)
    except ConfigError as error:
        known = fields_of_specs(section)
        unknown = [str(key) for key in value if key not in (*known, "name")]
        raise ConfigError(*error.mistakes, *(_unknown(key, value[key], known, where) for key in unknown)) from None
    return model


def _unknown(field: str, written: object, fields: Sequence[str], where: str) -> Mistake:
    close = nearest(field, fields)
    return Mistake(where, f"unknown field '{field}'", f"{field}: {written}", allowed=fields, nearest=close)


def _not_a_word(value: object) -> str:
    return f"YAML reads this as {value!r} ({type(value).__name__}), and not as a word"


def _named(section: str, raw: Any) -> Iterable[tuple[Any, Any]]:
    if raw is None:
        return []
    if isinstance(raw, Mapping):
        items = list(raw.items())
    elif isinstance(raw, list | tuple):
        items = [
            (value.get("name") or f"{section}_{i}" if isinstance(value, Mapping) else f"{section}_{i}", value)
            for i, value in enumerate(raw)
        ]
    else:
        raise ConfigError(
            Mistake(section, "has to be a mapping from a name to a spec, or a list of specs", written=raw)
        )
    return [
        (str(name) if isinstance(name, int) and not isinstance(name, bool) else name, value)
        for name, value in items
        if value is not None
    ]


def _hook_class(value: Mapping[str, Any], where: str) -> type[BaseModel]:
    kind = value.get("kind")
    if kind == "backward":
        raise ConfigError(
            Mistake(
                where,
                "kind backward is deprecated in PyTorch: it sees wrong gradients of modules with several operations",
                written="kind: backward",
                nearest=["full_backward"],
            )
        )
    action = _choice(value, "action", hook_specs.ACTIONS, where)
    if action != "modify":
        return hook_specs.ACTIONS[action]
    fn = value.get("fn")
    if isinstance(fn, Mapping) or callable(fn):
        return FunctionSpec
    return FUNCTIONS[_choice(value, "fn", FUNCTIONS, where, "or {_target_: package.function}")]


def _apply_class(value: Mapping[str, Any], where: str) -> type[BaseModel]:
    return apply_specs.ACTIONS[_choice(value, "action", apply_specs.ACTIONS, where)]


def _choice(value: Mapping[str, Any], key: str, options: Iterable[str], where: str, more: str = "") -> str:
    names = tuple(options)
    allowed = [*names, more] if more else names
    if value.get(key) is None:
        raise ConfigError(
            Mistake(
                f"{where}.{key}",
                "is missing",
                allowed=allowed,
                nearest=nearest(key, [str(name) for name in value if name != key]),
            )
        )
    written = spelled(value[key])
    if written not in names:
        raise ConfigError(
            Mistake(
                f"{where}.{key}",
                f"unknown {key}" if isinstance(written, str) else _not_a_word(written),
                written=written,
                allowed=allowed,
                nearest=nearest(str(written), names),
            )
        )
    return str(written)


def _build(model: type[ModelT], value: Mapping[str, Any], where: str) -> ModelT:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ConfigError(*_mistakes(error, where, model)) from None


def _mistakes(error: ValidationError, where: str, model: type[BaseModel]) -> list[Mistake]:
    found = [_mistake(dict(item), where, model) for item in error.errors()]
    return list({(mistake.where, mistake.problem): mistake for mistake in found}.values())


def _mistake(item: dict[str, Any], where: str, model: type[BaseModel]) -> Mistake:
    """Convert an error of pydantic."""
    kind, context = item["type"], item.get("ctx", {})
    loc = [str(part) for part in item["loc"] if not re.search(r"[\[(]", str(part))]
    place = ".".join([part for part in (where, *loc) if part])
    if kind == "extra_forbidden":
        fields = fields_of(model_at(model, loc[:-1]) or model)
        return _unknown(loc[-1], item["input"], fields, ".".join([part for part in (where, *loc[:-1]) if part]))
    if kind == "missing":
        return Mistake(place, "is missing")
    cause = context.get("error")
    if isinstance(cause, UnknownNameError):
        return Mistake(
            place,
            f"unknown {cause.what}",
            written=cause.name,
            allowed=cause.allowed,
            nearest=nearest(cause.name, cause.allowed),
        )
    written = None if isinstance(item["input"], Mapping) else item["input"]
    if kind == "string_type" and isinstance(written, bool | int | float):
        return Mistake(place, _not_a_word(written), written=written, allowed="the word in quotes")
    if kind == "literal_error":
        options = re.findall(r"'([^']+)'", context["expected"])
        return Mistake(
            place,
            "not one of the values allowed" if isinstance(written, str | None) else _not_a_word(written),
            written=written,
            allowed=options,
            nearest=nearest(str(written), options),
        )
    return Mistake(place, item["msg"].removeprefix("Value error, "), written=written)
