"""`python -m instrument`: train a model with hooks. The exit codes are those of `instrument.cli.command`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process."""
    try:  # the imports take a noticeable time
        from .cli.command import command
        from .cli.job import job
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    command(job)


if __name__ == "__main__":
    main()
