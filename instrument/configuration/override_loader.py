"""Hydra configuration loader that accepts overrides of known fields that no configuration file sets."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository, IConfigRepository
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.default_element import ResultDefault
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf

from ..errors import ConfigError, Problem
from ..spec.config import TASKS
from ..spec.known_keys import fields_below
from .name_clashes import SECTIONS, check_names

MAX_COMPOSED = 128  # merged configurations that are kept: 25 kilobytes each
MAX_PARSED = 1024  # parsed overrides that are kept


def parse_overrides(overrides: Iterable[str]) -> list[Override]:
    """Parse overrides. A command parses the same ones several times, and a sweep those of each job.

    Args:
        overrides: Overrides as written.

    Raises:
        OverrideParseException: The syntax of an override is invalid.
    """
    return [copy.copy(_parse_override(override)) for override in overrides]  # a composition changes the types


@lru_cache(maxsize=MAX_PARSED)
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


class FieldLoader(ConfigLoaderImpl):
    """Configuration loader that treats `hooks.tame.every=5` as `++hooks.tame.every=5` if the hook `tame` exists.

    It composes single runs, sweeps and their jobs, also in the processes of a launcher. Overrides are recorded as
    written.
    """

    _composed: ClassVar[dict[tuple[object, ...], bytes]] = {}  # pickled, which is read in half the time of a copy
    _plugins: ClassVar[Plugins | None] = None  # the plugins whose configurations are kept

    def __init__(self, config_search_path: ConfigSearchPath) -> None:
        super().__init__(config_search_path)
        if (plugins := Plugins.instance()) is not self._plugins:
            # A launcher has imported the plugins again: they have new classes, and the configurations of the old ones
            # cannot be pickled any more.
            ParsedFiles._parsed.clear()
            self._composed.clear()
            FieldLoader._plugins = plugins
        self.repository = ParsedFiles(config_search_path)

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
        """Merge configurations. The two compositions of a run, and the jobs of a sweep, often merge the same ones."""
        results = [repo.load_config(default.config_path or "") for default in defaults]
        loaded = [result for result in results if result is not None]
        merges = zip(defaults, loaded, strict=True)
        key = tuple((each.config_path, each.package, each.primary, id(result.config)) for each, result in merges)
        if key in self._composed:
            config: DictConfig = pickle.loads(self._composed[key])
            return config
        check_names(defaults, loaded)
        is_shared = ParsedFiles.share(loaded)
        for result in loaded:
            result.config = copy.deepcopy(result.config)
        config = super()._compose_config_from_defaults_list(defaults, repo)
        if is_shared:
            if len(self._composed) == MAX_COMPOSED:
                self._composed.clear()
            self._composed[key] = pickle.dumps(config)
        return config


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
