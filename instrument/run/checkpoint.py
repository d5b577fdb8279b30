"""A training's whole state on disk, from which it goes on as if it had never been stopped.

    checkpoints/step-00000300.pt

It is written when a step has ended: first all rows become Parquet parts, and their numbers go into the checkpoint; parts
of a higher number are of steps that are done again. A checkpoint is written aside and renamed, then the one before it is
removed. It holds tensors, numbers, texts, lists and dictionaries, and is read with `weights_only=True`.
"""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ..capture.probe import Probe
from ..errors import ConfigError, InstrumentError, Mistake
from ..sinks.parquet import ParquetSink
from .experiment import Experiment

FOLDER = "checkpoints"
VERSION = 1


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's folder.
        every: A checkpoint every N steps, and after the last one; 0: none.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.folder = folder
        self.every = every

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
        probe.flush()
        state = {
            "version": VERSION,
            "step": probe.step,
            "metrics": dict(metrics),
            "parts": sink.settle(),
            "probe": probe.state_dict(),
            "batches": experiment.batches.state_dict(),
            **{name: part.state_dict() for name, part in _parts(experiment).items()},
            "buffers": dict(_unsaved_buffers(experiment.model)),
            "random": _random_state(),
        }
        path = self.folder / FOLDER / f"step-{probe.step:08d}.pt"
        aside = path.with_suffix(".tmp")
        try:
            path.parent.mkdir(exist_ok=True)
            with open(aside, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            _read(aside)  # what cannot be read back is told now
            os.replace(aside, path)
        except OSError as error:
            raise InstrumentError(f"the checkpoint {path} cannot be written: {error.strerror}") from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InstrumentError(f"the checkpoint {path} cannot be written: {error}") from error
        for older in self._found():
            if older != path:
                with suppress(OSError):
                    older.unlink()

    def load(self) -> dict[str, Any]:
        """The latest checkpoint.

        Raises:
            ConfigError: There is none, or it is not one of ours.
        """
        found = self._found()
        if not found:
            raise ConfigError(
                Mistake(
                    "resume",
                    "this run has no checkpoint: train.checkpoint.every was 0, or it ended before the first one",
                    written=str(self.folder),
                )
            )
        try:
            state = _read(found[-1])
        except InstrumentError as error:
            raise ConfigError(Mistake("resume", str(error), written=str(found[-1]))) from None
        return state

    def _found(self) -> list[Path]:
        return sorted((self.folder / FOLDER).glob("step-*.pt"))


def _read(path: Path) -> dict[str, Any]:
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of many kinds: what a file of any content makes torch.load raise
        reason = str(error).strip().partition("\n")[0]
        raise InstrumentError(f"the checkpoint holds what cannot be read back safely: {reason}") from error
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise InstrumentError("this is no checkpoint of this version")
    return state


def restore(state: dict[str, Any], experiment: Experiment) -> None:
    """Put an experiment, made from the same configuration, into the state of a checkpoint; random numbers aside.

    Raises:
        ConfigError: It does not fit.
    """
    try:
        for name, part in _parts(experiment).items():
            part.load_state_dict(state[name])
        for name, buffer in _unsaved_buffers(experiment.model):
            buffer.copy_(state["buffers"][name])
        experiment.batches.load_state_dict(state["batches"])
    except (KeyError, RuntimeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(Mistake("resume", "the checkpoint does not fit the model", written=reason)) from None


def restore_random(state: dict[str, Any]) -> None:
    """Put the random numbers of the process into the state of a checkpoint; done last, before the next step."""
    kept = state["random"]
    version, words, gauss = kept["python"]
    random.setstate((version, tuple(words), gauss))
    name, words, *rest = kept["numpy"]
    np.random.set_state((name, words.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(kept["torch"])
    for device, words in enumerate(kept["cuda"]):
        torch.cuda.set_rng_state(words, device)


def _random_state() -> dict[str, Any]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, np.int64)), *rest),
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device) for device in range(torch.cuda.device_count())],
    }


def _parts(experiment: Experiment) -> dict[str, Any]:
    """Whatever has a state of its own, by name: a task of the user's too, where it says what its state is."""
    parts: dict[str, Any] = {
        "model": experiment.model,
        "optimizer": experiment.optimizer,
        "scheduler": experiment.scheduler,
        "scaler": experiment.scaler,
        "task": experiment.task if hasattr(experiment.task, "state_dict") else None,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _unsaved_buffers(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Buffers that are no part of the model's own state dict."""
    saved = model.state_dict(keep_vars=True).keys()
    return [(name, buffer) for name, buffer in model.named_buffers() if name not in saved]
