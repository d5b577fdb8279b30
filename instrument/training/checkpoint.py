"""Checkpoints: the complete state of a training run on disk. A resumed run is identical to an uninterrupted one.

    checkpoints/step-00000300.pt         state of rank 0; written last, so that it exists only if all others do
    checkpoints/step-00000300-0001.pt    state of rank 1: its random states, and its shards with FSDP2

A checkpoint is written at the end of a step. First, all rows are written to Parquet parts, and the checkpoint stores
the number of parts. Parts with a higher number belong to steps that are repeated after a resume. The checkpoint is
written to a temporary file and renamed. Then old checkpoints are removed. A checkpoint contains only tensors,
numbers, strings, lists and dictionaries, so that `torch.load(weights_only=True)` can read it. In `mode: forward`, it
contains the position in the data, the random states and the counts of the hooks, but no weights.

A checkpoint contains the actual values: interventions of the state-dict kinds do not change it. It is loaded before
hooks are attached.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ConfigError, InstrumentError, Problem, first_line
from ..probe.probe import Probe
from ..runtime.deferred_interrupts import deferred_signals
from ..storage.parquet import ParquetSink
from ..storage.run_record import CHECKPOINTS, WEIGHTS, checkpoint_steps
from ..values.dtensor import full_tensor, join_shards, own_rank, pack_shards, unpack_shards
from .distributed.torchrun import synced_errors
from .experiment import Experiment
from .loop import Metrics

if TYPE_CHECKING:
    from .distributed.process_group import Processes

VERSION = 7


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run."""

    folder: Path
    every: int = 0  # steps from one checkpoint to the next; another one is after the last step; 0 disables them
    processes: Processes | None = None
    keep: int | None = 1  # the number of checkpoints that are kept, the latest ones; None keeps all

    def save(self, experiment: Experiment, probe: Probe, sink: ParquetSink, metrics: Metrics) -> None:
        """Save the state after a step; all processes call this. Raise an InstrumentError if it cannot be written and read back."""
        with deferred_signals():
            with probe.saving_checkpoint():
                states = {name: part.state_dict() for name, part in _own(experiment).items()}
                if experiment.optimizer is not None and experiment.strategy.saves_state:
                    states |= pack_shards({name: part.state_dict() for name, part in _shared(experiment).items()})
                    states["buffers"] = dict(_unsaved_buffers(experiment.model, states["model"]))
            probe.recorder.flush()
            ends = sink.finish_parts()
        state = {
            "version": VERSION,
            "step": probe.step,
            "metrics": dict(metrics),
            "parts": [ends] if self.processes is None else self.processes.exchange(ends),
            "probe": probe.state_dict(),
            "batches": experiment.batches.state_dict(),
            "random": _random_state(experiment.device),
            **states,
        }
        with _written_file(self._file(probe.step, own_rank())) as (temporary, path):
            with synced_errors(self.processes):
                _write(state, temporary)
            if own_rank():
                os.replace(temporary, path)
            if self.processes is not None:
                self.processes.wait()
            if not own_rank():
                os.replace(temporary, path)
                saved = [earlier for earlier in checkpoint_steps(self.folder) if earlier <= probe.step]
                kept = tuple(f"step-{each:08d}" for each in (saved if self.keep is None else saved[-self.keep :]))
                for file in sorted(path.parent.iterdir(), key=lambda file: (len(file.name), file.name)):
                    if not file.name.startswith(kept):
                        with suppress(OSError):
                            file.unlink()

    def load(self, rank: int = 0, step: int | None = None) -> dict[str, Any]:
        """Return the state of a process, on the CPU: after a number of completed steps, or else of the latest checkpoint.

        Raise a ConfigError if the run has no checkpoint, or the file has another version.
        """
        where = "resume" if step is None else "RUN"
        steps = checkpoint_steps(self.folder) if step is None else [step]
        if not steps:
            reasons = "train.checkpoint.every was 0, or the run ended before the first checkpoint"
            raise ConfigError(Problem("resume", f"the run has no checkpoint: {reasons}", given=str(self.folder)))
        state = _read(self._file(steps[-1], rank), where)
        if rank and "model" not in state:  # If the model is replicated, at most the file of rank 0 contains it.
            state = _read(self._file(steps[-1], 0), where) | state
        return state

    def _file(self, step: int, rank: int) -> Path:
        return self.folder / CHECKPOINTS / f"step-{step:08d}{f'-{rank:04d}' if rank else ''}.pt"


@contextmanager
def _written_file(path: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the paths of a temporary file, which is removed if the block fails, and of the final one."""
    temporary = path.with_suffix(".tmp")
    try:
        yield temporary, path
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            raise InstrumentError(f"the checkpoint {path} cannot be written: {error.strerror}") from error
        raise


def _write(state: Mapping[str, Any], temporary: Path) -> None:
    path = temporary.with_suffix(".pt")
    try:
        temporary.parent.mkdir(exist_ok=True)
        with open(temporary, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _load(temporary)  # Report a file that cannot be read back now, not when the run is resumed.
    except (OSError, pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        # If the disk is full, PyTorch raises its own error and the OSError is the context.
        cause = error.__context__ if isinstance(error.__context__, OSError) else error
        reason = getattr(cause, "strerror", None) or first_line(cause)
        raise InstrumentError(f"the checkpoint {path} cannot be written: {reason}") from error


def save_weights(experiment: Experiment, folder: Path) -> None:
    """Save the state dict of a model without hooks to a file in the run folder. With several processes, all of them call this."""
    state: dict[str, Any] = {}
    for name, value in experiment.model.state_dict().items():
        full = full_tensor(value) if isinstance(value, Tensor) else value  # Collective, so in all processes.
        if own_rank() == 0 or experiment.strategy.pipeline is not None:
            state[name] = full.cpu() if isinstance(full, Tensor) else full
    if experiment.strategy.pipeline is not None and experiment.strategy.processes is not None:
        state = join_shards(experiment.strategy.processes.exchange(state))
    with synced_errors(experiment.strategy.processes):
        if own_rank() == 0:
            with _written_file(folder / WEIGHTS) as (temporary, path):
                _write(state, temporary)
                os.replace(temporary, path)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch.load raises many types of exceptions for a damaged file
        message = f"the checkpoint cannot be loaded with weights_only=True: {first_line(error)}"
        raise InstrumentError(message) from error


def _read(path: Path, where: str) -> dict[str, Any]:
    try:
        state = _load(path)
    except InstrumentError as error:
        raise ConfigError(Problem(where, str(error), given=str(path))) from None
    version = state.get("version") if isinstance(state, dict) else None
    if version != VERSION:
        message = f"the checkpoint must have version {VERSION}, but has version {version}"
        raise ConfigError(Problem(where, message, given=str(path)))
    return state  # type: ignore[no-any-return]


def restore(state: dict[str, Any], experiment: Experiment, probe: Probe, *, resumes: bool = True) -> None:
    """Load a checkpoint into an experiment and its probe, except for the random states (see `restore_random`).

    `resumes`: whether the probe continues the recording of the run. A replay begins a recording of its own, which may have other
    hooks. Raise a ConfigError if the checkpoint does not match the experiment.
    """
    mesh = experiment.strategy.mesh
    try:
        parts = _own(experiment)
        if experiment.optimizer is not None:  # A run that does not train has no state to restore.
            parts |= _shared(experiment)
            for name, buffer in _unsaved_buffers(experiment.model, state["model"]):
                buffer.copy_(state["buffers"][name])
        for name, part in parts.items():
            part.load_state_dict(state[name] if mesh is None else unpack_shards(state[name], mesh))
        experiment.batches.load_state_dict(state["batches"])
        if resumes:
            probe.load_state_dict(state["probe"])
        else:
            probe.set_step(state["step"], state["probe"]["epoch"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(Problem("resume", "the checkpoint does not match this experiment", given=reason)) from None


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Restore the random states of Python, NumPy and PyTorch from a checkpoint, that of CUDA for one device.

    Call it last, directly before the next step, because building the experiment draws random numbers.
    """
    saved = state["random"]
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = saved["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(saved["torch"])
    if saved["cuda"] is not None:
        torch.cuda.set_rng_state(saved["cuda"], device)


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _shared(experiment: Experiment) -> dict[str, Any]:
    """Return the stateful objects that are replicated or sharded over the processes, by name."""
    parts = {name: getattr(experiment, name) for name in ("model", "optimizer", "scheduler", "scaler")}
    return {name: part for name, part in parts.items() if part is not None}


def _own(experiment: Experiment) -> dict[str, Any]:
    """Return the stateful objects of which each process has a separate state: a custom task with a `state_dict`."""
    return {"task": experiment.task} if hasattr(experiment.task, "state_dict") else {}


def _unsaved_buffers(model: nn.Module, saved: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]
