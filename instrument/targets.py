"""`_target_`: the import of a dotted path and the call of it, with errors in the words of the configuration."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate

from .errors import ConfigError, Mistake, nearest
from .spec.fields import Target


def locate(path: str, where: str) -> Any:
    """The callable behind a dotted path.

    Raises:
        ConfigError: It is not there, it fails when imported, Hydra's policy refuses it, or it cannot be called.
    """
    try:
        found = get_object(path)
    except Exception as error:
        raise ConfigError(_not_there(path, where, error)) from None
    if not callable(found):
        raise ConfigError(Mistake(where, f"{path} is a {type(found).__name__}, not a class or function", written=path))
    return found


def takes(path: str, where: str) -> frozenset[str]:
    """The names of the parameters that a target declares; none for a built-in that does not say.

    Raises:
        ConfigError: As `locate`.
    """
    found = locate(path, where)
    try:
        return frozenset(inspect.signature(found).parameters)
    except (TypeError, ValueError):
        return frozenset()


def build(target: Target, where: str, *positional: Any, **given: Any) -> Any:
    """Call a target with its arguments; nested `_target_`s are built first.

    Args:
        target: What to call.
        where: Its key in the configuration, for messages.
        positional: Arguments that the caller adds in front.
        given: Keyword arguments that the caller adds.

    Raises:
        ConfigError: The target is not there, or the call fails.
    """
    locate(target.target, where)
    _locate_within(target.model_extra, where)
    try:
        return instantiate(target.to_config(), *positional, **given, _convert_="all")
    except InstantiationException as error:
        cause = error.__cause__
        raise ConfigError(
            Mistake(where, f"{target.target} could not be built: {_reason(cause or error)}", written=_arguments(target))
        ) from error


def _locate_within(value: Any, where: str) -> None:
    """Locate the targets among a target's arguments, however deep, so that a mistake is told at its own key."""
    if isinstance(value, dict):
        if isinstance(path := value.get("_target_"), str):
            locate(path, f"{where}._target_")
        for key, item in value.items():
            _locate_within(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _locate_within(item, f"{where}[{i}]")


def _arguments(target: Target) -> str:
    return ", ".join(f"{key}: {value}" for key, value in target.to_config().items())


def _reason(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, InstantiationException) else f"{type(error).__name__}: {text}"


def _not_there(path: str, where: str, error: BaseException) -> Mistake:
    """How far down the path the import gets, and the nearest names at the place where it stops."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InstantiationException) and "blocklisted" in str(cause):
            return Mistake(where, "Hydra refuses to call this", written=path)
        cause = cause.__cause__
    parts = path.split(".")
    found: Any = None
    for i, part in enumerate(parts):
        try:
            found = (
                getattr(found, part)
                if i and hasattr(found, part)
                else importlib.import_module(".".join(parts[: i + 1]))
            )
        except ModuleNotFoundError as missing:
            if missing.name not in (".".join(parts[: i + 1]), part) and not (missing.name or "").startswith(parts[0]):
                return Mistake(
                    where,
                    f"{'.'.join(parts[: i + 1])} needs the module {missing.name!r}, which is not installed",
                    written=path,
                )
            place = ".".join(parts[:i])
            known = dir(found) if i else [module.name for module in pkgutil.iter_modules()]
            problem = (
                f"{place} has no {part!r}"
                if i
                else f"there is no module {part!r} here; Python looks in the working directory too"
            )
            return Mistake(
                where,
                problem,
                written=path,
                nearest=[f"{place}.{name}" if place else name for name in nearest(part, known)],
            )
        except Exception as failure:
            return Mistake(
                where, f"importing {'.'.join(parts[: i + 1])} failed: {type(failure).__name__}: {failure}", written=path
            )
    return Mistake(where, f"cannot be imported: {error}", written=path)
