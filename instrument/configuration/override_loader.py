"""Hydra configuration loader that accepts overrides of known fields that no configuration file sets."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import Any, ClassVar

import hydra._internal.hydra
from hydra._internal import defaults_list
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra._internal.defaults_list import Overrides
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import InputDefault, ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from ..errors import ConfigError, Problem
from ..spec.config import TASKS
from ..spec.known_keys import fields_below
from .name_clashes import SECTIONS, check_names

MOST_COMPOSED = 128  # merged configurations that are kept: 25 kilobytes each
MOST_PARSED = 1024  # parsed overrides that are kept


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides. A command parses the same ones several times, and a sweep those of each job.

    Args:
        overrides: Overrides as written.

    Raises:
        OverrideParseException: The syntax of an override is invalid.
    """
    return [copy.copy(_parse_override(override)) for override in overrides]  # a composition changes the types


@lru_cache(maxsize=MOST_PARSED)
def _parse_override(override: str) -> Override:
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


class ParsedFiles(ConfigRepository):
    """Configuration files, each parsed once per process as long as it does not change.

    A sweep composes every job twice, and parsing takes a third of a composition.
    """

    _parsed: ClassVar[dict[tuple[object, ...], ConfigResult]] = {}

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Load a configuration. The argument is that of `ConfigRepository.load_config`.

        The content of the result is shared by all compositions, and must be copied before it is modified.
        """
        source = self._find_object_source(config_path, ObjectType.CONFIG)
        group, _, name = config_path.partition("/")
        if source is None and group == "task" and name in TASKS:
            task = TASKS[name]
            target = OmegaConf.create({"_target_": f"{task.__module__}.{task.__qualname__}"})
            return ConfigResult("instrument.tasks", config_path, target, {"package": None}, [])
        if source is None or source.scheme() not in ("file", "pkg", "structured"):
            return super().load_config(config_path)
        key: tuple[object, ...] = (source.provider, source.full_path(), config_path)
        if source.scheme() == "file":  # installed files do not change
            file = Path(source.path, source._normalize_file_name(config_path)).resolve()
            status = file.stat()
            key = (*key, file, status.st_mtime_ns, status.st_size, status.st_ino)
        if key not in self._parsed:
            result = super().load_config(config_path)
            assert result is not None
            is_constant = source.scheme() == "file" or result.path.startswith(("pkg://hydra.", "pkg://instrument."))
            if not is_constant and result.provider != "hydra":
                return result
            self._parsed[key] = result
        return copy.copy(self._parsed[key])

    @classmethod
    def share(cls, results: Iterable[ConfigResult]) -> bool:
        """Return whether all results have shared content, whose `id` identifies it."""
        return {id(result.config) for result in results} <= {id(result.config) for result in cls._parsed.values()}

    def __deepcopy__(self, memo: dict[int, Any]) -> ParsedFiles:
        # Each composition copies its repository before it sets the list of sources; the sources are not changed.
        return copy.copy(self)


@dataclass(kw_only=True)
class MergedDefault(ResultDefault):
    """The entries of Hydra's own configurations in a defaults list, which are already merged."""

    config: DictConfig


class FieldLoader(ConfigLoaderImpl):
    """Configuration loader that treats `hooks.tame.every=5` as `++hooks.tame.every=5` if the hook `tame` exists.

    It composes single runs, sweeps and their jobs, also in the processes of a launcher. Overrides are recorded as
    written.
    """

    _composed: ClassVar[dict[tuple[object, ...], bytes]] = {}  # pickled, which is read in half the time of a copy
    _plugins: ClassVar[Plugins | None] = None  # the plugins whose configurations are kept
    _first: tuple[list[str], DictConfig] | None = None  # overrides and result of the first composition

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        if (plugins := Plugins.instance()) is not self._plugins:
            # A launcher has imported the plugins again: they have new classes, and the configurations of the old ones
            # cannot be pickled any more.
            ParsedFiles._parsed.clear()
            self._composed.clear()
            FieldLoader._plugins = plugins
        self.repository = ParsedFiles(config_search_path)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose a configuration. The arguments are those of `ConfigLoaderImpl.load_configuration`.

        Hydra composes twice: once to read `hydra.mode`, and again with the mode in the overrides. A single run reuses
        the first result. If the overrides contain a sweep, or a group has no choice, the second composition is needed:
        Hydra accepts both only in a sweep.
        """
        first, self._first = self._first, None
        if first and run_mode == RunMode.RUN and overrides == [*first[0], "hydra.mode=RUN"]:
            config = first[1]
            config.hydra.mode = RunMode.RUN
            config.hydra.overrides.hydra.append(overrides[-1])
            return config
        with _maps_only_for_interpolations():
            config = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        only_mode = run_mode == RunMode.MULTIRUN and not validate_sweep_overrides and config.hydra.mode is None
        sweeps = any(override.is_sweep_override() for override in self._given)
        if only_mode and not sweeps and "???" not in config.hydra.runtime.choices.values():
            self._first = (list(overrides), config)
        return config

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        self._given = parse_overrides(overrides)
        repository = CachingConfigRepository(self.repository)
        self._process_config_searchpath(config_name, self._given, repository)
        return self._given, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        config = self._merged(defaults, repo)
        exists: dict[str, bool] = {}  # by key, after the earlier overrides
        for override in self._given:
            key, value = override.key_or_group, override.value()
            if override.type == OverrideType.DEL and key in SECTIONS and value is None:
                config.pop(key, None)  # Hydra removes only the choice of the group
            elif override.type == OverrideType.ADD and isinstance(value, dict):
                _check_new(key, exists, config)
            elif override.type == OverrideType.CHANGE and _is_known(key, config, exists):
                override.type = OverrideType.FORCE_ADD
            exists[key] = override.type != OverrideType.DEL and value is not None
        return config

    def _merged(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        """Merge configurations. The jobs of a sweep often merge the same ones, which is done once.

        Hydra's own configurations are merged separately, since most compositions begin with the same ones. Merging them
        takes half of a composition, because they have schemas.
        """
        results = [repo.load_config(default.config_path or "") for default in defaults]
        loaded = [result for result in results if result is not None]
        merges = zip(defaults, loaded, strict=True)
        key = tuple((each.config_path, each.package, each.primary, id(result.config)) for each, result in merges)
        if key in self._composed:
            config: DictConfig = pickle.loads(self._composed[key])
            return config
        check_names(defaults, loaded)
        is_shared = ParsedFiles.share(loaded)
        first, rest = [*takewhile(_is_of_hydra, defaults)], [*dropwhile(_is_of_hydra, defaults)]
        if first and rest:
            first = [MergedDefault("hydra/config", config=self._merged(first, repo))]
        for result in loaded[-len(rest) :]:
            result.config = copy.deepcopy(result.config)
        config = super()._compose_config_from_defaults_list(first + rest, repo)
        if is_shared:
            if len(self._composed) == MOST_COMPOSED:
                self._composed.clear()
            self._composed[key] = pickle.dumps(config)
        return config

    def _load_single_config(self, default: ResultDefault, repo: IConfigRepository) -> ConfigResult:
        if isinstance(default, MergedDefault):
            return ConfigResult("hydra", "hydra/config", default.config, header={"package": None})
        return super()._load_single_config(default, repo)


def _is_of_hydra(default: ResultDefault) -> bool:
    return str(default.config_path).startswith("hydra/")


def _check_new(key: str, exists: Mapping[str, bool], config: DictConfig) -> None:
    """Check that an override with a plus adds a spec. Hydra would merge it with an existing one.

    Args:
        key: Key of the override, for example `hooks.tame`.
        exists: Whether keys exist, according to the earlier overrides.
        config: Configuration composed from the defaults list.

    Raises:
        ConfigError: The spec exists.
    """
    section, _, name = key.partition(".")
    if section not in SECTIONS or not name or "." in name:
        return
    if exists.get(key, OmegaConf.is_dict(OmegaConf.select(config, key, throw_on_resolution_failure=False))):
        message = "exists already, and + only adds a new one"
        fix = f"{key}={{...}} without + changes the given fields; '~{key}' in front of +{key} replaces all"
        raise ConfigError(Problem(key, message, fix=fix))


def _is_known(key: str, config: DictConfig, added: Container[str]) -> bool:
    """Return whether a key is a known field of a section, or of a spec in the configuration or in an earlier override.

    Args:
        key: Key of the override, for example `hooks.tame.every`.
        config: Configuration composed from the defaults list.
        added: Keys of the earlier overrides.
    """
    above, _, field = key.rpartition(".")
    path = above.split(".")
    if field not in fields_below(path):
        return False
    section = ".".join(path[:2]) if path[0] in SECTIONS else path[0]
    node: Any = OmegaConf.select(config, section, throw_on_resolution_failure=False)
    return OmegaConf.is_dict(node) or section in added


@contextmanager
def _maps_only_for_interpolations() -> Iterator[None]:
    """Let Hydra create its map of choices only for a defaults list with interpolations during the `with` block.

    Hydra creates a map for every file, which takes a third of a composition. Only interpolations read it.
    """
    before = defaults_list._create_interpolation_map

    def create(overrides: Overrides, defaults_list: list[InputDefault], self_added: bool) -> DictConfig:
        if any(default.is_interpolation() for default in defaults_list):
            return before(overrides, defaults_list, self_added)
        return DictConfig({})

    defaults_list._create_interpolation_map = create
    try:
        yield
    finally:
        defaults_list._create_interpolation_map = before


@contextmanager
def use_field_loader() -> Iterator[None]:
    """Replace the loader of `hydra.main` by `FieldLoader` during the `with` block.

    `hydra.main` has no parameter for the loader.
    """
    before = hydra._internal.hydra.ConfigLoaderImpl  # type: ignore[attr-defined]
    hydra._internal.hydra.ConfigLoaderImpl = FieldLoader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hydra._internal.hydra.ConfigLoaderImpl = before  # type: ignore[attr-defined]
