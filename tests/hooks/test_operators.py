"""`probe.record_operators`: the table `operators`, and the location of each operator in the forward and the backward pass."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.hooks.operators import _kind

FILE = "tests/hooks/test_operators.py"
EVERYTHING = {
    "outputs": {"layers": "**", "kind": "forward", "action": "record", "stats": ["mean", "skewness"], "tensors": True},
    "functions": {"layers": "**", "kind": "function", "functions": "*", "action": "record", "stats": ["mean"]},
    "gradients": {"layers": "**", "kind": "full_backward", "action": "record"},
    "parameters": {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": ["previous_cosine"]},
    "updates": {"layers": "**", "kind": "step_post", "role": "update", "action": "record", "stats": ["update_ratio"]},
}


class Logarithm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x)


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        root = x.sqrt()
        return torch.where(x > 0, root, 0.0)


class Slices(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        x[:, 0].sqrt_()
        return x.relu()


class Views(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        part = x[:, 0]
        part.add_(0)
        return part.sqrt()


class Lists(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = x + 0
        one, other = torch._foreach_sqrt([x, x + 1])
        return one + other


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda value: self.inner(value).exp(), x, use_reentrant=self.reentrant)
        return result


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return the file and the line of a function that contains a text."""
    lines, first = inspect.getsourcelines(function)
    return f"{FILE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def train(
    model: nn.Module, batch: Tensor, hooks: Any = (), *, steps: int = 1, record: bool = True, foreach: bool = False
) -> Any:
    """Train on the sum of the output, and return the probe."""
    optimizer = torch.optim.Adam(model.parameters(), foreach=foreach) if [*model.parameters()] else None
    with instrument.attach(model, {**dict(hooks)}, optimizer=optimizer) as probe:
        for _ in range(steps):
            with probe.record_operators() if record else torch.enable_grad():
                loss = model(batch).sum()
                loss.backward()
                if optimizer is not None:
                    optimizer.step()
            probe.end_step(loss=loss)
    return probe


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8, 3)
    )


pytestmark = pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")


@pytest.mark.spread(1)
@pytest.mark.parametrize("foreach", [False, True])
def test_recording_operators_changes_nothing(foreach: bool) -> None:
    batch, states = torch.randn(4, 1, 4, 4), []
    for record in (False, True):
        model = network()
        train(model, batch, steps=2, record=record, foreach=foreach)
        states.append({**model.state_dict(), "random": torch.get_rng_state()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class _Listing(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: list[tuple[str, list[tuple[int, ...]], list[float]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [
            each for each in (result if isinstance(result, tuple | list) else [result]) if isinstance(each, Tensor)
        ]
        if tensors:
            norms = [each.double().norm().item() for each in tensors]
            self.rows.append((str(func), [tuple(each.shape) for each in tensors], norms))
        return result


def test_rows_are_those_of_a_dispatch_mode_of_pytorch() -> None:
    batch, model = torch.randn(4, 1, 4, 4), network()
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), foreach=False)
    state = torch.get_rng_state()
    with _Listing() as listing:
        other(batch).sum().backward()
        optimizer.step()
    torch.set_rng_state(state)
    rows = train(model, batch).run.operators
    rows = rows[rows["dtype"] != "uint8"]  # batch normalization returns a buffer of cuDNN
    wanted = [each for each in listing.rows if each[1] != [(0,)]]
    calls = [frame for _, frame in rows.groupby("number")]
    assert [frame["operator"].iloc[0] for frame in calls] == [name for name, _, _ in wanted]
    for frame, (_, shapes, norms) in zip(calls, wanted, strict=True):
        assert [tuple(shape) for shape in frame["shape"]] == shapes
        if frame["fingerprint"].notna().all():
            assert frame["l2"].to_numpy() == pytest.approx(norms, rel=1e-6)


def test_views_and_uninitialized_memory_have_no_numbers() -> None:
    rows = train(network(), torch.randn(4, 1, 4, 4)).run.operators
    without = rows[rows["fingerprint"].isna()]
    assert {"aten.view.default", "aten.t.default", "aten.detach.default", "aten.empty_like.default"} <= {
        *without["operator"]
    }
    assert without["nan_count"].isna().all()
    kept = rows[rows["fingerprint"].notna()]
    assert {"aten.relu_.default", "aten.mm.default"} <= {*kept["operator"]}
    assert {*rows[rows["random"]]["operator"]} == {"aten.bernoulli_.float"}


@pytest.mark.slow
def test_hooks_that_record_add_no_operators() -> None:
    batch, columns = torch.randn(4, 1, 4, 4), ["part", "layer", "operator", "source", "output", "fingerprint"]
    frames = []
    for hooks in ({}, EVERYTHING):
        frames.append(train(network(), batch, hooks, steps=2).run.operators[columns])
    pd.testing.assert_frame_equal(*frames)


def test_interventions_are_recorded() -> None:
    hooks = {"twice": {"layers": "5", "kind": "forward", "action": "scale", "factor": 2.0}}
    added = []
    for each in ({}, hooks):
        rows = train(network(), torch.randn(4, 1, 4, 4), each).run.operators
        added.append(rows[(rows["part"] == "forward") & (rows["operator"] == "aten.mul.Tensor")])
    assert len(added[1]) == len(added[0]) + 1
    assert added[1].iloc[-1]["layer"] == "5"


def test_locations_in_forward_backward_and_optimizer() -> None:
    rows = train(nn.Sequential(nn.Linear(4, 4), Root(), nn.Linear(4, 2)), torch.rand(3, 4)).run.operators
    root = line_of(Root.forward, "sqrt()")
    sqrt = rows[rows["operator"] == "aten.sqrt.default"].iloc[0]
    assert tuple(sqrt[["part", "layer", "source"]]) == ("forward", "1", root)
    backward = rows[rows["part"] == "backward"]
    assert [*backward[backward["operator"].isin(["aten.mm.default"])]["layer"]] == ["2", "2", "0"]
    division = backward[backward["operator"] == "aten.div.Tensor"].iloc[0]  # gradient / (2 * root)
    assert tuple(division[["layer", "source"]]) == ("1", root)
    step = rows[rows["part"] == "optimizer"]
    written = step[step["operator"] == "aten.addcdiv_.default"]
    assert [*written["layer"]] == ["0", "0", "2", "2"]
    assert {*step["source"]} == {line_of(train, "optimizer.step()")}
    assert {*rows[rows["part"] == "loop"]["source"]} <= {
        line_of(train, "model(batch)"),
        line_of(train, "loss.backward()"),
    }


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_repeated_forward_pass_is_a_part_of_its_own(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed(reentrant))
    rows = train(model, torch.rand(3, 4)).run.operators
    for part in ("forward", "recompute"):
        those = rows[rows["part"] == part].set_index("operator")
        assert those["layer"]["aten.tanh.default"] == "1.inner.1"
        assert those["layer"]["aten.exp.default"] == "1"
        assert those["source"]["aten.exp.default"] == line_of(Checkpointed.forward, "exp()")
    backward = rows[rows["part"] == "backward"].set_index("operator")
    assert backward["layer"]["aten.tanh_backward.default"] == "1.inner.1"
    assert backward["layer"]["aten.mul.Tensor"] == "1"  # of exp


@pytest.mark.spread(2)
@pytest.mark.parametrize(("module", "text"), [(Slices(), "sqrt_()"), (Views(), "sqrt()"), (Lists(), "_foreach_sqrt(")])
def test_each_of_several_nodes_has_its_line(module: nn.Module, text: str) -> None:
    """An operator on a view makes a node after it runs, and one on a list makes several nodes before."""
    line = line_of(type(module).forward, text)
    rows = train(nn.Sequential(nn.Linear(2, 2), module), torch.rand(3, 2)).run.operators
    divisions = rows[(rows["operator"] == "aten.div.Tensor") & (rows["part"] == "backward")]
    assert {*divisions["source"]} == {line}


def test_nodes_of_functional_transforms_have_their_line() -> None:
    """Each transform makes a node for the same operator."""
    model = nn.Sequential(nn.Linear(2, 2), Root())
    with instrument.attach(model, {}) as probe, probe.record_operators():

        def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
            result: Tensor = torch.func.functional_call(model, weights, (sample[None],)).sum()
            return result

        gradients = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        gradients(dict(model.named_parameters()), torch.rand(3, 2))
    rows = probe.run.operators
    divisions = rows[(rows["operator"] == "aten.div.Tensor") & (rows["part"] == "backward")]
    assert {*divisions["source"]} == {line_of(Root.forward, "sqrt()")}


def test_blocks_of_one_step_continue() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    with instrument.attach(model, {}) as probe:
        outside = nn.functional.silu(model(torch.rand(3, 2)))
        with probe.record_operators(), probe.record_operators():
            loss = model(torch.rand(3, 2)).sum()
        outside = outside.sigmoid().sum()
        with probe.record_operators():
            (loss + outside).backward()
    rows = probe.run.operators
    assert [*rows.drop_duplicates("number")["number"]] == [*range(rows["number"].nunique())]
    assert not rows.duplicated(["number", "output"]).any()
    operators = rows[rows["part"] == "backward"].groupby("operator")
    assert sorted(operators["layer"].get_group("aten.tanh_backward.default").fillna("unknown")) == ["1", "unknown"]
    for name in ("aten.sigmoid_backward.default", "aten.silu_backward.default"):
        assert operators.get_group(name)[["layer", "source"]].isna().all(axis=None)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("module", "part", "operator", "line"),
    [
        (Logarithm(), "forward", "aten.log.default", line_of(Logarithm.forward, "log(x)")),
        (Root(), "backward", "aten.div.Tensor", line_of(Root.forward, "sqrt()")),
    ],
)
def test_first_nan_has_the_operator_and_the_line(module: nn.Module, part: str, operator: str, line: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2), module, nn.Linear(2, 1))
    nn.init.zeros_(model[0].weight)  # type: ignore[arg-type]
    nn.init.constant_(model[0].bias, -1.0 if part == "forward" else 0.0)  # type: ignore[arg-type]
    rows = train(model, torch.rand(3, 2)).run.operators
    first = rows[rows["nan_count"] > 0].iloc[0]
    assert tuple(first[["part", "operator", "layer", "source", "nan_inputs"]]) == (part, operator, "1", line, 0)
    assert rows[rows["nan_inputs"] > 0]["number"].min() > first["number"]


def test_no_tensor_is_kept() -> None:
    kept = []

    class Remembering(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 1
            kept.append(weakref.ref(y.untyped_storage()))
            return y * 2

    model = nn.Sequential(Remembering(), nn.Linear(2, 1))
    with instrument.attach(model, {}) as probe, probe.record_operators():
        model(torch.rand(3, 2))
        assert kept[0]() is None


def test_steps_are_numbered_and_rows_are_written_after_an_exception() -> None:
    model = nn.Linear(2, 1)

    def fail(probe: Any) -> None:
        with probe.record_operators():
            for _ in range(2):
                model(torch.rand(3, 2))
                probe.end_step()
            raise ZeroDivisionError

    with instrument.attach(model, {}) as probe, pytest.raises(ZeroDivisionError):
        fail(probe)
    rows = probe.run.operators
    assert {*rows["step"]} == {0, 1}
    assert [*rows[rows["step"] == 1]["number"]] == [*rows[rows["step"] == 0]["number"]]


def test_nodes_of_a_double_backward_pass_have_their_layer() -> None:
    model, batch = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)), torch.rand(3, 2, requires_grad=True)
    with instrument.attach(model, {}) as probe, probe.record_operators():
        (gradient,) = torch.autograd.grad(model(batch).sum(), batch, create_graph=True)
        gradient.square().sum().backward()
    rows = probe.run.operators
    assert [*rows[rows["operator"] == "aten.tanh_backward.default"]["layer"]] == ["1", "1", "1"]


def test_saved_bytes_of_recurrent_layers_are_not_compared() -> None:
    model, batch = nn.LSTM(2, 3), torch.rand(4, 1, 2)
    with instrument.attach(model, {}) as probe, probe.record_operators():
        model(batch)[0].sum().backward()
    rows = probe.run.operators
    assert rows[(rows["dtype"] == "uint8") & (rows["output"] > 0)]["fingerprint"].isna().all()
    assert rows[rows["output"] == 0]["fingerprint"].notna().any()


def test_nested_tensors_have_no_shape() -> None:
    nested = torch.nested.nested_tensor([torch.rand(1, 2), torch.rand(3, 2)], layout=torch.jagged)
    model = nn.Linear(2, 2)
    with instrument.attach(model, {}) as probe, probe.record_operators():
        model(nested).values().sum().backward()
    rows = probe.run.operators
    assert rows.iloc[0]["shape"] is None
    assert rows[rows["part"] == "loop"]["fingerprint"].notna().any()


def test_sources_of_installed_packages_are_below_site_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the environment is in the working directory."""
    monkeypatch.chdir(tmp_path)
    for file, shown in (
        (tmp_path / "venv" / "site-packages" / "timm" / "layers.py", "timm/layers.py"),
        (tmp_path / "models" / "own.py", "models/own.py"),
        (Path("/elsewhere/model.py"), "/elsewhere/model.py"),
    ):
        assert _kind(compile("", str(file), "exec")) == shown
