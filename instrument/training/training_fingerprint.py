"""The fingerprint of a training, for run.json: its losses, and its parameters and buffers at the end."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..errors import FingerprintError
from ..stats.fingerprint import fingerprint
from ..stats.flatten import unreadable
from ..storage.run_files import RunFiles
from .distributed.process_group import Processes
from .experiment import Experiment

_PARTS = ("losses", "parameters and buffers")


def training_fingerprint(experiment: Experiment, folder: Path, processes: Processes | None) -> str:
    """Return two numbers of 64 bits, hexadecimal: that of the losses in the table `metrics`, and that of all parameters and buffers.

    With several processes, the second one covers those of all. All processes have to call it, after the last rows were written.
    """
    named = [*experiment.model.named_parameters(), *experiment.model.named_buffers()]
    weights = repr([(name, int(fingerprint(tensor))) for name, tensor in named if unreadable(tensor) is None])
    every = [weights] if processes is None else processes.exchange(weights)
    metrics = RunFiles(folder).read("metrics", ["step", "phase", "loss"])
    rows = zip(*(metrics[name].to_pylist() for name in metrics.column_names), strict=True)
    losses = repr(sorted(rows, key=lambda row: row[:2]))
    return "-".join(hashlib.blake2b(text.encode(), digest_size=8).hexdigest() for text in (losses, "".join(every)))


def check_fingerprint(expected: str, found: str) -> None:
    """Raise a FingerprintError if the fingerprint of a training is not the expected one."""
    pairs = zip(_PARTS, expected.split("-"), found.split("-"), strict=True)
    if differing := [part for part, one, other in pairs if one != other]:
        raise FingerprintError(
            f"train.fingerprint: the {' and the '.join(differing)} of the training differ from the expected ones\n"
            f"    given    {expected}\n    found    {found}\n"
            "    fix      instrument diff names the first difference to an earlier run"
        )
