"""The same job with other tools, each in a separate environment: the table of relative step times in `docs/comparison.md`.

    python benchmarks/peers/compare.py [--only captum wandb] [--rounds 8]

The environments are created in `.peers/` on top of the current environment: they share PyTorch, and each has the dependencies of
one tool. A tool that fails also has a row, with its error. With `--only`, the other rows of the page stay.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from measure import machine  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

ENVIRONMENTS = HERE.parent.parent / ".peers"
PAGE = HERE.parent.parent / "docs" / "comparison.md"
BEGIN, END = "<!-- peers: made by make bench-peers -->\n", "<!-- /peers -->"
HEADER = ("tool", "recorded per step", *(workload.name for workload in WORKLOADS.values()))
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


def updated(page: str, measured: Mapping[str, Sequence[str]]) -> str:
    """Return the page with new rows of the measured tools. The other rows stay, if their version is that of `PEERS`."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    hardware = machine() if measured.keys() == PEERS.keys() else old.partition("\n")[0]
    rows = []
    for tool, requirement in PEERS.items():
        kept = [row for row in old.splitlines() if row.startswith(f"| {requirement or tool} |")]
        rows += measured.get(tool, kept)
    table = "\n".join([f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|", *rows])
    return f"{before}{BEGIN}{hardware}\n\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", default="8")
    parser.add_argument("--only", nargs="*", choices=list(PEERS), default=list(PEERS))
    options = parser.parse_args()
    measured: dict[str, list[str]] = {}
    for tool in options.only:
        requirement = PEERS[tool]
        try:
            rows = results(tool, environment(tool, requirement), ["--rounds", options.rounds])
        except subprocess.CalledProcessError as error:
            rows = [{"workload": "", "label": "", "failed": f"could not be installed: {error}"}]
        for label in dict.fromkeys(result["label"] for result in rows):
            by_workload = {result["workload"]: result for result in rows if result["label"] == label}
            cells = [cell(by_workload.get(name, by_workload.get(""))) for name in WORKLOADS]
            measured.setdefault(tool, []).append(f"| {requirement or tool} | {label} | {' | '.join(cells)} |")
    PAGE.write_text(updated(PAGE.read_text(), measured))
    print(f"written: {PAGE}")


if __name__ == "__main__":
    main()
