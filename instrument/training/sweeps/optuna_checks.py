"""Hyperparameter search with Optuna: checks before the first trial, and the objective value of a pruned trial."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ...errors import ConfigError, Problem, similar_names

SWEEPER = "OptunaSweeper"
WHERE = "hydra.sweeper"
DIRECTIONS = ("minimize", "maximize")


def is_search(hydra: DictConfig) -> bool:
    """Return whether Optuna chooses the jobs of a sweep."""
    return str(hydra.sweeper["_target_"]).rpartition(".")[2] == SWEEPER


def worst_score(hydra: DictConfig) -> float:
    """Return the objective value of a pruned trial: infinity, with the sign that is the worst one.

    The sweeper can report a trial as complete or failed only, and a failed trial teaches Optuna nothing. With the worst value,
    the trial is never the best one, and Optuna avoids its settings.
    """
    return math.inf if _directions(hydra.sweeper.direction) == ["minimize"] else -math.inf


def check_search(hydra: DictConfig) -> None:
    """Check that a search can start, and that it can continue an existing study of the same name.

    Raises:
        ConfigError: A setting of the Optuna sweeper is invalid, the storage cannot be used, or the existing study has
            another direction.
    """
    import optuna

    optuna.logging.set_verbosity(logging.WARNING)  # The summary of the sweep prints the best trial.
    sweeper, problems = hydra.sweeper, []
    for name in ("n_trials", "n_jobs"):
        if sweeper[name] < 1:
            problems.append(Problem(f"{WHERE}.{name}", "must be at least 1", sweeper[name], "1, 2, 3, ..."))
    if not 0.0 <= sweeper.max_failure_rate <= 1.0:
        message = "must be a fraction of the trials"
        problems.append(Problem(f"{WHERE}.max_failure_rate", message, sweeper.max_failure_rate, "0 to 1"))
    directions = _directions(sweeper.direction)
    if len(directions) != 1 or directions[0] not in DIRECTIONS:
        message, similar = "must be one direction (single objective)", similar_names(directions[0], DIRECTIONS)
        problems.append(Problem(f"{WHERE}.direction", message, ", ".join(directions), DIRECTIONS, similar))
    if problems:
        raise ConfigError(*problems)
    if isinstance(sweeper.storage, str):
        _check_storage(sweeper)


def _directions(written: Any) -> list[str]:
    """Return the names of one direction or a list of directions, each a string or an enum member of the sweeper."""
    directions = written if OmegaConf.is_list(written) else [written]
    return [str(getattr(direction, "name", direction)) for direction in directions]


def _check_storage(sweeper: DictConfig) -> None:
    where = f"{WHERE}.storage"
    plain: Any = OmegaConf.to_container(sweeper, resolve=False)
    if re.search(r"://[^/]*:[^/]*@", plain["storage"]):
        message = "this address is written to multirun.yaml, so it must not contain a password"
        fix = f"set {where}='${{oc.env:NAME}}', with the address in the environment variable NAME"
        raise ConfigError(Problem(where, message, fix=fix))
    import optuna

    try:
        database = optuna.storages.get_storage(sweeper.storage)
        studies = [
            study for study in optuna.get_all_study_summaries(database) if study.study_name == sweeper.study_name
        ]
    except Exception as error:  # Each database client raises its own exception types.
        message = f"the study storage cannot be used: {type(error).__name__}"
        raise ConfigError(Problem(where, message, plain["storage"], "such as sqlite:///study.db")) from None
    now = _directions(sweeper.direction)
    before = [direction.name.lower() for study in studies for direction in study.directions]
    if before not in ([], now):
        message = f"the study {sweeper.study_name} already exists with another direction"
        raise ConfigError(Problem(f"{WHERE}.direction", message, ", ".join(now), before))
