"""Hydra's loader of configurations, for which a field that the specs know need not be written in a file to be overridden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra._internal.hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, IConfigRepository
from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

from ...spec.keys import fields_below


class FieldLoader(ConfigLoaderImpl):
    """Takes `hooks.tame.every=5` for `++hooks.tame.every=5` where there is a hook `tame`.

    It composes single runs, sweeps and each of their jobs, also in the processes of a launcher. Overrides are recorded as they
    were written.
    """

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        self._given, repository = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        return self._given, repository

    def _compose_config_from_defaults_list(self, defaults: list[ResultDefault], repo: IConfigRepository) -> DictConfig:
        config = super()._compose_config_from_defaults_list(defaults, repo)
        added: list[str] = []
        for override in self._given:
            key = override.key_or_group
            if override.type == OverrideType.CHANGE and _is_known(key, config, added):
                override.type = OverrideType.FORCE_ADD
            added.append(key)
        return config


def _is_known(key: str, config: DictConfig, added: Sequence[str]) -> bool:
    """Whether a key is a field of a section, or of a spec that the configuration or an override before names."""
    above, _, field = key.rpartition(".")
    path = above.split(".")
    if field not in fields_below(path):
        return False
    there = above if path[0] in ("hooks", "apply") else path[0]
    node: Any = OmegaConf.select(config, there, throw_on_resolution_failure=False)
    return OmegaConf.is_dict(node) or there in added


@contextmanager
def fields_known() -> Iterator[None]:
    """Inside, `hydra.main` composes with this loader: it has no parameter for another one."""
    before = hydra._internal.hydra.ConfigLoaderImpl  # type: ignore[attr-defined]
    hydra._internal.hydra.ConfigLoaderImpl = FieldLoader  # type: ignore[attr-defined]
    try:
        yield
    finally:
        hydra._internal.hydra.ConfigLoaderImpl = before  # type: ignore[attr-defined]
