"""What one tool does in a training step, and how much longer the step takes for it.

    python benchmarks/peers/job.py captum

runs in the tool's own environment and prints a line of JSON for each job and workload. A tool's jobs are in a module of its
own, `with_<tool>.py`, as a tuple `JOBS`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent))
from measure import keep_memory, paired
from workloads import WORKLOADS, Training

Step = Callable[[], "Sequence[Tensor] | None"]
"""A training step with the tool; gives the tensors that the tool kept and did no more with, or None."""


@dataclass(frozen=True)
class Job:
    """One way of using a tool.

    Attributes:
        what: What it records, in words.
        open: Makes the step of a training; files go into the folder.
    """

    what: str
    open: Callable[[Training, Path], AbstractContextManager[Step]]


@contextmanager
def watched(training: Training, see: Callable[[str, str, Tensor], None]) -> Iterator[None]:
    """Hooks for tools that have none of their own: each leaf's output and its gradient are shown, by name and role."""

    def look(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:  # noqa: ARG001
            see(name, "output", output.detach())
            if output.requires_grad:
                output.register_hook(lambda gradient: see(name, "gradient", gradient))

        return hook

    handles = [training.model.get_submodule(name).register_forward_hook(look(name)) for name in training.leaves()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def statistics(tensor: Tensor) -> list[float]:
    """Mean, std, minimum, maximum, L2 norm and the counts of zeros, NaN and infinities, as one would write them."""
    x = tensor.detach().float()
    low, high = x.aminmax()
    values = (x.mean(), x.std(), low, high, x.norm(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum())
    numbers: list[float] = torch.stack([value.double() for value in values]).tolist()
    return numbers


def measure(job: Job, workload: str, rounds: int) -> Iterator[dict[str, object]]:
    """The ratio of a step with the tool to the bare one; where it only keeps tensors, also with their statistics."""
    bare, seen = WORKLOADS[workload].training(), WORKLOADS[workload].training()
    with tempfile.TemporaryDirectory() as folder, job.open(seen, Path(folder)) as step:
        kept = step()
        found = paired(lambda: bare.step().item(), step, rounds=rounds)
        yield {"what": job.what, "kept": None if kept is None else len(kept), **vars(found)}
        if kept is not None:
            del kept
            rows: list[list[float]] = []

            def with_statistics() -> None:
                rows.extend(statistics(tensor) for tensor in step() or ())

            found = paired(lambda: bare.step().item(), with_statistics, rounds=rounds)
            yield {"what": f"{job.what}, and their statistics in a list", "kept": None, **vars(found)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_memory()
    jobs: Sequence[Job] = importlib.import_module(f"with_{given.tool.replace('-', '_')}").JOBS
    for job in jobs:
        for workload in given.only:
            try:
                for found in measure(job, workload, given.rounds):
                    print(json.dumps({"workload": workload, **found}), flush=True)
            except Exception as error:  # whatever a tool raises is its result
                said = (str(error).strip() or "nothing said").splitlines()[0]
                failed = f"{type(error).__name__}: {said[:120]}"
                print(json.dumps({"workload": workload, "what": job.what, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
