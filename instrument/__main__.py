"""`python -m instrument`: Hydra in, exit code out.

0    done
1    a failure while running: in a hook, in the user's own code, in the machine
2    a mistake in what was asked, found before a step was spent on it
130  interrupted by Ctrl-C
"""

from __future__ import annotations

import os
import sys

import hydra
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import InstrumentError, nearest
from .run.launch import JobFailed, OwnConf, conf_folder, job


def main() -> None:
    """The command line; ends the process."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a model of the user's own lies in the working directory
    Plugins.instance().register(OwnConf)
    app = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)
    try:
        app()
    except SystemExit as stop:
        # Hydra reports what fails and ends with 1; what it was about is the exception that it was handling.
        cause = stop.__context__
        if isinstance(cause, CompactHydraException) and not isinstance(cause, JobFailed):
            suggest(cause.__cause__)
            sys.exit(2)
        sys.exit(cause.exit_code if isinstance(cause, InstrumentError | JobFailed) else stop.code)
    except KeyboardInterrupt:
        sys.exit(130)


def suggest(cause: BaseException | None) -> None:
    """Add to Hydra's words on an unknown key the nearest keys that there are."""
    if (
        isinstance(cause, OmegaConfBaseException)
        and isinstance(cause.key, str)
        and OmegaConf.is_dict(cause.parent_node)
    ):
        close = nearest(cause.key, [str(key) for key in cause.parent_node])
        if close:
            print(f"nearest: {', '.join(close)}", file=sys.stderr)


if __name__ == "__main__":
    main()
