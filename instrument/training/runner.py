"""Execution of a run or of a replay: from the configuration to the finished folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..analysis.replay import replay
from ..config.experiment import TRACKERS, RunConfig
from ..config.run_changes import Settings
from ..errors import ConfigError, Problem
from ..fields.targets import build
from ..runtime.deferred_interrupts import signal_safe_contextmanager, uninterrupted
from ..stats.cpu_kernel import KERNEL
from ..stats.device_choice import measured_by
from ..storage.parquet import ParquetSink
from ..storage.parts import remove_rows_after_checkpoint
from ..storage.run_files import RunFiles
from ..storage.run_folder import RunFolder, WorkerRunFolder
from ..storage.run_record import config_hash
from ..storage.run_upload import RemoteCopy
from ..storage.tee import CustomSink, TeeSink
from ..trackers.tracking import TrackedRun, open_tracker, require
from ..values.dtensor import own_rank
from .checkpoint import Checkpoints, restore, restore_random, save_weights
from .compiler import reported_graph_breaks
from .control import Control
from .distributed.process_group import Processes
from .distributed.strategies import choose_strategy
from .distributed.torchrun import process_group, synced_errors
from .environment import code_hashes, content_hash, hardware, process_state
from .experiment import Experiment
from .loop import Metrics, run_forward, train
from .replay import Replay
from .terminal import Terminal
from .verification import check_fingerprint, training_fingerprint


@dataclass(frozen=True)
class Result:
    """The result of a run: the metrics of the last evaluation, or the means over all batches in `mode: forward`, and why it was stopped."""

    folder: Path
    metrics: Metrics
    stopped: str | None = None
    is_pruned: bool = False


def run(
    config: RunConfig,
    folder: Path,
    terminal: Terminal,
    *,
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any],
    make_report: Callable[[Path], Path] | None = None,
    source: Replay | None = None,
) -> Result:
    """Run an experiment, resume a stopped run if `config.resume` is set, or replay a run.

    Args:
        folder: The folder of the run. It may exist, but must not contain a run other than the one to resume.
        make_report: Writes the report of the complete run in a folder, and returns its file.
        source: The run to replay, with the configuration of the replay in `config`.

    Raises:
        ConfigError: An object that the configuration names does not exist, does not fit, or matches nothing.
        HookError: A hook failed. The rows recorded before remain readable.
        SinkError: Rows cannot be written.
        RankError: Another process failed.
    """
    folder = folder.absolute()  # custom code may change the working directory
    processes = process_group()
    if processes is not None and not processes.is_rank_zero:
        terminal.silence()
    with synced_errors(processes):
        strategy = choose_strategy(config, processes)
        require({name: f"sink.{name}" for name in config.sink.trackers})
        copy = RemoteCopy(folder, config.sink, terminal.warn, terminal.uploaded)
    training: _Training | None = None
    with _opened_folder(config, folder, raw, overrides, processes, source, remote=copy.address) as run_folder, copy:
        with (
            run_folder.recording(
                has_started=lambda: training is not None and training.has_started,
                stop_reason=lambda: None if training is None else training.probe.stop_reason,
            ),
            nullcontext()
            if processes is None
            else processes.stop_together(folder, lambda rank: run_folder.update(failed_rank=rank)),
            process_state(seed=config.seed, deterministic=config.deterministic),
        ):
            if source is not None and (threads := (source.run.record.get("hardware") or {}).get("threads")) is not None:
                torch.set_num_threads(threads)  # it affects the order of sums
            with synced_errors(processes):
                experiment = Experiment(config, strategy)
                if processes is None or processes.is_rank_zero:
                    _record_environment(run_folder, experiment, raw, copy.address)
                    if source is not None:
                        source.check(run_folder.record)
                        run_folder.update(replay=source.entry())
                training = _Training(experiment, folder, terminal, raw, copy, source)
                run_folder.update(advice=training.probe.rules.custom_advice)
                run_folder.write_files(training.probe.rules.files)
                training.begin()
            terminal.begin(experiment, folder)
            metrics, failure = training.run()
            if config.train.save:
                save_weights(experiment, folder)
            if processes is not None:  # The rows of this process are on disk.
                failures = enumerate(processes.exchange(failure))
                failure = next((f"rank {rank}: {reason}" for rank, reason in failures if reason), None)
            found = training_fingerprint(experiment, folder, processes) if failure is None else None
            run_folder.update(
                fingerprint=found,
                metrics=dict(metrics),
                warnings=len(training.probe.warnings),
                overhead=training.probe.overhead,
                recording_stopped=failure,
                device_statistics=measured_by(),
            )
        if processes is not None:
            copy.finish_ranks(processes.exchange)
            processes.close()
            if not processes.is_rank_zero:
                return Result(folder, metrics, training.probe.stop_reason, training.probe.is_pruned)
        if failure is None:
            readable = copy.readable_folder(is_shared=run_folder.is_shared)
            page = None if make_report is None else make_report(readable)
            terminal.end(experiment, readable, metrics, page, training.probe.stop_reason)
        else:
            terminal.end_unrecorded(failure, metrics)
    is_complete = source is None and training.probe.stop_reason is None
    if config.train.fingerprint is not None and found is not None and is_complete:
        check_fingerprint(config.train.fingerprint, found)
    return Result(folder, metrics, training.probe.stop_reason, training.probe.is_pruned)


@signal_safe_contextmanager
def _opened_folder(
    config: RunConfig,
    folder: Path,
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any],
    processes: Processes | None,
    source: Replay | None,
    *,
    remote: str | None,
) -> Iterator[RunFolder]:
    """Create the folder of a new run, or open the folder of the run to resume. Afterwards, the run has ended."""
    own: RunFolder | None = None
    try:
        with synced_errors(processes), uninterrupted():  # a signal is handled when the folder is known
            if config.resume is not None and (processes is None or processes.is_rank_zero):
                own = RunFolder.reopen(folder, on_error=config.sink.on_error)
            elif processes is None or processes.is_rank_zero:
                own = RunFolder(
                    folder,
                    name=config.name,
                    seed=config.seed,
                    config=raw,
                    config_hash=config_hash(dict(raw)),
                    overrides=overrides,
                    device=None,
                    data=None,
                    statistics=KERNEL,
                    remote=remote,
                    ranks=1 if processes is None else processes.size,
                    replay=None if source is None else source.entry(),
                    on_error=config.sink.on_error,
                )
        with synced_errors(processes):
            own = own or WorkerRunFolder(folder, own_rank(), remote=remote)
        yield own
    finally:
        if own is not None:
            own.close()


def _record_environment(
    run_folder: RunFolder, experiment: Experiment, raw: Mapping[str, Any], remote: str | None
) -> None:
    data, weights, recorded = experiment.data, experiment.weights, run_folder.record.get("init_from")
    if recorded and weights is not None and recorded["sha256"] != weights.sha256:
        raise ConfigError(Problem("init_from", "the file has changed since the run was started", recorded["path"]))
    run_folder.update(
        device=str(experiment.device),
        hardware=hardware(experiment.device),
        data={**data.source, "hashes": {"train": content_hash(data.train), "eval": content_hash(data.test)}},
        code=code_hashes(raw),
        remote=remote,
    )
    if weights is not None:
        run_folder.update(init_from=weights.entry())


@dataclass
class _Training:
    experiment: Experiment
    folder: Path
    terminal: Terminal
    raw: Mapping[str, Any]
    copy: RemoteCopy
    source: Replay | None
    has_started: bool = False

    def __post_init__(self) -> None:
        experiment, folder, terminal, source = self.experiment, self.folder, self.terminal, self.source
        config = experiment.config
        kept = config.train.checkpoint
        self.checkpoints = Checkpoints(folder, kept.every, experiment.strategy.processes, kept.keep)
        self.state = self.parts = None
        if config.resume is not None:
            self.state = self.checkpoints.load(own_rank())
            self.parts = self.state["parts"][own_rank()]
        elif source is not None and source.begin:
            self.state = Checkpoints(source.run.folder).load(own_rank(), source.begin)
        self.sink = ParquetSink(
            folder,
            **config.sink.model_dump(exclude={*TRACKERS.builtin, "remote", "keep_local", "custom"}),
            report=terminal.show_recording_stopped,
            parts=self.parts,
        )
        self.several = TeeSink(self.sink, {}, report=terminal.warn)
        self.probe = experiment.probe(
            self.several,
            archive=experiment.archive,
            budget=config.budget,
            steps=experiment.steps,
            ranks=experiment.strategy.ranks,
            ids=config.data.ids,
            print_line=terminal.print_line,
            rules=config.rules,
        )
        if self.state is not None:
            restore(self.state, experiment, self.probe, resumes=self.parts is not None)
        if source is not None:
            experiment.batches.stop = source.window.stop
            experiment.operator_steps = source.window if source.operators else range(0)
        self.control = Control(
            folder,
            Settings.of(self.raw) if source is None else source.settings,
            self.probe,
            lr_scale=experiment.lr_scale,
            processes=experiment.strategy.processes,
            repeated=None if source is None else source.repeated,
        )

    def run(self) -> tuple[Metrics, str | None]:
        experiment, probe = self.experiment, self.probe
        with probe, self.terminal.progress(experiment.steps) as show, reported_graph_breaks(probe):
            last = None
            if self.source is not None:
                rule = "counterfactual" if self.source.counterfactual else "replay"
                probe.event(rule, self.source.message, severity="info")
            if self.state is not None:
                trains = experiment.config.mode == "train"
                if self.parts is not None:
                    work = "training" if trains else "the run"
                    message = f"{work} continues after {probe.step} steps"
                    # Not counted by the recorder: a resumed run counts the same rows as an uninterrupted one.
                    event = (probe.step, own_rank(), None, "resumed", message, "info", *[None] * 3)
                    self.several.write("events", [event])
                if self.parts is not None or not trains:
                    last = self.state["metrics"]
                restore_random(self.state, experiment.device)
            elif fallback := experiment.data.source["fallback"]:
                probe.event("fallback", fallback)
            if self.state is None and experiment.data.overlap:
                probe.event("data", experiment.data.overlap)
            if self.state is None and (notice := experiment.output_notice) is not None:
                probe.event("output", notice.message, severity=notice.severity)
            if experiment.weights is not None and (ignored := experiment.weights.ignored):
                probe.event("init_from", ignored)
            loop = train if experiment.config.mode == "train" else run_forward
            metrics = loop(experiment, probe, show, self._end_step, last)
        return metrics, self.sink.failure

    def begin(self) -> None:
        """Open the trackers and the custom sink, and start the upload."""
        config = self.experiment.config.sink
        since = None if self.state is None or self.parts is None else self.state["step"]
        with ExitStack() as opened:
            trackers = {}
            for name in config.trackers if not own_rank() else ():
                trackers[name] = open_tracker(name, TrackedRun.of(self.folder, self.raw, since), f"sink.{name}")
                opened.callback(trackers[name].close)
            custom: dict[str, CustomSink] = {}
            if config.custom is not None:
                sink = CustomSink(build(config.custom, "sink"), "sink")
                opened.callback(sink.close)
                custom[sink.name] = sink
            if self.parts is not None:
                self.copy.remove_parts_after(self.parts)
                remove_rows_after_checkpoint(self.folder, own_rank(), self.parts)
                for tracker in trackers.values():
                    replay(RunFiles(self.folder), tracker, tables=tracker.tables, since=since, rank=own_rank())
            self.copy.begin()
            opened.pop_all()
        self.several.others.update(trackers)
        self.several.others.update(custom)
        if config.on_error == "stop":
            self.several.required.update(custom)
        self.has_started = True

    def _end_step(self, metrics: Callable[[], Metrics]) -> None:
        """Record upload messages, make requested changes, and save a checkpoint if it is scheduled or requested."""
        for message in self.copy.messages():
            self.probe.event("remote", message)
        saves = self.control.end_step() or self.probe.should_checkpoint
        step, every = self.probe.step, self.checkpoints.every
        is_last = self.probe.should_stop or step == self.experiment.steps
        if saves or (every > 0 and (is_last or step % every == 0)):
            self.checkpoints.save(self.experiment, self.probe, self.sink, metrics())
