"""Translation of composition errors of Hydra into problems with a location, the given value and the allowed values."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, QuotedString
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import MarkedYAMLError

from ..config.experiment import TASKS
from ..config.hydra_internals import SECTIONS, TARGETS
from ..config.schema import fields_below
from ..config.spec_file import fix_of_yaml
from ..errors import Problem, similar_names
from ..fields.field_types import nested_values
from ..fields.pip_extras import pip_command
from ..training.sweep_objective import OBJECTIVE_KEY

PACKAGE_LINE = "# @package _global_"  # first line of an experiment file
_FIX = f"add the first line: {PACKAGE_LINE}"
NO_PACKAGE_LINE = Problem("exp", f"the experiment file lacks its `{PACKAGE_LINE}` line", fix=_FIX)
EXTRAS = {
    "hydra/launcher": {"joblib": "joblib", "submitit_slurm": "submitit", "submitit_local": "submitit", "ray": "ray"},
    "hydra/sweeper": {"optuna": "optuna"},
}
"""The options that Hydra plugins provide, by group, with the extra that installs the plugin."""


def composition_problem(error: Exception, overrides: Sequence[str], folders: Sequence[Path]) -> Problem:
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        where = f"{mark.name}:{mark.line + 1}" if mark else ""
        return Problem(where, f"invalid YAML: {error.problem}", fix=fix_of_yaml(error))
    if isinstance(error, OverrideParseException):
        return _override_problem(error)
    if re.search(r"Could not override '[^']+@exp\.", str(error)):
        return NO_PACKAGE_LINE
    missing = re.search(r"Could not (?:find|load) '([^'\n]+)/([^'\n/]*)'", str(error))
    if missing and (extra := EXTRAS.get(missing[1], {}).get(missing[2])):
        return Problem(missing[1], "requires a package that is not installed", fix=pip_command(extra))
    if missing:
        options = getattr(error, "options", None) or _options(missing[1], folders)
        options = [*options, *(TASKS if missing[1] == "task" else ())]
        message = "unknown option of this group" if options else "unknown group"
        similar, own = similar_names(missing[2], options), f"conf/{missing[1]}/{missing[2]}.yaml"
        is_own = missing[1] == "exp" or not (similar or missing[1].startswith("hydra"))  # experiments have any name
        fix = f"your own option is the file {own} in the working folder, {Path.cwd()}" if options and is_own else ""
        return Problem(missing[1], message, missing[2], options, similar, fix)
    if isinstance(error.__cause__, OmegaConfBaseException):
        return _key_problem(error, error.__cause__)
    text = _one_line(error)
    if mixed := re.match(r"In '(.+?)': .*Cannot merge (?:Dict|List)Config with", text):
        message = "a key of this file is a list here and a mapping in another file, or vice versa"
        return Problem(f"{mixed[1]}.yaml", message, fix="write a mapping in both, such as hooks: {NAME: {...}}")
    if absent := re.search(r"(?:default list use |not supported: '\+)\+([^=]+)=(.*?)'?$", text):
        fix = f"add it with one plus: +{absent[1]}={absent[2]}"
        return Problem(absent[1], "the defaults contain no option of this group", absent[2], fix=fix)
    if several := re.match(r"Ambiguous value for argument '([^=]+)=(.*?)' 1\.", text):
        fix = f"add -m to run each of them, or write a list: {several[1]}=[{several[2]}]"
        return Problem(several[1], "has several values", several[2], fix=fix)
    if present := re.match(r"Multiple values for ([^ ]+)\. .* 'override [^ ]+: (.*)'", text):
        fix = f"replace it without a plus: {present[1]}={present[2]}; in a defaults list: override /{present[1]}: {present[2]}"
        return Problem(present[1], "the defaults contain an option of this group already", present[2], fix=fix)
    if unmatched := re.match(r"In '((.+/)[^/']+)': Could not override '(\2)?([^'@]+)", text):
        if unmatched[3]:
            fix = f"override /{unmatched[4]}: ..."
            return Problem(unmatched[1], "a group in the defaults list must begin with a slash", unmatched[4], fix=fix)
        groups = [group.name for folder in folders for group in folder.glob("*/")]
        similar = [] if unmatched[4] in groups else similar_names(unmatched[4], groups)
        fix = "" if similar else f"add it without override: /{unmatched[4]}: ..."
        return Problem(unmatched[1], "the defaults contain no option of this group", unmatched[4], (), similar, fix)
    return _group_value_problem(overrides, folders) or Problem("", f"cannot compose the configuration: {text}")


def _override_problem(error: OverrideParseException) -> Problem:
    key, _, value = error.override.partition("=")
    needs_quotes = (key.lstrip("+") == OBJECTIVE_KEY and "(" in value) or key.lstrip("+") == "forward.of"
    fix = f"""quote the value twice, for the shell and for Hydra: '{key}="{value}"'""" if needs_quotes else ""
    function = re.search(r"Unknown function '(\w+)'", str(error))
    if function and not needs_quotes:
        fix = f"quote the value for Hydra, inside the quotes of the shell: '{function[1]}(...)'"
    if "=" not in error.override:
        fix = "write KEY=VALUE without spaces, such as +exp=NAME"
    return Problem("", f"cannot parse this override: {_one_line(error)}", given=error.override, fix=fix)


def _options(group: str, folders: Sequence[Path]) -> list[str]:
    # `isdir` is also false for a name that is too long.
    existing = [folder / group for folder in folders if os.path.isdir(folder / group)]
    return sorted({file.stem for folder in existing for file in folder.glob("*.yaml")})


def _key_problem(error: Exception, cause: OmegaConfBaseException) -> Problem:
    if re.match(r"Cannot merge (Dict|List)Config with", str(cause)):
        value = str(error).partition("=")[2]
        return Problem(str(cause.full_key), f"must be a {'mapping' if value.startswith('[') else 'list'}", given=value)
    parent = cause.parent_node
    keys = [str(key) for key in parent] if OmegaConf.is_dict(parent) else []
    is_new_spec = str(cause.full_key).rpartition(".")[0] in ("hooks", "apply")
    if str(cause.key) in keys or not (keys or is_new_spec):
        return Problem(str(cause.full_key or ""), f"{_one_line(error)} {_one_line(cause)}")
    name = str(cause.full_key)
    written = re.match(r"Could not override '(.+)'", str(error))
    keys += [field for field in fields_below(name.split(".")[:-1]) if field not in keys]
    if written and written[1].startswith(f"{name}.") and str(cause.key) in keys:  # a field of a mapping that is not set
        name = written[1]
        keys = list(fields_below(name.split(".")[:-1]))
    if name.rpartition(".")[2] in keys:
        message = "this field is not set yet, and a mapping without a plus changes only fields that are set"
        return Problem(name, message, fix=f"prefix the override with a plus: +{name.rpartition('.')[0]}=...")
    section, _, last = name.rpartition(".")
    # A target can have any argument, and specs have the same fields.
    others = ("hydra", *TARGETS, *SECTIONS) if section else ()
    sections = {} if section.partition(".")[0] in others else OmegaConf.to_container(parent._get_root())
    found = (each.lstrip(".") for each, _ in nested_values(sections, "") if each.endswith(f".{last}"))
    elsewhere = [each for each in found if each.partition(".")[0] not in ("hydra", *SECTIONS) or not section]
    similar = [] if elsewhere else similar_names(last, keys)
    key = name if "." in name else f"vars.{name}"  # the root has a fixed set of keys
    fix = "" if similar else f"to add it, prefix it with a plus: +{key}=..."
    if elsewhere:
        fix = f"write {' or '.join(elsewhere)}"
    return Problem(name, "the configuration does not have this key", allowed=keys, similar=similar, fix=fix)


def _group_value_problem(overrides: Sequence[str], folders: Sequence[Path]) -> Problem | None:
    """Report a group option that is neither a string nor a mapping, such as `model=3`. The error of Hydra does not name the group."""
    settings = [override for override in overrides if "=" in override]
    for override in OverridesParser.create().parse_overrides(settings):
        value, options = override.value(), _options(override.key_or_group, folders)
        names = value.list if isinstance(value, ChoiceSweep) else value if isinstance(value, list) else [value]
        if options and not all(isinstance(name, str | QuotedString | dict) for name in names):
            group = override.key_or_group
            message = f"must name one of the config files in conf/{group}"
            return Problem(group, message, given=str(override.input_line), allowed=options)
    return None


def _one_line(error: Exception) -> str:
    """Return an error message in one line, without the type notes of OmegaConf and the links of Hydra."""
    noise = ("full_key:", "object_type=", "reference_type=", "See https:")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(noise)) or type(error).__name__
