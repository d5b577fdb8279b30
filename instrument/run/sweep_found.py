"""What is found in a folder that somebody asks about: a sweep, or runs that no sweep made."""

from __future__ import annotations

from pathlib import Path

from ..analysis.load import NoRunError, Run, load
from ..analysis.trainings import differing_overrides, in_yaml
from ..errors import ConfigError, Mistake
from ..sinks.remote import is_address
from .sweep_jobs import RECORD, Jobs, Sweep, SweepJob, error_of, unwarned

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


def jobs_in(folder: str) -> Jobs:
    """The sweep in a folder, or the runs below it.

    Args:
        folder: Its path or its address.

    Raises:
        ConfigError: There is neither.
    """
    if not is_address(folder) and (Path(folder) / RECORD).exists():
        return Sweep(Path(folder))
    try:
        run = load(folder)
    except NoRunError as error:
        raise ConfigError(Mistake("", f"there is no sweep: {error}", written=folder, allowed=ALLOWED)) from None
    if run.folders == [run.path]:
        above = Path(folder).resolve().parent
        is_job = not is_address(folder) and (above / RECORD).exists()
        problem = "this is one run, and no sweep"
        raise ConfigError(Mistake("", problem, folder, ALLOWED, [str(Path(folder).parent)] if is_job else ()))
    return Runs(run)
