"""Attributions: closed forms, axioms, values of Captum, exact patches, the roles in a compiled circuit, runs, pictures and errors."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from compiled_circuit import ROLES, CompiledCircuit, prompts
from figures import axis_labels, legend_of, mesh_of
from torch import Tensor, nn
from training_runs import compose, train_here

import instrument
from instrument import InstrumentError, analysis
from instrument.interpret import Attribution, attribute, patch_grid
from instrument.plot import patching
from instrument.report import make
from instrument.training.apply import build_module

RECORD = {"action": "record", "stats": "none", "tensors": True}
PARTS = ["tokens", "blocks.*.heads.*", "blocks.*.mlp"]


class Residual(nn.Module):
    """Layers that return their input, write in place, return nested tensors, and are called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.act = nn.Linear(6, 6), nn.Dropout(), nn.ReLU(inplace=True)
        self.lstm, self.head = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.linear(x)
        hidden = self.act(self.linear(hidden) + self.drop(hidden))
        return self.head(self.lstm(hidden)[0])[:, -1]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Residual()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))


def quadratic(output: Tensor) -> Tensor:
    return output.square().sum(-1)


# ------------------------------------------------------------------------------------------------ values


def test_gradient_x_input_of_a_linear_layer_is_its_terms(x: Tensor) -> None:
    layer = nn.Linear(6, 1, bias=False)
    with torch.inference_mode():
        found = attribute(layer, x, of="[:, :, 0]")
    np.testing.assert_allclose(found.values["."], (x * layer.weight[0]).detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(found.grid.to_numpy()[0], (layer(x)).sum((0, 2)).detach().numpy(), rtol=1e-5)
    assert (found.method, found.of, [*found.grid.columns]) == ("gradient_x_input", "[:, :, 0]", ["0", "1", "2", "3"])


def test_methods_of_a_quadratic_function_have_closed_forms(x: Tensor) -> None:
    """For m = sum of x²: gradient x input is 2x², integrated gradients x² - b², attribution patching 2b(x - b)."""
    base, function = x.flip(0), nn.Identity()
    options: dict[str, Any] = {"of": quadratic, "exact": True}
    values, other = x.double().numpy(), base.double().numpy()
    np.testing.assert_allclose(attribute(function, x, of=quadratic).values["."], 2 * values**2, rtol=1e-6)
    integrated = attribute(function, x, method="integrated_gradients", baseline=base, steps=1, **options)
    np.testing.assert_allclose(integrated.values["."], values**2 - other**2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(integrated.exact, integrated.grid, rtol=1e-5, atol=1e-5)  # separable
    patched = attribute(function, x, method="attribution_patching", baseline=base, **options)
    np.testing.assert_allclose(patched.values["."], 2 * other * (values - other), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(patched.exact, integrated.exact, rtol=1e-5, atol=1e-5)
    assert patched.change == pytest.approx((values**2 - other**2).sum(), rel=1e-4, abs=1e-4)


def test_integrated_gradients_add_up_to_the_change(x: Tensor) -> None:
    torch.manual_seed(0)
    smooth = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3), nn.Softplus())
    for layers in (None, "0", "1"):  # the baseline of a layer is its output for the baseline
        found = attribute(smooth, x, of=quadratic, layers=layers, method="integrated_gradients", steps=20)
        assert found.grid.to_numpy().sum() == pytest.approx(found.change, rel=1e-5)
    with torch.no_grad():
        change = quadratic(smooth(x)).sum() - quadratic(smooth(torch.zeros_like(x))).sum()
    assert found.change == pytest.approx(change.item(), rel=1e-5)


def test_compiled_model_has_the_values_of_the_model(x: Tensor) -> None:
    smooth = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    options: dict[str, Any] = {"of": quadratic, "layers": "*", "exact": True}
    expected, found = (attribute(each, x, **options) for each in (smooth, torch.compile(smooth, backend="eager")))
    np.testing.assert_array_equal(found.grid, expected.grid)
    np.testing.assert_array_equal(found.exact, expected.exact)


def test_gradients_are_those_of_the_layer_only(model: nn.Module, x: Tensor) -> None:
    """The output of dropout is its input, which is added to it; ReLU writes in place; one layer is called twice."""
    found = attribute(model, x, of="[:, 2]", layers=["linear", "drop", "act"])
    assert [*found.values] == ["linear call 0", "linear call 1", "drop", "act"]

    def numbers(scale: Tensor, at: str) -> Tensor:
        factor = {name: scale if name == at else 1.0 for name in found.values}
        hidden = factor["linear call 0"] * model.linear(x)
        hidden = factor["linear call 1"] * model.linear(hidden) + factor["drop"] * hidden
        return model.head(model.lstm(factor["act"] * hidden.relu())[0])[:, -1, 2].sum()

    for at, values in found.values.items():
        one = torch.ones(3, 4, 6, requires_grad=True)  # the gradient of a factor is x * dm/dx
        (expected,) = torch.autograd.grad(numbers(one, at), one)
        np.testing.assert_allclose(values, expected.numpy(), atol=1e-7, rtol=1e-5)


def test_tensors_of_nested_outputs_and_inputs_are_attributed(model: nn.Module, x: Tensor) -> None:
    found = attribute(model, x, of="[:, 2]", layers="lstm", exact=True)
    assert {name: each.shape for name, each in found.values.items()} == {
        "lstm[0]": (3, 4, 5),
        "lstm[1.0]": (1, 3, 5),
        "lstm[1.1]": (1, 3, 5),
    }
    assert not found.values["lstm[1.0]"].any()  # nothing reads it
    assert found.grid.loc["lstm[0]", "3"] == pytest.approx(
        found.exact.loc["lstm[0]", "3"], rel=1e-5
    )  # linear from here
    chosen = attribute(model, x, of="[:, 2]", layers="lstm", path="0")
    np.testing.assert_array_equal(chosen.values["lstm"], found.values["lstm[0]"])
    heads = attribute(model, x, of="[:, 2]", layers="head", role="input")
    np.testing.assert_allclose(heads.values["head"], found.values["lstm[0]"], atol=1e-7)


def test_columns_are_positions_or_heads(model: nn.Module, x: Tensor) -> None:
    def found(**options: Any) -> Attribution:
        return attribute(model, x, of="[:, 2]", layers="act", exact=True, **options)

    values = found().values["act"]
    np.testing.assert_allclose(found().grid.loc["act"], values.sum((0, 2)))
    np.testing.assert_allclose(found(heads=6).grid.loc["act"], values.sum((0, 1)))
    by_head = found(heads=3)
    np.testing.assert_allclose(by_head.grid.loc["act"], values.reshape(3, 4, 3, 2).sum((0, 1, 3)))
    assert (by_head.grid.columns.name, by_head.exact.shape) == ("heads", (1, 3))
    maps = attribute(nn.Conv2d(2, 3, 1), torch.ones(1, 2, 5, 5), of=quadratic, layers=".")
    assert maps.grid.shape == (1, 1)


@pytest.mark.slow
def test_captum_gives_the_same_values(model: nn.Module, x: Tensor) -> None:
    captum = pytest.importorskip("captum.attr")
    model, base = copy.deepcopy(model).eval(), x.flip(0)
    lone = {"layers": ["drop", "act", "head"]}

    def same(found: np.ndarray, expected: Tensor) -> None:
        np.testing.assert_allclose(found, expected.detach().numpy(), atol=1e-6, rtol=0)

    same(
        attribute(model, x, of="[:, 2]").values["."],
        captum.InputXGradient(model).attribute(x.clone().requires_grad_(), target=2),
    )
    by_layer = attribute(model, x, of="[:, 2]", **lone).values
    for name in ("act", "head"):  # the gradient of Captum for "drop" is that of its input, which is the same tensor
        same(by_layer[name], captum.LayerGradientXActivation(model, getattr(model, name)).attribute(x, target=2))
    for baseline in (None, base):
        options: dict[str, Any] = {"of": "[:, 2]", "method": "integrated_gradients", "baseline": baseline}
        zero = torch.zeros_like(x) if baseline is None else baseline
        expected = captum.IntegratedGradients(model).attribute(x, zero, target=2)
        same(attribute(model, x, **options).values["."], expected)
        by_layer = attribute(model, x, steps=20, **options, **lone).values
        for name, found in by_layer.items():
            layer = captum.LayerIntegratedGradients(model, getattr(model, name))
            same(found, layer.attribute(x, zero, target=2, n_steps=20))


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["transformer.wte", "transformer.h.0.mlp", "transformer.h.1.ln_1"])
def test_captum_gives_the_same_values_for_layers_of_a_language_model(layer: str) -> None:
    """Token ids have no baseline of zeros: other prompts and padding are the baselines."""
    captum, transformers = (pytest.importorskip(name) for name in ("captum.attr", "transformers"))
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 8}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    ids, other = torch.randint(1, 50, (2, 2, 7))
    module, of = model.get_submodule(layer), "logits[:, -1, 7]"

    def logits(tokens: Tensor) -> Tensor:
        return model(tokens).logits[:, -1]

    expected = captum.LayerGradientXActivation(logits, module).attribute(ids, target=7).detach()
    np.testing.assert_allclose(attribute(model, ids, of=of, layers=layer).values[layer], expected, atol=1e-6, rtol=0)
    for baseline in (other, torch.zeros_like(ids)):
        expected = captum.LayerIntegratedGradients(logits, module).attribute(ids, baseline, target=7, n_steps=20)
        found = attribute(
            model, ids, of=of, layers=layer, method="integrated_gradients", baseline=baseline, steps=20
        ).values[layer]
        np.testing.assert_allclose(found, expected.detach(), atol=1e-6, rtol=0)


# ------------------------------------------------------------------------------------------------ the compiled circuit


@pytest.fixture(scope="module")
def circuit() -> CompiledCircuit:
    return CompiledCircuit()


def test_compiled_circuit_computes_its_program(circuit: CompiledCircuit) -> None:
    clean, corrupted, answers = prompts(100)
    assert torch.equal(circuit(clean)[:, -1].argmax(-1), answers)
    assert circuit(clean)[range(100), -1, answers].min() > 0.99
    assert circuit(corrupted)[range(100), -1, answers].max() < 0.2


@pytest.mark.spread(1)
@pytest.mark.parametrize("method", ["attribution_patching", "integrated_gradients"])
def test_role_of_each_component_is_found(circuit: CompiledCircuit, method: Any) -> None:
    """Each of the seven components carries the answer at its one position, or nowhere; the exact patches agree."""
    clean, corrupted, answers = prompts(8)

    def logit(output: Tensor) -> Tensor:
        return output[range(8), -1, answers]

    found = attribute(circuit, clean, baseline=corrupted, of=logit, layers=PARTS, method=method, steps=10, exact=True)
    assert len(found.grid) == 7
    for grid in (found.grid, found.exact):
        important = grid.abs() > 0.01 * grid.abs().max().max()
        rows, columns = np.nonzero(important.to_numpy())
        assert {grid.index[row]: int(grid.columns[column]) for row, column in zip(rows, columns, strict=True)} == ROLES
        assert len(rows) == len(ROLES)
        assert (grid.to_numpy()[important] > 0).all()
    for part, position in ROLES.items():  # each of them is a bottleneck
        assert found.exact.loc[part, str(position)] == pytest.approx(found.change, rel=1e-4)
    if method == "attribution_patching":
        assert found.rank_correlation() > 0.99


def test_attribution_patching_takes_two_forward_passes_and_one_backward(circuit: CompiledCircuit) -> None:
    clean, corrupted, _ = prompts(2)
    counts = {"forward": 0, "backward": 0}

    def count(_: object, __: object, output: Tensor) -> None:
        counts["forward"] += 1
        if output.requires_grad:
            output.register_hook(lambda _: counts.update(backward=counts["backward"] + 1))

    with circuit.register_forward_hook(count):
        attribute(circuit, clean, baseline=corrupted, of="[:, -1, 3]", layers="**", method="attribution_patching")
    assert counts == {"forward": 2, "backward": 1}


def test_model_and_random_state_are_unchanged(x: Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(4), nn.Dropout())
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attribute(model, x, of=quadratic, layers="**", method="integrated_gradients", steps=2, exact=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not x.requires_grad


# ------------------------------------------------------------------------------------------------ runs


def recorded(model: nn.Module, *batches: Tensor, **fields: Any) -> instrument.Run:
    hooks = {
        "values": {**RECORD, **fields, "kind": "forward"},
        "gradients": {**RECORD, **fields, "kind": "full_backward_pre"},
    }
    with instrument.attach(model, hooks) as probe:
        for batch in batches:
            model(batch)[:, 2].sum().backward()
            probe.end_step()
    return probe.run


@pytest.mark.slow
def test_run_gives_the_values_of_the_model(model: nn.Module, x: Tensor) -> None:
    model = copy.deepcopy(model).eval()
    layers, of = ["act", "head"], "[:, 2]"
    run, expected = recorded(model, x, layers=layers), attribute(model, x, of=of, layers=layers)
    found = analysis.attribute(run)
    pd.testing.assert_frame_equal(found.grid, expected.grid, rtol=1e-5, atol=1e-7)
    for name, values in found.values.items():
        np.testing.assert_allclose(values, expected.values[name], rtol=1e-5, atol=1e-7)
    assert [*attribute(run, layers="h*").values] == ["head"]
    nested = attribute(recorded(model, x, layers="lstm"), path="0")
    expected = attribute(model, x, of=of, layers="lstm", path="0")
    np.testing.assert_allclose(nested.values["lstm"], expected.values["lstm"], rtol=1e-5, atol=1e-7)


def test_batches_of_a_run_are_averaged(model: nn.Module, x: Tensor) -> None:
    model = copy.deepcopy(model).eval()
    run = recorded(model, x, 2 * x, layers=["act"])
    one, two = (attribute(model, each, of="[:, 2]", layers="act") for each in (x, 2 * x))
    found = attribute(run)
    np.testing.assert_allclose(found.grid, (one.grid + two.grid) / 2, rtol=1e-5)
    assert found.values["act"].shape == (6, 4, 6)
    np.testing.assert_allclose(attribute(run, step=1).grid, two.grid, rtol=1e-5)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Attribution patching by YAML, of an untrained model."""
    folder = tmp_path_factory.mktemp("attribution") / "pairs"
    return train_here(folder, "+exp=attribution_patching", "init_from=null", "data.slice.stop=8", "report=true")


@pytest.mark.slow
def test_yaml_gives_the_estimates_of_the_exact_patches(pairs: instrument.Run, tmp_path: Path) -> None:
    found = attribute(pairs)
    assert (found.method, found.of, found.grid.shape) == ("attribution_patching", "loss", (3, 6))
    assert found.values["blocks.0"].shape == (4, 6, 64)  # the corrupted sample of each pair
    folders = {"base": ["hooks.patch=null"]}
    cells = [(layer, position) for layer in found.grid.index for position in found.grid.columns]
    options = ["+exp=causal_tracing", "init_from=null", "data.slice.stop=8"]
    for layer, position in cells[::5]:
        folders[f"{layer}_{position}"] = [f"hooks.patch.layers={layer}", f"hooks.patch.positions=[{position}]"]
    for name, overrides in folders.items():
        train_here(tmp_path / name, *options, *overrides)
    runs = [instrument.load(tmp_path / name) for name in folders if name != "base"]
    exact = patch_grid(runs, baseline=instrument.load(tmp_path / "base"))
    for layer, position in cells[::5]:
        assert found.grid.loc[layer, position] == pytest.approx(exact.loc[layer, position], rel=0.2, abs=2e-4)
    assert found.rank_correlation(exact) > 0.9


@pytest.mark.slow
def test_yaml_gives_integrated_gradients_of_the_inputs(tmp_path: Path) -> None:
    """The passes are the points of the integral: the same values as those of the trained model itself."""
    trained = ["model=mlp", "data=digits", "train.batch_size=8", "data.slice.stop=16", "train.steps=2"]
    weights = train_here(tmp_path / "trained", *trained, "train.save=true")
    options = [
        "mode=forward",
        f"init_from={weights.path}",
        "forward={grad: true, of: '[:, 3]', passes: 6, integrate: true}",
    ]
    record = "{layers: ., kind: %s, action: record, tensors: true}"
    hooks = [f"+hooks.{name}={record % kind}" for name, kind in (("x", "forward_pre"), ("g", "full_backward"))]
    run = train_here(tmp_path / "run", *trained, *options, *hooks)
    found = attribute(run)
    assert (found.method, found.of) == ("integrated_gradients", "[:, 3]")
    config = compose(*trained, *options)[0]
    model = build_module(config.model, "model")
    model.load_state_dict(torch.load(weights.path / "weights.pt", weights_only=True))
    images = torch.from_numpy(np.concatenate([*run.tensors(hook="x", step=[0, 1])["values"]]))
    images /= (np.polynomial.legendre.leggauss(6)[0][0] + 1) / 2  # the first pass has the inputs times the first point
    expected = attribute(model, images, of="[:, 3]", method="integrated_gradients", steps=6)
    np.testing.assert_allclose(found.values["."], expected.values["."], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.grid, expected.grid / 2, rtol=1e-4)  # two batches
    with pytest.raises(InstrumentError, match="layers: the inputs of the model are on the line"):
        attribute(run, layers="layers.0")
    with pytest.raises(InstrumentError, match="run: batch 1 was recorded in 1 of 6 passes"):
        attribute(run, step=1)


@pytest.mark.parametrize("schedule", ["stop: 4", "every: 3"])
def test_integral_needs_all_batches_of_all_passes(tmp_path: Path, schedule: str) -> None:
    """Of 4 passes over 2 batches: two passes, or other batches in each pass. Both have as many steps as a batch of each pass."""
    options = ["model=mlp", "data=digits", "train.batch_size=4", "data.slice.stop=8", "mode=forward"]
    options.append("forward={grad: true, of: '[:, 3]', passes: 4, integrate: true}")
    record = f"{{layers: ., kind: %s, action: record, tensors: true, {schedule}}}"
    hooks = [f"+hooks.{name}={record % kind}" for name, kind in (("x", "forward_pre"), ("g", "full_backward"))]
    run = train_here(tmp_path / "run", *options, *hooks)
    with pytest.raises(InstrumentError, match=r"run: batch \d was recorded in \d of 4 passes"):
        attribute(run)


def test_clean_sample_is_found_among_recorded_samples() -> None:
    """The run records samples 1 to 3 of 4, and sample 2 is clean."""
    model, x = nn.Linear(6, 3), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    run = recorded(model, x, layers=".", samples=[1, 2, 3])
    run.info["config"]["forward"] = {"from_sample": 2}
    output = model(x).detach().double()
    expected = torch.zeros(2, 3)
    expected[:, 2] = output[2, 2] - output[[1, 3], 2]
    np.testing.assert_allclose(attribute(run).values["."], expected, rtol=1e-5)
    run.info["config"]["forward"]["from_sample"] = 0
    with pytest.raises(InstrumentError, match=r"forward.from_sample: a batch has no recorded clean sample"):
        attribute(run)


@pytest.mark.slow
def test_picture_and_panel_are_those_of_patching(pairs: instrument.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    found = attribute(pairs)
    axes, bar = patching(found, tokens=list("ABCDAB")).axes
    np.testing.assert_allclose(mesh_of(axes).get_array(), found.grid)
    assert axis_labels(axes) == ["tokens", "blocks.0", "blocks.1"]
    assert [label.get_text() for label in axes.get_xticklabels()][:2] == ["A (0)", "B (1)"]
    assert (axes.get_ylabel(), axes.get_xlabel()) == ("layers", "positions")
    assert (axes.get_title(), bar.get_ylabel()) == ("attribution patching of loss", "contribution to loss")
    page = make(pairs).html
    assert "<h2>Attribution</h2>" in page
    assert "attribution patching of loss" in page
    monkeypatch.setattr("instrument.interpret.panels.MAX_ELEMENTS", 10)
    assert "too many recorded values" in make(pairs).html


def test_layers_without_positions_have_a_column(model: nn.Module, x: Tensor) -> None:
    found = attribute(model, x, of="[:, 2]", layers=["act", "."])
    figure = patching(found)
    axes, _ = figure.axes
    assert legend_of(figure) == ["no such position"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["all", "0", "1", "2", "3"]
    assert np.isnan(found.grid.loc["act", ""])
    with pytest.raises(InstrumentError, match="tokens: tokens are labels of positions, which are not the columns"):
        patching(found, tokens=list("abcd"))
    axes, _ = patching(attribute(model, x, of="[:, 2]", layers=".")).axes
    assert not axes.get_xlabel()


@pytest.mark.slow
def test_panel_is_only_on_pages_of_runs_with_gradients(tmp_path: Path) -> None:
    options = ["forward={grad: false, from_sample: null}", "hooks.gradients=null"]
    run = train_here(tmp_path / "run", "+exp=attribution_patching", "init_from=null", "data.slice.stop=4", *options)
    assert "<h2>Attribution</h2>" not in make(run).html


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": None}, r"of: .* is not a part of the model's output"),
        ({"of": "logits[:, 1]"}, r"(?s)of: the model's output has no such tensor.*given    logits\[:, 1\]"),
        ({"of": lambda output: output.shape}, "of: must be a floating-point tensor"),
        ({"of": lambda output: output.detach()}, "layers: the number does not depend on"),
        ({"layers": "akt"}, r"(?s)layers: this pattern matches no module.*given    akt.*act"),
        ({"method": "gradients"}, r"(?s)method: unknown value.*'gradients'.*integrated_gradients"),
        (
            {"heads": 4},
            r"(?s)heads: .*shape \[3, 4, 6\] has no such number of equal parts.*given    4",
        ),
        ({"baseline": torch.ones(3, 4, 6)}, "baseline: gradient_x_input has no baseline"),
        ({"method": "attribution_patching"}, "baseline: attribution_patching requires the corrupted inputs"),
        ({"method": "attribution_patching", "baseline": torch.ones(3, 2, 6)}, "baseline: the tensors .* other shapes"),
        ({"method": "integrated_gradients", "steps": 0}, "steps: must be positive"),
        ({"step": 0}, "step: does not apply to a model"),
        ({"role": "outputs"}, r"(?s)role: unknown value.*output, input"),
    ],
)
def test_unsuitable_arguments_are_refused(model: nn.Module, x: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InstrumentError, match=message):
        attribute(model, x, **{"of": "[:, 2]", "layers": "act", **options})


def test_integer_inputs_need_a_layer_and_a_baseline(circuit: CompiledCircuit) -> None:
    clean, _, _ = prompts(2)
    with pytest.raises(
        InstrumentError, match="baseline: is required, because the inputs have no floating-point values"
    ):
        attribute(circuit, clean, of="[:, -1, 3]", layers="tokens", method="integrated_gradients")
    with pytest.raises(InstrumentError, match="layers: no floating-point tensor passed through"):
        attribute(circuit, clean, of="[:, -1, 3]")
    with pytest.raises(InstrumentError, match=r"(?s)source: must be a model or a run.*given    list"):
        attribute([], clean, of="[:, -1, 3]")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"of": "[:, 2]"}, "of: does not apply to a run"),
        ({"exact": True}, "exact: does not apply to a run"),
        ({"layers": "blocks.7"}, r"(?s)layers: no such layer .*given    blocks.7.*allowed  tokens, blocks.0, blocks.1"),
        (
            {"method": "integrated_gradients"},
            r"(?s)method: the run was made for another .*allowed  attribution_patching",
        ),
        ({"method": "gradient_x_input"}, r"(?s)method: the run was made .*fix      set forward.integrate"),
        ({"baseline": torch.ones(2)}, "baseline: does not apply to a run"),
        ({"step": 99}, "phase: the values and the gradients are of other steps"),
        ({"role": "input"}, "layers: no such layer has recorded values and gradients"),
    ],
)
def test_arguments_that_a_run_does_not_support_are_refused(
    pairs: instrument.Run, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InstrumentError, match=message):
        attribute(pairs, **options)


@pytest.mark.parametrize("units", [[0], [2, 3]])
def test_gradients_of_another_part_are_refused(model: nn.Module, x: Tensor, units: list[int]) -> None:
    hooks = {
        "values": {**RECORD, "layers": "linear", "kind": "forward", "units": [0, 1]},
        "gradients": {**RECORD, "layers": "linear", "kind": "full_backward_pre", "units": units},
    }
    with instrument.attach(model, hooks) as probe:
        model(x)[:, 2].sum().backward()
        probe.end_step()
    allowed = r"(?s)layers: the gradients have another shape or selection.*allowed  \[3, 4, 2\]"
    with pytest.raises(InstrumentError, match=allowed):
        attribute(probe.run)


def test_attributions_of_several_runs_are_refused(pairs: instrument.Run, tmp_path: Path) -> None:
    for name in "ab":
        shutil.copytree(pairs.path, tmp_path / name)
    with pytest.raises(InstrumentError, match="run: the folder contains 2 runs"):
        attribute(instrument.load(tmp_path))


def test_correlation_and_picture_name_what_is_missing(pairs: instrument.Run) -> None:
    found = attribute(pairs)
    with pytest.raises(InstrumentError, match="exact: there are no exact effects"):
        found.rank_correlation()
    with pytest.raises(InstrumentError, match="exact: fewer than two cells are in both grids"):
        found.rank_correlation(found.grid.iloc[:1, :1])
    with pytest.raises(InstrumentError, match="layer: does not apply to an attribution"):
        patching(found, layer="blocks.0")


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["forward.grad=false", "hooks.gradients=null"], r"forward: 'from_sample' requires 'grad: true'"),
        (
            ["forward.from_sample=2"],
            r"(?s)forward.from_sample: each batch needs this clean sample.*given    2.*batch_size is 2",
        ),
        (["forward.integrate=true"], "forward: 'integrate' and 'from_sample' are parts of different methods"),
        (
            ["forward.integrate=true", "forward.from_sample=null", "forward.grad=false"],
            "'integrate' requires 'grad: true'",
        ),
        (["train.batch_size=1"], r"(?s)forward.from_sample: each batch needs.*given    0.*batch_size is 1"),
        (["forward.from_sample=-1"], r"forward.from_sample: .*greater than or equal to 0"),
    ],
)
def test_clean_sample_is_checked_before_the_run(overrides: list[str], message: str) -> None:
    with pytest.raises(InstrumentError, match=message):
        compose("+exp=attribution_patching", *overrides)


def test_smallest_batch_has_a_corrupted_sample(tmp_path: Path) -> None:
    options = ["+exp=attribution_patching", "init_from=null", "data.slice.stop=7"]
    with pytest.raises(
        InstrumentError, match=r"(?s)forward.from_sample: the smallest batch lacks .*given    0.*1 samples"
    ):
        train_here(tmp_path / "run", *options)
