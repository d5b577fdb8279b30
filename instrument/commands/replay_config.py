"""The configuration of a replay: that of the recorded run, with further record hooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf

from ..config.base import ObservationSpec
from ..config.experiment import TRACKERS, SinkConfig
from ..config.hook_specs import HookSpec
from ..config.parse import named_specs, parse_hooks, parse_rules
from ..config.rules import DisableAction, EnableAction, RuleBase
from ..config.run_changes import SCHEDULE_FIELDS, RepeatedChanges, Settings, changed_hook
from ..config.schedule import STEP_PHASES
from ..config.spec_file import conf_folder
from ..errors import ConfigError, InstrumentError, Problem
from ..formatting import steps_text
from ..storage.control_folder import ControlFolder
from ..storage.remote_folder import check_is_local
from ..storage.run_files import RunFiles
from ..storage.run_record import REQUIRED, checkpoint_steps, read_record
from .hydra_errors import composition_problem

RUN = "RUN"  # the argument, for error messages
CONFIG_NAME = "replayed_run"  # root configuration of the replay, which is not a file
# An override below these keys changes no value of the training. The device and a dataset in another folder are compared
# with those of the run.
ALLOWED = (
    *("hooks", "sink", "budget", "reduce", "report", "quiet", "name", "device"),
    *("data.ids", "data.num_workers", "data.pin_memory", "data.root"),
)


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
        jobs = sorted(file.parent for file in folder.glob("*/run.json")) if not (folder / "run.json").exists() else []
        if jobs:
            message = f"the folder contains several runs: pass one of them, such as {path}/{jobs[0].name}"
            raise ConfigError(Problem(RUN, message, given=path))
        record = read_record(folder, RUN)
        config = record["config"]
        if "train" not in config:
            message = "the run was started with instrument.attach, so its training loop is unknown"
            fix = "call the loop again with other hooks, or with a block `with probe.record_operators():` instead of --ops"
            raise ConfigError(Problem(RUN, message, given=path, allowed="a run of python -m instrument", fix=fix))
        if replay := record.get("replay"):
            fix = f"repeat the run itself: python -m instrument.replay {replay['source']}"
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

    def begin(self, window: range) -> int:
        """Return the number of completed steps of the last checkpoint at or before a window; 0 for the start of the run.

        If interventions depend on the values of earlier steps, the replay begins at the start.
        """
        if self.depends_on_values:
            return 0
        return max((step for step in checkpoint_steps(self.folder) if step <= window.start), default=0)

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

    def rules_of_replay(self, hooks: Mapping[str, HookSpec]) -> dict[str, RuleBase]:
        """Return the rules of a replay: those that affect the training, that only warn, or that one of its hooks follows."""
        if self.depends_on_values:
            return self.rules
        followed = {spec.follows for spec in hooks.values()}
        return {name: rule for name, rule in self.rules.items() if rule.is_optional or name in followed}

    @property
    def hooks(self) -> dict[str, HookSpec]:
        mode = self.record["config"].get("mode")
        return parse_hooks(self.record["config"].get("hooks"), phase="forward" if mode == "forward" else "train")


def store_config(run: RecordedRun, overrides: Sequence[str]) -> None:
    """Store the root configuration of a replay, to which Hydra applies the overrides.

    It is the configuration of the run without its outputs: remote storage, trackers, custom sinks, checkpoints, budget.
    A hook set that the overrides choose is added to the hooks of the run, as in a run.
    """
    _check_overrides(overrides)
    config: dict[str, Any] = OmegaConf.to_container(OmegaConf.create(dict(run.record["config"])))  # type: ignore[assignment]
    hooks = dict(named_specs("hooks", config.get("hooks")))
    sink = {key: value for key, value in (config.get("sink") or {}).items() if key in _PARQUET_FIELDS}
    config |= {"plan": False, "resume": None, "report": False, "quiet": False, "objective": "loss", "sink": sink}
    config |= {"budget": {"time": None, "bytes": None}, "hooks": hooks or None}
    config["train"] |= {"checkpoint": {"every": 0}, "save": False}
    packaged: Any = OmegaConf.load(conf_folder() / "config.yaml")
    packaged.hydra.run.dir = f"runs/replays/{_label(run.folder)}/${{now:%Y-%m-%d_%H-%M-%S-%f}}"
    node = {"defaults": ["_self_", {"sink": None}, {"hooks": None}], **config, "hydra": packaged.hydra}
    ConfigStore.instance().store(CONFIG_NAME, node, provider="instrument.replay")


_PARQUET_FIELDS = set(SinkConfig.model_fields) - {"remote", "keep_local", "custom", *TRACKERS.builtin}


def _check_overrides(overrides: Sequence[str]) -> None:
    try:
        parsed = OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        raise ConfigError(composition_problem(error, overrides, [])) from None
    for override in parsed:
        key = override.key_or_group
        if not any(f"{key}.".startswith(f"{allowed}.") for allowed in (*ALLOWED, "hydra")):
            message = "a replay repeats the training of the run, so this key cannot be overridden"
            fix = "to train with another configuration, use python -m instrument"
            raise ConfigError(Problem(key, message, given=override.input_line, allowed=", ".join(ALLOWED), fix=fix))


def _label(folder: Path) -> str:
    """Return the path of a run below `runs`, or the name of its folder."""
    runs = (Path.cwd() / "runs").resolve()
    resolved = folder.resolve()
    return str(resolved.relative_to(runs)) if resolved.is_relative_to(runs) else resolved.name


def is_required(spec: HookSpec) -> bool:
    """Return whether a hook can affect the training: it is an intervention, or keeps a tensor for one."""
    return not isinstance(spec, ObservationSpec) or spec.keep_as is not None


@dataclass(frozen=True)
class ReplayHooks:
    """The hooks of a replay."""

    specs: dict[str, HookSpec]
    left_out: tuple[str, ...]  # the record hooks of the run that are not scheduled in the window
    changed: tuple[str, ...]  # the interventions that differ from those of the run
    # The first step at which a changed intervention runs or is missing; for an evaluation, the number of completed steps. None without
    # changed interventions.
    first_step: int | None
    changes_evaluation: bool  # whether a changed intervention runs in evaluations or on the probe batch

    @classmethod
    def of(cls, run: RecordedRun, given: Mapping[str, HookSpec], window: range, *, intervene: bool) -> ReplayHooks:
        """Combine the hooks of a run with those of the command line. Raise a ConfigError if one cannot run in the window.

        Record hooks run in the window. Interventions run as in the run. Inside the window, changed interventions
        replace those of the run.
        """
        original, before = run.hooks, run.required_hooks
        after = {name: spec for name, spec in given.items() if name in before or is_required(spec)}
        changed = tuple(name for name in {**before, **after} if before.get(name) != after.get(name))
        _check_interventions(changed, before, intervene=intervene)
        specs: dict[str, HookSpec] = {}
        left_out, starts = [], []
        lead_in = range(window.start)
        # The order of the run, because hooks at the same tensor act in this order.
        for name in dict.fromkeys([*(name for name in original if name in given or name in before), *given]):
            spec = given.get(name)
            if name in before and name not in changed:
                specs[name] = before[name]
                continue
            if name in before:
                starts += _first(_within(before[name], window))
                if (unchanged := _within(before[name], lead_in)) is not None:
                    specs[name] = unchanged
            if spec is None:
                continue
            restricted = _within(spec, window)
            if restricted is not None:
                if name in changed:
                    starts += _first(restricted)
                new = f"{name}_counterfactual" if name in before else name
                specs[new] = restricted.model_copy(update={"name": new})
            elif original.get(name) == spec:
                left_out.append(name)
            else:
                text = f"the hook is not scheduled in {steps_text(window)}: its schedule is {spec.schedule}"
                fix = f"pass hooks.{name}.every=1" if spec.steps is None else "change its steps"
                raise ConfigError(Problem(f"hooks.{name}", text, fix=fix))
        if changed and not starts:
            raise ConfigError(Problem("--intervene", f"no changed intervention runs in {steps_text(window)}", changed))
        phases = {spec.phase for specs in (before, after) for name, spec in specs.items() if name in changed}
        return cls(specs, tuple(left_out), changed, min(starts, default=None), bool(phases - {*STEP_PHASES}))


def repeated_changes(run: RecordedRun, hooks: ReplayHooks, window: range) -> RepeatedChanges:
    """Return the changes that `instrument.control` made during a run, as its replay repeats them.

    These are the changes of the learning rate and of the interventions of the run. If a counterfactual changes an
    intervention, the original one acts before the window. Its changes are repeated, except for changes of the schedule.
    """
    settings = Settings.of(run.record["config"])
    kept = {name: settings.hooks[name] for name in run.required_hooks if name in hooks.specs}
    for name in kept.keys() & set(hooks.changed):
        spec = hooks.specs[name]
        limit = {"stop": spec.stop} if spec.steps is None else {"steps": sorted(spec.steps)}
        kept[name] = {**kept[name], **limit}
    fixed = {f"hooks.{name}.{field}" for name in hooks.changed for field in SCHEDULE_FIELDS}
    repeated: list[tuple[int, tuple[str, ...]]] = []
    left_out: list[tuple[int, tuple[str, ...]]] = []
    for step, texts in ControlFolder(run.folder).recorded():
        if step >= window.stop:
            break
        chosen = [changed_hook(text) in (None, *kept) and text.partition("=")[0] not in fixed for text in texts]
        for changes, wanted in ((repeated, True), (left_out, False)):
            if part := tuple(text for text, is_kept in zip(texts, chosen, strict=True) if is_kept is wanted):
                changes.append((step, part))
    return RepeatedChanges(replace(settings, hooks=kept), tuple(repeated), tuple(left_out))


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


def _first(spec: HookSpec | None) -> list[int]:
    return [] if spec is None else [spec.start if spec.steps is None else min(spec.steps)]
