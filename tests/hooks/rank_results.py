"""The results of a program in several processes: printed by rank 0 as one line of JSON, and read by a test."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def print_results(compute: Callable[[], Any]) -> None:
    """Join the process group, compute the result of this process, and let rank 0 print those of all."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(results, compute())
    if dist.get_rank() == 0:
        print(json.dumps(results))
    dist.destroy_process_group()


def results_of(program: str, folder: Path, *arguments: str, processes: int) -> list[dict[str, Any]]:
    """Run a program of this folder, and return the result of each process."""
    from distributed_runs import run_processes

    done = run_processes(folder, *arguments, processes=processes, module=Path(__file__).with_name(program))
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return results
