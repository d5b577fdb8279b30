"""Changes to a run in progress at the end of a step: messages of `instrument.control`, and logged ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..config.run_changes import Request, Settings, parse_changes
from ..errors import ConfigError
from ..probe.probe import Probe
from ..storage.control_folder import Answer, ControlFolder, MessageError
from .distributed.process_group import Processes
from .schedulers import LearningRateScale


@dataclass
class Control:
    """Makes the changes that messages request. With several processes, rank 0 reads them and all follow."""

    folder: Path
    settings: Settings  # the settings of the run at its start
    probe: Probe
    lr_scale: LearningRateScale | None = None  # None for the loop of a user, which sets its own learning rates
    processes: Processes | None = None
    # The changes of another run to repeat, each with the number of completed steps, in order. Default: those of the run itself, if it is
    # resumed.
    repeated: Sequence[tuple[int, Sequence[str]]] | None = None

    def __post_init__(self) -> None:
        probe = self.probe
        self._is_rank_zero = self.processes is None or self.processes.is_rank_zero
        self._folder = ControlFolder(self.folder)
        self._reported: set[str] = set()
        self._is_closed = False  # whether messages are not read any more
        is_resumed = probe.step > 0
        own = self._folder.recorded() if is_resumed else []
        self._logged: list[tuple[int, Sequence[str]]] = [*(own if self.repeated is None else self.repeated)]
        if self._is_rank_zero:
            with suppress(MessageError, OSError):  # reported at the end of the first step
                if not is_resumed:
                    self._folder.remove_log()
                for message in self._folder.messages():
                    problem = "the message was sent before the run was started or resumed"
                    self._folder.answer(message, Answer(probe.step, problem=problem))
        while self._logged and self._logged[0][0] <= probe.step:
            self._make(parse_changes(self._logged.pop(0)[1], self.settings))

    def end_step(self) -> bool:
        """Make the changes that are requested or, after a resume or in a replay, that were made at this step.

        Return whether a checkpoint is requested.
        """
        while self._logged and self._logged[0][0] <= self.probe.step:
            self._make_with_event(parse_changes(self._logged.pop(0)[1], self.settings))
        requests = self._new_requests() if self._is_rank_zero else []
        commands: list[str] = []
        for request in requests if self.processes is None else self.processes.from_rank_zero(requests):
            self._make_with_event(request)
            commands += request.commands
        if "stop" in commands:
            self.probe.stop_reason = f"python -m instrument.control stopped the run after {self.probe.step} steps"
        return "checkpoint" in commands

    def _new_requests(self) -> list[Request]:
        requests: list[Request] = []
        try:
            messages = [] if self._is_closed else self._folder.messages()
        except MessageError as error:
            self._report(f"messages are not read: {error}")
            return []
        for message in messages:
            step = self.probe.step
            try:
                texts = self._folder.read(message)
                request = parse_changes(texts, requests[-1].settings if requests else self.settings)
                if request.changes:
                    self._folder.record(step, [text for text in texts if text not in request.commands])
            except FileNotFoundError:  # the sender has withdrawn the message
                continue
            except (MessageError, ConfigError, OSError) as error:
                self.probe.event("control", f"a message was refused: {error}")
                self._answer(message, Answer(step, problem=str(error)))
                continue
            requests.append(request)
            self._answer(message, Answer(step, [*(str(change) for change in request.changes), *request.commands]))
        return requests

    def _answer(self, message: Path, answer: Answer) -> None:
        """Answer a message. If this fails, the message would be read again at each step, so no more messages are read."""
        try:
            self._folder.answer(message, answer)
        except OSError as error:
            self._is_closed = True
            self._report(f"no more messages are read, since one cannot be answered: {error}")

    def _report(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            self.probe.event("control", message)

    def _make_with_event(self, request: Request) -> None:
        self._make(request)
        if self._is_rank_zero:
            for change in [*request.changes, *request.commands]:
                self.probe.event("control", str(change), severity="info")

    def _make(self, request: Request) -> None:
        self.settings = request.settings
        if self.lr_scale is not None:
            self.lr_scale.factor = request.settings.lr_scale
        self.probe.change_hooks(request.settings.specs(request.hooks), request.settings.disabled)
