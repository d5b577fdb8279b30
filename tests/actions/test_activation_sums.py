"""Statistics of a residual stream, of tokens, and of logits."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, counts, record, refused, run_step
from torch import Tensor, nn
from torch.nn import functional as F
from training_runs import train_here

import instrument
from instrument.actions import context_sums
from instrument.actions.base import Context, StepContext
from instrument.actions.measurement import measure_in_context
from instrument.config.hook_specs import graph_obstacle
from instrument.config.parse import parse_hooks
from instrument.stats import portable
from instrument.stats.sums import extremes, merged, needs_of, statistics_of, totals
from instrument.tables.reasons import NO_CHANGE, REPLACED_INPUT

CHANGE = ["l2", "branch_ratio", "input_cosine"]


def change_of(module: nn.Module, *args: Any, stats: Any = CHANGE, **fields: Any) -> tuple[Any, Any]:
    """Return the rows of the change of a module, and the probe."""
    _, probe = run_step(module, {"h": record("forward", role="change", stats=stats, **fields)}, *args)
    return probe.sink.records("stats"), probe


def assert_change(row: dict[str, Any], given: Tensor, output: Tensor) -> None:
    x, y = given.double().flatten(), output.detach().double().flatten()
    assert row["branch_ratio"] == pytest.approx(((y - x).norm() / x.norm()).item(), rel=1e-6)
    assert row["input_cosine"] == pytest.approx(F.cosine_similarity(x, y, dim=0).item(), rel=1e-6)


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure on the CPU, and as on a device. Tensors are read in several parts."""
    monkeypatch.setattr(portable, "PART", 50)
    if request.param:
        use_device_statistics(monkeypatch)


@pytest.mark.spread(4)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_change_is_output_minus_input(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8, dtype=dtype)
    block = Calls(lambda linear, x: x + 0.1 * linear(x), linear=nn.Linear(8, 8, dtype=dtype))
    (row,), _ = change_of(block, x)
    output = block(x)
    assert_change(row, x, output)
    assert row["l2"] == pytest.approx((output.double() - x.double()).norm().item(), rel=1e-6)
    assert (row["role"], row["shape"]) == ("change", [3, 5, 8])


@pytest.mark.parametrize("inference", [False, True])
def test_change_of_a_block_that_overwrites_its_input(inference: bool) -> None:
    x = torch.tensor([[3.0, 4.0]])
    given = x.clone()
    with torch.inference_mode(inference):
        (row,), _ = change_of(Calls(lambda x: x.mul_(2)), x)
    assert_change(row, given, 2 * given)
    assert (row["branch_ratio"], row["input_cosine"]) == (1.0, pytest.approx(1.0))


def test_change_of_the_first_tensors_of_nested_values() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    (row,), _ = change_of(Calls(lambda flag, x, y: (None, x + y, y)), None, x, y)
    assert_change(row, x, x + y)
    assert row["path"] == "1"


def test_change_of_a_float8_tensor() -> None:
    """PyTorch does not promote float8."""
    x = torch.tensor([3.0, 4.0]).to(torch.float8_e4m3fn)
    (row,), _ = change_of(Calls(lambda x: (2 * x.float()).to(x.dtype)), x)
    assert (row["branch_ratio"], row["input_cosine"]) == (1.0, pytest.approx(1.0))


def test_change_is_to_the_output_that_hooks_leave() -> None:
    x = torch.randn(2, 3)
    hooks = {
        "half": {"layers": ".", "kind": "forward_pre", "action": "scale", "factor": 0.5},
        "seen": record("forward", role="change", stats=CHANGE),
        "twice": {"layers": ".", "kind": "forward", "action": "scale", "factor": 8.0},
    }
    output, probe = run_step(nn.Identity(), hooks, x)
    (row,) = probe.sink.records("stats")
    assert_change(row, 0.5 * x, output)
    assert row["branch_ratio"] == pytest.approx(7.0)


def test_change_of_a_selection() -> None:
    x = torch.randn(4, 3, 6)
    (row,), _ = change_of(Calls(lambda x: x.sin()), x, units=[0, 4], samples=[1, 2])
    assert_change(row, x[1:3][..., [0, 4]], x.sin()[1:3][..., [0, 4]])


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x[:, :1], torch.ones(2, 3)),
        (lambda x: x + 1, torch.ones(2, 3, dtype=torch.int64)),
        (lambda x: {"loss": None}, torch.ones(2)),
        (lambda x: x.to_sparse(), torch.ones(2, 2)),
    ],
)
def test_module_without_a_change_is_in_the_coverage(function: Any, x: Tensor) -> None:
    with pytest.warns(instrument.InstrumentWarning, match="another shape"):
        rows, probe = change_of(Calls(function), x)
    assert rows == []
    assert (counts(probe), probe.coverage()[0]["cause"]) == ([(1, 0)], NO_CHANGE)


def test_replaced_input_is_in_the_coverage() -> None:
    module = nn.Identity()
    hook = record("forward", role="change", stats=CHANGE)
    with (
        pytest.warns(instrument.InstrumentWarning, match="replaced the input"),
        instrument.attach(module, {"h": hook}) as probe,
    ):
        module.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        module(torch.ones(2))
        probe.end_step()
    assert (probe.sink.records("stats"), probe.coverage()[0]["cause"]) == ([], REPLACED_INPUT)


def test_change_counts_elements_at_which_both_are_finite() -> None:
    x = torch.tensor([3.0, math.inf, 4.0, 1.0, 12.0])
    y = torch.tensor([6.0, 1.0, 8.0, math.nan, 24.0])
    (row,), _ = change_of(Calls(lambda x: y), x)
    assert (row["branch_ratio"], row["input_cosine"]) == (pytest.approx(1.0), pytest.approx(1.0))
    (row,), _ = change_of(Calls(lambda x: x + 1), torch.zeros(3))
    assert (row["branch_ratio"], row["input_cosine"]) == (None, None)
    (row,), _ = change_of(Calls(lambda x: x * 0), torch.ones(3))
    assert (row["branch_ratio"], row["input_cosine"]) == (1.0, None)


def test_change_of_the_calls_of_checkpointing_is_recorded_once() -> None:
    from torch.utils.checkpoint import checkpoint

    block = Calls(lambda linear, x: x + linear(x), linear=nn.Linear(3, 3))
    model = Calls(lambda block, x: checkpoint(block, x, use_reentrant=False), block=block)
    x = torch.randn(2, 3, requires_grad=True)
    hooks = {"h": record("forward", "block", role="change", stats=CHANGE)}
    _, probe = run_step(model, hooks, x, loss=torch.sum)
    (row,) = probe.sink.records("stats")
    assert_change(row, x.detach(), block(x))


def test_role_change_is_refused_for_interventions_and_kept_tensors() -> None:
    scale = {"layers": ".", "kind": "forward", "role": "change", "action": "scale", "factor": 2.0}
    assert "kind forward cannot change role change" in refused(nn.Identity(), {"h": scale})
    kept = record("forward", role="change", keep_as="x")
    assert "'keep_as' requires a tensor of the module" in refused(nn.Identity(), {"h": kept})
    wrong = record("forward", stats=["branch_ratio"])
    assert "statistic branch_ratio requires kind forward, role change" in refused(nn.Identity(), {"h": wrong})


def statistics(x: Tensor, names: list[str], module: nn.Module | None = None, **fields: Any) -> list[Any]:
    """Return statistics of the output of a module that returns a tensor."""
    _, probe = run_step(module or nn.Identity(), {"h": record("forward", stats=names, **fields)}, x)
    (row,) = probe.sink.records("stats")
    return [row[name] for name in names]


@pytest.mark.spread(4)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_token_cosine_is_the_mean_cosine_of_all_pairs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 5, dtype=dtype) + 0.5
    pairs = itertools.combinations(range(6), 2)
    wide = x.double()
    expected = np.mean([F.cosine_similarity(wide[:, i], wide[:, j], dim=-1).mean().item() for i, j in pairs])
    assert statistics(x, ["token_cosine"]) == [pytest.approx(expected, rel=1e-6)]


def test_token_cosine_leaves_out_tokens_without_a_direction() -> None:
    x = torch.randn(3, 4, 5)
    x[0, 1], x[0, 3, 2], x[1, 1:] = (
        0.0,
        math.nan,
        0.0,
    )  # two tokens are left of sample 0, one of sample 1, four of sample 2
    one = F.cosine_similarity(x[0, 0], x[0, 2], dim=0).item()
    all_pairs = [F.cosine_similarity(a, b, dim=0).item() for a, b in itertools.combinations(x[2], 2)]
    assert statistics(x, ["token_cosine"]) == [pytest.approx((one + np.mean(all_pairs)) / 2, rel=1e-6)]
    same = torch.ones(2, 3, 4)
    assert statistics(same, ["token_cosine"]) == [pytest.approx(1.0)]
    for without in (torch.randn(3, 4), torch.randn(2, 1, 4), torch.zeros(2, 0, 4), torch.ones(2, 3, 4).long()):
        assert statistics(without, ["token_cosine"]) == [None]


@pytest.mark.spread(3)
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.float8_e5m2])
def test_statistics_of_logits_equal_scipy(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = 4 * torch.randn(3, 5, 11, dtype=torch.float64)
    x[0, 0, 3:] = -math.inf  # masked classes
    x = x.to(dtype)
    wide = x.double().numpy()
    entropies = scipy.stats.entropy(scipy.special.softmax(wide, axis=-1), axis=-1)
    squares = scipy.special.logsumexp(wide, axis=-1) ** 2
    rel = 1e-12 if dtype == torch.float64 else 1e-7
    expected = [pytest.approx(entropies.mean(), rel=rel), pytest.approx(squares.mean(), rel=rel)]
    assert statistics(x, ["softmax_entropy", "z_loss"]) == expected


def test_rows_of_logits_that_are_not_finite_do_not_count() -> None:
    x = torch.tensor([[0.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [-math.inf, -math.inf]])
    assert statistics(x, ["softmax_entropy", "z_loss"]) == [pytest.approx(math.log(2)), pytest.approx(math.log(2) ** 2)]
    assert statistics(x[1:], ["softmax_entropy", "z_loss"]) == [None, None]
    assert statistics(torch.tensor(1.0), ["softmax_entropy"]) == [None]


def test_logits_are_converted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = context_sums.softmax_of
    monkeypatch.setattr(portable, "PART", 64)
    monkeypatch.setattr(context_sums, "softmax_of", lambda rows: (seen.append(rows.numel()), original(rows))[1])
    statistics(torch.randn(2, 20, 16), ["z_loss"])
    assert seen == [64] * 10


@pytest.mark.parametrize("name", ["branch_ratio", "input_cosine", "token_cosine", "softmax_entropy", "z_loss"])
def test_sums_of_parts_of_a_batch_are_those_of_the_batch(name: str) -> None:
    """`reduce: global` adds the sums of all processes."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6) + 0.3

    def sums(part: Tensor) -> Tensor:
        context = Context("h", "forward", "change", "", nn.Identity(), "", StepContext(0, 0, 0, "train"), value=part)
        tensor = part.sin() - part if name in CHANGE else part
        return torch.from_numpy(measure_in_context(tensor, context, needs_of((name,)), None).row)[None]

    rows = [sums(part) for part in x.split((2, 3))]
    maxima = torch.stack([extremes(row) for row in rows]).amax(0)
    total = torch.stack([totals(row, maxima) for row in rows]).sum(0)
    found, expected = (statistics_of(matrix.numpy(), (name,))[0][0] for matrix in (merged(maxima, total), sums(x)))
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")  # the graph breaks
def test_change_of_a_compiled_block_is_recorded_outside_of_the_graph() -> None:
    block = Calls(lambda linear, x: x + linear(x), linear=nn.Linear(3, 3))
    x = torch.randn(2, 3)
    compiled = torch.compile(block, backend="eager")
    (row,), _ = change_of(compiled, x, layers=".")
    assert_change(row, x, block(x))
    spec = parse_hooks({"h": record("forward", role="change")})["h"]
    obstacle = graph_obstacle(spec)
    assert obstacle is not None
    assert (obstacle.key, obstacle.fix) == ("role", "record the output")


def test_function_of_a_change_gets_the_input() -> None:
    seen: list[Any] = []
    hook = record("forward", role="change", action="call")
    hook |= {"fn": lambda tensor, context: seen.append((tensor, context.value))}
    x = torch.randn(2, 3)
    run_step(Calls(torch.exp), {"h": hook}, x)
    ((change, given),) = seen
    assert torch.equal(change, x.exp() - x)
    assert torch.equal(given, x)


@pytest.mark.parametrize("gap", [0.0, 5.0, 20.0, 50.0])
def test_entropy_of_certain_predictions_is_exact(gap: float) -> None:
    x = torch.zeros(4, 1000)
    x[:, 3] = gap
    shares = scipy.special.softmax(x[:1].double().numpy(), axis=-1)
    expected = scipy.stats.entropy(shares[0])
    assert statistics(x, ["softmax_entropy"]) == [pytest.approx(expected, rel=1e-5, abs=1e-15)]


@pytest.mark.slow
def test_trial_before_a_run_measures_a_change(tmp_path: Path) -> None:
    stats = "[branch_ratio, {_target_: torch.mean, name: shift}]"
    hook = f"{{layers: '**', types: ReLU, kind: forward, role: change, action: record, stats: {stats}}}"
    run = train_here(tmp_path / "out", "model=mlp", "data=digits", "train.steps=2", f"+hooks.c={hook}")
    assert len(run.stats) == 4
    assert (run.stats["branch_ratio"] > 0).all()  # a ReLU removes the negative values
    assert (run.stats["shift"] > 0).all()
