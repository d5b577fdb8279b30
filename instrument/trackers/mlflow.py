"""MLflow tracker: an experiment named after the run, at the tracking URI of the environment (`MLFLOW_TRACKING_URI`).

It receives numbers, as parameters the configuration, and as tags the events of each step. Histograms are not exported.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException

from ..values.containers import leaves
from .step_summary import StepSummary
from .tracking import Outcome, TrackedRun

# Limits of MLflow servers: https://mlflow.org/docs/latest/rest-api.html#log-batch
KEY_LENGTH = 250
VALUE_LENGTH = 500
TAG_LENGTH = 5000
METRICS, PARAMS = 1000, 100  # The maximum number in one batch.
STATUS = {"done": "FINISHED", "failed": "FAILED", "killed": "KILLED"}


class Mlflow:
    """Logs one batch per step. A resumed run creates a new MLflow run that starts at the first repeated step."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:  # noqa: ARG002
        self.client = MlflowClient()
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name)
        self.id = self.client.create_run(experiment, run_name=run.title).info.run_id
        settings = leaves(run.config, lambda value: not (isinstance(value, Mapping) and value))
        params = [Param(key[-KEY_LENGTH:], _text(value)) for key, value in settings if key]
        for start in range(0, len(params), PARAMS):
            self.client.log_batch(self.id, params=params[start : start + PARAMS])

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        try:
            return self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        except MlflowException:  # another job of the sweep created it in the meantime
            experiment = self.client.get_experiment_by_name(name)
            if experiment is None:
                raise
            return experiment.experiment_id

    def log(self, step: int, summary: StepSummary) -> None:
        now = int(time.time() * 1000)
        metrics = [Metric(tag[-KEY_LENGTH:], value, now, step) for tag, value in summary.scalars.items()]
        for start in range(0, len(metrics), METRICS):
            self.client.log_batch(self.id, metrics=metrics[start : start + METRICS])
        for tag, lines in summary.texts.items():
            self.client.set_tag(self.id, f"{tag}/{step}", lines[:TAG_LENGTH])

    def close(self, outcome: Outcome) -> None:
        self.client.set_terminated(self.id, STATUS[outcome])


def _text(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= VALUE_LENGTH else f"{text[: VALUE_LENGTH - 3]}..."
