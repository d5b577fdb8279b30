"""The objective of a sweep, the number that a sweeper minimizes or maximizes, its value for a job, and checks of a search with Optuna.

loss                                                a metric of the last evaluation, also a custom one
max(stats.abs_max where layer = 'decoder.2')        an aggregate of a table column, with a condition in SQL
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config.hook_specs import names_of_custom_statistics
from ..errors import ConfigError, InstrumentError, Problem, first_line, raise_problems, similar_names
from ..fields.field_types import is_misspelled
from ..fields.pip_extras import pip_command
from ..storage.remote_folder import REMOTE_KEY, RemoteFolder, folder_at, moved_to, safe_message
from ..storage.run_record import read_record, write_json
from ..tables.schemas import TABLES

OBJECTIVE_KEY, DEFAULT = "objective", "loss"
RECORD = "run.json"
METRICS = ("loss", "accuracy", "seconds", "samples_per_second")  # metrics of an evaluation
NUMERIC_TABLES = tuple(name for name, table in TABLES.items() if table.has_numbers)
AGGREGATES = {
    "min": "min(value)",
    "max": "max(value)",
    "mean": "avg(value)",
    "median": "median(value)",
    "sum": "sum(value)",
    "std": "stddev_pop(value)",
    "first": "arg_min(value, step)",
    "last": "arg_max(value, step)",
}
"""DuckDB expression of each aggregate.

`first` and `last` apply to the mean over the rows of each step; they return the mean at the first and last step.
"""
ALLOWED = (
    f"a metric of the last evaluation ({', '.join(METRICS)}, or a custom one), or an aggregate of a table column, such as "
    "max(stats.abs_max where layer = 'decoder.2')"
)
SWEEPER, WHERE = "OptunaSweeper", "hydra.sweeper"
DIRECTIONS = ("minimize", "maximize")
_AGGREGATE_PATTERN = re.compile(r"(\w+)\s*\(\s*(\w+)\.(\w+)(?:\s+where\s+(.+?))?\s*\)", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True)
class Objective:
    """A validated objective."""

    written: str
    # SQL query for DuckDB that returns one row with the columns `value` (the number) and `rows` (how many rows it aggregates). None if the
    # objective is a metric.
    query: str | None = None

    def value_of(self, folder: Path, metrics: Mapping[str, float | None]) -> tuple[float | None, str]:
        """Return the objective value of a run, None if it is missing or not finite, and the reason."""
        if self.query is None:
            value = metrics.get(self.written)
            if value is None:
                known = [name for name, number in metrics.items() if number is not None]
                others = _alternatives(known, similar_names(self.written, known))
                return None, f"the last evaluation has no value for it{others}"
        else:
            from ..analysis.load import load

            try:
                (row,) = load(folder).sql(self.query).to_dict("records")
            except InstrumentError as error:
                reason = f"the query failed: {first_line(error).removeprefix('run.sql: ')}"
                problem = error.problems[0] if isinstance(error, ConfigError) else None  # an unknown column
                return None, reason + (_alternatives(problem.allowed, problem.similar) if problem else "")
            if not row["rows"]:
                return None, "no row that meets the condition has a value in this column"
            value = row["value"]
        return (float(value), "") if math.isfinite(value) else (None, f"the value is {float(value)}")


def read_objective(written: str, hooks: Any = None) -> Objective:
    """Parse the value of `objective`, and test its query on an empty table. Raise a ConfigError if it is invalid.

    The query leaves out rows of a recomputed forward pass (activation checkpointing).
    """
    if written in METRICS or (written not in TABLES["metrics"].names and _is_custom_metric(written, METRICS)):
        return Objective(written)
    match = _AGGREGATE_PATTERN.fullmatch(written.strip())
    if match is None:
        word = re.fullmatch(r"\w+", written)
        message = "unknown metric" if word else "cannot parse the objective"
        similar = similar_names(written, METRICS) if word else ()
        raise ConfigError(Problem(OBJECTIVE_KEY, message, written, ALLOWED, similar))
    aggregate, table, column = (name.lower() for name in match.groups()[:3])
    condition = match[4]
    _check_known("aggregate", aggregate, list(AGGREGATES), written)
    _check_known("table", table, NUMERIC_TABLES, written)
    custom = [name.lower() for name in names_of_custom_statistics(hooks)] if table == "stats" else []
    if table == "metrics":  # a task or a callback may add any metric
        words, known = re.findall(r"\w+", f"{column} {match[4] or ''}".lower()), TABLES[table].names
        custom = [word for word in words if word not in known and _is_custom_metric(word, known)]
    numeric = [c.name for c in TABLES[table].columns if c.name in TABLES[table].numbers and c.type_name != "bool"]
    _check_known(f"numeric column of {table}", column, [*numeric, *custom], written)
    once = "" if table == "metrics" else " and not recompute"
    # The newline ends a SQL comment at the end of the condition.
    where = f"{column} is not null{once}" + (f" and ({condition}\n)" if condition else "")
    rows = f"select step, {column} as value from {table} where {where}"
    if aggregate in ("first", "last"):
        rows = f"select step, avg(value) as value from ({rows}) group by step"
    query = f"select {AGGREGATES[aggregate]} as value, count(*) as rows from ({rows})"
    _check_query(query, table, custom, condition or "")
    return Objective(written, query)


def _is_custom_metric(name: str, known: Sequence[str]) -> bool:
    return name.isidentifier() and not is_misspelled(name, known)


def _check_known(what: str, name: str, names: Iterable[str], written: str) -> None:
    if name not in names:
        similar = similar_names(name, names)
        raise ConfigError(Problem(OBJECTIVE_KEY, f"no {what} is named {name}", written, list(names), similar))


def _check_query(query: str, table: str, custom: Iterable[str], condition: str) -> None:
    try:
        import duckdb
    except ImportError:
        message = "an objective from a table requires DuckDB"
        raise ConfigError(Problem(OBJECTIVE_KEY, message, condition or None, METRICS, fix=pip_command("sql"))) from None
    import pyarrow as pa

    with duckdb.connect() as connection:
        empty = TABLES[table].schema.empty_table()
        for name in dict.fromkeys(custom):
            empty = empty.append_column(name, pa.array([], pa.float64()))
        connection.register(table, empty)
        try:
            if condition:
                duckdb.SQLExpression(condition)  # raises unless it is one complete expression
            connection.execute(query)
        except duckdb.Error as error:
            message = first_line(error)
            names, unknown = empty.column_names, re.search(r'column "(\w+)"', message)
            like = similar_names(unknown[1], names) if unknown else ()
            message = f"cannot parse the condition: {message}"
            raise ConfigError(Problem(OBJECTIVE_KEY, message, condition, names, like)) from None


def _alternatives(names: Sequence[str], similar: Sequence[str]) -> str:
    """Return the end of a reason: the metrics or columns that exist, and the most similar ones."""
    return (f"; it has {', '.join(names)}" if names else "") + (f"; similar: {', '.join(similar)}" if similar else "")


def score_job(
    objective: Objective, folder: Path, metrics: Mapping[str, float | None], *, searched: bool = False
) -> float | None:
    """Return the objective value of a finished job; None if it is missing or not finite.

    If a search depends on it, a missing value is always reported. A value computed from a table is printed and saved in `run.json`
    next to the metrics.
    """
    if objective.query is None:
        value, reason = objective.value_of(folder, metrics)
    else:
        record = read_record(folder, OBJECTIVE_KEY)
        reason = _incomplete_reason(folder, record)
        address = moved_to(record)
        rows = folder if address is None else folder_at(address)
        value, reason = (None, reason) if reason else objective.value_of(rows, metrics)
        _save(folder, {**record, OBJECTIVE_KEY: value})
        if value is not None:
            print(f"{folder}  {objective.written} = {value:.6g}")
    if value is None and (searched or objective.written != DEFAULT):
        print(f"{folder}  the objective has no value: {objective.written}: {reason}", file=sys.stderr)
    return value


def _incomplete_reason(folder: Path, record: Mapping[str, Any]) -> str:
    """Return why the available rows are not all rows of the run; empty if they are complete."""
    from ..storage.parts import part_files  # Imported late: it imports pyarrow.

    if stopped := record.get("recording_stopped"):
        return f"recording stopped: {stopped}"
    if moved_to(record) is not None and any(part_files(folder, table) for table in NUMERIC_TABLES):
        return f"some of the rows are not in {moved_to(record)}"
    return ""


def _save(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / RECORD, record)
    if record.get("remote") is None:
        return
    try:
        RemoteFolder(record["remote"], REMOTE_KEY).put(folder / RECORD, RECORD)
    except Exception as error:  # Each storage client raises its own exception types.
        message = f"the objective value was not uploaded to {record['remote']}: {safe_message(error)}"
        print(f"{folder}  {message}", file=sys.stderr)


def is_search(hydra: DictConfig) -> bool:
    return str(hydra.sweeper["_target_"]).rpartition(".")[2] == SWEEPER


def worst_score(hydra: DictConfig) -> float:
    """Return the objective value of a pruned trial: infinity, with the sign that is the worst one.

    The sweeper can report a trial as complete or failed only, and a failed trial teaches Optuna nothing. With the worst value,
    the trial is never the best one, and Optuna avoids its settings.
    """
    return math.inf if _directions(hydra.sweeper.direction) == ["minimize"] else -math.inf


def check_search(hydra: DictConfig) -> None:
    """Raise a ConfigError if a setting of the Optuna sweeper is invalid, or its storage cannot be used for the study."""
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
    raise_problems(problems)
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
        studies = [each for each in optuna.get_all_study_summaries(database) if each.study_name == sweeper.study_name]
    except Exception as error:  # Each database client raises its own exception types.
        message = f"the study storage cannot be used: {type(error).__name__}"
        raise ConfigError(Problem(where, message, plain["storage"], "such as sqlite:///study.db")) from None
    now = _directions(sweeper.direction)
    before = [direction.name.lower() for study in studies for direction in study.directions]
    if before not in ([], now):
        message = f"the study {sweeper.study_name} already exists with another direction"
        raise ConfigError(Problem(f"{WHERE}.direction", message, ", ".join(now), before))
