"""`python -m instrument.verify +exp=...`: proof that an experiment's record hooks change nothing.

The experiment is trained bare and with its record hooks; losses, gradients, weights, buffers and random states are
compared at each step, to the last bit. Exit code 0: equal; 1: not; 2: a mistake in what was asked.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from .errors import ConfigError, Mistake
from .run.cli.command import command
from .run.cli.launch import told
from .run.cli.reading import read_config
from .run.ranks.torchrun import joined

if TYPE_CHECKING:
    from .run.verification import Certificate


def main() -> None:
    """The command line; ends the process."""
    command(certify)


def certify(config: DictConfig) -> None:
    """Verify an experiment, print the certificate, and keep it as `certificate.json` in the job's folder."""
    with told() as place:
        parsed, _ = read_config(config)
        if joined() is not None:
            raise ConfigError(
                Mistake("", "a proof is made by one process", allowed="the same command without torchrun")
            )
        from .run.verification import verify

        certificate = verify(parsed)
        path = Path(place.folder) / "certificate.json"
        path.write_text(json.dumps({**asdict(certificate), "holds": certificate.holds}, indent=2) + "\n")
        print(_words(certificate, path))
        if not certificate.holds:
            raise SystemExit(1)


def _words(certificate: Certificate, path: Path) -> str:
    lines = [
        f"{certificate.steps} steps, bare and with {len(certificate.hooks)} record hooks at {certificate.sites} places "
        f"({', '.join(certificate.hooks) or 'none'}), which recorded {certificate.rows:,} rows",
        f"compared at each step: the loss, {certificate.tensors} gradients, weights and buffers, and the random state",
    ]
    if certificate.left_out:
        lines.append(f"left out, since they change values by design: {', '.join(certificate.left_out)}")
    verdict = "EQUAL to the last bit" if certificate.holds else f"NOT EQUAL: {certificate.difference}"
    return "\n".join([*lines, verdict, f"certificate  {path}"])


if __name__ == "__main__":
    main()
