"""`python -m instrument.verify +exp=...`: verify that the record hooks of an experiment do not change training.

The experiment is trained without hooks and with its record hooks. Metrics, gradients, parameters, buffers, the
optimizer state and random states must have equal bits after each step and each evaluation: their fingerprints are compared.
Under torchrun, those of all processes are compared.

Exit codes: 0, equal; 1, the hooks change a value; 2, the arguments are invalid; 3, two trainings without hooks differ,
so nothing can be verified.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from instrument.commands.hydra_main import command
from instrument.commands.job import importing, read_config, report_errors
from instrument.errors import ConfigError, Problem
from instrument.formatting import counted
from instrument.training.distributed.torchrun import is_rank_zero, process_group

if TYPE_CHECKING:
    from instrument.training.verification import Certificate

NOT_REPEATABLE = 3  # exit code if two trainings without hooks differ


def main() -> None:
    as_json = "--json" in sys.argv
    sys.argv[:] = [each for each in sys.argv if each != "--json"]
    command(partial(certify, as_json=as_json))


def certify(config: DictConfig, *, as_json: bool = False) -> None:
    """Verify an experiment, print the certificate, and write it to `certificate.json` in the folder of the job."""
    with report_errors() as (folder, _):
        parsed, _ = read_config(config)
        if parsed.mode != "train":
            message = "verification compares two trainings, but this mode does not train"
            raise ConfigError(Problem("mode", message, given=parsed.mode, allowed="train"))
        with importing():
            from instrument.training.verification import verify, write_certificate

        processes = process_group()
        with redirect_stdout(sys.stderr if as_json else sys.stdout):  # of the model
            certificate = verify(parsed, processes)
        if is_rank_zero():
            content = write_certificate(certificate, folder)
            print(content if as_json else _summary(certificate, folder, is_compiled=parsed.train.compile is not None))
        if processes is not None:
            processes.close()
        if not certificate.holds:
            raise SystemExit(1 if certificate.unrepeated is None else NOT_REPEATABLE)


def _summary(certificate: Certificate, folder: Path, *, is_compiled: bool) -> str:
    lines = [
        f"{counted(certificate.steps, 'step')} and {counted(certificate.evaluations, 'evaluation')}, without hooks and with "
        f"{counted(len(certificate.hooks), 'record hook')} at {counted(certificate.sites, 'location')} "
        f"({', '.join(certificate.hooks) or 'none'}), which recorded {certificate.rows:,} rows",
        f"compared after each: metrics, {certificate.tensors} gradients, parameters, buffers and optimizer tensors, "
        "random states",
    ]
    if certificate.left_out:
        lines.append(f"not verified, since they change values by design: {', '.join(certificate.left_out)}")
    verdict = "EQUAL BITS: all compared values are equal"
    if certificate.difference is not None:
        assert certificate.largest is not None, "it is computed if anything differs"
        size, name = certificate.largest
        verdict = f"NOT EQUAL: {certificate.difference}\nat the end, parameters differ by at most {size:.3g} ({name})"
        if is_compiled:
            verdict += ". In a compiled model, hooks change which operations are fused, and with it their rounding"
    elif certificate.unrepeated is not None:
        verdict = (
            f"NOT REPEATABLE: two trainings without hooks differ at {certificate.unrepeated}. The model is not "
            "deterministic, so the hooks cannot be verified. Possible causes: the time, os.urandom, a global counter, "
            "or an operation without a deterministic algorithm (set deterministic=true)"
        )
    return "\n".join([*lines, verdict, f"certificate  {folder}/certificate.json"])


if __name__ == "__main__":
    main()
