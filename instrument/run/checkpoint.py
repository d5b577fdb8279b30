"""A training's whole state on disk, from which it goes on as if it had never been stopped.

    checkpoints/step-00000300.pt         the first process's, which is there when all others' are
    checkpoints/step-00000300-0001.pt    that of rank 1: what is its own, such as random states; with fsdp2 its shards

It is written when a step has ended: first all rows become Parquet parts, and their numbers go into the checkpoint; parts
of a higher number are of steps that are done again. A checkpoint is written aside and renamed, then the one before it is
removed. It holds tensors, numbers, texts, lists and dictionaries, and is read with `weights_only=True`.

It holds the live values: interventions of the state-dict kinds do not change it, and no hook is attached yet when it is loaded.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..capture.probe import Probe
from ..capture.ranks import own_rank
from ..errors import ConfigError, InstrumentError, Mistake
from ..sharded import as_plain, from_plain, mesh_of
from ..sinks.parquet import ParquetSink
from .experiment import Experiment
from .folder import CHECKPOINTS
from .ranks.torchrun import agreed

if TYPE_CHECKING:
    from .ranks.processes import Processes

VERSION = 3
ASIDE = ".tmp"


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's folder.
        every: A checkpoint every N steps, and after the last one; 0: none.
        processes: Those that train together, which all save and load at once; None for a single one.
    """

    def __init__(self, folder: Path, every: int = 0, processes: Processes | None = None) -> None:
        self.folder = folder
        self.every = every
        self.processes = processes

    def due(self, step: int, steps: int) -> bool:
        """Whether there is one after so many steps of the run's."""
        return bool(self.every) and (step % self.every == 0 or step == steps)

    def save(
        self, experiment: Experiment, probe: Probe, sink: ParquetSink, metrics: Mapping[str, float | None]
    ) -> None:
        """Write down how everything stands after a step.

        Args:
            experiment: What is trained.
            probe: The attached hooks.
            sink: Where the rows went.
            metrics: Those of the last evaluation.

        Raises:
            InstrumentError: A part of the state cannot be read back, or nothing can be written.
        """
        with probe.saving_checkpoint():
            states = _states(_own(experiment))
            if experiment.strategy.keeps_state:
                states |= as_plain(_states(_shared(experiment)))
                states["buffers"] = dict(_unsaved_buffers(experiment.model, states["model"]))
        probe.flush()
        ends = sink.settle()
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
        path = self._file(probe.step, own_rank())
        try:
            with agreed(self.processes):
                _write(state, path.with_suffix(ASIDE))
            if own_rank():
                _put_in_place(path)
            if self.processes is not None:
                self.processes.wait()
            if not own_rank():
                _put_in_place(path)
                self._remove_others(probe.step)
        except BaseException:
            with suppress(OSError):
                path.with_suffix(ASIDE).unlink()
            raise

    def load(self, rank: int = 0) -> dict[str, Any]:
        """The latest checkpoint, as one of the processes needs it.

        Raises:
            ConfigError: There is none, or it is not one of ours.
        """
        found = sorted((self.folder / CHECKPOINTS).glob(f"step-{'[0-9]' * 8}.pt"))
        if not found:
            raise ConfigError(
                Mistake(
                    "resume",
                    "this run has no checkpoint: train.checkpoint.every was 0, or it ended before the first one",
                    written=str(self.folder),
                )
            )
        step = int(found[-1].stem.partition("-")[2])
        state: dict[str, Any] = {}
        for each in (rank,) if rank == 0 else (rank, 0):
            if "model" not in state:  # all have the same one, which the first process has kept
                path = self._file(step, each)
                try:
                    state = _read(path) | state
                except InstrumentError as error:
                    raise ConfigError(Mistake("resume", str(error), written=str(path))) from None
        return state

    def _file(self, step: int, rank: int) -> Path:
        return self.folder / CHECKPOINTS / f"step-{step:08d}{f'-{rank:04d}' if rank else ''}.pt"

    def _remove_others(self, step: int) -> None:
        """Remove what is of other steps, the last file of each first: the first process's, without which it counts for nothing."""
        for file in sorted((self.folder / CHECKPOINTS).iterdir(), key=lambda file: (len(file.name), file.name)):
            if not file.name.startswith(f"step-{step:08d}"):
                with suppress(OSError):
                    file.unlink()


def _write(state: Mapping[str, Any], aside: Path) -> None:
    """Put a state beside the place where it belongs.

    Raises:
        InstrumentError: It cannot be read back, or not be written.
    """
    path = aside.with_suffix(".pt")
    try:
        aside.parent.mkdir(exist_ok=True)
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        _read(aside)  # what cannot be read back is told now
    except OSError as error:
        raise InstrumentError(f"the checkpoint {path} cannot be written: {error.strerror}") from error
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        cause = error.__context__ if isinstance(error.__context__, OSError) else error  # PyTorch's own of a full disk
        reason = getattr(cause, "strerror", None) or str(cause).partition("\n")[0]
        raise InstrumentError(f"the checkpoint {path} cannot be written: {reason}") from error


def _put_in_place(path: Path) -> None:
    try:
        os.replace(path.with_suffix(ASIDE), path)
    except OSError as error:
        raise InstrumentError(f"the checkpoint {path} cannot be written: {error.strerror}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds: what a file of any content makes torch.load raise
        reason = str(error).strip().partition("\n")[0]
        raise InstrumentError(f"the checkpoint holds what cannot be read back safely: {reason}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise InstrumentError("this is no checkpoint of this version")
    return state


def restore(state: dict[str, Any], experiment: Experiment, probe: Probe) -> None:
    """Put an experiment and its probe, made from the same configuration, into the state of a checkpoint; random numbers aside.

    Raises:
        ConfigError: It does not fit.
    """
    mesh = mesh_of(experiment.model)
    try:
        for name, part in (_shared(experiment) | _own(experiment)).items():
            part.load_state_dict(state[name] if mesh is None else from_plain(state[name], mesh))
        for name, buffer in _unsaved_buffers(experiment.model, state["model"]):
            buffer.copy_(state["buffers"][name])
        experiment.batches.load_state_dict(state["batches"])
        probe.load_state_dict(state["probe"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(Mistake("resume", "the checkpoint does not fit this experiment", written=reason)) from None


def restore_random(state: dict[str, Any], device: torch.device) -> None:
    """Put the random numbers of the process into the state of a checkpoint; done last, before the next step."""
    kept = state["random"]
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = kept["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(kept["torch"])
    if kept["cuda"] is not None:
        torch.cuda.set_rng_state(kept["cuda"], device)


def _random_state(device: torch.device) -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _shared(experiment: Experiment) -> dict[str, Any]:
    """What has a state that all processes have a copy, or a shard, of."""
    parts = {
        "model": experiment.model,
        "optimizer": experiment.optimizer,
        "scheduler": experiment.scheduler,
        "scaler": experiment.scaler,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _own(experiment: Experiment) -> dict[str, Any]:
    """What has a state of this process's own: a task of the user's, where it says what its state is."""
    return {"task": experiment.task} if hasattr(experiment.task, "state_dict") else {}


def _states(parts: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in parts.items()}


def _unsaved_buffers(model: nn.Module, saved: Mapping[str, Any]) -> list[tuple[str, torch.Tensor]]:
    """Buffers that are not in the model's state dict."""
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]
