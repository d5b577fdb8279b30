"""`python -m instrument.verify +exp=...`: verify that the record hooks of an experiment do not change training.

The experiment is trained without hooks and with its record hooks. Metrics, gradients, parameters, buffers, the
optimizer state and random states must be bit-identical after each step and each evaluation, and so must the outputs of
evaluations.

Exit codes: 0, equal; 1, the hooks change a value; 2, the arguments are invalid; 3, two trainings without hooks differ,
so nothing can be verified.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from .cli.command import command
from .cli.fast_imports import importing
from .cli.job import told
from .cli.reading import read_config
from .distributed.torchrun import joined
from .errors import ConfigError, Mistake

if TYPE_CHECKING:
    from .verification import Certificate

UNREPEATED = 3  # exit code if two trainings without hooks differ


def main() -> None:
    """Run the command line and end the process."""
    command(certify)


def certify(config: DictConfig) -> None:
    """Verify an experiment, print the certificate, and write it to `certificate.json` in the folder of the job.

    Args:
        config: The composed Hydra configuration of the experiment.

    Raises:
        SystemExit: The trainings differ; the code is 1, or 3 if trainings without hooks differ as well.
    """
    with told() as place:
        parsed, _ = read_config(config)
        if joined() is not None:
            raise ConfigError(
                Mistake("", "a proof is made by one process", allowed="the same command without torchrun")
            )
        with importing():
            from .verification import verify

        certificate = verify(parsed)
        path = Path(place.folder) / "certificate.json"
        path.write_text(json.dumps({**asdict(certificate), "holds": certificate.holds}, indent=2) + "\n")
        print(_words(certificate, path))
        if not certificate.holds:
            raise SystemExit(1 if certificate.unrepeated is None else UNREPEATED)


def _words(certificate: Certificate, path: Path) -> str:
    lines = [
        f"{certificate.steps} steps and {certificate.evaluations} evaluations, without hooks and with "
        f"{len(certificate.hooks)} record hooks at {certificate.sites} places "
        f"({', '.join(certificate.hooks) or 'none'}), which recorded {certificate.rows:,} rows",
        f"compared after each: metrics, {certificate.tensors} gradients, parameters, buffers and tensors of the optimizer, "
        "random states; and the outputs of evaluations",
    ]
    if certificate.left_out:
        lines.append(f"left out, since they change values by design: {', '.join(certificate.left_out)}")
    verdict = "EQUAL to the last bit"
    if certificate.difference is not None:
        verdict = f"NOT EQUAL: {certificate.difference}"
    elif certificate.unrepeated is not None:
        verdict = (
            f"NOT REPEATABLE: two trainings without hooks differ at {certificate.unrepeated}. The model itself does not "
            "repeat, so nothing can be proved about the hooks. Look for the time, os.urandom, a global counter, or an "
            "operation without a deterministic algorithm (deterministic=true)"
        )
    return "\n".join([*lines, verdict, f"certificate  {path}"])


if __name__ == "__main__":
    main()
