"""The run that a replay repeats, and the steps that it repeats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config.run_changes import RepeatedChanges
from ..errors import ConfigError, Problem
from ..storage.run_record import environment_differences


@dataclass(frozen=True)
class ReplaySource:
    """A run to repeat.

    Attributes:
        folder: The folder of the run.
        record: The content of its run.json.
        window: The steps in which the record hooks of the replay run.
        begin: The number of completed steps of the checkpoint at which the replay begins; 0 for the start of the run.
        changes: The changes that were made during the run.
        force: Whether a replay that cannot be expected to be exact is allowed.
        counterfactual: The interventions that differ from those of the run; empty for an exact replay.
        first_step: The first step at which one of them runs or is missing; None for an exact replay.
        operators: Whether the replay records every operator in the window.
        notes: The decisive differences of a forced replay. Filled by `check`.
    """

    folder: Path
    record: Mapping[str, Any]
    window: range
    begin: int
    changes: RepeatedChanges
    force: bool = False
    counterfactual: tuple[str, ...] = ()
    first_step: int | None = None
    operators: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def threads(self) -> int | None:
        """The number of threads of the run, which affects the order of sums; None if it is unknown."""
        threads: int | None = (self.record.get("hardware") or {}).get("threads")
        return threads

    @property
    def message(self) -> str:
        """The text of the event at the begin of the replay."""
        start = f"its checkpoint after {self.begin} steps" if self.begin else "its start"
        text = f"repeats {self.folder} from {start}; hooks record {steps_text(self.window)}"
        names = ", ".join(self.counterfactual)
        return (
            f"{text}; a counterfactual from step {self.first_step} on, with other interventions: {names}"
            if names
            else text
        )

    def entry(self) -> dict[str, Any]:
        """Return the entry `replay` of run.json."""
        return {
            "source": str(self.folder.resolve()),
            "source_config_hash": self.record.get("config_hash"),
            "begin": self.begin,
            "steps": [self.window.start, self.window.stop],
            "counterfactual": list(self.counterfactual),
            "first_step": self.first_step,
            "operators": self.operators,
            "forced": self.notes,
            "changes": _texts(self.changes.repeated),
            "changes_left_out": _texts(self.changes.left_out),
        }

    def check(self, present: Mapping[str, Any]) -> None:
        """Check that the replay can be exact in this environment.

        Raises:
            ConfigError: The environment differs, and `force` is not set.
        """
        differences = [each for each in environment_differences(self.record, present) if each.is_decisive]
        if differences and not self.force:
            message = f"the replay cannot be expected to be exact, because {differences[0]}"
            more = f"; {', '.join(each.what for each in differences[1:])} differ too" if differences[1:] else ""
            fix = "repeat it in the environment of the run, or pass --force; the certificate then has the difference"
            raise ConfigError(Problem("RUN", message + more, given=str(self.folder), fix=fix))
        self.notes.extend(map(str, differences))


def _texts(changes: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    return [f"{text} after {step} steps" for step, texts in changes for text in texts]


def steps_text(steps: range) -> str:
    """Return a text such as `step 48` or `steps 48 to 52`."""
    return f"step {steps.start}" if len(steps) == 1 else f"steps {steps.start} to {steps.stop - 1}"
