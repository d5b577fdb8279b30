"""All uses of private parts of Hydra 1.3, which has no public way to do these things. `test_hydra_internals.py` has a test of each.

- The loader: `hydra.main` has no parameter for it. `FieldLoader` accepts overrides of known fields that no file sets, refuses a
  name that two files define, and finds the tasks of installed packages.
- The jobs of a sweep are listed before they start, and unfinished ones run again: only the sweeper, the overrides and the callbacks
  of Hydra can expand and report them.
- The options of `hydra.main`, which takes `--exp` for the beginning of one of them.
- The search path of `hydra.main`, for compositions outside of it: the files of the package, then those of the working directory.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra._internal.hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ConfigDefault, GroupDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from ..errors import ConfigError, Problem, raise_problems
from .experiment import TASKS
from .schema import fields_below
from .spec_file import conf_folder

BASIC_SWEEPER = f"{BasicSweeper.__module__}.{BasicSweeper.__qualname__}"
SECTIONS = ("hooks", "apply", "rules")  # mappings of specs by name
TARGETS = ("model", "task", "optimizer", "scheduler")  # sections that are a target


class TaskRepository(ConfigRepository):
    """The configuration files, and the tasks of installed packages as options of the group `task`."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        group, _, name = config_path.partition("/")
        if group == "task" and source is None and name in TASKS:
            task = TASKS[name]
            target = OmegaConf.create({"_target_": f"{task.__module__}.{task.__qualname__}"})
            return ConfigResult("instrument.tasks", config_path, target, {"package": None}, [])
        return super().load_config(config_path)


class FieldLoader(ConfigLoaderImpl):
    """Configuration loader that treats `hooks.tame.every=5` as `++hooks.tame.every=5` if the hook `tame` exists.

    It composes single runs, sweeps and their jobs, also in the processes of a launcher. Overrides are recorded as
    written.
    """

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        self.repository = TaskRepository(config_search_path)

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        self._given, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return self._given, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        loaded = [(default, repo.load_config(default.config_path or "")) for default in defaults]
        results = [(default, result) for default, result in loaded if result is not None]
        check_names(defaults, [result for _, result in results])
        # Hydra would merge the arguments of both targets. It changes the results.
        own = {key: _of_group(key, results) for key in _own_targets(results)}
        _remove_replaced_targets(results)
        used = [default for default in defaults if default.package not in own]
        config = super()._compose_config_from_defaults_list(used, repo)
        exists: dict[str, bool] = {}  # by key, after the earlier overrides
        for override in self._given:
            key = override.get_key_element().lstrip("+~")  # with the package, such as optimizer@critic
            value = override.value()
            _check_mapping(key, config)
            _check_removal(key, override, self._given)
            if override.type == OverrideType.DEL and key in (*SECTIONS, *TARGETS) and value is None:
                config.pop(key, None)  # Hydra removes only the choice of the group
            elif override.type == OverrideType.ADD and isinstance(value, dict):
                _check_new(key, exists, config)
            elif override.type == OverrideType.CHANGE and _is_known(key, config, exists):
                override.type = OverrideType.FORCE_ADD
            elif key in TARGETS and key in config and isinstance(value, dict) and "_target_" in value:
                config[key] = None
            elif key in own and override.type == OverrideType.CHANGE and isinstance(value, str):
                config[key] = own[key]
            elif (key, value) == ("rules", "none"):
                config[key] = None  # also without those of an experiment
            exists[key] = override.type != OverrideType.DEL and value is not None
        return config


def _of_group(key: str, results: Sequence[tuple[ResultDefault, ConfigResult]]) -> Any:
    """Return a section as the chosen files of its group define it; None if none is chosen."""
    chosen = [(default.package, each.config) for default, each in results if _group_of(default) == key]
    files = [config if at else OmegaConf.select(config, key) for at, config in chosen if at in (key, "", None)]
    return OmegaConf.merge(*filter(None, files)) if any(files) else None


def _group_of(default: ResultDefault) -> str:
    return str(default.config_path).partition("/")[0]


def _own_targets(results: Sequence[tuple[ResultDefault, ConfigResult]]) -> set[str]:
    """Return the sections for which a file such as an experiment has a `_target_`, instead of a file of the section's group."""
    own: set[str] = set()
    for default, result in results:
        content = OmegaConf.to_container(result.config)
        if isinstance(content, dict) and not default.package:
            others = {*TARGETS} - {_group_of(default)}
            sections = [(key, value) for key, value in content.items() if key in others]
            own |= {str(key) for key, value in sections if isinstance(value, dict) and "_target_" in value}
    return own


def _remove_replaced_targets(results: Sequence[tuple[ResultDefault, ConfigResult]]) -> None:
    """Remove the sections of files for which a later file, such as an experiment that inherits from them, has another `_target_`."""
    files = [each.config for default, each in results if not default.package and isinstance(each.config, DictConfig)]
    for key in TARGETS:
        target, earlier = None, list[DictConfig]()
        for file in files:
            section = file._get_node(key)
            own = section._get_node("_target_") if isinstance(section, DictConfig) else None
            if own is not None and target not in (None, own):
                for other in earlier:
                    other.pop(key, None)
                earlier = []
            target = target if own is None else own
            earlier.append(file)


def _check_removal(key: str, override: Override, given: Sequence[Override]) -> None:
    """Check that no other override selects a file for a section that this one removes. Hydra would ignore it."""
    others = [each for each in given if each.type == OverrideType.CHANGE and each.get_key_element() == key]
    selected = [str(each.input_line) for each in others if isinstance(each.value(), str)]
    if override.type == OverrideType.DEL and key in TARGETS and selected:
        message, fix = "the section is removed and a file is selected for it", f"remove ~{key}: {selected[0]} is enough"
        raise ConfigError(Problem(key, message, given=f"{override.input_line} {selected[0]}", fix=fix))


def _check_mapping(key: str, config: DictConfig) -> None:
    """Check that a section whose specs an override changes by name is not a list."""
    section, _, name = key.partition(".")
    if name and not name[0].isdigit() and section in SECTIONS and OmegaConf.is_list(config.get(section)):
        message = "must be a mapping, since the items of a list cannot be overridden by name"
        fix = f"write {section}: {{NAME: {{...}}}} in the file"
        raise ConfigError(Problem(section, message, given="a list", fix=fix))


def _check_new(key: str, exists: Mapping[str, bool], config: DictConfig) -> None:
    """Check that an override with a plus adds a spec. Hydra would merge it with an existing one."""
    section, _, name = key.partition(".")
    if section not in SECTIONS or not name or "." in name:
        return
    if exists.get(key, OmegaConf.is_dict(OmegaConf.select(config, key, throw_on_resolution_failure=False))):
        message = "exists already, and + only adds a new one"
        fix = f"{key}={{...}} without + changes the given fields; '~{key}' in front of +{key} replaces all"
        raise ConfigError(Problem(key, message, fix=fix))


def _is_known(key: str, config: DictConfig, added: Container[str]) -> bool:
    """Return whether a key is a known field of a section, or of a spec in the configuration or in an earlier override."""
    above, _, field = key.rpartition(".")
    path = above.split(".")
    if field not in fields_below(path):
        return False
    section = ".".join(path[:2]) if path[0] in SECTIONS else path[0]
    node: Any = OmegaConf.select(config, section, throw_on_resolution_failure=False)
    return OmegaConf.is_dict(node) or section in added


@contextmanager
def use_field_loader() -> Iterator[None]:
    """Replace the loader of `hydra.main` by `FieldLoader` during the `with` block."""
    before = hydra._internal.hydra.ConfigLoaderImpl  # type: ignore[attr-defined]
    hydra._internal.hydra.ConfigLoaderImpl = FieldLoader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hydra._internal.hydra.ConfigLoaderImpl = before  # type: ignore[attr-defined]


def split_sweep(overrides: Sequence[Override]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as the basic sweeper of Hydra splits them."""
    (jobs,) = BasicSweeper.split_arguments(list(overrides), max_batch_size=None)
    return jobs


def plain_value(element: Any) -> Any:
    """Return the value of an element of a choice, as a job gets it."""
    return Override._convert_value(element)


def launcher_of(config: DictConfig, loader: ConfigLoader, job: TaskFunction) -> Launcher:
    """Return the launcher that a configuration names. It calls the callbacks of the configuration."""
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=job, config=config)


def check_names(defaults: Sequence[ResultDefault], results: Sequence[ConfigResult]) -> None:
    """Raise a ConfigError, which names both files, if a file changes a spec of another file.

    A file may change the specs of the files in its own defaults list, and in the root defaults list, such as `rules/default`.
    """
    lists = {str(default.config_path): [*_listed(result)] for default, result in zip(defaults, results, strict=True)}
    root = [entry for default in defaults if default.primary for entry in lists[str(default.config_path)]]
    # By section and name: the files that define it, with their labels.
    owners: dict[tuple[str, str], dict[str, str]] = {}
    problems: list[Problem] = []
    for default, result in zip(defaults, results, strict=True):
        file = str(default.config_path)
        for section, name in _defined_names(default, result):
            label = f"the configuration {file!r}" if result.path.startswith("structured:") else f"{file}.yaml"
            others = owners.setdefault((section, name), {})
            allowed = {*root, *_reachable(file, lists), file}
            for first in [first for other, first in others.items() if other not in allowed]:
                message = f"two configurations define this name: {first} and {label}; their fields would be merged"
                fix = f"rename one of them, or change single fields on the command line: {section}.{name}.FIELD=VALUE"
                problems.append(Problem(f"{section}.{name}", message, fix=fix))
            others[file] = label
    raise_problems(problems)


def _defined_names(default: ResultDefault, result: ConfigResult) -> Iterator[tuple[str, str]]:
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


class WorkingDirectoryConf(SearchPathPlugin):
    """Hydra plugin that adds the folder `conf` of the working directory after the configurations of the package."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder, and warn about files that a different file of the package hides."""
        user_folder, packaged = Path.cwd() / "conf", conf_folder()
        if not user_folder.is_dir() or user_folder.samefile(packaged):
            return
        search_path.append("working directory", f"file://{user_folder}")
        for file in sorted(user_folder.rglob("*.yaml")):
            same = packaged / file.relative_to(user_folder)
            if same.exists() and same.read_bytes() != file.read_bytes():
                name = f"conf/{file.relative_to(user_folder)}"
                text = f"warning: {name} is ignored: the package has a file of this name; choose another name"
                print(text, file=sys.stderr)


def check_options(arguments: Sequence[str]) -> None:
    """Raise a ConfigError for an option that Hydra does not have, before it completes its name."""
    known = get_args_parser()._option_string_actions
    for name in (argument.partition("=")[0] for argument in arguments if argument.startswith("--")):
        if name not in (*known, "--"):
            fix = "write settings without dashes, as KEY=VALUE, such as train.steps=5 or +exp=NAME"
            raise ConfigError(Problem(name, "unknown option", fix=fix))


def config_loader() -> ConfigLoader:
    """Create a configuration loader with the search path of the command line, for compositions outside `hydra.main`."""
    Plugins.instance().register(WorkingDirectoryConf)
    return FieldLoader(create_config_search_path(str(conf_folder())))
