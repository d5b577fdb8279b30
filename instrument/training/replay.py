"""Replays: a recorded run, and what its repetition with other record hooks does. This module imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.base import ObservationSpec
from ..config.hook_specs import HookSpec
from ..config.parse import named_specs, parse_hooks, parse_rules
from ..config.rules import DisableAction, EnableAction, RuleBase
from ..config.run_changes import SCHEDULE_FIELDS, Settings, changed_hook
from ..config.schedule import STEP_PHASES
from ..errors import ConfigError, InstrumentError, Problem, raise_problems
from ..formatting import steps_text
from ..storage.control_folder import ControlFolder
from ..storage.remote_folder import check_is_local
from ..storage.run_files import RunFiles
from ..storage.run_record import REQUIRED, checkpoint_steps, environment_differences, read_record

RUN = "RUN"  # the argument, for error messages


@dataclass(frozen=True)
class RecordedRun:
    """A run that can be replayed."""

    folder: Path
    record: Mapping[str, Any]  # the content of its run.json, with the current status
    done: int  # the number of completed steps that were recorded
    steps: int | None  # the planned number of steps; None if the length is given in epochs or the run does not train

    @classmethod
    def open(cls, path: str, *, force: bool) -> RecordedRun:
        """Open the folder of a run. Raise a ConfigError if it contains no run, or one that cannot be replayed."""
        check_is_local(path, RUN, "a replay requires the files of the run", fix="download the folder of the run")
        folder = Path(path)
        record = read_record(folder, RUN)
        config = record["config"]
        if "train" not in config:
            message = "the run was started with instrument.attach, so its training loop is unknown"
            fix = "call the loop again with other hooks, or with a block `with probe.record_operators():` instead of --ops"
            raise ConfigError(Problem(RUN, message, given=path, allowed="a run of python -m instrument", fix=fix))
        if replay := record.get("replay"):
            fix = f"repeat the run itself: python -m instrument.replay {replay.get('source', 'RUN')}"
            raise ConfigError(Problem(RUN, "this run is a replay itself", given=path, fix=fix))
        missing = [name for name in REQUIRED if not record.get(name)]
        if missing and not force:
            message = f"run.json has no entry {missing[0]!r}, so it is unknown whether a replay can be exact"
            fix = "pass --force to repeat the run and compare what was recorded"
            raise ConfigError(Problem(RUN, message, given=path, fix=fix))
        files = RunFiles(folder)
        record = {**record, "status": files.info()["status"]}
        if record["status"] == "running":
            raise ConfigError(Problem(RUN, "the run is in progress", given=path, fix="wait for its end"))
        try:
            rows = files.read("metrics", ["step", "phase"]).to_pydict()
        except InstrumentError as error:
            raise ConfigError(Problem(RUN, f"its metrics cannot be read: {error}", given=path)) from None
        done = max((step + 1 for step, phase in zip(*rows.values(), strict=True) if phase in STEP_PHASES), default=0)
        if not done:
            message = "the run recorded no step, so there is nothing to repeat"
            raise ConfigError(Problem(RUN, message, given=path, fix="run it again with python -m instrument"))
        return cls(folder, record, done, config["train"].get("steps") if config.get("mode") != "forward" else None)

    @property
    def is_done(self) -> bool:
        return bool(self.record["status"] == "done")

    def window(self, text: str | None, before_failure: int | None, *, is_counterfactual: bool) -> range:
        """Return the steps in which the record hooks run: `START:STOP`, `STEP`, or the last ones before the end of the run.

        A counterfactual may continue after the last recorded step.
        """
        if before_failure is not None:
            return self._before_failure(before_failure)
        most = self.done + (not self.is_done)  # The step in which the run failed can be repeated too.
        if is_counterfactual and not self.is_done:
            most = self.steps or most
        match = re.fullmatch(r"(\d*)(:?)(\d*)", text or ":")
        if match is None or not match[0]:
            allowed = "START:STOP, such as 48:53 for the steps 48 to 52"
            raise ConfigError(Problem("--steps", "must be a range of steps", given=text, allowed=allowed))
        start = int(match[1] or 0)
        stop = int(match[3]) if match[3] else start + 1 if not match[2] else self.done
        if not start < stop <= most:
            message = "the range is empty" if start >= stop else "the run did not record these steps"
            allowed = f"steps 0 to {most - 1}, as in --steps {max(0, most - 5)}:{most}"
            raise ConfigError(Problem("--steps", message, given=text, allowed=allowed))
        return range(start, stop)

    def _before_failure(self, count: int) -> range:
        if self.is_done:
            events = RunFiles(self.folder).read("events", ["rule", "step"]).to_pylist()
            step = next((event["step"] for event in events if event["rule"] == "non_finite"), None)
            fix = f"pass --steps {max(0, step - count)}:{step + 1}, up to its first non-finite value" if step else ""
            message = "the run did not fail: its status is done"
            raise ConfigError(Problem("--before-failure", message, count, fix=fix or "pass --steps START:STOP"))
        if count < 1:
            raise ConfigError(Problem("--before-failure", "must be a number of steps", count, "1 or more"))
        return range(max(0, self.done - count), self.done)

    @property
    def depends_on_values(self) -> bool:
        """Whether interventions depend on values of earlier steps: they have a condition, or a rule turns hooks on or off."""
        actions = [action for rule in self.rules.values() for action in rule.actions]
        return any(isinstance(action, EnableAction | DisableAction) for action in actions) or any(
            spec.when is not None for spec in self.hooks.values() if not isinstance(spec, ObservationSpec)
        )

    @property
    def required_hooks(self) -> dict[str, HookSpec]:
        """The hooks that can affect the training: with rules that turn hooks on or off, all of them."""
        every = self.depends_on_values
        return {name: spec for name, spec in self.hooks.items() if every or is_required(spec)}

    @property
    def rules(self) -> dict[str, RuleBase]:
        return parse_rules(self.record["config"].get("rules"))

    @property
    def hooks(self) -> dict[str, HookSpec]:
        mode = self.record["config"].get("mode")
        return parse_hooks(self.record["config"].get("hooks"), phase="forward" if mode == "forward" else "train")


def is_required(spec: HookSpec) -> bool:
    """Return whether a hook can affect the training: it is an intervention, or keeps a tensor for one."""
    return not isinstance(spec, ObservationSpec) or spec.keep_as is not None


class Replay:
    """A run to repeat, with its hooks and those of the command line.

    Record hooks run in the window. Interventions run as in the run. Inside the window, changed interventions replace those of the run.

    Args:
        given: The hooks of the run, as the command line has changed them.
        window: The steps in which the record hooks run.
        intervene: Whether the replay is a counterfactual.
        force: Whether a replay that cannot be expected to be exact is allowed.
        operators: Whether every operator of the window is recorded.

    Attributes:
        hooks: The hooks of the replay.
        left_out: The record hooks of the run that are not scheduled in the window.
        counterfactual: The interventions that differ from those of the run.
        first_step: The first step at which one of them runs or is missing; for an evaluation, the number of completed steps. None for an
            exact replay.
        changes_evaluation: Whether one of them runs in evaluations or on the probe batch.
        begin: The number of completed steps of the checkpoint at which the replay begins; 0 for the start of the run.
        settings, repeated, not_repeated: See `_repeat_changes`.
        notes: The decisive differences of a forced replay, which `check` adds.

    Raises:
        ConfigError: A hook cannot run in the window, or interventions differ without `intervene`, or none differs with it.
    """

    def __init__(
        self,
        run: RecordedRun,
        given: Mapping[str, HookSpec],
        window: range,
        *,
        intervene: bool,
        force: bool,
        operators: bool,
    ) -> None:
        self.run, self.window, self.force, self.operators = run, window, force, operators
        self.notes: list[str] = []
        original, before = run.hooks, run.required_hooks
        after = {name: spec for name, spec in given.items() if name in before or is_required(spec)}
        changed = tuple(name for name in {**before, **after} if before.get(name) != after.get(name))
        _check_interventions(changed, before, intervene=intervene)
        self.hooks: dict[str, HookSpec] = {}
        self.left_out: list[str] = []
        starts = []
        # If interventions depend on the values of earlier steps, the replay begins at the start.
        steps = [] if run.depends_on_values else checkpoint_steps(run.folder)
        self.begin = max((step for step in steps if step <= window.start), default=0)
        lead_in = range(self.begin, window.start)
        problems: list[Problem] = []
        # The order of the run, because hooks at the same tensor act in this order.
        for name in dict.fromkeys([*(name for name in original if name in given or name in before), *given]):
            spec = given.get(name)
            if name in before and name not in changed:
                self.hooks[name] = before[name]
                continue
            if name in before:
                starts += _first(_within(before[name], window))
                if (unchanged := _within(before[name], lead_in)) is not None:
                    self.hooks[name] = unchanged
            if spec is None:
                continue
            restricted = _within(spec, window)
            if restricted is not None:
                if name in changed:
                    starts += _first(restricted)
                new = f"{name}_counterfactual" if name in before else name
                self.hooks[new] = restricted.model_copy(update={"name": new})
            elif original.get(name) == spec:
                self.left_out.append(name)
            else:
                text = f"the hook is not scheduled in {steps_text(window)}: its schedule is {spec.schedule}"
                is_due = _within(spec.model_copy(update={"every": 1}), window) is not None
                fix = f"pass hooks.{name}.every=1" if is_due else "change its schedule, or the range of --steps"
                problems.append(Problem(f"hooks.{name}", text, fix=fix))
        raise_problems(problems)
        if changed and not starts:
            raise ConfigError(Problem("--intervene", f"no changed intervention runs in {steps_text(window)}", changed))
        phases = {spec.phase for specs in (before, after) for name, spec in specs.items() if name in changed}
        self.counterfactual, self.first_step = changed, min(starts, default=None)
        self.changes_evaluation = bool(phases - {*STEP_PHASES})
        self._repeat_changes()

    def _repeat_changes(self) -> None:
        """Find the changes that `instrument.control` made during the run: those to repeat, and those that are not repeated.

        Repeated are the changes of the learning rate and of the interventions of the run. If a counterfactual changes an intervention, the
        original one acts before the window. Its changes are repeated, except for changes of the schedule. `settings` are those at the
        start of the run, of the hooks whose changes are repeated.
        """
        settings = Settings.of(self.run.record["config"])
        kept = {name: settings.hooks[name] for name in self.run.required_hooks if name in self.hooks}
        for name in kept.keys() & set(self.counterfactual):
            kept[name] = {**kept[name], **_limits(self.hooks[name], "stop")}
        self.settings = replace(settings, hooks=kept)
        fixed = {f"hooks.{name}.{field}" for name in self.counterfactual for field in SCHEDULE_FIELDS}
        self.repeated: list[tuple[int, list[str]]] = []
        self.not_repeated: list[tuple[int, list[str]]] = []
        for step, texts in ControlFolder(self.run.folder).recorded():
            chosen = [changed_hook(text) in (None, *kept) and text.partition("=")[0] not in fixed for text in texts]
            for changes, wanted in ((self.repeated, True), (self.not_repeated, False)):
                part = [text for text, is_kept in zip(texts, chosen, strict=True) if is_kept is wanted]
                if part and step < self.window.stop:
                    changes.append((step, part))

    @property
    def rules(self) -> dict[str, RuleBase]:
        """The rules of the replay: those that affect the training, that only warn, or that one of its hooks follows."""
        if self.run.depends_on_values:
            return self.run.rules
        followed = {spec.follows for spec in self.hooks.values()}
        return {name: rule for name, rule in self.run.rules.items() if rule.is_optional or name in followed}

    @property
    def message(self) -> str:
        start = f"its checkpoint after {self.begin} steps" if self.begin else "its start"
        text = f"repeats {self.run.folder} from {start}; hooks record {steps_text(self.window)}"
        if not self.counterfactual:
            return text
        names = ", ".join(self.counterfactual)
        return f"{text}; a counterfactual from step {self.first_step} on, with other interventions: {names}"

    def entry(self) -> dict[str, Any]:
        """Return the entry `replay` of run.json."""
        return {
            "source": str(self.run.folder.resolve()),
            "source_config_hash": self.run.record.get("config_hash"),
            "begin": self.begin,
            "steps": [self.window.start, self.window.stop],
            "counterfactual": list(self.counterfactual),
            "first_step": self.first_step,
            "operators": self.operators,
            "forced": self.notes,
            "changes": _texts(self.repeated),
            "changes_left_out": _texts(self.not_repeated),
        }

    def recorded_hooks(self, given: Any) -> dict[str, Any]:
        """Return the hooks for run.json: those of the command line, `given`, under the names and in the steps in which they run."""
        entries, before = dict(named_specs("hooks", given)), self.run.required_hooks
        for name in self.counterfactual:
            new = entries.pop(name, None)
            if name in self.settings.hooks:  # it runs as in the run, before the window
                entries[name] = self.settings.hooks[name]
            if new is not None:
                spec = self.hooks[f"{name}_counterfactual" if name in before else name]
                entries[spec.name] = {**new, "name": spec.name, **_limits(spec, "start", "stop")}
        return entries

    def check(self, present: Mapping[str, Any]) -> None:
        """Raise a ConfigError if the replay cannot be exact in this environment, unless `force` is set."""
        differences = [each for each in environment_differences(self.run.record, present) if each.is_decisive]
        if differences and not self.force:
            message = f"the replay cannot be expected to be exact, because {differences[0]}"
            more = f"; {', '.join(each.what for each in differences[1:])} differ too" if differences[1:] else ""
            fix = "repeat it in the environment of the run, or pass --force; the certificate then has the difference"
            raise ConfigError(Problem(RUN, message + more, given=str(self.run.folder), fix=fix))
        self.notes.extend(map(str, differences))


def _texts(changes: Sequence[tuple[int, Sequence[str]]]) -> list[str]:
    return [f"{text} after {step} steps" for step, texts in changes for text in texts]


def _check_interventions(changed: Sequence[str], before: Mapping[str, HookSpec], *, intervene: bool) -> None:
    if changed and not intervene:
        name = changed[0]
        what = "is changed or removed" if name in before else "is not part of the run"
        message = f"this intervention {what}, so the replay would not repeat the training of the run"
        fix = "pass --intervene for a counterfactual, which is compared with the run from that step on"
        raise ConfigError(Problem(f"hooks.{name}", message, fix=fix))
    if intervene and not changed:
        fix = "add one: '+hooks.NAME={layers: ..., kind: ..., action: clip, ...}', or change one of the run"
        raise ConfigError(Problem("--intervene", "no intervention differs from those of the run", fix=fix))


def _within(spec: HookSpec, steps: range) -> HookSpec | None:
    # The step of an evaluation is the number of completed steps. The evaluation after the last of the steps is included.
    schedule = spec.schedule
    offset = int(schedule.phase == "eval")
    steps = range(steps.start + offset, steps.stop + offset)
    due_steps = schedule.steps_in(steps)
    if not due_steps:
        return None
    if schedule.steps is not None:
        return spec.model_copy(update={"steps": tuple(due_steps)})
    return spec.model_copy(update={"start": due_steps[0], "stop": steps.stop})


def _limits(spec: HookSpec, *fields: str) -> dict[str, Any]:
    return {field: getattr(spec, field) for field in fields} if spec.steps is None else {"steps": sorted(spec.steps)}


def _first(spec: HookSpec | None) -> list[int]:
    return [] if spec is None else [spec.start if spec.steps is None else min(spec.steps)]
