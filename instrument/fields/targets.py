"""Import and call the dotted paths of `_target_`, with error messages that name the configuration key."""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
import re
from collections.abc import Callable
from typing import Any

from ..errors import ConfigError, Problem, similar_names
from .field_types import Target, nested_values
from .pip_extras import PACKAGES_OF_RUN, packages_of, pip_command


def locate(path: str, where: str) -> Any:
    """Import the callable of a dotted path. `where` is its configuration key, here and below.

    Raises:
        ConfigError: The path does not exist, its import fails, Hydra's policy forbids it, or it is not callable.
        InstrumentError: Hydra is not installed.
    """
    with packages_of("run", where):
        from hydra.utils import get_object

    log = logging.getLogger("hydra.utils")  # it writes the error too
    was_disabled, log.disabled = log.disabled, True
    try:
        target = get_object(path)
    except (Exception, SystemExit) as error:
        raise ConfigError(_import_problem(path, where, error)) from None
    finally:
        log.disabled = was_disabled
    if not callable(target):
        raise ConfigError(Problem(where, f"{path} is a {type(target).__name__}, not a class or function", given=path))
    return target


def argument_names(path: str, where: str) -> frozenset[str]:
    """Return the parameter names of a target; empty for a built-in function without a signature.

    The constructor of a class that takes `**kwargs` passes them to that of its base class, whose parameters count too.

    Raises:
        ConfigError: As for `locate`.
    """
    target = locate(path, where)
    bases = target.__mro__[1:] if inspect.isclass(target) else ()
    inherited = [vars(base)["__init__"] for base in bases if "__init__" in vars(base)]
    names: set[str] = set()
    try:
        for function in (target, *inherited):
            parameters = inspect.signature(function).parameters
            names.update(parameters)
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
                break
    except (TypeError, ValueError):
        pass  # a built-in function without a signature
    return frozenset(names)


def build(target: Target, where: str, *positional: Any, **given: Any) -> Any:
    """Call a target with its arguments and those of the caller; nested `_target_`s are built first.

    Raises:
        ConfigError: The target does not exist, or the call fails.
    """
    locate(target.target, where)
    for key, value in nested_values(target.model_extra, where):  # so that an error is reported at its own key
        if isinstance(value, dict) and isinstance(path := value.get("_target_"), str):
            locate(path, f"{key}._target_")
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(target.to_config(), *positional, **given, _convert_="all")
    except (InstantiationException, SystemExit) as error:
        cause = error.__cause__
        if (
            isinstance(cause, TypeError)
            and re.search(r"\bstr\b", str(cause))
            and (texts := _texts_for_numbers(target, where))
        ):
            raise ConfigError(*texts) from error
        message = f"{target.target} could not be built: {_reason(cause or error)}"
        arguments = ", ".join(f"{key}: {value}" for key, value in target.to_config().items())
        raise ConfigError(Problem(where, message, arguments)) from error


def _texts_for_numbers(target: Target, where: str) -> list[Problem]:
    """Return a problem for each argument that is a text, although its default is a number."""
    try:
        parameters = inspect.signature(locate(target.target, where)).parameters
    except (TypeError, ValueError):
        return []  # a built-in function without a signature
    texts = ((name, given) for name, given in (target.model_extra or {}).items() if isinstance(given, str))
    return [
        Problem(f"{where}.{name}", "must be a number", given)
        for name, given in texts
        if name in parameters and type(parameters[name].default) in (int, float)
    ]


def build_callable(target: Target, where: str) -> Callable[..., Any]:
    """Return the function of a target with its arguments bound, or the instance if the target is a class.

    Raises:
        ConfigError: The target does not exist, its construction fails, or its instances cannot be called.
    """
    is_class = inspect.isclass(locate(target.target, where))
    value = build(target if is_class else target.model_copy(update={"_partial_": True}), where)
    if not callable(value):
        raise ConfigError(Problem(where, f"instances of {target.target} cannot be called", given=type(value).__name__))
    return value  # type: ignore[no-any-return]


def _reason(error: BaseException) -> str:
    from hydra.errors import InstantiationException

    text = str(error).strip() or type(error).__name__
    return text if isinstance(error, InstantiationException) else f"{type(error).__name__}: {text}"


def _import_problem(path: str, where: str, error: BaseException) -> Problem:
    """Return the problem of a failed import: the part of the path that fails, and similar existing names."""
    from hydra.errors import InstantiationException

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, InstantiationException) and "blocklisted" in str(cause):
            return Problem(where, "Hydra does not allow this target", given=path)
        cause = cause.__cause__
    parts = path.split(".")
    value: Any = None
    for i, part in enumerate(parts):
        parent, name = ".".join(parts[:i]), ".".join(parts[: i + 1])
        try:
            value = getattr(value, part) if i and hasattr(value, part) else importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name not in (name, part) and not (missing.name or "").startswith(parts[0]):
                message = f"{name} requires the module {missing.name!r}, which is not installed"
                return Problem(where, message, given=path)
            if i:
                similar = [f"{parent}.{each}" for each in similar_names(part, dir(value))]
                return Problem(where, f"{parent} has no {part!r}", given=path, similar=similar)
            message = f"no module named {part!r}; Python also searches the working directory"
            if part in PACKAGES_OF_RUN:
                return Problem(where, message, given=path, fix=pip_command("run"))
            similar = similar_names(part, [module.name for module in pkgutil.iter_modules()])
            return Problem(where, message, given=path, similar=similar)
        except (Exception, SystemExit) as failure:
            return Problem(where, f"importing {name} failed: {type(failure).__name__}: {failure}", given=path)
    return Problem(where, f"cannot be imported: {error}", given=path)
