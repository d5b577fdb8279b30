"""What a job of a sweep came to: the number that `objective` names, told, and kept in run.json, here and where it was sent."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...sinks.client_errors import told
from ...sinks.parts import parts_of
from ...sinks.remote import REMOTE, RemoteFolder, folder_at, moved_to
from ..folder import read_record, write_json
from .objective import ASKED, DEFAULT, KEY, Objective

RECORD = "run.json"


def judge(
    objective: Objective, folder: Path, metrics: Mapping[str, float | None], *, searched: bool = False
) -> float | None:
    """The number of a job that is over. What the metrics do not have is told, and kept in run.json beside them.

    Args:
        objective: What is asked for.
        folder: The job's.
        metrics: Of its last evaluation.
        searched: Whether the next job depends on it, so that it is told where there is none.

    Returns:
        None where there is no number, or none that is finite.
    """
    if objective.query is None:
        value, reason = objective.of(folder, metrics)
    else:
        record = read_record(folder, KEY)
        reason = _why_incomplete(folder, record)
        value, reason = (None, reason) if reason else objective.of(_rows_of(folder, record), metrics)
        _keep(folder, {**record, KEY: value})
    if value is not None and objective.query is not None:
        print(f"{folder}  {objective.written} = {value:.6g}")
    if value is None and (searched or objective.written != DEFAULT):
        print(f"{folder}  nothing to go by: {objective.written}: {reason}", file=sys.stderr)
    return value


def _why_incomplete(folder: Path, record: Mapping[str, Any]) -> str:
    """Why a number of the rows that there are would not be that of the run; empty where all are there."""
    if stopped := record.get("recording_stopped"):
        return f"its recording stopped: {stopped}"
    if moved_to(record) is not None and any(parts_of(folder, table) for table in ASKED):
        return f"not all of its rows are in {moved_to(record)}"
    return ""


def _rows_of(folder: Path, record: Mapping[str, Any]) -> Path:
    """Where the rows are: here, or where they were moved to."""
    address = moved_to(record)
    return folder if address is None else folder_at(address)


def _keep(folder: Path, record: dict[str, Any]) -> None:
    write_json(folder / RECORD, record)
    if record.get("remote") is None:
        return
    try:
        RemoteFolder(record["remote"], REMOTE).put(folder / RECORD, RECORD)
    except Exception as error:  # of many kinds: whatever a client raises
        print(f"{folder}  its number is not in {record['remote']}: {told(error)}", file=sys.stderr)
