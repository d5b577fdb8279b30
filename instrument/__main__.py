"""`python -m instrument`: train, with hooks. The exit codes are those of `instrument.run.command`."""

from __future__ import annotations

from .run.command import command
from .run.launch import job


def main() -> None:
    """The command line; ends the process."""
    command(job)


if __name__ == "__main__":
    main()
