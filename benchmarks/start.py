"""Start-up time of commands relative to `import torch`. Each command runs in a new process; the commands alternate.

python benchmarks/start.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from statistics import median

from measure import machine

PLAIN_PYTORCH = """
import torch
from torch import nn
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(torch.randn(64, 64)), torch.randint(10, (64,))).backward()
    optimizer.step()
"""
RUN = ["-m", "instrument", "model=mlp", "model.sizes=[64,64,10]", "data=digits", "train.steps=2"]
HOOKS = ["+hooks.outputs={layers: '**', kind: forward, action: record}"]
REFERENCE = "`import torch`"
COMMANDS = {
    REFERENCE: ["-c", "import torch"],
    "two steps in plain PyTorch": ["-c", PLAIN_PYTORCH],
    "a run of two steps, digits, no hooks": RUN,
    "a run of two steps, digits, outputs recorded": [*RUN, *HOOKS],
    "`import instrument`": ["-c", "import instrument"],
    "`python -m instrument --cfg job`": [*RUN, "--cfg", "job"],
    "`python -m instrument.recover --help`": ["-m", "instrument.recover", "--help"],
}


@dataclass(frozen=True)
class Duration:
    """The duration of a process.

    Attributes:
        elapsed: The elapsed time, in seconds.
        processor: The processor time of all threads, in seconds.
    """

    elapsed: float
    processor: float


def start(arguments: list[str]) -> Duration:
    """Run a Python process in an empty folder and return its duration."""
    with tempfile.TemporaryDirectory() as folder:
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
        elapsed, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Duration(elapsed, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for arguments in COMMANDS.values():
        start(arguments)  # warm-up: read the files into the page cache and compile the modules
    durations = [{name: start(arguments) for name, arguments in COMMANDS.items()} for _ in range(rounds)]
    print(f"{machine()}; medians of {rounds} rounds; the commands alternate\n")
    print("| command | elapsed time, s | relative to `import torch` | processor time, s | relative to `import torch` |")
    print("|---|---|---|---|---|")
    for name in COMMANDS:
        cells = []
        for field in ("elapsed", "processor"):
            seconds = median(getattr(row[name], field) for row in durations)
            ratio = median(getattr(row[name], field) / getattr(row[REFERENCE], field) for row in durations)
            cells.append(f"{seconds:.2f} | {ratio:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
