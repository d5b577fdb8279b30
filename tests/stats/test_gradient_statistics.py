"""Statistics of gradients: the cosine with the previous one, the noise of a batch, and updates relative to the learning rate."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from attached_runs import train_steps
from hook_runs import record
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import instrument
from instrument.actions.base import Context, StepContext
from instrument.actions.context_sums import MicroGradients
from instrument.actions.measurement import measure_in_context
from instrument.stats.sums import extremes, merged, needs_of, statistics_of, totals
from instrument.tables.statistics import NOISE, SIGNAL


def rows_of(probe: Any, path: str = "weight") -> list[dict[str, Any]]:
    return [row for row in probe.sink.records("stats") if row["path"] == path]


def linear(**options: Any) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 3, **options)


@pytest.mark.spread(2)
@pytest.mark.parametrize("kind", ["parameter_grad", "parameter_grad_micro"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_previous_cosine_is_that_of_two_gradients(kind: str, dtype: torch.dtype) -> None:
    model = linear().to(dtype)
    gradients: list[Tensor] = []
    model.weight.register_post_accumulate_grad_hook(lambda p: gradients.append(p.grad.double().flatten()))
    batches = torch.randn(4, 8, 5, dtype=dtype)
    probe = train_steps(model, {"g": record(kind, "**", stats="previous_cosine")}, batches)
    found = [row["previous_cosine"] for row in rows_of(probe)]
    wanted = [functional.cosine_similarity(a, b, dim=0).item() for a, b in pairwise(gradients)]
    assert found == [None, *(pytest.approx(value, rel=1e-5) for value in wanted)]


def gradient_steps(gradients: list[Tensor | None], stats: Any = "previous_cosine", **options: Any) -> list[Any]:
    """Return the statistic of gradients that a loop sets."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(gradients[0].shape, dtype=gradients[0].dtype))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"g": record("parameter_grad", "**", stats=stats, **options)}
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for gradient in gradients:
            model[0].grad = gradient
            optimizer.step()
            probe.end_step()
    return [row["previous_cosine"] for row in probe.sink.records("stats")]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_previous_cosine_does_not_overflow(scale: float) -> None:
    one, other = torch.tensor([3.0, 4.0]) * scale, torch.tensor([4.0, 3.0]) * scale
    assert gradient_steps([one, other, -other]) == [None, pytest.approx(0.96), pytest.approx(-1.0)]


def test_previous_cosine_of_unusual_gradients() -> None:
    one = torch.tensor([1.0, 0.0])
    assert gradient_steps([one, torch.zeros(2), one]) == [None, None, None]
    broken = torch.tensor([1.0, math.nan, math.inf, 1.0])
    found = gradient_steps([broken, torch.ones(4)])
    assert found == [None, pytest.approx(math.sqrt(0.5))]
    assert gradient_steps([one.to_sparse(), one, one]) == [None, None, pytest.approx(1.0)]
    wide = torch.tensor([1.0 + 1.0j, 1.0])
    assert gradient_steps([wide, torch.tensor([1.0, 1.0 + 0j])]) == [None, pytest.approx(2 / math.sqrt(6))]


def test_previous_cosine_compares_recorded_steps_only() -> None:
    gradients = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])]
    assert gradient_steps(gradients, every=2) == [None, pytest.approx(math.sqrt(0.5))]


def test_condition_and_record_read_the_same_previous_gradient() -> None:
    one, other = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    when = {"stat": "previous_cosine", "below": 0.5}
    assert gradient_steps([one, one, other, other, one], when=when) == [pytest.approx(0.0), pytest.approx(0.0)]


def test_previous_cosine_of_updates_is_that_of_the_changes() -> None:
    model, weights = linear(), []
    handle = model.register_forward_pre_hook(lambda *_: weights.append(model.weight.detach().clone().flatten()))
    hooks = {"u": record("step_post", "**", role="update", stats="previous_cosine")}
    probe = train_steps(model, hooks, torch.randn(4, 8, 5))
    handle.remove()
    updates = torch.stack([*weights, model.weight.detach().flatten()]).diff(dim=0)
    wanted = functional.cosine_similarity(updates[:-1], updates[1:]).tolist()
    found = [row["previous_cosine"] for row in rows_of(probe)]
    assert found == [None, *(pytest.approx(value, rel=1e-4) for value in wanted)]


def squared_error(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def micro_steps(
    model: nn.Module,
    steps: Tensor,
    *,
    scaler: Any = None,
    clip: float = math.inf,
    passes: int = 1,
    declared: bool = True,
) -> Any:
    """Train with gradients accumulated over micro-batches, [steps, micro-batches, samples, 5], and return the probe."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"g": record("parameter_grad", "**", stats=["gradient_noise", "gradient_signal"])}
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    with instrument.attach(model, hooks, optimizer=optimizer, scaler=scaler) as probe:
        for micro_batches in steps:
            optimizer.zero_grad()
            for batch in micro_batches:
                for _ in range(passes):
                    scaler.scale(squared_error(model, batch) / len(micro_batches)).backward()
                if declared:
                    probe.end_micro_step()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            probe.end_step()
    return probe


def gradients_of(model: nn.Module, micro_batches: Tensor) -> np.ndarray[Any, Any]:
    """Return the gradient of the weight for each micro-batch, [micro-batches, elements]."""
    gradients = [torch.autograd.grad(squared_error(model, batch), model.weight)[0] for batch in micro_batches]
    return torch.stack(gradients).flatten(1).double().numpy()


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", init_scale=1024.0)], ids=["unscaled", "scaled"])
@pytest.mark.parametrize("clip", [math.inf, 1e-3])
def test_noise_and_signal_are_those_of_the_micro_batches(scaler: Any, clip: float) -> None:
    model, steps = linear(), torch.randn(1, 6, 4, 5)
    gradients = gradients_of(model, steps[0])
    (row,) = rows_of(micro_steps(model, steps, scaler=scaler, clip=clip))
    noise = gradients.var(axis=0, ddof=1).sum() / len(gradients)  # of the mean
    assert row["gradient_noise"] == pytest.approx(noise, rel=1e-5)
    assert row["gradient_signal"] == pytest.approx((gradients.mean(axis=0) ** 2).sum() - noise, rel=1e-4)


def test_noise_is_measured_in_each_step() -> None:
    model, steps = linear(), torch.randn(3, 2, 4, 5)
    rows = rows_of(micro_steps(model, steps))
    assert len({row["gradient_noise"] for row in rows}) == 3


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("count", "options"), [(1, {}), (4, {"declared": False}), (4, {"passes": 2})], ids=["one", "undeclared", "twice"]
)
def test_noise_requires_one_gradient_in_each_of_several_micro_steps(count: int, options: Any) -> None:
    rows = rows_of(micro_steps(linear(), torch.randn(2, count, 4, 5), **options))
    assert [(row["gradient_noise"], row["gradient_signal"]) for row in rows] == [(None, None)] * 2


def test_noise_requires_an_unchanged_sum_of_the_micro_batches() -> None:
    """DistributedDataParallel averages the sum after each micro-batch, except with `no_sync`."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"g": record("parameter_grad", "**", stats=["gradient_noise"])}
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for written in (False, True):
            optimizer.zero_grad()
            for batch in torch.randn(2, 4, 5):
                (squared_error(model, batch) / 2).backward()
                if written:
                    model.weight.grad.mul_(0.5)
                probe.end_micro_step()
            optimizer.step()
            probe.end_step()
    first, second = (row["gradient_noise"] for row in rows_of(probe))
    assert first > 0
    assert second is None


def test_measuring_noise_changes_nothing() -> None:
    model, other, steps = linear(), linear(), torch.randn(3, 2, 4, 5)
    micro_steps(model, steps)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for micro_batches in steps:
        optimizer.zero_grad()
        for batch in micro_batches:
            (squared_error(other, batch) / 2).backward()
        optimizer.step()
    assert torch.equal(model.weight, other.weight)


def test_update_ratio_per_rate_uses_the_rate_of_each_group() -> None:
    model = nn.ModuleDict({"slow": linear(), "fast": linear(), "other": linear()})
    first = torch.optim.SGD(
        [{"params": model["slow"].parameters(), "lr": 0.01}, {"params": model["fast"].parameters()}], lr=0.5
    )
    second = torch.optim.Adam(model["other"].parameters(), lr=torch.tensor(0.02))
    schedule = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
    hooks = {"u": record("step_post", "**", role="update", stats=["update_ratio", "update_ratio_per_rate"])}
    with instrument.attach(model, hooks, optimizer=[first, second]) as probe:
        for batch in torch.randn(2, 8, 5):
            sum(squared_error(part, batch) for part in model.values()).backward()
            first.step()
            schedule.step()
            second.step()
            probe.end_step()
    rates = {"slow": [0.01, 0.005], "fast": [0.5, 0.25], "other": [0.02, 0.02]}
    for row in rows_of(probe):
        wanted = row["update_ratio"] / rates[row["layer"]][row["step"]]
        assert row["update_ratio_per_rate"] == pytest.approx(wanted, rel=1e-6)


def test_update_ratio_per_rate_without_a_rate_is_none() -> None:
    hooks = {"u": record("step_post", "**", role="update", stats="update_ratio_per_rate")}
    probe = train_steps(linear(), hooks, torch.randn(1, 8, 5), lr=0.0)
    assert [row["update_ratio_per_rate"] for row in rows_of(probe)] == [None]


@pytest.mark.parametrize("is_summed", [False, True])
def test_noise_of_one_gradient_in_each_of_several_processes(is_summed: bool) -> None:
    """All processes together give the variance; each of them estimates it from its own gradient."""
    gradients = torch.randn(4, 7, dtype=torch.float64)
    total = gradients.sum(dim=0) / (1 if is_summed else 4)
    found = []
    for gradient in gradients:
        micro = MicroGradients(4, is_summed=is_summed)
        micro.add(gradient, None, StepContext(0, 0, 0, "train"), None)
        micro.accumulate(gradient, None)
        found.append(micro.estimates(total, 0))
    parts = (gradients * (4 if is_summed else 1)).numpy()
    noise = parts.var(axis=0, ddof=1).sum() / 4
    assert np.mean([each[NOISE] for each in found]) == pytest.approx(noise)
    assert np.mean([each[SIGNAL] for each in found]) == pytest.approx((parts.mean(axis=0) ** 2).sum() - noise)


def test_noise_of_a_sharded_gradient_is_that_of_the_shard() -> None:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh, gradients = init_device_mesh("cpu", (2,)), torch.randn(2, 3, 4)
        found = []
        for is_sharded in (True, False):
            micro = MicroGradients(1, is_summed=False)
            for at, local in enumerate([*gradients, gradients.sum(dim=0)]):
                size = {"shape": torch.Size((5, 4)), "stride": (4, 1)}  # the other process has two rows
                gradient = DTensor.from_local(local, mesh, [Shard(0)], **size) if is_sharded else local
                if at < 2:
                    micro.add(gradient, None, StepContext(0, at, 0, "train"), None)
                else:
                    micro.accumulate(gradient, None)
            found.append(micro.estimates(gradients.sum(dim=0), 0))
    finally:
        dist.destroy_process_group()
    assert found[0] == found[1]


def test_merged_sums_of_shards_give_the_cosine_of_the_full_gradient() -> None:
    one, other = torch.randn(2, 10)
    rows = []
    for part in (slice(0, 3), slice(3, 3), slice(3, 10)):
        context = Context(
            "h", "parameter_grad", "param_grad", "", nn.Identity(), "weight", StepContext(0, 0, 0, "train")
        )
        names = ("previous_cosine", "gradient_noise", "gradient_signal")
        measure_in_context(one[part], context, needs_of(names), None)
        context.moment = StepContext(1, 0, 0, "train")
        context.state["micro_gradients"] = micro = MicroGradients(1, is_summed=False)
        for at in range(2):
            micro.add(other[part] * (at + 1), None, context.moment._replace(micro_step=at), None)
        micro.accumulate(3 * other[part], None)
        rows.append(torch.from_numpy(measure_in_context(other[part], context, needs_of(names), None).row)[None])
    most = torch.stack([extremes(row) for row in rows]).amax(dim=0)
    total = torch.stack([totals(row, most) for row in rows]).sum(dim=0)
    cosine, noise, signal = (column.item() for column in statistics_of(merged(most, total), names))
    assert cosine == pytest.approx(functional.cosine_similarity(one, other, dim=0).item(), rel=1e-5)
    square = other.square().sum().item()
    assert noise == pytest.approx(square)  # 2 (1 + 4) - 9
    assert signal == pytest.approx(8 * square)
