"""Commands in separate processes, forked from a server that has already imported PyTorch.

Importing PyTorch, Hydra and the packages of a run takes longer than most runs of the tests. Each pytest process has one
server, which starts with the first command.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from waiting import TIMEOUT

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["__main__", "preloaded"])
TESTS = Path(__file__).parent


class Command:
    """A running command, as with `python -m` or of a script, whose output is written to `.NAME.out` and `.NAME.err`.

    The entries of `PYTHONPATH` in its environment and its working directory are added to `sys.path`.
    """

    def __init__(
        self, folder: Path, module: str | Path, arguments: Sequence[str], environment: Mapping[str, str], name: str
    ) -> None:
        self.arguments = [str(module), *arguments]
        self.outputs = [folder / f".{name}.{stream}" for stream in ("out", "err")]
        variables = {**os.environ, **environment}
        self.process: ForkServerProcess = CONTEXT.Process(
            target=_main, args=(str(folder), module, self.arguments, variables, [str(file) for file in self.outputs])
        )
        # The server imports the module `preloaded`, and the package of this repository, from PYTHONPATH.
        before, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), f"{TESTS}{os.pathsep}{TESTS.parent}"
        try:
            self.process.start()
        finally:
            del os.environ["PYTHONPATH"]
            if before is not None:
                os.environ["PYTHONPATH"] = before

    def send(self, number: int) -> None:
        """Send a signal to the process."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def poll(self) -> int | None:
        """Return the exit code; None while the process runs."""
        return self.process.exitcode

    def wait(self) -> subprocess.CompletedProcess[str]:
        """Wait until the process ends.

        Returns:
            The exit code, and the text printed to stdout and stderr.

        Raises:
            subprocess.TimeoutExpired: The process runs for more than `TIMEOUT` seconds. It is killed.
        """
        self.process.join(TIMEOUT)
        if self.process.exitcode is None:
            self.send(signal.SIGKILL)
            raise subprocess.TimeoutExpired(self.arguments, TIMEOUT)
        printed = [file.read_text(errors="replace") for file in self.outputs]
        for file in self.outputs:
            file.unlink()
        return subprocess.CompletedProcess(self.arguments, self.process.exitcode, *printed)


def _main(
    folder: str, module: str | Path, arguments: list[str], variables: dict[str, str], outputs: Sequence[str]
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    for descriptor, file in enumerate(outputs, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A background process would ignore SIGINT.
    sys.path[:0] = [folder, *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = arguments
    try:
        if isinstance(module, Path):
            sys.path.insert(0, str(module.parent))
            runpy.run_path(str(module), run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # A child process of multiprocessing does not call them.
