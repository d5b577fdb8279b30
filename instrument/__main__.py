"""`instrument VERB`, and `python -m instrument`: train a model with hooks. The exit codes are those of `instrument.cli.command`."""

from __future__ import annotations

from .cli.interrupts import handle_interrupts


def main() -> None:
    """Run the command line and end the process."""
    handle_interrupts()
    from .verbs import run_verb

    run_verb()
    from .cli.command import command
    from .cli.job import job

    command(job)


if __name__ == "__main__":
    main()
