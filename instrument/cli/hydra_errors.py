"""Translation of composition errors of Hydra into problems with a location, the given value and the allowed values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from ..errors import Mistake, nearest
from ..extras import pip_command
from ..spec.keys import fields_below
from ..sweeps.objective import KEY as OBJECTIVE

PACKAGE_LINE = "# @package _global_"  # first line of an experiment file
EXTRAS = {
    "hydra/launcher": {"joblib": "joblib", "submitit_slurm": "submitit", "submitit_local": "submitit", "ray": "ray"},
    "hydra/sweeper": {"optuna": "optuna"},
}
"""The options that Hydra plugins provide, by group, with the extra that installs the plugin."""


def composition_mistake(error: Exception, overrides: Sequence[str], folders: Sequence[Path]) -> Mistake:
    """Translate an error that Hydra, OmegaConf or YAML raised during composition.

    Args:
        error: Error that was raised.
        overrides: Overrides of the command line.
        folders: Folders that are searched for configuration files.

    Returns:
        The problem, with a suggestion if a similar name exists.
    """
    if isinstance(error, MarkedYAMLError):
        return _not_yaml(error)
    if isinstance(error, OverrideParseException):
        return _not_readable(error)
    if re.search(r"Could not override '[^']+@exp\.", str(error)):
        return Mistake(
            "exp", "its 'override' lines are looked for below the key 'exp'", allowed=f"first line: {PACKAGE_LINE}"
        )
    missing = re.search(r"Could not (?:find|load) '([^'\n]+)/([^'\n/]*)'", str(error))
    if missing and (extra := EXTRAS.get(missing[1], {}).get(missing[2])):
        return Mistake(missing[1], f"needs a package that is not installed: {pip_command(extra)}")
    if missing:
        known = getattr(error, "options", None) or _options(missing[1], folders)
        return _no_such_option(missing[1], missing[2], known)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return _no_such_key(error, error.__cause__)
    return _no_name_of_a_group(overrides, folders) or Mistake("", f"cannot be composed: {_told(error)}")


def _not_readable(error: OverrideParseException) -> Mistake:
    key, _, value = error.override.partition("=")
    is_question = key.lstrip("+") == OBJECTIVE and "(" in value
    quoted = f"""'{key}="{value}"', in quotes twice: the shell's, and Hydra's""" if is_question else ()
    return Mistake("", f"this override cannot be read: {_told(error)}", written=error.override, allowed=quoted)


def _not_yaml(error: MarkedYAMLError) -> Mistake:
    mark = error.problem_mark
    where = f"{mark.name}:{mark.line + 1}" if mark else ""
    star = "alias" in str(error.context)
    hint = "a value that starts with '*', such as a glob, in quotes" if star else ()
    return Mistake(where, f"cannot be read as YAML: {error.problem}", allowed=hint)


def _no_such_option(group: str, name: str, options: Sequence[str]) -> Mistake:
    problem = "there is no such option in this group" if options else "there is no such group"
    return Mistake(group, problem, written=name, allowed=options, nearest=nearest(name, options))


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    places = [folder / group for folder in folders if os.path.isdir(folder / group)]
    return sorted({file.stem for place in places for file in place.glob("*.yaml")})


def _no_such_key(error: Exception, cause: OmegaConfBaseException) -> Mistake:
    parent = cause.parent_node
    keys = [str(key) for key in parent] if OmegaConf.is_dict(parent) else []
    if str(cause.key) in keys or not keys:
        return Mistake(str(cause.full_key or ""), f"{_told(error)} {_told(cause)}")
    name = str(cause.full_key)
    keys += [field for field in fields_below(name.split(".")[:-1]) if field not in keys]
    if nearest(str(cause.key), keys):
        problem = "the configuration does not have this key"
        return Mistake(name, problem, allowed=keys, nearest=nearest(str(cause.key), keys))
    problem = f"the configuration does not have this key; with a plus in front it is added: +{name}=..."
    return Mistake(name, problem, allowed=keys)


def _no_name_of_a_group(overrides: Sequence[str], folders: Sequence[Path]) -> Mistake | None:
    """Report a group option that is not a string, such as `model=3`. The error of Hydra does not name the group."""
    settings = [override for override in overrides if "=" in override]
    for override in OverridesParser.create().parse_overrides(settings):
        value, options = override.value(), _options(override.key_or_group, folders)
        names = value if isinstance(value, list) else [value]
        if options and not all(isinstance(name, str) for name in names):
            return Mistake(
                override.key_or_group,
                f"has to be the name of a file in conf/{override.key_or_group}",
                written=str(override.input_line),
                allowed=options,
            )
    return None


def _told(error: Exception) -> str:
    """Return an error message in one line, without the type notes of OmegaConf and the links of Hydra."""
    noise = ("full_key:", "object_type=", "reference_type=", "See https:")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(noise)) or type(error).__name__
