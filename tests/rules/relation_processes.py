"""Data-parallel trainings, healthy and faulty: `torchrun --nproc-per-node 2 relation_processes.py`.

Rank 0 prints the relations that were checked, by training: the relation, whether it holds, the layer and the path.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_rules

STEPS = 7
OF_PROCESSES = ("distinct_data", "replicas_equal")


def train(
    *,
    batch: Callable[[int, int], Tensor] = lambda rank, step: torch.randn(8, 4, generator=seeded(100 * rank + step)),
    is_wrapped: bool = True,
    is_inside: bool = False,
    is_local: bool = False,
    alone_at_the_end: int = 0,
    by_hand: bool = False,
    seeds: tuple[int, int] = (0, 0),
    corrupted_from: int = STEPS,
    swapped_at: int = STEPS,
    factor: float = 1.0,
) -> list[tuple[str, bool, str, str]]:
    """Train for some steps. Return the rows of relations.

    Args:
        batch: Returns the batch of a rank in a step.
        is_wrapped: Whether the loop calls the wrapper, which averages the gradients.
        is_inside: Whether the hooks are attached to the wrapped model instead of the wrapper.
        is_local: Whether the processes average their parameters in each third step, and no gradients.
        alone_at_the_end: The number of further steps of rank 0, without the other process.
        by_hand: Whether the loop averages the gradients, without a wrapper.
        seeds: The seed of each rank for the parameters.
        corrupted_from: The first step in which rank 1 changes its gradients.
        swapped_at: The step in which rank 1 swaps two elements of its last bias.
        factor: A factor of the loss.
    """
    rank = dist.get_rank()
    torch.manual_seed(seeds[rank])
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model: Any = plain if by_hand else DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(action="ignore"):
        observed = plain if is_inside else model
        with instrument.attach(observed, {}, optimizer=optimizer) as probe:
            for step in range(STEPS + (alone_at_the_end if rank == 0 else 0)):
                is_alone = step >= STEPS
                with model.no_sync() if is_alone or is_local else nullcontext():
                    loss = (model if is_wrapped and not is_alone else plain)(batch(rank, step)).square().mean() * factor
                    optimizer.zero_grad()
                    loss.backward()
                gradients = [each.grad for each in plain.parameters() if each.grad is not None]
                for gradient in gradients if by_hand and is_wrapped else ():
                    dist.all_reduce(gradient)
                    gradient.mul_(2 if rank and step >= corrupted_from else 0.5)
                optimizer.step()
                if rank and step == swapped_at:
                    plain[3].bias.data = plain[3].bias.detach().flip(0)
                if is_local and step % 3 == 2:
                    average(plain)
                probe.end_step(loss=loss)
                if not is_alone:
                    dist.barrier()
    columns = ["relation", "holds", "layer", "path"]
    rows = probe.relations[columns].itertuples(index=False) if len(probe.relations) else ()
    # Without the relations of optimizers, which hold.
    found = [row for row in map(tuple, rows) if row[0] in OF_PROCESSES or not row[1]]
    return sorted(found)  # values of the other process may arrive a step later


@torch.no_grad()
def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())


class Communicating(nn.Module):
    """A language model whose processes share a mean of their activations."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mean = x.detach().mean((0, 1))
        dist.all_reduce(mean)
        return self.head(x + mean)


def communicate() -> list[str]:
    """Train a model that communicates in its forward pass. Return the text of the relation that would call it again."""
    model = DistributedDataParallel(Communicating())
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}) as probe:
        for step in range(2):
            tokens = torch.randint(0, 11, (3, 12), generator=seeded(step))
            logits = model(tokens[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            probe.end_step()
    table = probe.relations.to_dict("records") if len(probe.relations) else []
    return [row["text"] for row in table if row["relation"] == "looks_ahead"]


def train_with_fingerprints(
    fault: str = "", at: int = STEPS - 1, *, is_wrapped: bool = True, is_averaged: bool = True
) -> list[tuple[str | None, int, str]]:
    """Train with fingerprints of updates and parameters, and a fault of rank 1 in one step. Return the events of the rule, and of
    the same rule afterwards.
    """
    torch.manual_seed(0)
    plain, step, is_faulty = nn.Linear(4, 3), 0, dist.get_rank() == 1 and bool(fault)
    model: Any = DistributedDataParallel(plain) if is_wrapped else plain

    def message(state: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        def received(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            gradients: Tensor = future.value()[0] / 2
            return gradients.zero_() if fault == "zeroed" and is_faulty and step == at else gradients

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(received)

    message.__annotations__ = {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}  # no strings
    if is_wrapped:
        model.register_comm_hook(None, message)
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {
        "bits": {"layers": "**", "kind": "step_post", "role": "param", "action": "record", "stats": ["fingerprint"]}
    }
    rules = {"replicas": {"rule": "replicas_differ"}}
    with warnings.catch_warnings(action="ignore"):
        with instrument.attach(model, hooks, optimizer=optimizer, rules=rules) as probe:
            for step in range(STEPS):
                if fault == "swapped" and is_faulty and step == at:
                    bias = plain.bias.detach()
                    bias[:2] = bias[:2].flip(0)
                loss = model(torch.randn(8, 4)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                for parameter in plain.parameters() if is_averaged and not is_wrapped else ():
                    dist.all_reduce(parameter.grad)
                optimizer.step()
                probe.end_step(loss=loss)
        live = probe.events[probe.events["rule"] == "replicas"]
        again = [event for event in rule_events(probe.run, parse_rules(rules)) if event.rule == "replicas"]
    assert [(event.step, event.message) for event in again] == [*zip(live["step"], live["message"], strict=True)]
    return [(event.layer, event.step, event.message) for event in again]


def train_different_parameters(kind: str) -> list[str]:
    """Train a model whose parameters or gradients may differ between the processes. Return the events of `replicas_differ`."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if kind == "partly_wrapped":
        model[1] = DistributedDataParallel(model[1])
    elif kind != "warmup":
        ignored = ["1.weight", "1.bias"] if kind == "ignored" else []
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())] if kind == "group" else [None, None]
        model = DistributedDataParallel(model, process_group=groups[dist.get_rank()])
    torch.manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0 if kind == "warmup" else 0.1)
    hooks = {
        "bits": {"layers": "**", "kind": "step_post", "action": "record", "role": "param", "stats": ["fingerprint"]}
    }
    rules = {"replicas": {"rule": "replicas_differ"}}
    with warnings.catch_warnings(action="ignore"):
        with instrument.attach(model, hooks, optimizer=optimizer, rules=rules) as probe:
            for step in range(STEPS):
                with model.no_sync() if kind == "local" and step > 1 else nullcontext():
                    optimizer.zero_grad()
                    model(torch.randn(8, 4)).square().mean().backward()
                optimizer.param_groups[0]["lr"] = 0.1 if step > 1 else optimizer.param_groups[0]["lr"]
                optimizer.step()
                probe.end_step()
        return [*probe.events["message"]]


def train_partly_wrapped() -> list[str]:
    """Train a model whose first layer differs between the processes. Return the relations that do not hold."""
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), DistributedDataParallel(nn.Linear(4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}, optimizer=optimizer) as probe:
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            probe.end_step()
            dist.barrier()
    table = probe.relations.to_dict("records") if len(probe.relations) else []
    return [row["relation"] for row in table if row["holds"] is False]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> None:
    dist.init_process_group("gloo")
    done = {
        "healthy": train(),
        "inside": train(is_inside=True),
        "all_data": train(batch=lambda rank, step: torch.ones(8, 4)),
        "local": train(is_local=True),
        "communicating": communicate(),
        "partly_wrapped": train_partly_wrapped(),
        "one_leaves": train(alone_at_the_end=60),
        "not_synchronized": train(is_wrapped=False),
        "past_the_wrapper": train(is_wrapped=False, is_inside=True),
        "by_hand": train(by_hand=True),
        "corrupted": train(by_hand=True, corrupted_from=2),
        "swapped_elements": train(swapped_at=2),
        "other_starts": train(by_hand=True, seeds=(0, 1)),
        "independent": train(by_hand=True, is_wrapped=False, seeds=(0, 1)),
        "without_loss": train(by_hand=True, is_wrapped=False, seeds=(0, 1), factor=0.0),
        "healthy_fingerprints": train_with_fingerprints(),
        "independent_fingerprints": train_with_fingerprints(is_wrapped=False, is_averaged=False),
        "averaged_fingerprints": train_with_fingerprints(is_wrapped=False),
        "swapped_by_hand": train_with_fingerprints("swapped", is_wrapped=False),
        "different": {
            kind: train_different_parameters(kind) for kind in ("partly_wrapped", "ignored", "group", "local", "warmup")
        },
        "zeroed": train_with_fingerprints("zeroed", 3),
        "swapped": train_with_fingerprints("swapped"),
        "same_data": train(batch=lambda rank, step: torch.randn(8, 4, generator=seeded(step))),
    }
    if dist.get_rank() == 0:
        print(json.dumps(done))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
