"""What is found in a folder that somebody asks about: a sweep, or runs that no sweep made."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from ...analysis.folders import NoRunError
from ...analysis.load import Run, load
from ...analysis.trainings import differing_overrides, in_yaml
from ...errors import ConfigError, Mistake
from ...sinks.remote import SWEEP_RECORD, is_address
from .jobs import (
    MISSING,
    Jobs,
    Sweep,
    SweepJob,
    composed,
    error_of,
    is_laid_out,
    keys_of,
    natural,
    read_sweep,
    swept_in,
    unwarned,
)

ALLOWED = "the folder of a sweep, or one above several runs"


class Runs(Jobs):
    """Runs below a folder that has no record of a sweep, such as those of a loop in a shell, or one behind an address:
    what is there is known, and not what is missing.

    Args:
        run: All of them.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_laid_out = False

    @property
    def swept(self) -> frozenset[str]:
        """The keys in which the command lines differ."""
        return frozenset(differing_overrides(self.run))

    def jobs(self) -> list[SweepJob]:
        """All runs, in the order of their numbers."""
        with unwarned():
            infos = self.run.infos
        return [
            SweepJob(
                str(folder.relative_to(self.run.path)),
                folder,
                tuple(f"{key}={in_yaml(value)}" for key, value in info["overrides"].items()),
                info["status"],
                error_of(info),
            )
            for folder, info in zip(self.run.folders, infos, strict=True)
        ]


class SentSweep(Jobs):
    """A sweep behind an address: its record says which jobs there are to be, and the runs there what became of them.

    Args:
        run: All of them.
        hydra: The part `hydra` of the sweep's configuration.
    """

    def __init__(self, run: Run, hydra: DictConfig) -> None:
        self.runs, self.hydra = Runs(run), hydra
        self.is_laid_out = is_laid_out(hydra)

    @property
    def swept(self) -> frozenset[str]:
        """The keys that tell the jobs from each other."""
        return keys_of(swept_in(self.hydra))

    def jobs(self) -> list[SweepJob]:
        """All jobs, in the order of their numbers; those that are there alone where it is not known which number is which."""
        there = {job.name: job for job in self.runs.jobs()}
        shuffled = any(getattr(override.value(), "shuffle", False) for override in swept_in(self.hydra))
        if not self.is_laid_out or shuffled:
            return list(there.values())
        planned = {str(number): overrides for number, overrides in enumerate(composed(self.hydra))}
        above = self.runs.run.path
        missing = [
            SweepJob(name, above / name, overrides, MISSING, None)
            for name, overrides in planned.items()
            if name not in there
        ]
        return sorted([*there.values(), *missing], key=lambda job: natural(job.name))


def jobs_in(folder: str) -> Jobs:
    """The sweep in a folder, or the runs below it.

    Args:
        folder: Its path or its address.

    Raises:
        ConfigError: There is neither.
    """
    if not is_address(folder) and (Path(folder) / SWEEP_RECORD).exists():
        return Sweep(Path(folder))
    try:
        run = load(folder)
    except NoRunError as error:
        raise ConfigError(Mistake("", f"there is no sweep: {error}", written=folder, allowed=ALLOWED)) from None
    if run.folders == [run.path]:
        above = Path(folder).resolve().parent
        is_job = not is_address(folder) and (above / SWEEP_RECORD).exists()
        problem = "this is one run, and no sweep"
        raise ConfigError(Mistake("", problem, folder, ALLOWED, [str(Path(folder).parent)] if is_job else ()))
    if is_address(folder) and (run.path / SWEEP_RECORD).exists():
        return SentSweep(run, read_sweep(run.path).hydra)
    return Runs(run)
