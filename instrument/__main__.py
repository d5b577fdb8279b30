"""`python -m instrument`: train a model with hooks. The exit codes are those of `instrument.run.cli.command`."""

from __future__ import annotations

from .run.cli.command import command
from .run.cli.launch import job


def main() -> None:
    """Run the command line and end the process."""
    command(job)


if __name__ == "__main__":
    main()
