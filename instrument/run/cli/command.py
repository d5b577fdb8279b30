"""The command line around a job: Hydra in, exit code out.

0    done
1    a failure while running: in a hook, in the user's own code, in the machine; or a proof that failed
2    a mistake in what was asked, found before a step was spent on it
130  interrupted by Ctrl-C
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import hydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from ...errors import ConfigError, InstrumentError
from ..ranks.torchrun import agreed, joined
from ..sweep.told import tell_sweep
from .guard import Guard
from .launch import JobFailedError, complain, refused
from .loader import fields_known
from .search_path import OwnConf, conf_folder

FULL_ERROR = "HYDRA_FULL_ERROR"  # Hydra's own switch: set to 1 by the user, a whole traceback is shown


def command(job: Callable[[DictConfig], object]) -> None:
    """Compose a configuration of what stands on the command line, and do a job with it; ends the process."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # a model of the user's own lies in the working directory
    Plugins.instance().register(OwnConf)
    app = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name="config")(job)
    try:
        with hydra_hands_errors_on(), fields_known():
            app()
    except JobFailedError as failed:
        _end(failed.exit_code)
        sys.exit(failed.exit_code)
    except SystemExit as stop:
        if stop.code:
            _end(stop.code)
        raise
    except KeyboardInterrupt:
        _tell_sweep()
        sys.exit(130)
    except Exception as error:
        # A job tells about its own errors: this one is about what there is to compose.
        if os.environ.get(FULL_ERROR) == "1":
            raise
        own = refused(error, sys.argv[1:])
        with suppress(InstrumentError), agreed(joined()):  # of several processes one speaks
            raise own from error
        complain(own)
        _end(own.exit_code)
        sys.exit(own.exit_code)
    finally:
        Guard.let_go()


def _end(exit_code: object) -> None:
    """A run that was refused leaves no folder; of a sweep it is told which jobs are not done."""
    if exit_code == ConfigError.exit_code and Guard.withdraw():
        return
    _tell_sweep()


def _tell_sweep() -> None:
    if Guard.sweep is not None:
        tell_sweep(Guard.sweep)


@contextmanager
def hydra_hands_errors_on() -> Iterator[None]:
    """Hydra raises what it would otherwise print itself, with a traceback where it is no exception of its own."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before
