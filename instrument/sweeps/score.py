"""The score of a sweep job: compute, print and save the value of `objective`, in `run.json` and its uploaded copy."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..folders.run_record import read_record, write_json
from ..sinks.parts import part_files
from ..sinks.remote_errors import safe_message
from ..sinks.remote_folder import REMOTE_KEY, RemoteFolder, folder_at, moved_to
from .objective import DEFAULT, NUMERIC_TABLES, OBJECTIVE_KEY, Objective

RECORD = "run.json"


def score_job(
    objective: Objective, folder: Path, metrics: Mapping[str, float | None], *, searched: bool = False
) -> float | None:
    """Compute the objective value of a finished job.

    A value computed from a table is printed and saved in `run.json` next to the metrics.

    Args:
        objective: Objective of the sweep.
        folder: Folder of the job.
        metrics: Metrics of the last evaluation.
        searched: Whether the next job depends on the value. If so, a missing value is always reported; otherwise only
            for an objective other than the default. Default: False.

    Returns:
        The value; None if it is missing or not finite.
    """
    if objective.query is None:
        value, reason = objective.value_of(folder, metrics)
    else:
        record = read_record(folder, OBJECTIVE_KEY)
        reason = _incomplete_reason(folder, record)
        value, reason = (None, reason) if reason else objective.value_of(_rows_of(folder, record), metrics)
        _save(folder, {**record, OBJECTIVE_KEY: value})
    if value is not None and objective.query is not None:
        print(f"{folder}  {objective.written} = {value:.6g}")
    if value is None and (searched or objective.written != DEFAULT):
        print(f"{folder}  the objective has no value: {objective.written}: {reason}", file=sys.stderr)
    return value


def _incomplete_reason(folder: Path, record: Mapping[str, Any]) -> str:
    """Return why the available rows are not all rows of the run; empty if they are complete."""
    if stopped := record.get("recording_stopped"):
        return f"recording stopped: {stopped}"
    if moved_to(record) is not None and any(part_files(folder, table) for table in NUMERIC_TABLES):
        return f"some of the rows are not in {moved_to(record)}"
    return ""


def _rows_of(folder: Path, record: Mapping[str, Any]) -> Path:
    """Return the folder with the rows of a run: the local folder, or the remote folder to which they were moved."""
    address = moved_to(record)
    return folder if address is None else folder_at(address)


def _save(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / RECORD, record)
    if record.get("remote") is None:
        return
    try:
        RemoteFolder(record["remote"], REMOTE_KEY).put(folder / RECORD, RECORD)
    except Exception as error:  # Each storage client raises its own exception types.
        print(
            f"{folder}  the objective value was not uploaded to {record['remote']}: {safe_message(error)}",
            file=sys.stderr,
        )
