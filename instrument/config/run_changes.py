"""Changes to a run in progress: which settings can change, and their validation. They are those of `instrument.control`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from ..errors import ConfigError, Problem, raise_problems, similar_names
from .hook_specs import HookSpec
from .parse import named_specs, parse_hooks
from .schedule import Phase
from .spec_file import YAML_ERRORS

SCHEDULE_FIELDS = ("every", "start", "stop", "steps")
FIELDS_OF_ACTIONS = {"clip": ("norm", "min", "max", "value", "quantile", "ratio"), "scale": ("factor",)}
COMMANDS = ("checkpoint", "stop")
"""Changes that are requests: they are made once, and not repeated when the run is resumed."""
SCALE = "lr_scale"
MAX_CHARACTERS = 80  # of an invalid value in a message
SWITCHES = {"enable": True, "disable": False}
ALLOWED = "hooks.NAME.FIELD=VALUE, enable=NAME, disable=NAME, lr_scale=FACTOR, checkpoint, stop"
NOT_IN_CUSTOM_LOOPS = {
    SCALE: "instrument.attach does not change the learning rates: the training loop sets them",
    "checkpoint": "instrument.attach saves no checkpoints: the training loop saves them",
}


@dataclass(frozen=True)
class RunChange:
    """A changed setting, such as `hooks.tame.norm`, with its values; None if it is not set."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}: {_text(self.before)} -> {_text(self.after)}"


@dataclass(frozen=True)
class Settings:
    """The settings of a run that can change while it runs. `phase`: that of hooks that set none."""

    hooks: Mapping[str, Mapping[str, Any]]
    phase: Phase = "train"
    disabled: frozenset[str] = frozenset()
    lr_scale: float = 1.0
    has_custom_loop: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Return the settings of a run, given the configuration in its run.json."""
        named = dict(named_specs("hooks", config.get("hooks")))
        phase: Phase = "forward" if config.get("mode") == "forward" else "train"
        return cls(named, phase=phase, has_custom_loop="train" not in config)

    def specs(self, names: Sequence[str]) -> dict[str, HookSpec]:
        return parse_hooks({name: self.hooks[name] for name in names}, self.phase)


@dataclass(frozen=True)
class Request:
    """The validated changes of one message, the settings afterwards, and the names of the hooks whose fields change."""

    settings: Settings
    changes: list[RunChange] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def parse_changes(texts: Sequence[str], settings: Settings) -> Request:
    """Validate changes, which are made together. Their values are YAML; `null` unsets a field. The ConfigError contains every problem."""
    request = Request(settings)
    problems: list[Problem] = []
    for text in texts:
        try:
            request = _with(text, request)
        except ConfigError as error:
            problems += error.problems
    if not problems:
        try:
            request.settings.specs(request.hooks)
        except ConfigError as error:
            problems += error.problems
    if not texts:
        problems.append(Problem("", "no change is given", allowed=ALLOWED))
    raise_problems(problems)
    return request


def changed_hook(text: str) -> str | None:
    """Return the name of the hook that a change concerns, such as `hooks.tame.norm=0.5`; None if it concerns all of the run."""
    key, _, value = text.partition("=")
    if key in SWITCHES:
        return str(yaml.safe_load(value))
    return key.split(".")[1] if key.startswith("hooks.") else None


def _with(text: str, request: Request) -> Request:
    settings, hooks = request.settings, request.hooks
    key, equals, written = text.partition("=")
    if settings.has_custom_loop and (problem := NOT_IN_CUSTOM_LOOPS.get(key)):
        raise ConfigError(Problem(text, problem))
    if text in COMMANDS:
        return replace(request, commands=[*request.commands, text])
    try:
        value = yaml.safe_load(written)
    except YAML_ERRORS:
        raise ConfigError(Problem(key, "the value is not valid YAML", given=written[:MAX_CHARACTERS])) from None
    if equals and key in SWITCHES:
        name = _known_hook(str(value), key, settings)
        disabled = settings.disabled - {name} if SWITCHES[key] else settings.disabled | {name}
        states = ("disabled" if name in each else "enabled" for each in (settings.disabled, disabled))
        change = RunChange(f"hooks.{name}", *states)
        settings = replace(settings, disabled=disabled)
    elif equals and key == SCALE:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
            raise ConfigError(Problem(key, "must be a number that is at least 0", given=value))
        change = RunChange(key, settings.lr_scale, float(value))
        settings = replace(settings, lr_scale=float(value))
    elif equals and key.startswith("hooks."):
        change, settings, name = _with_field(key, value, settings)
        hooks = list(dict.fromkeys([*hooks, name]))
    else:
        similar = similar_names(key, (*COMMANDS, *SWITCHES, SCALE))
        raise ConfigError(Problem("", "unknown change", given=text, allowed=ALLOWED, similar=similar))
    return replace(request, settings=settings, changes=[*request.changes, change], hooks=hooks)


def _with_field(key: str, value: Any, settings: Settings) -> tuple[RunChange, Settings, str]:
    """Return the change of a field, the settings afterwards, and the name of the hook."""
    _, name, *fields = key.split(".")
    _known_hook(name, "hooks", settings)
    spec = settings.hooks[name]
    allowed = [*SCHEDULE_FIELDS, *_bounds(spec)]
    if len(fields) != 1 or fields[0] not in allowed:
        similar = similar_names(fields[0], allowed) if fields else ()
        message = "this field cannot change while the run is in progress"
        raise ConfigError(Problem(key, message, allowed=allowed, similar=similar))
    (changed,) = fields
    if changed == "factor" and _length(value) != _length(spec[changed]):
        message = "must have as many factors as before" if _length(spec[changed]) else "cannot become a list"
        raise ConfigError(Problem(key, message, value, allowed=_text(spec[changed])))
    new = {**spec, changed: value}
    if value is None:
        del new[changed]
    return RunChange(key, spec.get(changed), value), replace(settings, hooks={**settings.hooks, name: new}), name


def _bounds(spec: Mapping[str, Any]) -> list[str]:
    """Return the bounds and factors of a hook that can change: those that are set, since another one is another action."""
    names = FIELDS_OF_ACTIONS.get(str(spec.get("action")), ())
    bounds = {name for name in names if spec.get(name) is not None}
    return [name for name in names if name in bounds or (name in ("min", "max") and bounds & {"min", "max"})]


def _length(factor: Any) -> int:
    """Return the number of factors in a list, which the size of a tensor determines; 0 if it is not a list."""
    return len(factor) if isinstance(factor, Sequence) and not isinstance(factor, str) else 0


def _known_hook(name: str, where: str, settings: Settings) -> str:
    if name not in settings.hooks:
        similar = similar_names(name, settings.hooks)
        raise ConfigError(Problem(where, "the run has no such hook", name, list(settings.hooks), similar))
    return name


def _text(value: Any) -> str:
    if value is None:
        return "not set"
    return value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
