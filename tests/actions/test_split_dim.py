"""`split_dim`: a record of each index of a dimension, such as each attention head."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attached_runs import forward_steps
from device_statistics import use_device_statistics
from hook_runs import Calls, assert_equal, keep, record, refused, run_step, run_steps, tensors_by
from torch import Tensor, nn

import instrument
from instrument.config.parse import parse_hooks
from instrument.errors import HookError
from instrument.stats.measure import measure_statistics
from instrument.training.distributed.strategies import reduce_problems

NAMES = ("numel", "mean", "std", "min", "max", "l2", "zero_fraction")
identity = partial(Calls, lambda x: x * 1)
HEADS = record("function", role="attention", split_dim=1)


def heads(count: int = 3, length: int = 4) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, count, length, 5) for _ in range(3)]


@pytest.mark.spread(4)
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_those_of_the_parts(
    monkeypatch: pytest.MonkeyPatch, dim: int, dtype: torch.dtype, on_device: bool
) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    x = (3 * torch.randn(2, 3, 4)).to(dtype)
    _, probe = run_step(identity(), {"h": record("forward", split_dim=dim, stats=[*NAMES])}, x)
    rows = probe.sink.records("stats")
    parts = x.unbind(dim)
    assert [row["path"] for row in rows] == [f":{index}" for index in range(len(parts))]
    assert [row["shape"] for row in rows] == [[*part.shape] for part in parts]
    for row, part in zip(rows, parts, strict=True):
        assert [row[name] for name in NAMES] == pytest.approx(measure_statistics(part, NAMES), rel=1e-6)
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(1, 1)]


def test_each_head_has_its_entropy() -> None:
    query, key, value = heads()
    hooks = {"h": {**HEADS, "stats": ["row_entropy"]}, "all": {**HEADS, "stats": ["row_entropy"], "split_dim": None}}
    _, probe = run_step(Calls(F.scaled_dot_product_attention), hooks, query, key, value)
    weights = (query @ key.mT / 5**0.5).softmax(-1).double()
    entropies = torch.special.entr(weights).sum(-1).mean((0, 2)).tolist()
    found = {row["path"]: row["row_entropy"] for row in probe.sink.records("stats")}
    name = "scaled_dot_product_attention.0"
    assert found == pytest.approx(
        {f"{name}:{head}": entropies[head] for head in range(3)} | {name: sum(entropies) / 3}, rel=1e-6
    )


def test_queries_and_keys_are_recorded_per_head() -> None:
    arguments = heads()
    spec = {"functions": "scaled_dot_product_attention", "role": "input", "path": "*.0.?", "split_dim": 1}
    _, probe = run_step(Calls(F.scaled_dot_product_attention), {"h": keep("function", **spec)}, *arguments)
    found = tensors_by(probe, "path")
    assert len(found) == 9
    for at, argument in enumerate(arguments):
        assert_equal([found[f"scaled_dot_product_attention.0.{at}:{head}"] for head in range(3)], argument.unbind(1))


def test_gradients_are_split() -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    _, probe = run_step(identity(), {"h": keep("full_backward", split_dim=1)}, x, loss=lambda y: y.square().sum())
    found = tensors_by(probe, "path")
    assert_equal([found[f"0:{index}"] for index in range(3)], (2 * x).detach().unbind(1))


def test_all_that_a_hook_records_is_of_the_parts() -> None:
    x = torch.randn(4, 3, 6)
    spec = {"quantiles": [0.5], "tensors": True, "samples": 2, "stats": [{"_target_": torch.sum, "name": "total"}]}
    _, probe = run_step(identity(), {"h": record("forward", split_dim=1, **spec)}, x)
    for name, column in (("stats", "total"), ("distributions", "quantiles"), ("tensors", "values")):
        rows = probe.sink.records(name)
        assert [row["path"] for row in rows] == [":0", ":1", ":2"]
        for row, part in zip(rows, x.unbind(1), strict=True):
            if name == "stats":
                assert row["custom"][column] == pytest.approx(part.sum().item(), rel=1e-5)
            elif name == "tensors":
                assert torch.equal(row[column], part[:2])
            else:
                assert row[column] == pytest.approx([part.quantile(0.5).item()])


def test_selections_are_of_the_parts() -> None:
    x = torch.randn(2, 3, 5, 4)
    hooks = {
        "positions": keep("forward", split_dim=1, positions=[-1]),
        "slice": keep("forward", split_dim=1, slice=":, 0"),
        "units": keep("forward", split_dim=1, units=[0, 2], unit_dim=1),
    }
    _, probe = run_step(identity(), hooks, x)
    found = tensors_by(probe, "hook", "path")
    for head in range(3):
        assert torch.equal(found["positions", f":{head}"], x[:, head, -1:])
        assert torch.equal(found["slice", f":{head}"], x[:, head, 0])
        assert torch.equal(found["units", f":{head}"], x[:, head, [0, 2]])


def test_conditions_and_rules_see_each_index() -> None:
    model = identity()
    batches = [torch.ones(2, 3) * torch.tensor([1.0, scale, 1.0]) for scale in (1.0, 1.0, 9.0)]
    hooks = {
        "all": record("forward", split_dim=1),
        "large": record("forward", split_dim=1, when={"stat": "max", "above": 2, "times": "median", "after": 2}),
    }
    rules = {"peak": {"watch": "all", "stat": "max", "above": 5}}
    with instrument.attach(model, hooks, rules=rules) as probe:
        for batch in batches:
            model(batch)
            probe.end_step()
    assert [(row["step"], row["path"]) for row in probe.sink.records("stats") if row["hook"] == "large"] == [(2, ":1")]
    (event,) = [row for row in probe.sink.records("events") if row["rule"] == "peak"]
    assert "[:1]" in event["message"]
    assert event["step"] == 2


def test_kept_tensor_is_complete() -> None:
    seen: list[Tensor] = []

    def look(tensor: Tensor, context: instrument.Context) -> None:
        seen.append(context.tensors["x"]["0"])

    model, x = nn.Sequential(nn.Identity(), nn.Identity()), torch.randn(2, 3)
    hooks = {
        "h": record("forward", "0", split_dim=1, keep_as="x"),
        "look": {"layers": "1", "kind": "forward", "action": "call", "fn": look},
    }
    run_step(model, hooks, x)
    assert_equal(seen, [x])


@pytest.mark.slow
def test_rows_in_a_compiled_graph_are_the_same() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4)), torch.randn(2, 3)
    hooks = {
        "h": record("forward", "0", split_dim=-1),
        "g": record("full_backward", "0", role="grad_output", split_dim=-1),
    }
    rows = []
    for compiled in (False, True):
        runner = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        probe = run_steps(model, hooks, lambda: runner(x).sum().backward())  # noqa: B023
        rows.append([(row["hook"], row["path"], row["mean"], row["l2"]) for row in probe.sink.records("stats")])
    torch.compiler.reset()
    assert len(rows[0]) == 8
    assert rows[1] == [(*row[:2], *map(pytest.approx, row[2:])) for row in rows[0]]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (record("parameter_grad", "**", split_dim=0), "'split_dim' requires the tensors of a module call"),
        ({**record("forward", split_dim=1), "action": "print"}, "another action has this field"),
        (record("forward", split_dim=True), "split_dim"),
    ],
)
def test_invalid_specs_are_refused(spec: dict[str, Any], message: str) -> None:
    assert message in refused(nn.Linear(2, 2), {"h": spec})


@pytest.mark.parametrize(
    ("fields", "where"),
    [({"split_dim": 2}, "split_dim"), ({"split_dim": 1, "slice": ":, 0"}, "slice")],
)
def test_field_that_does_not_fit_the_first_tensor_is_refused(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(instrument.ConfigError) as caught:
        run_step(identity(), {"h": record("forward", **fields)}, torch.ones(2, 3))
    assert caught.value.problems[0].where == f"hooks.h.{where}"


def test_dimension_that_a_later_tensor_lacks_is_an_error() -> None:
    model, batches = identity(), [torch.ones(2, 3, 4), torch.ones(2, 3)]
    with pytest.raises(HookError, match=r"split_dim 2 is out of range for shape \[2, 3\]"):
        forward_steps(model, {"h": record("forward", split_dim=2)}, batches)


def test_shard_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.hooks.attached_hook.scope_of", lambda *_: "shard")
    with pytest.raises(HookError, match="split_dim requires the complete tensor"):
        run_step(identity(), {"h": record("forward", split_dim=0)}, torch.ones(2))


def test_rows_of_samples_are_not_merged() -> None:
    hooks = {f"along{dim}": record("forward", split_dim=dim) for dim in (0, 1)}
    (problem,) = reduce_problems(None, parse_hooks(hooks))
    assert problem.where == "hooks.along0.split_dim"
