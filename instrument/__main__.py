"""`python -m instrument`: train a model with hooks. The exit codes are those of `instrument.cli.command`."""

from __future__ import annotations

from .cli.interrupts import end_with_one_line


def main() -> None:
    """Run the command line and end the process."""
    end_with_one_line()
    from .cli.command import command
    from .cli.job import job

    command(job)


if __name__ == "__main__":
    main()
