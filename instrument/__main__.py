"""`instrument VERB`, and `python -m instrument`: train a model with hooks. The exit codes are those of `instrument.commands.hydra_main`."""

from __future__ import annotations

from .commands.interrupts import handle_interrupts


def main() -> None:
    """Run the command line and end the process."""
    handle_interrupts()
    from .commands.verbs import run_verb

    run_verb()
    from .commands.hydra_main import command
    from .commands.job import job

    command(job)


if __name__ == "__main__":
    main()
