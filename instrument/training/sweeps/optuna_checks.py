"""Hyperparameter search with Optuna: checks before the first trial, and the best trial."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from ...errors import ConfigError, Problem, similar_names
from .jobs import SweepJob
from .objective import OBJECTIVE_KEY

SWEEPER = "OptunaSweeper"
RESULTS = "optimization_results.yaml"  # written by the sweeper to the folder of the sweep
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


def best_trial(folder: Path, jobs: Sequence[SweepJob]) -> dict[str, str]:
    """Describe the best trial of a search.

    Returns:
        Text by label: `best` (job folder, parameters and objective value) and `written to` (results file of Optuna).
        Empty if the folder has no readable results file, or if every trial was pruned.
    """
    file = folder / RESULTS
    try:
        results = yaml.safe_load(file.read_text())
        best, value = results["best_params"], float(results["best_value"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return {}
    if not math.isfinite(value):  # every trial was pruned
        return {}
    chosen = [f"{name}={setting}" for name, setting in best.items()]
    name, source = OBJECTIVE_KEY, "from an earlier sweep of the study"
    for job in jobs:
        if (
            set(chosen) <= set(job.overrides)
            and (objective := _objective_value(job.folder))
            and math.isclose(objective[1], value)
        ):
            name, source = objective[0], str(job.folder)
            break
    return {"best": "  ".join([source, *chosen, f"{name} = {value:.6g}"]), "written to": str(file)}


def _directions(written: Any) -> list[str]:
    """Return the names of one direction or a list of directions, each a string or an enum member of the sweeper."""
    directions = written if OmegaConf.is_list(written) else [written]
    return [str(getattr(direction, "name", direction)) for direction in directions]


def _check_storage(sweeper: DictConfig) -> None:
    """Check the storage of a study."""
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


def _objective_value(folder: Path) -> tuple[str, float] | None:
    """Return the objective of a job and its value; None if the job has no value."""
    try:
        record = json.loads((folder / "run.json").read_text())
        name = record["config"].get(OBJECTIVE_KEY, "")
        numbers: Mapping[str, Any] = record if OBJECTIVE_KEY in record else {OBJECTIVE_KEY: record["metrics"].get(name)}
        return name, float(numbers[OBJECTIVE_KEY])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
