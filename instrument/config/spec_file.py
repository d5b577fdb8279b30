"""The configuration files of the package, and hook specs from a YAML file, from plain mappings, or from spec objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import yaml

from ..errors import ConfigError, Problem, raise_problems, similar_names
from .base import HookBase
from .experiment import RunConfig
from .hook_specs import HookSpec
from .parse import parse_hooks, parse_rules
from .rules import RuleBase, default_rules

YAML_ERRORS = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""The errors of PyYAML for invalid YAML. A date that does not exist, for example, raises ValueError."""
Specs = str | Path | Mapping[str, Any] | Sequence[Any]


def conf_folder() -> Path:
    """Return the folder with the configuration files of the package: inside it, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if (folder / "config.yaml").exists())


def hook_sets() -> dict[str, Path]:
    """Return the files with the hook specs of the package, by the name in `hooks=NAME`."""
    return {file.stem: file for file in sorted((conf_folder() / "hooks").glob("*.yaml"))}


def read_specs(specs: Specs) -> dict[str, HookSpec]:
    """Parse hook specs from a file, from plain mappings, or from spec objects.

    Args:
        specs: The path of a YAML file, the name of a hook set of the package (`transformer`, as in `hooks=transformer`), a mapping or
            list with the content of such a file, or spec objects. The specs are at the top level or in a `hooks` section. This section
            can be the name of a hook set. A list can also have names of hook sets, and then mappings from names to specs:
            `["transformer", "moe", {"mine": {...}}]`. In them, None removes a hook of a set.

    Raises:
        ConfigError: The file cannot be read or is not YAML, a spec is invalid, or a key next to `hooks` is unknown.
    """
    given = _read_file(specs) if isinstance(specs, str | Path) else specs
    if isinstance(given, Mapping) and isinstance(given.get("hooks"), Mapping | list | str):
        known = [*RunConfig.model_fields, "defaults", "hydra"]  # the file can be an experiment
        raise_problems(
            [
                Problem(
                    str(key), "unknown key next to 'hooks'", None, ("hooks", "rules"), similar_names(str(key), known)
                )
                for key in given
                if key not in known
            ]
        )
        given = [given["hooks"]] if isinstance(given["hooks"], str) else given["hooks"]
    elif isinstance(given, Mapping):
        fix = "write the hooks into a section of this name, hooks: {NAME: {...}}, and rules into rules"
        raise_problems(
            [
                Problem(str(name), "is a section, but the section 'hooks' is missing", fix=fix)
                for name, spec in given.items()
                if isinstance(spec, Mapping) and spec and all(isinstance(each, Mapping) for each in spec.values())
            ]
        )
    if isinstance(given, Mapping):
        return parse_hooks({name: _plain(spec) for name, spec in given.items()})
    if isinstance(given, Sequence) and not isinstance(given, str):
        if any(isinstance(each, str) for each in given):
            return parse_hooks(_joined(given))
        return parse_hooks([_plain(spec) for spec in given])
    return parse_hooks(given)


def read_rules(specs: Specs, rules: Mapping[str, Any] | Literal["default"] | None = "default") -> dict[str, RuleBase]:
    """Parse the rules of a custom training loop.

    Args:
        specs: The argument of `read_specs`. The file or mapping can have a section `rules` next to `hooks`.
        rules: Rules by name, which replace those of the file and the default rules with the same name; None for an entry
            removes it. `default`: no further rules. None: no rules at all.

    Raises:
        ConfigError: A rule is invalid.
    """
    if rules is None:
        return {}
    if not isinstance(rules, Mapping) and rules != "default":
        similar = similar_names(rules, ["default"]) if isinstance(rules, str) else ()
        fix = "write {NAME: {...}} to add or change a rule, and {NAME: None} to remove one"
        raise ConfigError(Problem("rules", "must be a mapping, None or 'default'", rules, (), similar, fix))
    given = _read_file(specs) if isinstance(specs, str | Path) else specs
    sections = given if isinstance(given, Mapping) and isinstance(given.get("hooks"), Mapping | list | str) else {}
    in_file = sections.get("rules")
    if in_file is not None and not isinstance(in_file, Mapping):
        raise ConfigError(Problem("rules", "must be a mapping from names to rules", given=in_file))
    known = {**default_rules(), **(in_file or {})}
    given_rules = {} if rules == "default" else rules
    for name in [name for name, rule in given_rules.items() if rule is None and name not in known]:
        message = "no rule has this name, so None removes nothing"
        raise ConfigError(Problem(f"rules.{name}", message, None, [*known], similar_names(str(name), known)))
    return parse_rules({**known, **given_rules})


def _joined(entries: Sequence[Any]) -> dict[str, Any]:
    """Return the specs of hook sets and of mappings from names to specs."""
    packaged, joined = hook_sets(), dict[str, Any]()
    for entry in entries:
        if isinstance(entry, str) and entry not in packaged:
            similar = similar_names(entry, packaged)
            raise ConfigError(Problem("specs", "no hook set has this name", entry, [*packaged], similar))
        specs = _read_file(packaged[entry]) if isinstance(entry, str) else entry
        if not isinstance(specs, Mapping):
            raise ConfigError(Problem("specs", "must be a hook set, or a mapping from names to specs", given=specs))
        for name, spec in specs.items():
            if name in joined and spec is not None:
                message = "several entries have a hook of this name"
                raise ConfigError(Problem(f"hooks.{name}", message, fix="rename one"))
            joined[name] = _plain(spec)
    return joined


def _read_file(path: str | Path) -> Any:
    """Read a YAML file, or a hook set of the package. A file of this name precedes the hook set."""
    packaged = hook_sets()
    file = packaged[path] if path in packaged and not Path(path).exists() else Path(path)
    try:
        return yaml.safe_load(file.read_text())
    except OSError as error:
        message = f"neither a file that can be read nor a hook set: {error.strerror}"
        allowed = f"a YAML file, or a hook set: {', '.join(packaged)}"
        similar = similar_names(str(path), packaged)
        raise ConfigError(Problem("specs", message, given=str(path), allowed=allowed, similar=similar)) from None
    except YAML_ERRORS as error:
        fix = fix_of_yaml(error)
        raise ConfigError(Problem("specs", f"the file is not YAML: {error}", given=str(path), fix=fix)) from None


def fix_of_yaml(error: Exception) -> str:
    """Return how to correct YAML that cannot be read; empty if it is not known."""
    starts_with_star = "alias" in str(getattr(error, "context", ""))
    return "put quotes around a value that starts with '*', such as a glob" if starts_with_star else ""


def _plain(spec: Any) -> Any:
    """Convert a spec object to a mapping. Other values are returned unchanged."""
    if isinstance(spec, HookBase):
        # Not a dump of the spec, which would contain the names of functions instead of the functions.
        given = {name: getattr(spec, name) for name in type(spec).model_fields if name in spec.model_fields_set}
        return {name: value for name, value in given.items() if name != "name" or value}
    return spec
