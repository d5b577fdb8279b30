"""The same job with other tools, each in a separate environment. The script prints a table of relative step times.

    python benchmarks/peers/compare.py [--only captum wandb] [--rounds 8]

The environments are created in `.peers/` on top of the current environment: they share PyTorch, and each has the dependencies of
one tool. A tool that fails also has a row, with its error.
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
    """Return the Python of a tool's environment, created if it is missing; the current Python without a requirement."""
    if requirement is None:
        return Path(sys.executable)
    folder = ENVIRONMENTS / tool
    python = folder / "bin" / "python"
    marker = folder / requirement
    if not marker.exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = sysconfig.get_path("purelib", vars={"base": str(folder)})
        Path(packages, "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement], check=True
        )
        marker.touch()
    return python


def results(tool: str, python: Path, arguments: list[str]) -> list[dict[str, Any]]:
    """Run the jobs of a tool and return their results. Each result is also printed to stderr when it is available."""
    command = [str(python), "-W", "ignore", str(HERE / "job.py"), tool, *arguments]
    collected = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET}) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                collected.append(json.loads(line))
                print(f"{tool}: {line.strip()}", file=sys.stderr, flush=True)
    if process.returncode:
        collected.append({"workload": "", "label": "", "failed": f"exit code {process.returncode}"})
    return collected


def cell(result: dict[str, Any] | None) -> str:
    """Return the cell of the table: the ratio, or the error."""
    if result is None:
        return ""
    return result["failed"].replace("|", "\\|") if "failed" in result else f"{result['ratio']:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default="8")
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    options = parser.parse_args()
    print(machine())
    print("\n| tool | recorded per step | " + " | ".join(w.name for w in WORKLOADS.values()) + " |")
    print("|---|---|" + "---|" * len(WORKLOADS), flush=True)
    for tool in options.only:
        requirement = PEERS[tool]
        try:
            rows = results(tool, environment(tool, requirement), ["--rounds", options.rounds])
        except subprocess.CalledProcessError as error:
            rows = [{"workload": "", "label": "", "failed": f"could not be installed: {error}"}]
        for label in dict.fromkeys(result["label"] for result in rows):
            by_workload = {result["workload"]: result for result in rows if result["label"] == label}
            cells = [cell(by_workload.get(name, by_workload.get(""))) for name in WORKLOADS]
            print(f"| {requirement or tool} | {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
