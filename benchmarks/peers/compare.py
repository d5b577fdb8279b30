"""The same job through other tools, each in an environment of its own, and one table of what a step costs with each.

    python benchmarks/peers/compare.py [--only captum wandb] [--rounds 8]

The environments are made in `.peers/`, on top of the one that this runs in: PyTorch is shared, all that a tool brings along is
its own. What fails is a row too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from measure import machine  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

ENVIRONMENTS = HERE.parent.parent / ".peers"
PEERS = {
    "instrument": None,
    "nvdlfw-inspect": "nvdlfw-inspect==0.2.2",
    "tensorboard": "tensorboard==2.21.0",
    "wandb": "wandb==0.31.0",
    "nnsight": "nnsight==0.8.1",
    "tdhook": "tdhook==0.3.0",
    "torchlens": "torchlens==2.36.1",
    "captum": "captum==0.9.0",
}
QUIET = {"WANDB_MODE": "offline", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def environment(tool: str, requirement: str | None) -> Path:
    """The Python of a tool's environment, which is made where it is missing; our own where nothing is required."""
    if requirement is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / tool
    python = folder / "bin" / "python"
    done = folder / requirement
    if not done.exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(packages, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], check=True
        )
        done.touch()
    return python


def results(tool: str, python: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """The lines that the tool's job prints, shown as they come."""
    command = [str(python), "-W", "ignore", str(HERE / "job.py"), tool, *arguments]
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                found.append(json.loads(line))
                print(f"{tool}: {line.strip()}", file=sys.stderr, flush=True)
    if process.returncode:
        found.append({"workload": "", "what": "", "failed": f"exit code {process.returncode}"})
    return found


def cell(result: dict[str, Any] | None) -> str:
    """A ratio, or what went wrong."""
    if result is None:
        return ""
    return result["failed"].replace("|", "\\|") if "failed" in result else f"{result['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default="8")
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    given = parser.parse_args()
    print(machine())
    print("\n| tool | what is kept of a step | " + " | ".join(w.name for w in WORKLOADS.values()) + " |")
    print("|---|---|" + "---|" * len(WORKLOADS), flush=True)
    for tool in given.only:
        requirement = PEERS[tool]
        try:
            found = results(tool, environment(tool, requirement), ["--rounds", given.rounds])
        except subprocess.CalledProcessError as error:
            found = [{"workload": "", "what": "", "failed": f"could not be installed: {error}"}]
        for what in dict.fromkeys(result["what"] for result in found):
            of = {result["workload"]: result for result in found if result["what"] == what}
            cells = [cell(of.get(name, of.get(""))) for name in WORKLOADS]
            print(f"| {requirement or tool} | {what} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
