"""Validation of the configuration that Hydra composed, and the overrides of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ..config.experiment import RunConfig
from ..config.parse import parse_config
from ..errors import ConfigError, Problem
from ..rules.requirements import check_rules
from ..storage.run_record import read_record
from .hydra_errors import NO_PACKAGE_LINE


def read_config(config: DictConfig) -> tuple[RunConfig, dict[str, Any]]:
    """Validate a composed configuration. With `resume`, it is that of the recorded run.

    Returns:
        The validated configuration, and the resolved dictionary from which it was created.

    Raises:
        ConfigError: The configuration is invalid; the error lists all problems.
    """
    if "exp" in config:
        raise ConfigError(NO_PACKAGE_LINE)
    try:
        raw = {str(key): _resolved(config[key]) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(Problem(str(getattr(error, "full_key", "") or ""), str(error).splitlines()[0])) from None
    if raw.get("resume") is not None:
        raw = _recorded_config(raw, read_overrides(config.get("hydra")))
    parsed = parse_config(raw)
    check_rules(parsed.rules, parsed.hooks)
    return parsed, raw


ALLOWED_WITH_RESUME = ("resume", "quiet", "plan", "report")


def _recorded_config(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the run to resume."""
    path = str(raw["resume"])
    others = [key for key in overrides if key not in ALLOWED_WITH_RESUME and not key.startswith("hydra.")]
    if others:
        message = "a run is resumed with its original configuration; these keys cannot be overridden"
        raise ConfigError(Problem(others[0], message, given=others, allowed=ALLOWED_WITH_RESUME))
    config: dict[str, Any] = read_record(Path(path), "resume")["config"]
    return {**config, **{key: raw[key] for key in ALLOWED_WITH_RESUME}}


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def read_overrides(hydra: DictConfig | None = None) -> dict[str, Any]:
    """Return the overrides of the command line: those of the running job, or in a section `hydra`.

    Returns:
        Values by key, parsed to Python types; None for a deleted key.
    """
    overrides = (HydraConfig.get() if hydra is None else hydra).overrides.task
    values: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        values[override.key_or_group] = None if override.is_delete() else override.value()
    return {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else _plain(value)
        for key, value in values.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | bool | str) or value is None else str(value)
