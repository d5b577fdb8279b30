"""What is composed for plain tensors writes the same rows as the general path, and steps aside where it does not apply."""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import test_trap_random_graphs as random_graphs
import torch
from fork_server import Command
from hook_runs import Calls, record, run_steps, scale
from tiers import portions
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.utils.parametrize import register_parametrization, remove_parametrizations
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.actions.base import EFFECT
from instrument.config.parse import parse_hooks
from instrument.hooks import attached_hook
from instrument.hooks.attached_hook import AttachedHook
from instrument.hooks.clock import FIRST_CALL
from instrument.hooks.module_calls import Call
from instrument.hooks.module_calls import Calls as ModuleCalls
from instrument.hooks.plain_calls import Direct, FiringCounts, direct_of, update_counts
from instrument.stats import cpu_kernel
from instrument.stats.sums import COLUMNS
from instrument.tables.reasons import RAISED

RECORD = {"kind": "forward", "action": "record", "stats": ["default", "l1"]}
SPECS: dict[str, Any] = {
    "outputs": {"layers": "**", **RECORD},
    "few": {"layers": "**", "kind": "forward", "action": "record", "stats": ["mean", "l2"], "every": 2},
    "gradients": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
    "totals": {"layers": "**", "kind": "tensor", "action": "record", "role": "output", "start": 1},
    "evaluated": {"layers": "**", "kind": "forward", "action": "record", "phase": "eval"},
}
INTERVENTIONS: dict[str, Any] = {
    "tame": {"layers": "**", "kind": "forward", "action": "clip", "min": -0.5, "max": 0.4},
    "shrink": {"layers": "*", "kind": "forward", "action": "scale", "factor": {0: 1.0, 3: 0.7}, "every": 2},
    "norm": {"layers": "last", "kind": "forward", "action": "clip", "norm": 0.1, "start": 2},
    "bound": {"layers": "**", "kind": "forward", "action": "clip", "value": 0.3, "start": 1},
    "halve": {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.5, "start": 1, "stop": 3},
    "reverse": {"layers": "last", "kind": "forward", "action": "scale", "factor": 2, "reverse": True, "start": 3},
}
RECORDED_AND_CLIPPED = {**SPECS, "tame": INTERVENTIONS["tame"]}
GRADIENT: dict[str, Any] = {"layers": "**", "kind": "tensor", "role": "output"}
GRADIENT_CHANGES: dict[str, Any] = {
    "tame_gradients": {**GRADIENT, "action": "clip", "min": -0.01, "max": 0.02},
    "seen": {**GRADIENT, "action": "record", "every": 2},
    "shrink_gradients": {**GRADIENT, "layers": "*", "action": "scale", "factor": {0: 1.0, 3: 0.7}, "start": 1},
    "before": {"layers": "**", "kind": "full_backward_pre", "action": "clip", "value": 0.015, "every": 3},
    "norm_of_gradients": {"layers": "last", "kind": "full_backward_pre", "action": "clip", "norm": 0.1, "start": 2},
    "gradients": {"layers": "**", "kind": "full_backward", "role": "grad_output", "action": "record"},
}
Rows = dict[str, list[Any]]


@contextmanager
def general_path() -> Iterator[None]:
    """Let all hooks take the general path inside the block."""
    with mock.patch.object(attached_hook, "direct_of", return_value=None):
        yield


@contextmanager
def counting() -> Iterator[list[str]]:
    """Yield a list that receives the hook of each tensor that is not handled by the general path."""
    handled: list[str] = []

    def counted(attached: AttachedHook) -> Direct | None:
        direct = direct_of(attached)

        def act(tensor: Tensor, *given: Any) -> Tensor | None:
            new = None if direct is None else direct(tensor, *given)
            if new is not None:
                handled.append(attached.site.spec.name)
            return new

        return direct and act

    with mock.patch.object(attached_hook, "direct_of", counted):
        yield handled


def network(convert: Callable[[Tensor], Any], back: Callable[[Any], Tensor] = lambda value: value) -> nn.Module:
    """Return linear layers around a module that returns its input as a value of another type."""
    parts = {"first": nn.Linear(6, 8), "unusual": Calls(convert), "last": nn.Linear(8, 3)}
    return Calls(lambda first, unusual, last, x: last(back(unusual(first(x)))), **parts)


class Recursive(nn.Module):
    """Calls itself: the calls end in another order than they start."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        return self.layer(self(x, depth - 1)) if depth else x + 1


def checkpointed() -> nn.Module:
    """Return a module that recomputes its layer twice, by both variants of checkpointing."""
    twice = lambda layer, x: checkpoint(layer, checkpoint(layer, x, use_reentrant=False), use_reentrant=True)  # noqa: E731
    return Calls(twice, layer=nn.Sequential(nn.Linear(6, 6), nn.Tanh()))


def fails() -> nn.Module:
    """Return a module that fails at its second call."""
    calls = count(1)

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        x = layer(x)
        if next(calls) == 2:
            raise ArithmeticError
        return x

    return Calls(forward, layer=nn.Linear(6, 6))


def with_special_values(x: Tensor) -> Tensor:
    """Return a tensor with NaN, infinity and zero."""
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, 2.0, 3.0])
    return x + special.to(x.dtype)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: network(lambda x: x * 2),
    "view": lambda: network(lambda x: x.view(-1, 8)),
    "its input": lambda: network(lambda x: x),
    "transposed": lambda: network(lambda x: x.t() * 1, lambda x: x.t()),
    "not dense": lambda: network(lambda x: x.repeat(1, 2)[:, ::2]),
    "expanded": lambda: network(lambda x: x[:1].expand(4, 8)),
    "one element": lambda: network(lambda x: x.sum(), lambda x: x.expand(4, 8)),
    "no elements": lambda: network(lambda x: x[:0], lambda x: x.sum().expand(4, 8)),
    "negated": lambda: network(lambda x: torch._neg_view(x * 1.0), lambda x: x.clone()),
    "integers": lambda: network(lambda x: (x > 0).long(), lambda x: x.float()),
    "float16": lambda: network(lambda x: x.half(), lambda x: x.float()),
    "bfloat16": lambda: network(lambda x: x.bfloat16(), lambda x: x.float()),
    "float64": lambda: network(lambda x: x.double(), lambda x: x.float()),
    "huge float64": lambda: network(lambda x: x.double() * 1e200, lambda x: x.float()),
    "not finite": lambda: network(with_special_values),
    "nothing finite": lambda: network(lambda x: x * math.nan),
    "far from zero": lambda: network(lambda x: x + 1e6),
    "sparse": lambda: network(lambda x: x.to_sparse(), lambda x: x.to_dense()),
    "tuple": lambda: network(lambda x: (x, x * 2), lambda pair: pair[1]),
    "dict": lambda: network(lambda x: {"a": x, "b": None}, lambda value: value["a"]),
    "detached": lambda: network(lambda x: x.detach()),
    "parameter": lambda: network(lambda x: nn.Parameter(x.detach())),
    "in place": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 3)),
    "disabled dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Identity(), nn.Linear(8, 3)),
    "shared": lambda: nn.Sequential(*[nn.Linear(6, 6)] * 3),
    "recursive": Recursive,
    "checkpointed": checkpointed,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last), nn.Flatten()
    ),
    "recurrent": lambda: network(nn.LSTM(8, 8), lambda value: value[0]),
    "fails": fails,
}


def train(model: nn.Module, probe: Any) -> None:
    """Make four steps, the second with two micro-batches, one evaluation, and second backward passes."""
    generator = torch.Generator().manual_seed(1)
    for step in range(4):
        for _ in range(2 if step == 1 else 1):
            x = torch.randn(4, 6, generator=generator)
            with suppress(ArithmeticError):
                loss = model(x).square().mean()
                if loss.requires_grad:
                    loss.backward(retain_graph=step == 1)
                    if step == 1:
                        loss.backward()
            probe.end_micro_step()
        probe.end_step(loss=0.0)
        if step == 2:
            with probe.evaluating(), torch.no_grad(), suppress(ArithmeticError):
                model(x)
            with torch.inference_mode(), suppress(ArithmeticError):
                model(x)


def rows_of(model: nn.Module, specs: dict[str, Any]) -> Rows:
    torch.manual_seed(0)
    with pytest.warns(), instrument.attach(model, specs) as probe:
        train(model, probe)
        probe.event("end", "so that there is a warning")
    rows = {table: list(rows) for table, rows in probe.sink.rows.items() if table not in ("metrics", "layers")}
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return rows | {"gradients": [gradient.view(torch.int32).tolist() for gradient in gradients]}


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize(
    "specs",
    [
        SPECS,
        INTERVENTIONS,
        {**SPECS, **INTERVENTIONS},
        GRADIENT_CHANGES,
        {**SPECS, **INTERVENTIONS, **GRADIENT_CHANGES},
    ],
    ids=["record", "change", "both", "change gradients", "all"],
)
@pytest.mark.parametrize("name", MODELS)
def test_both_paths_write_the_same_rows(name: str, specs: dict[str, Any]) -> None:
    if not hasattr(MODELS[name](), "last"):
        specs = {key: spec for key, spec in specs.items() if spec["layers"] != "last"}
    torch.manual_seed(0)
    fast = rows_of(MODELS[name](), specs)
    torch.manual_seed(0)
    with general_path():
        general = rows_of(MODELS[name](), specs)
    assert len(general["stats"] + general["effects"]) > 12
    assert repr(fast) == repr(general)  # as text, since NaN differs from itself


@pytest.mark.slow
@pytest.mark.parametrize("seeds", portions(quick=10, total=300, size=97))
def test_both_paths_write_the_same_rows_for_random_networks(seeds: range) -> None:
    hooks = {name: SPECS[name] for name in ("outputs", "gradients", "totals")}
    hooks["totals"] = {**hooks["totals"], "start": 0}
    rows = 0
    for seed in seeds:
        network = random_graphs.Network(seed, list(random_graphs.OPERATIONS))
        if random_graphs.train_uninstrumented(network) is None:
            continue
        fast = random_graphs.train(network, hooks)[1].sink.rows
        with general_path():
            general = random_graphs.train(network, hooks)[1].sink.rows
        for table in ("stats", "coverage", "events"):
            assert repr(fast[table]) == repr(general[table]), seed
        rows += len(fast["stats"])
    assert rows > 10 * len(seeds)


@pytest.mark.parametrize("wrap", [torch.func.vmap, torch.func.functionalize], ids=["vmap", "functionalize"])
def test_both_paths_agree_in_transforms(wrap: Callable[[Any], Any]) -> None:
    def rows() -> Rows:
        model = nn.Linear(6, 3)
        with pytest.warns(), instrument.attach(model, {"seen": {"layers": ".", **RECORD}}) as probe:
            wrap(model)(torch.ones(4, 6))
            probe.end_step()
        return {table: list(probe.sink.rows[table]) for table in ("stats", "coverage", "events")}

    fast = rows()
    with general_path():
        assert repr(rows()) == repr(fast)


def measured_directly(specs: dict[str, Any], *, steps: int = 2, **options: Any) -> int:
    """Return how many tensors of the hook `a` are not handled by the general path in a small training."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counting() as handled, instrument.attach(model, specs, optimizer=optimizer, **options) as probe:
        for _ in range(steps):
            model(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            probe.end_step()
    return handled.count("a")


OUTPUTS = record("forward", "*", stats=RECORD["stats"])
HALF = scale("forward", 0.5, "0")
FAST: dict[str, tuple[dict[str, Any], int]] = {
    "all": ({"a": OUTPUTS}, 6),
    "every 2": ({"a": {**OUTPUTS, "every": 2}}, 3),
    "gradients": ({"a": OUTPUTS, "b": record("full_backward", "*", role="grad_output")}, 6),
    "quantiles": ({"a": {**OUTPUTS, "quantiles": [0.5]}}, 0),
    "histogram": ({"a": {**OUTPUTS, "histogram": 4}}, 0),
    "tensors": ({"a": {**OUTPUTS, "tensors": True}}, 0),
    "dead": ({"a": {**OUTPUTS, "stats": ["dead_fraction"]}}, 0),
    "intervention": ({"a": OUTPUTS, "b": HALF}, 6),
    "changed": ({"b": HALF, "a": OUTPUTS}, 6),
    "input": ({"a": OUTPUTS, "b": record("forward", "0", role="input")}, 6),
}


@pytest.mark.spread(4)
@pytest.mark.parametrize(("specs", "directly"), FAST.values(), ids=FAST)
def test_fast_path_is_taken_where_it_applies(specs: dict[str, Any], directly: int) -> None:
    assert measured_directly(specs) == directly


def test_fast_path_is_taken_if_each_process_writes_its_own_rows() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        assert measured_directly({"a": OUTPUTS}) == 6
        assert measured_directly({"a": {"layers": "0", "kind": "parameter_grad", "action": "record"}}) == 4
    finally:
        dist.destroy_process_group()


def test_fast_path_measures_the_time_for_a_budget() -> None:
    assert measured_directly({"a": OUTPUTS}, budget={"time": "50%"}) == 6


BACKWARD: dict[str, Any] = {"kind": "tensor", "role": "output", "action": "clip", "value": 0.1}
FORWARD: dict[str, Any] = {"kind": "forward", "action": "scale", "factor": 0.5}
INTERVENED: dict[str, tuple[nn.Module, dict[str, Any], int]] = {
    "clip": (nn.Identity(), {"kind": "forward", "action": "clip", "norm": 0.1}, 6),
    "reverse": (nn.Identity(), {**FORWARD, "reverse": True}, 6),
    "modify": (nn.Identity(), {"kind": "forward", "action": "modify", "fn": "zero"}, 0),
    "condition": (nn.Identity(), {**FORWARD, "when": {"stat": "l2", "above": 0.0}}, 0),
    "path": (nn.Identity(), {**FORWARD, "path": "0"}, 0),
    "tensor": (nn.Linear(6, 6), BACKWARD, 6),
    "full_backward_pre": (nn.Linear(6, 6), {**FORWARD, "kind": "full_backward_pre"}, 6),
    "modified gradient": (nn.Linear(6, 6), {"kind": "full_backward_pre", "action": "modify", "fn": "zero"}, 0),
    "its input": (nn.Identity(), BACKWARD, 6),
    "in place": (nn.ReLU(inplace=True), BACKWARD, 6),
    "view": (nn.Flatten(0), BACKWARD, 6),
}


@pytest.mark.spread(3)
@pytest.mark.parametrize(("module", "spec", "directly"), INTERVENED.values(), ids=INTERVENED)
def test_interventions_take_the_fast_path_where_it_applies(
    module: nn.Module, spec: dict[str, Any], directly: int
) -> None:
    step = lambda: module(torch.ones(4, 6, requires_grad=True) * 1.0).sum().backward()  # noqa: E731
    with pytest.warns() if "path" in spec else nullcontext(), counting() as handled:
        probe = run_steps(module, {"a": {"layers": ".", **spec}}, step, 6)
    assert len(handled) == directly
    assert len(probe.sink.rows["effects"]) == (0 if "path" in spec else 6)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("action", "field", "values"),
    [
        ("clip", "value", (0.5, 0.25, 2.0)),
        ("clip", "max", (0.5, 0.25, 2.0)),
        ("clip", "min", (2.0, 0.25, 3.0)),
        ("scale", "factor", (0.0, -0.0, 0.5)),
    ],
    ids=["value", "max", "min", "factor"],
)
def test_bounds_and_factors_may_change_during_a_run(action: str, field: str, values: tuple[float, ...]) -> None:
    spec = {"layers": ".", "kind": "forward", "action": action}

    def outputs() -> list[str]:
        model, results = nn.Identity(), []
        with instrument.attach(model, {"a": {**spec, field: values[0]}}) as probe:
            for value in values:
                probe.change_hooks(parse_hooks({"a": {**spec, field: value}}), ())
                x = torch.tensor([1.0, -1.0, 0.125]).requires_grad_()
                result = model(x * 1)
                result.sum().backward()
                results.append(repr((result.tolist(), x.grad.tolist())))
                probe.end_step()
        return [*results, repr(probe.sink.rows["effects"])]

    fast = outputs()
    with general_path():
        assert outputs() == fast
    assert len(set(fast)) == len(values) + 1


def test_budget_counts_each_firing_once() -> None:
    model = nn.Identity()
    with instrument.attach(model, {"a": {**OUTPUTS, "layers": "."}}, budget={"bytes": "1GB"}) as probe:
        for tensor in (torch.ones(8), torch.ones(8).half(), torch.ones(1)):
            model(tensor)
        (attached,) = probe.attached_hooks
        assert attached.clock.timer.firings[attached] == 3
        probe.end_step()
    assert len(probe.sink.rows["stats"]) == 3


@pytest.mark.spread(1)
@pytest.mark.parametrize("kind", ["full_backward", "tensor", "parameter_grad_micro"])
def test_scaled_gradients_are_measured_directly(kind: str) -> None:
    role = {"role": "grad_output"} if kind == "full_backward" else {}
    gradients = record(kind, "*", **role)
    scaler = torch.amp.GradScaler("cpu")
    assert measured_directly({"a": gradients}, scaler=scaler) == measured_directly({"a": gradients}) > 0
    assert measured_directly({"a": OUTPUTS}, scaler=scaler) == 6
    assert measured_directly({"a": {**gradients, "tensors": True}}, scaler=scaler) == 0
    assert measured_directly({"a": {"layers": "*", "kind": kind, "action": "clip", "value": 0.1}}, scaler=scaler) == 0


@pytest.mark.spread(1)
@pytest.mark.parametrize("init_scale", [2.0**16, 1000.0, 2.0**-40])
def test_scaled_gradients_have_unscaled_statistics(init_scale: float) -> None:
    """In the second step, the scale changes between two backward passes."""
    names = ["min", "max", "mean", "std", "l1", "l2", "abs_max", "numel", "zero_fraction", "nan_count", "inf_count"]
    specs = {
        "flow": record("tensor", "*", stats=names),
        "weights": record("post_accumulate_grad", "*", stats=names),
        "outputs": record("forward", "*", stats=names),
    }

    def rows(enabled: bool) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=init_scale, growth_interval=1)
        batch = torch.randn(4, 6)
        batch[0] = 0.0
        with instrument.attach(model, specs, optimizer=optimizer, scaler=scaler) as probe:
            for step in range(3):
                for _ in range(2 if step == 1 else 1):
                    optimizer.zero_grad()
                    scaler.scale(model(batch).square().mean()).backward()
                    scaler.step(optimizer)
                    scaler.update()
                probe.end_step()
        return probe.sink.records("stats")  # type: ignore[attr-defined]

    with counting() as handled:
        found = rows(enabled=True)
    # Directly: the first backward pass of each of 3 steps, with 3 gradients of outputs and 4 of parameters; and 3 outputs in each of 4
    # forward passes.
    assert (handled.count("flow"), handled.count("weights"), handled.count("outputs")) == (9, 12, 12)
    expected = rows(enabled=False)
    assert len(found) == len(expected) == 4 * 10
    for row, wanted in zip(sorted(found, key=_row_key), sorted(expected, key=_row_key), strict=True):
        assert _row_key(row) == _row_key(wanted)
        for name in names:
            assert row[name] == pytest.approx(wanted[name], rel=1e-5, abs=1e-12), (row["hook"], name)


@pytest.mark.parametrize("scale", [0.0, 8.0, 2.0**-149])
def test_gradients_under_an_unusual_scale_are_those_of_a_division(scale: float) -> None:
    """A scaler whose steps are all skipped reaches 0."""
    names = ["min", "max", "mean", "std", "l1", "l2", "zero_fraction", "nan_count", "inf_count"]
    model, scaler = nn.Sequential(nn.Linear(6, 8), nn.ReLU()), torch.amp.GradScaler("cpu")
    gradients: list[Tensor] = []
    with instrument.attach(model, {"h": record("tensor", "1", stats=names)}, scaler=scaler) as probe:
        output = model(torch.randn(4, 6))
        output.register_hook(gradients.append)
        scaler.scale(output.sum())
        scaler._get_scale_async().fill_(scale)
        output.backward(
            torch.tensor([0.0, 1.0, -3.0, math.inf, math.nan, -math.inf, 2.0, 4.0]).expand(4, 8).contiguous()
        )
        probe.end_step()
    x = gradients[0].double() / scale
    finite = x[x.isfinite()]
    (row,) = probe.sink.records("stats")
    assert (row["nan_count"], row["inf_count"]) == (x.isnan().sum(), x.isinf().sum())
    exists = finite.numel() > 0
    assert row["zero_fraction"] == (pytest.approx((finite == 0).double().mean().item()) if exists else None)
    expected = {
        "min": torch.min, "max": torch.max, "mean": torch.mean, "l1": lambda y: y.abs().sum(),
        "l2": torch.linalg.vector_norm, "std": lambda y: y.std(correction=0),
    }  # fmt: skip
    for name, compute in expected.items():
        assert row[name] == (pytest.approx(compute(finite).item(), rel=1e-6) if exists else None), name


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("step", "hook", "layer", "path", "call", "backward"))


def test_hook_is_composed_while_it_is_scheduled() -> None:
    model = nn.Linear(6, 3)
    with instrument.attach(model, {"late": {"layers": ".", **RECORD, "start": 1, "stop": 2}}) as probe:
        (attached,) = probe.attached_hooks
        for scheduled in (False, True, False):
            assert (attached.direct is not None) == scheduled
            model(torch.ones(4, 6))
            probe.end_step()
    assert len(probe.sink.rows["stats"]) == 1


def test_hook_is_composed_once_for_all_times_at_which_it_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh())
    composed: list[str] = []
    monkeypatch.setattr(
        attached_hook, "direct_of", lambda attached: (composed.append(attached.site.spec.name), direct_of(attached))[1]
    )
    specs = {
        "outputs": {"layers": "*", **RECORD, "every": 2},
        "scaled": {"layers": "0", "kind": "forward", "action": "scale", "factor": 0.5, "every": 3},
        "never": {"layers": "*", **RECORD, "start": 100},
    }
    with instrument.attach(model, specs) as probe:
        for _ in range(12):
            model(torch.ones(4, 6))
            probe.end_step()
        assert sorted(composed) == ["outputs", "outputs", "scaled"]
        changed = probe.plan.specs["scaled"].model_copy(update={"factor": 0.25})
        probe.change_hooks({"scaled": changed}, ())
        for _ in range(6):
            model(torch.ones(4, 6))
            probe.end_step()
    assert sorted(composed) == ["outputs"] * 4 + ["scaled"] * 2
    assert [row["step"] for row in probe.sink.records("stats")] == [step for step in range(0, 18, 2) for _ in range(2)]
    assert {row["step"]: row["factor"] for row in probe.sink.records("effects")} == {
        step: 0.5 if step < 12 else 0.25 for step in range(0, 18, 3)
    }


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 100_000])
def test_threads_record_at_the_same_time(size: int) -> None:
    model = nn.ModuleList([nn.Identity(), nn.Identity()])
    tensors = [torch.full((size,), float(i)) for i in range(2)]
    calls = 4_000_000 // size if size > 1000 else 1000
    with instrument.attach(model, {"seen": {"layers": "*", **RECORD}}) as probe:
        for _ in range(3):
            with ThreadPoolExecutor(2) as threads:
                list(threads.map(lambda i: [model[i](tensors[i]) for _ in range(calls)], range(2)))
            probe.end_step()
    rows = probe.sink.records("stats")
    assert len(rows) == 3 * 2 * calls
    assert {(row["layer"], row["numel"], row["min"], row["mean"]) for row in rows} == {
        ("0", size, 0.0, 0.0),
        ("1", size, 1.0, 1.0),
    }


def test_class_of_a_parametrized_module_is_that_of_its_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with instrument.attach(model, {"seen": {"layers": "0", **RECORD}}) as probe:
        for change in (None, register_parametrization, remove_parametrizations):
            if change is register_parametrization:
                change(model[0], "weight", Calls(lambda weight: weight * 2))
            elif change is not None:
                change(model[0], "weight")
            model(torch.ones(2, 4))
            probe.end_step()
    assert [row["module_type"] for row in probe.sink.records("stats")] == ["Linear", "Linear", "Linear"]


def test_state_with_a_budget_continues_to_sample_without_one() -> None:
    model = nn.Identity()
    with instrument.attach(model, {"a": {**OUTPUTS, "layers": "."}}, budget={"bytes": "1GB"}) as probe:
        (attached,) = probe.attached_hooks
        attached.subsampling = 4
        state = probe.state_dict()
    again = instrument.Probe(probe.plan, instrument.MemorySink())
    again.load_state_dict({**state, "budget": None})
    with again:
        for _ in range(12):
            model(torch.ones(4))
            again.end_step()
    steps = [row["step"] for row in again.sink.records("stats")]
    assert len(steps) == 3
    assert {later - step for step, later in pairwise(steps)} == {4}


def test_backward_pass_after_the_end_writes_no_row() -> None:
    model = nn.Linear(6, 3)
    with instrument.attach(model, {"gradients": SPECS["gradients"]}) as probe:
        loss = model(torch.ones(4, 6)).sum()
        loss.backward(retain_graph=True)
        probe.end_step()
    loss.backward()
    probe.recorder.end_step()
    assert len(probe.sink.rows["stats"]) == 1


def test_rows_grow_beyond_the_first_matrix() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(70)))
    with instrument.attach(model, {"seen": {"layers": "*", **RECORD}}) as probe:
        for _ in range(2):
            outputs, x = [], torch.randn(2, 4)
            for layer in model:
                x = layer(x)
                outputs.append(x.double().mean().item())
            probe.end_step()
            means = [row["mean"] for row in probe.sink.records("stats")[-70:]]
            assert means == pytest.approx(outputs, rel=1e-6)


class Branches(nn.Module):
    """Has one layer per way of being called."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(6, 6)
        self.repeated = nn.Linear(6, 6)
        self.without_gradients = nn.Linear(6, 6)
        self.checkpointed = nn.Linear(6, 6)
        self.recursive = Recursive()

    def forward(self, x: Tensor) -> Tensor:
        x = self.repeated(self.repeated(self.plain(x)))
        with torch.no_grad():
            x = x + self.without_gradients(x)
        return self.recursive(checkpoint(self.checkpointed, x, use_reentrant=False))


@pytest.mark.parametrize("names", [("outputs", "gradients"), ("outputs", "tame")])
def test_plain_calls_create_no_call_objects(names: tuple[str, ...]) -> None:
    """`Calls.enter` runs only for calls that a backward pass may repeat, or without gradients, and every second call of a recursion."""
    entered: Counter[str] = Counter()
    model = Branches()
    layers = {module: name for name, module in model.named_modules()}

    def enter(calls: ModuleCalls, group: Any, *given: Any, **options: Any) -> Call:
        entered[layers[group.module]] += 1
        return original(calls, group, *given, **options)

    original = ModuleCalls.enter
    hooks = {**SPECS, **INTERVENTIONS}
    specs = {name: {**hooks[name], "layers": "**"} for name in names}
    with mock.patch.object(ModuleCalls, "enter", enter), instrument.attach(model, specs) as probe:
        for _ in range(2):
            model(torch.randn(4, 6)).sum().backward()
            probe.end_step()
    if cpu_kernel.is_connected:
        assert entered == {"without_gradients": 2, "checkpointed": 4, "recursive": 2}
    rows = probe.sink.records("stats")
    indices = [
        row["call"] for row in rows if row["layer"] == "repeated" and row["hook"] == "outputs" and not row["step"]
    ]
    assert indices == [0, 1]


@pytest.mark.spread(1)
@pytest.mark.parametrize("names", [("outputs", "gradients"), ("outputs", "tame")])
def test_model_of_plain_calls_is_freed(few_objects: None, names: tuple[str, ...]) -> None:
    """The objects of plain calls and the hooks of a module refer to each other."""
    model, hooks = nn.Linear(6, 3), {**SPECS, **INTERVENTIONS}
    with instrument.attach(model, {name: hooks[name] for name in names}) as probe:
        model(torch.ones(4, 6)).sum().backward()
        probe.end_step()
    freed = weakref.ref(model)
    del model, probe
    gc.collect()
    assert freed() is None


def test_counts_of_usual_micro_steps_are_updated_without_python_code() -> None:
    """Others are those without an opportunity, with fewer firings, and with a note."""
    found = [FiringCounts() for _ in range(5)]
    for counts, (opportunities, firings) in zip(found, [(2, 2), (1, 3), (0, 0), (2, 1), (1, 1)], strict=True):
        counts.opportunities, counts.firings, counts.expected, counts.fired = opportunities, firings, 10, 10
        counts.has_notes = counts is found[-1]
    others = update_counts(found)
    if cpu_kernel.is_connected:
        assert others == found[2:]
        assert [(each.expected, each.fired) for each in found[:2]] == [(12, 12), (11, 13)]
        assert [(each.opportunities, each.firings) for each in found[:2]] == [(0, 0)] * 2
    assert [(each.expected, each.opportunities, each.firings) for each in found[2:]] == [
        (10, 0, 0),
        (10, 2, 1),
        (10, 1, 1),
    ]


@pytest.mark.skipif(not cpu_kernel.is_connected, reason="without the compiled kernel, the types do not exist")
def test_compiled_types_reject_other_objects() -> None:
    native = cpu_kernel.native
    assert native is not None
    counter, counts, slab = native.CallIndices(), native.FiringCounts(), native.Slab(len(COLUMNS))
    with pytest.raises(TypeError):
        native.Recording({}, counts, None, {}, None, False, False, False)
    with pytest.raises(TypeError):
        native.Recording(slab, counter, None, {}, None, False, False, False)  # type: ignore[arg-type]
    for given in ((counter, counts), (None, counter), (slab, counter)):
        with pytest.raises(TypeError):
            native.Changing(*given, None, {}, None, 0, False, False, print, print, None)
    for cls, functions in ((native.Recording, (print, print)), (native.Changing, ())):
        with pytest.raises(TypeError):
            cls(slab, counts, None, {}, None, 0, False, False, *functions)
    for outputs, several, gradients in (((print,), (), ()), ((print,), (counter,), ()), ((), (), (print,))):
        with pytest.raises(TypeError):
            native.PlainCalls(None, counter, outputs, several, gradients, print)  # type: ignore[arg-type]
    for given in ((counts,), [counts, counter]):
        with pytest.raises(TypeError, match="update_counts takes a list"):
            native.update_counts(given)  # type: ignore[arg-type]
    for cls in (
        native.Recording,
        native.Changing,
        native.PlainCalls,
        native.OutputGradientHook,
    ):  # no object without its fields
        with pytest.raises(TypeError):
            cls.__new__(cls)
    narrow = native.Recording(native.Slab(2), counts, SimpleNamespace(moment=None), {}, None, False, False, False)
    with pytest.raises(KeyError):
        narrow(torch.ones(3), "", FIRST_CALL)
    narrow = native.Recording(
        native.Slab(2), counts, SimpleNamespace(moment=None), defaultdict(int), None, False, False, False
    )
    with pytest.raises(TypeError, match="have 2 numbers"):
        narrow(torch.ones(3), "", FIRST_CALL)
    with pytest.raises(AttributeError, match="closed"):
        native.PlainCalls(None, counter, (), (), (), print).enter()


@pytest.mark.skipif(not cpu_kernel.is_connected, reason="without the compiled kernel, the types do not exist")
@pytest.mark.parametrize(
    ("with_slab", "factor", "is_finished"),
    [(True, 2.0, False), (True, None, False), (True, math.nan, True), (True, torch.ones(1), True), (False, 2.0, True)],
)
def test_slab_has_effects_with_an_ordinary_factor(with_slab: bool, factor: Any, is_finished: bool) -> None:
    native = cpu_kernel.native
    assert native is not None
    slab, finished, moment = native.Slab(len(EFFECT)), [], object()
    change = lambda tensor, path, moment: None if tensor.is_sparse else (2 * tensor, factor)  # noqa: E731
    finish = lambda *given: finished.append(given[2:])  # noqa: E731
    clock, given = SimpleNamespace(moment=moment), slab if with_slab else None
    counts, slots = native.FiringCounts(), defaultdict(int)
    changing = native.Changing(given, counts, clock, slots, None, 0, False, False, change, finish, True)
    tensor = torch.tensor([3.0, 4.0])
    new = changing(tensor, "path", FIRST_CALL)
    assert new is not None
    assert new.tolist() == [6.0, 8.0]
    assert changing(tensor.to_sparse(), "", FIRST_CALL) is None
    assert changing(tensor, "", FIRST_CALL._replace(recompute=True)) is None
    assert finished == [(factor, 0, "path", FIRST_CALL)] * is_finished
    numbers, _, _, moments = slab.take()
    row = [2, 2, 5.0, 10.0, math.nan if factor is None else factor, 1.0]
    np.testing.assert_array_equal(np.frombuffer(numbers), [] if is_finished else row)
    assert moments == [moment] * (not is_finished)


@pytest.mark.skipif(not cpu_kernel.is_connected, reason="without the compiled kernel, the types do not exist")
def test_exception_of_a_hook_ends_the_call() -> None:
    native = cpu_kernel.native
    assert native is not None
    clock, indices = SimpleNamespace(closed=False, micro_step_index=0), native.CallIndices()
    calls = native.PlainCalls(clock, indices, (math.sqrt,), (native.FiringCounts(),), (), print)
    assert calls.enter()
    with pytest.raises(TypeError):
        calls.leave(torch.ones(3))
    assert not indices.is_open
    assert calls.enter()


@pytest.mark.skipif(not cpu_kernel.is_connected, reason="without the compiled kernel, no hook runs in C")
def test_coverage_states_that_a_hook_raised_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    model, hooks = nn.Linear(2, 2), {"clip": {"layers": ".", "kind": "forward", "action": "clip", "norm": 1.0}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, hooks, optimizer=optimizer, rules=None) as probe:
        for step in range(3):
            with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
                if step == 1:
                    patched.setattr(torch.linalg, "vector_norm", mock.Mock(side_effect=KeyboardInterrupt))
                model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            probe.end_step()
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"], row["cause"]) == (3, 2, RAISED)


@pytest.mark.slow
def test_rows_are_the_same_without_the_c_extension(tmp_path: Path) -> None:
    """A process that imports the package without the compiled module writes the same rows, up to rounding."""
    program = tmp_path / "without_c_extension.py"
    program.write_text(
        "import sys\n"
        "sys.modules['instrument.hooks.compiled_operators'].LIBRARY._destroy()\n"  # PyTorch defines operators once
        "for name in [name for name in sys.modules if name.partition('.')[0] == 'instrument']:\n    del sys.modules[name]\n"
        "sys.modules['instrument.stats.native'] = None\n"
        "import json, torch, test_direct\n"
        "assert test_direct.cpu_kernel.KERNEL == 'portable'\n"
        "torch.manual_seed(0)\n"
        "print(json.dumps(test_direct.rows_of(test_direct.Branches(), test_direct.RECORDED_AND_CLIPPED)['stats'], default=float))"
    )
    done = Command(tmp_path, program, [], {"PYTHONPATH": os.pathsep.join(sys.path)}, "process").wait()
    assert done.returncode == 0, done.stderr
    torch.manual_seed(0)
    expected = rows_of(Branches(), RECORDED_AND_CLIPPED)["stats"]
    found = json.loads(done.stdout)
    assert len(found) == len(expected) > 100
    for row, other in zip(expected, found, strict=True):
        assert [cell for cell in row if isinstance(cell, str | int)] == [
            cell for cell in other if isinstance(cell, str | int)
        ]
        numbers, others = ([cell for cell in each if isinstance(cell, float)] for each in (row, other))
        assert others == pytest.approx(numbers, rel=1e-6, abs=1e-9)
