"""Changes to a run in progress at the end of a step: messages of `instrument.control`, and those before a resume."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..capture.probe import Probe
from ..distributed.process_group import Processes
from ..errors import ConfigError
from ..folders.control_folder import Answer, ControlFolder, MessageError
from ..spec.run_changes import Request, Settings, parse_changes
from .experiment import Experiment

SENT_TOO_EARLY = "the message was sent before the run was started or resumed"


class Control:
    """Makes the changes that messages request. With several processes, rank 0 reads them and all follow.

    Args:
        folder: The folder of the run.
        config: The composed configuration.
        experiment: The experiment.
        probe: The probe, which is not attached yet.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], experiment: Experiment, probe: Probe) -> None:
        self.settings = Settings.of(config)
        self.experiment = experiment
        self.probe = probe
        self.processes: Processes | None = experiment.strategy.processes
        self._folder = ControlFolder(folder)
        self._logged = self._folder.recorded()
        if self._is_rank_zero:
            for message in self._folder.messages():
                self._folder.answer(message, Answer(probe.step, problem=SENT_TOO_EARLY))
        while self._logged and self._logged[0][0] <= probe.step:
            self._make(parse_changes(self._logged.pop(0)[1], self.settings))

    @property
    def _is_rank_zero(self) -> bool:
        return self.processes is None or self.processes.is_rank_zero

    def end_step(self) -> list[str]:
        """Make the changes that are requested or, after a resume, that were made at this step.

        Returns:
            The requested commands: `checkpoint` and `stop`.
        """
        while self._logged and self._logged[0][0] <= self.probe.step:
            self._make_with_event(parse_changes(self._logged.pop(0)[1], self.settings))
        commands: list[str] = []
        requests = self._new_requests() if self._is_rank_zero else []
        for request in requests if self.processes is None else self.processes.from_rank_zero(requests):
            self._make_with_event(request)
            commands += request.commands
        return commands

    def _new_requests(self) -> list[Request]:
        """Read, log and answer the new messages."""
        requests: list[Request] = []
        step = self.probe.step
        for message in self._folder.messages():
            try:
                texts = self._folder.read(message)
                request = parse_changes(texts, requests[-1].settings if requests else self.settings)
            except (MessageError, ConfigError) as error:
                self.probe.event("control", f"a message was refused: {error}")
                self._folder.answer(message, Answer(step, problem=str(error)))
                continue
            if request.changes:
                self._folder.record(step, [text for text in texts if text not in request.commands])
            requests.append(request)
            changes = [str(change) for change in request.changes]
            self._folder.answer(message, Answer(step, [*changes, *request.commands]))
        return requests

    def _make_with_event(self, request: Request) -> None:
        self._make(request)
        if self._is_rank_zero:
            for change in [*request.changes, *request.commands]:
                self.probe.event("control", str(change), severity="info")

    def _make(self, request: Request) -> None:
        self.settings = request.settings
        self.experiment.lr_scale.factor = request.settings.lr_scale
        self.probe.change_hooks(request.settings.specs(request.hooks), request.settings.disabled)
