"""The command line around a job: compose a configuration with Hydra, run the job, return an exit code.

Exit codes: 0, the run is done; 1, it failed, for example in a hook, in custom code, or because the disk is full; 2, the command line or
the configuration is invalid, which is found before step 0, and no run folder remains; 3, a rule with `then: stop`, or `control`, stopped
the run; 4, the fingerprint of the training is not that of `train.fingerprint`; 130, interrupted by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress

import hydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig

from ..config.hydra_internals import WorkingDirectoryConf, check_options, use_field_loader
from ..config.spec_file import conf_folder
from ..errors import ConfigError, InstrumentError
from ..training.distributed.torchrun import is_rank_zero, process_group, synced_errors
from ..training.sweep_jobs import print_summary
from .job import JobFailedError, as_instrument_error, print_error
from .validation_callback import HydraCallback

FULL_ERROR = "HYDRA_FULL_ERROR"  # variable of Hydra; 1 shows full tracebacks


def command(job: Callable[[DictConfig], object], config_name: str = "config") -> None:
    """Compose the configuration with this name from the command line, and run a job with it.

    Raises:
        SystemExit: The command failed or was interrupted; see the exit codes above.
        Exception: The original error of the composition, if `HYDRA_FULL_ERROR=1`.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # makes custom models in the working directory importable
    full_error = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"  # Hydra raises errors instead of printing them
    try:
        check_options(sys.argv[1:])
        Plugins.instance().register(WorkingDirectoryConf)
        app = hydra.main(version_base="1.3", config_path=str(conf_folder()), config_name=config_name)(job)
        with use_field_loader():
            app()
    except JobFailedError as failed:
        _end(failed.exit_code)
        sys.exit(failed.exit_code)
    except SystemExit as stop:
        if stop.code:
            _end(stop.code)
        raise
    except KeyboardInterrupt:
        if is_rank_zero():
            print("\ninterrupted", file=sys.stderr)
        _print_sweep_summary()
        sys.exit(130)
    except Exception as error:
        # A job reports its own errors, so this error comes from the composition.
        if full_error == "1":
            raise
        problem = as_instrument_error(error, sys.argv[1:])
        with suppress(InstrumentError), synced_errors(process_group()):  # Only rank 0 prints the error.
            raise problem from error
        print_error(problem)
        _end(problem.exit_code)
        sys.exit(problem.exit_code)
    finally:
        del os.environ[FULL_ERROR]
        os.environ |= {} if full_error is None else {FULL_ERROR: full_error}
        HydraCallback.release_lock()


def _end(exit_code: object) -> None:
    """Remove the folder of a run that was refused; otherwise print the summary of the sweep, if there is one."""
    if exit_code == ConfigError.exit_code and HydraCallback.restore_folder():
        return
    _print_sweep_summary()


def _print_sweep_summary() -> None:
    if HydraCallback.sweep_folder is not None:
        print_summary(HydraCallback.sweep_folder)
