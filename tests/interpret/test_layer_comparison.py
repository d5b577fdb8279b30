"""Linear CKA: the formula, invariances, two runs matched by id, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attached_runs import forward_steps
from torch import Tensor, nn

import instrument
from instrument import InstrumentError, InstrumentWarning
from instrument.interpret import layer_comparison, layer_similarity
from instrument.plot import layer_similarity as plot

RECORD = {"layers": "*", "kind": "forward", "action": "record", "stats": "none", "tensors": True}


def by_hand(x: np.ndarray, y: np.ndarray) -> float:
    """Return the linear CKA from the Gram matrices of the samples (Kornblith et al. 2019, equations 1 and 3)."""
    x, y = (features.reshape(len(features), -1).astype(np.float64) for features in (x, y))
    center = np.eye(len(x)) - 1 / len(x)
    k, l = (center @ features @ features.T @ center for features in (x, y))  # noqa: E741
    return float(np.trace(k @ l) / np.sqrt(np.trace(k @ k) * np.trace(l @ l)))


def recorded(model: nn.Module, batch: Tensor, ids: Tensor | None = None, size: int = 100, **options: Any) -> Any:
    """Return a run with the outputs of all layers of a model, one step for each batch of `size` samples."""
    sample_ids = () if ids is None else ids.split(size)
    return forward_steps(model, {"features": RECORD}, batch.split(size), sample_ids=sample_ids, **options).run


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(2, 3, 1), nn.Tanh(), nn.Flatten(), nn.Linear(24, 4))


@pytest.fixture(scope="module")
def run(model: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    batch = torch.randn(30, 2, 8)
    return recorded(model, batch, torch.arange(30), 16, out=tmp_path_factory.mktemp("similarity") / "run")


@pytest.mark.slow
def test_similarity_equals_the_formula(run: instrument.Run) -> None:
    table = layer_similarity(run)
    assert list(table.index) == list(table.columns) == ["0", "1", "2", "3"]
    features = [run.features(layer).X for layer in table.index]  # type: ignore[union-attr]
    expected = [[by_hand(one, two) for two in features] for one in features]
    np.testing.assert_allclose(table, expected, rtol=1e-12)
    assert table.attrs["samples"] == 30
    part = layer_similarity(run, layers=["3"], other_layers=["0", "1"])
    np.testing.assert_allclose(part, [expected[3][:2]], rtol=1e-12)


def test_few_samples_with_many_features_use_products_of_samples() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(9, 200)), generator.normal(size=(9, 150)) + 3
    one, two = (features - features.mean(0) for features in (x, y))
    norm = layer_comparison._product_norm
    assert norm(one, two) ** 2 / (norm(one, one) * norm(two, two)) == pytest.approx(by_hand(x, y), rel=1e-12)


def test_call_of_a_layer_is_selected() -> None:
    tanh, x = nn.Tanh(), torch.randn(9, 4)
    models = [nn.Sequential(tanh, nn.Linear(4, 3), tanh) for _ in range(2)]
    runs = [recorded(model, x, torch.arange(9)) for model in models]
    with pytest.raises(InstrumentError, match=r"(?s)call: .*pass call=0"):
        layer_similarity(*runs)
    expected = by_hand(*(model(x).detach().numpy() for model in models))
    for call, value in enumerate((1.0, expected)):
        (found,) = layer_similarity(*runs, layers=["0"], other_layers=["0"], call=call).to_numpy().ravel()
        assert found == pytest.approx(value, rel=1e-5)


def test_similarity_ignores_rotation_and_scale() -> None:
    torch.manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(6, 6))[0]
    first = nn.Linear(6, 6, bias=False)
    second, third = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
    with torch.no_grad():
        second.weight.copy_(2.5 * rotation)
        third.weight.copy_(torch.diag(torch.tensor([9.0, 1, 1, 1, 1, 1])))
    values = layer_similarity(recorded(nn.Sequential(first, second, third).double(), torch.randn(50, 6).double()))
    assert values.loc["0", "1"] == pytest.approx(1.0, rel=1e-6)  # values are stored as float32
    assert values.loc["1", "2"] < 0.9


def test_two_runs_are_matched_by_id(model: nn.Module, run: instrument.Run) -> None:
    batch, order = torch.randn(30, 2, 8), torch.randperm(30)
    one = recorded(model, batch, torch.arange(30))
    shuffled = recorded(model, batch[order], order)
    np.testing.assert_allclose(np.diag(layer_similarity(one, shuffled)), 1.0, rtol=1e-6)
    with pytest.warns(InstrumentWarning, match="10 of 30 samples are left out"):
        table = layer_similarity(one, recorded(model, batch[:20], torch.arange(20)), layers=["3"], other_layers=["3"])
    assert table.attrs["samples"] == 20
    with pytest.raises(InstrumentError, match=r"0 of up to 30 samples are common to all layers"):
        layer_similarity(one, recorded(model, batch, torch.arange(100, 130)), layers=["3"], other_layers=["3"])


@pytest.mark.parametrize("fields", [{"every": 2}, {"samples": 3}, {"samples": [2, 5]}, {"slice": "1::2"}])
def test_samples_without_ids_are_matched_by_batch(fields: dict[str, Any]) -> None:
    hooks = {"all": {**RECORD, "layers": "0"}, "some": {**RECORD, "layers": "1", **fields}}
    model = nn.Sequential(nn.Linear(4, 6), nn.Identity())
    with pytest.warns(InstrumentWarning, match="samples are left out"):
        table = layer_similarity(forward_steps(model, hooks, torch.randn(6, 8, 4)).run)
    assert table.loc["0", "1"] == pytest.approx(1.0, rel=1e-6)


def test_runs_without_ids_must_have_the_same_batches() -> None:
    model, batches = nn.Linear(4, 6), torch.randn(6, 8, 4)
    one, two, rare = (
        forward_steps(model, {"f": {**RECORD, "layers": ".", "every": every}}, batches).run for every in (1, 1, 2)
    )
    assert layer_similarity(one, two).loc[".", "."] == pytest.approx(1.0, rel=1e-6)
    with pytest.raises(
        InstrumentError, match="other: the samples have no ids, and the runs recorded different batches"
    ):
        layer_similarity(one, rare)
    named = forward_steps(
        model, {"f": {**RECORD, "layers": "."}}, batches, sample_ids=np.arange(48).reshape(6, 8).tolist()
    ).run
    with pytest.raises(InstrumentError, match="other: the samples of only one of the runs have ids"):
        layer_similarity(one, named)


def test_samples_of_runs_without_ids_do_not_depend_on_other_layers() -> None:
    """A layer that one run records has as many rows as tokens."""
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Flatten(0, 1)), torch.randn(5, 6, 2, 4)
    runs = [
        forward_steps(model, {"f": {**RECORD, "layers": layers}}, batches).run
        for layers in (["0", "1"], ["0", "1", "2"])
    ]
    table = layer_similarity(*runs, layers=["0", "1"], other_layers=["0", "1"])
    assert np.diag(table) == pytest.approx([1.0, 1.0], rel=1e-6)
    assert table.attrs["samples"] == 30


def test_constant_layers_have_no_similarity() -> None:
    table = layer_similarity(recorded(nn.Sequential(nn.Threshold(9.0, 0.0), nn.Tanh()), torch.rand(4, 3)))
    assert table.isna().all(axis=None)
    assert plot(table).legends
    not_exact = nn.Sequential(nn.Threshold(9.0, 0.1)).double()  # the mean of 97 times 0.1 is not 0.1
    assert layer_similarity(recorded(not_exact, torch.rand(97, 3).double(), size=97)).isna().all(axis=None)
    infinite = nn.Sequential(nn.Linear(2, 2), nn.Threshold(9.0, torch.inf))
    assert layer_similarity(recorded(infinite, torch.rand(4, 2)))["1"].isna().all()


def test_figure_shows_the_table(run: instrument.Run) -> None:
    table = layer_similarity(run, other_layers=["3", "0"])
    axes, bar = plot(table).axes
    np.testing.assert_array_equal(axes.collections[0].get_array(), table)
    assert axes.collections[0].get_clim() == (0.0, 1.0)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["3", "0"]
    assert (axes.get_title(), bar.get_ylabel()) == ("similarity of layers, 30 samples", "linear CKA")


def test_outputs_are_preferred_to_results_of_functions() -> None:
    hooks = {"inside": {**RECORD, "kind": "function", "functions": "linear"}, "outputs": RECORD}
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.rand(6, 4)
    probe = forward_steps(model, hooks, [batch], sample_ids=[range(6)])
    expected = layer_similarity(recorded(model, batch, torch.arange(6)))
    pd.testing.assert_frame_equal(layer_similarity(probe.run), expected)


def test_missing_layers_are_errors(run: instrument.Run) -> None:
    message = r"(?s)layers: no tensors of this layer.*given    conv.*0 \[14, 3, 8\].*fix"
    with pytest.raises(InstrumentError, match=message):
        layer_similarity(run, layers=["conv"])
    for arguments, message in (
        ({"hook": "other"}, r"hook: none of the selected tensors.*given    'other'.*allowed  'features'"),
        ({"step": 7}, r"step: none of the selected tensors.*given    7.*allowed  0, 1"),
        ({"layers": "conv"}, r"layers: must be a list of names.*given    conv"),
        ({"other": str(run.path)}, r"run: must be a run\n.*given    str.*instrument\.load"),
    ):
        with pytest.raises(InstrumentError, match=f"(?s){message}"):
            layer_similarity(run, **arguments)
    with pytest.raises(InstrumentError, match="requires the layer similarity table, but a Run was given"):
        plot(run)
