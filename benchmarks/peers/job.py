"""Step time with one tool relative to the same step without it.

    python benchmarks/peers/job.py captum

runs in the environment of the tool and prints a line of JSON for each job and workload. The module `with_<tool>.py` defines the
jobs of a tool in a tuple `JOBS`.
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
"""A training step with the tool. Returns the tensors if the tool only keeps references to them, otherwise None."""


@dataclass(frozen=True)
class Job:
    """One configuration of a tool.

    Attributes:
        label: What the tool records; the label in the table.
        open: Function that creates the step of a training. The tool writes its files into the folder.
    """

    label: str
    open: Callable[[Training, Path], AbstractContextManager[Step]]


@contextmanager
def leaf_hooks(training: Training, callback: Callable[[str, str, Tensor], None]) -> Iterator[None]:
    """Call a function with the name, role and tensor of each leaf's output and gradient, for tools without hooks."""

    def make_hook(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:  # noqa: ARG001
            callback(name, "output", output.detach())
            if output.requires_grad:
                output.register_hook(lambda gradient: callback(name, "gradient", gradient))

        return hook

    handles = [training.model.get_submodule(name).register_forward_hook(make_hook(name)) for name in training.leaves()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def statistics(tensor: Tensor) -> list[float]:
    """Return mean, std, minimum, maximum, L2 norm and the counts of zeros, NaN and infinities."""
    x = tensor.detach().float()
    low, high = x.aminmax()
    values = (x.mean(), x.std(), low, high, x.norm(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum())
    result: list[float] = torch.stack([value.double() for value in values]).tolist()
    return result


def measure(job: Job, workload: str, rounds: int) -> Iterator[dict[str, object]]:
    """Yield the relative step time with the tool; if it only keeps tensors, also with statistics computed from them."""
    baseline, training = WORKLOADS[workload].training(), WORKLOADS[workload].training()
    with tempfile.TemporaryDirectory() as folder, job.open(training, Path(folder)) as step:
        kept = step()
        ratio = paired(lambda: baseline.step().item(), step, rounds=rounds)
        yield {"label": job.label, "kept": None if kept is None else len(kept), **vars(ratio)}
        if kept is not None:
            del kept
            rows: list[list[float]] = []

            def with_statistics() -> None:
                rows.extend(statistics(tensor) for tensor in step() or ())

            ratio = paired(lambda: baseline.step().item(), with_statistics, rounds=rounds)
            yield {"label": f"{job.label}, and their statistics in a list", "kept": None, **vars(ratio)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tool")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=list(WORKLOADS))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_memory()
    jobs: Sequence[Job] = importlib.import_module(f"with_{options.tool.replace('-', '_')}").JOBS
    for job in jobs:
        for workload in options.only:
            try:
                for result in measure(job, workload, options.rounds):
                    print(json.dumps({"workload": workload, **result}), flush=True)
            except Exception as error:  # any error of a tool is its result
                message = (str(error).strip() or "no message").splitlines()[0]
                failed = f"{type(error).__name__}: {message[:120]}"
                print(json.dumps({"workload": workload, "label": job.label, "failed": failed}), flush=True)


if __name__ == "__main__":
    main()
