"""What Hydra has composed, as a checked configuration; what the user put over it on the command line."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ...errors import ConfigError, Mistake
from ...spec.config import RunConfig
from ...spec.parse import parse_config
from ..folder import read_record
from .composition import PACKAGE_LINE


def read_config(config: DictConfig) -> tuple[RunConfig, dict[str, Any]]:
    """The checked configuration, and the plain one that it was made from.

    Raises:
        ConfigError: With every mistake that was found.
    """
    if "exp" in config:
        raise ConfigError(
            Mistake(
                "exp", "what the experiment says was put under the key 'exp'", allowed=f"first line: {PACKAGE_LINE}"
            )
        )
    try:
        raw = {str(key): _resolved(config[key]) for key in config if key != "hydra"}
    except OmegaConfBaseException as error:
        raise ConfigError(Mistake(str(getattr(error, "full_key", "") or ""), str(error).splitlines()[0])) from None
    if raw.get("resume") is not None:
        raw = _config_of_run(raw, read_overrides(config.get("hydra")))
    return parse_config(raw), raw


WITH_RESUME = ("resume", "quiet", "plan", "report")


def _config_of_run(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that a run was started with, and goes on with.

    Raises:
        ConfigError: There is no such run, or more is asked for than to go on.
    """
    path = str(raw["resume"])
    others = [key for key in overrides if key not in WITH_RESUME and not key.startswith("hydra.")]
    if others:
        raise ConfigError(
            Mistake(
                others[0],
                "a run goes on with the configuration that it was started with",
                written=others,
                allowed=", ".join(WITH_RESUME),
            )
        )
    config: dict[str, Any] = read_record(Path(path), "resume")["config"]
    return {**config, **{key: raw[key] for key in WITH_RESUME}}


def _resolved(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True, throw_on_missing=True) if OmegaConf.is_config(value) else value


def read_overrides(hydra: DictConfig | None = None) -> dict[str, Any]:
    """What the user put over the configuration on the command line, by key, with typed values."""
    given = (HydraConfig.get() if hydra is None else hydra).overrides.task
    found: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(list(given)):
        found[override.key_or_group] = None if override.is_delete() else override.value()
    return {
        key: OmegaConf.to_container(value) if OmegaConf.is_config(value) else _plain(value)
        for key, value in found.items()
    }


def swept_overrides(swept: Collection[str], overrides: Mapping[str, Any]) -> str:
    """What tells a job from the others of its sweep: `seed=1 hooks.tame.norm=0.1`.

    Args:
        swept: The keys that differ from job to job.
        overrides: Those of the job, by key.
    """
    return " ".join(
        f"{key}={'{...}' if isinstance(value, dict) else value}" for key, value in overrides.items() if key in swept
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, int | float | bool | str) or value is None else str(value)
