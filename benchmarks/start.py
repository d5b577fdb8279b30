"""How long commands take to start: each in a new process, in turns, over `import torch`.

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

PLAIN = """
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
FIRST = "`import torch`"
COMMANDS = {
    FIRST: ["-c", "import torch"],
    "two steps in PyTorch alone": ["-c", PLAIN],
    "a run of two steps, digits, no hooks": RUN,
    "a run of two steps, digits, outputs recorded": [*RUN, *HOOKS],
    "`import instrument`": ["-c", "import instrument"],
    "`python -m instrument --cfg job`": [*RUN, "--cfg", "job"],
    "`python -m instrument.recover --help`": ["-m", "instrument.recover", "--help"],
}


@dataclass(frozen=True)
class Taken:
    """What a process took, in seconds: of the clock, and of the processor in all of its threads."""

    clock: float
    processor: float


def start(arguments: list[str]) -> Taken:
    """Run a Python process in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True)
        clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Taken(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    for arguments in COMMANDS.values():
        start(arguments)  # files are in memory, modules compiled
    taken = [{name: start(arguments) for name, arguments in COMMANDS.items()} for _ in range(rounds)]
    print(f"{machine()}; medians of {rounds} rounds, in which all take turns\n")
    print("| command | s | over `import torch` | processor, s | over `import torch` |\n|---|---|---|---|---|")
    for name in COMMANDS:
        cells = []
        for of in ("clock", "processor"):
            seconds = median(getattr(row[name], of) for row in taken)
            ratio = median(getattr(row[name], of) / getattr(row[FIRST], of) for row in taken)
            cells.append(f"{seconds:.2f} | {ratio:.2f}")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
