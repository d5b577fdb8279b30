"""Names of hooks, changes and rules that two configuration files define. Hydra would merge them field by field."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf

from ..errors import Problem, raise_problems

SECTIONS = ("hooks", "apply", "rules")  # mappings of specs by name


def check_names(defaults: Sequence[ResultDefault], results: Sequence[ConfigResult]) -> None:
    """Check that no file changes a spec of another file, except of a file that its own defaults list contains.

    A file may also change the specs of the files in the root defaults list, such as `rules/default`.

    Raises:
        ConfigError: Two files define the same name. The error names both.
    """
    lists = {str(default.config_path): [*_listed(result)] for default, result in zip(defaults, results, strict=True)}
    labels = {
        str(default.config_path): _label(default, result) for default, result in zip(defaults, results, strict=True)
    }
    root = [entry for default in defaults if default.primary for entry in lists[str(default.config_path)]]
    owners: dict[tuple[str, str], list[str]] = {}
    problems: list[Problem] = []
    for default, result in zip(defaults, results, strict=True):
        file = str(default.config_path)
        for section, name in _names(default, result):
            others = owners.setdefault((section, name), [])
            allowed = {*root, *_reachable(file, lists), file}
            problems += [
                _problem(section, name, labels[other], labels[file]) for other in others if other not in allowed
            ]
            others.append(file)
    raise_problems(problems)


def _label(default: ResultDefault, result: ConfigResult) -> str:
    """Return the name of a configuration for messages: a file, or a configuration that code has stored."""
    is_stored = result.path.startswith("structured:")
    return f"the configuration {default.config_path!r}" if is_stored else f"{default.config_path}.yaml"


def _names(default: ResultDefault, result: ConfigResult) -> Iterator[tuple[str, str]]:
    package = [part for part in (default.package or "").split(".") if part]
    content: Any = OmegaConf.to_container(result.config)
    if not isinstance(content, dict) or (package and package[0] not in SECTIONS):
        return
    for section in SECTIONS if not package else package[:1]:
        specs = content if package else content.get(section)
        if isinstance(specs, dict):
            yield from ((section, str(name)) for name in (package[1:2] or specs))


def _listed(result: ConfigResult) -> Iterator[str]:
    """Yield the paths of the files in the defaults list of a file, such as `hooks/gradients`."""
    for entry in result.defaults_list or ():
        if isinstance(entry, GroupDefault):
            group = str(entry.group).strip("/")
            values = entry.value if isinstance(entry.value, list) else [entry.value]
            yield from (f"{group}/{value}" for value in values)
        elif isinstance(entry, ConfigDefault) and not entry.is_self():
            yield str(entry.path).strip("/")


def _reachable(file: str, lists: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the files in the defaults list of a file, and in those of these files."""
    files: set[str] = set()
    waiting = [file]
    while waiting:
        folder = waiting[-1].rpartition("/")[0]
        for entry in lists.get(waiting.pop(), ()):
            for path in (entry, f"{folder}/{entry}"):
                if path in lists and path not in files:
                    files.add(path)
                    waiting.append(path)
    return files


def _problem(section: str, name: str, first: str, second: str) -> Problem:
    message = f"two configurations define this name: {first} and {second}; their fields would be merged"
    fix = f"rename one of them, or change single fields on the command line: {section}.{name}.FIELD=VALUE"
    return Problem(f"{section}.{name}", message, fix=fix)
