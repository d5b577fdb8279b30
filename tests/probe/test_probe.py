"""The life of a probe: attaching, steps, evaluations, detaching, and its coverage."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import AlreadyAttachedError, MemorySink, Probe
from instrument.actions.base import StepContext
from instrument.config.parse import parse_hooks
from instrument.hooks.clock import Clock
from instrument.integrations.attached_probe import AttachedProbe
from instrument.plan.hook_plan import make_plan
from instrument.plan.modules import Layers
from instrument.probe.program_settings import LossOperators, equal_parameters
from instrument.rules.reference_ranges import GRAPH_PARTS
from instrument.tables.reasons import NEVER_DUE

RECORD = {"layers": ".", "kind": "forward", "action": "record"}


def probe_of(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **specs: Any) -> Probe:
    return Probe(make_plan(parse_hooks(specs), model), MemorySink(), optimizer=optimizer)


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 1)


X = torch.ones(3, 2)


# ------------------------------------------------------------------------------------------------ life


def test_probe_refuses_to_attach_twice(model: nn.Module) -> None:
    probe = probe_of(model, h=RECORD)
    with probe:
        with pytest.raises(AlreadyAttachedError):
            probe.__enter__()
        model(X)
        probe.end_step()
    with pytest.raises(AlreadyAttachedError), probe:
        pass
    assert not model._forward_hooks
    assert len(probe.sink.rows["stats"]) == 1


def test_two_probes_on_one_model_are_independent(model: nn.Module) -> None:
    double = {**RECORD, "action": "scale", "factor": 2.0}
    with probe_of(model, outer=double) as outer:
        with probe_of(model, inner=RECORD, again=double) as inner:
            quadrupled = model(X)
            inner.end_step()
        assert torch.equal(model(X) * 2, quadrupled)
        outer.end_step()
    assert torch.equal(model(X) * 4, quadrupled)
    assert len(inner.sink.rows["stats"]) == 1
    assert [len(probe.sink.rows["effects"]) for probe in (outer, inner)] == [2, 1]


@pytest.mark.parametrize(
    ("error", "events"),
    [
        (None, []),
        (ValueError("no"), [("error", "ValueError: no", "error")]),
        (KeyboardInterrupt(), [("interrupted", "KeyboardInterrupt: ", "error")]),
    ],
    ids=repr,
)
def test_sink_is_closed_whichever_way_the_probe_exits(
    model: nn.Module, error: BaseException | None, events: list[tuple[str, str, str]]
) -> None:
    probe = probe_of(model, h=RECORD)
    with pytest.raises(type(error)) if error else nullcontext(), probe:
        model(X)
        if error is not None:
            raise error
        probe.end_step()
    assert probe.sink.closed
    assert len(probe.sink.rows["stats"]) == 1, "the rows of the interrupted step are kept"
    found = [(row["rule"], row["message"], row["severity"]) for row in probe.sink.records("events")]
    assert found == events


def test_layers_are_written_at_the_end_of_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1, bias=False))
    model.again = model[0]
    model[2].requires_grad_(False)
    with probe_of(model, a={**RECORD, "layers": "*"}, b={**RECORD, "types": "Linear", "layers": None}) as probe:
        probe.end_step()
        rows = {row["layer"]: row for row in probe.sink.records("layers")}
    assert list(rows) == ["", "0", "1", "2"]
    assert rows["0"]["aliases"] == ["again"]
    seen = [
        tuple(rows[name][key] for key in ("module_type", "depth", "parameters", "trainable", "hooks")) for name in rows
    ]
    assert seen == [
        ("Sequential", 0, 0, 0, []),
        ("Linear", 1, 6, 6, ["a", "b"]),
        ("BatchNorm1d", 1, 4, 4, ["a"]),
        ("Linear", 1, 2, 0, ["a", "b"]),
    ]


class _Block(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.scale, self.sizes, self.function, self.norm_layer = 0.125, (2, None), torch.relu, nn.LayerNorm
        self.mode, self.folder, self.table, self._hidden, self.long = "mean", "/data/x", torch.ones(3), 1, [0] * 99
        self.gain, self.api_token, self.count = torch.tensor(2.0), "hf_AbCd", np.int64(3)


def test_layers_have_the_settings_of_modules_and_optimizers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.25), nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64))
    model.append(_Block(model[0].weight))
    model[2].weight.requires_grad_(False)
    groups = [{"params": model[0].parameters()}, {"params": [model[3].bias], "lr": torch.tensor(0.5), "name": "head"}]
    optimizers = [torch.optim.SGD(groups, lr=0.1, momentum=0.9), torch.optim.AdamW([model[3].weight], betas=(0.8, 0.9))]
    with instrument.attach(model, {"a": {**RECORD, "layers": "*"}}, optimizer=optimizers) as probe:
        probe.end_step()
        settings = dict(zip(probe.layers["layer"], probe.layers["settings"], strict=True))
    groups_of_root = {name: text for name, text in settings[""].items() if name.startswith("optimizer")}
    keys = ["optimizer[0]", "optimizer[0].lr", "optimizer[0].momentum", "optimizer[1].lr", "optimizer[1].name"]
    keys += ["optimizer[2]", "optimizer[2].betas"]
    assert [groups_of_root[key] for key in keys] == ["SGD", "0.1", "0.9", "0.5", "head", "AdamW", "[0.8, 0.9]"]
    assert "optimizer[0].params" not in groups_of_root
    assert settings["0"] == {
        "in_features": "2",
        "out_features": "2",
        "weight": "float32 [2, 2]",
        "weight.optimizer": "optimizer[0]",
        "bias": "float32 [2]",
        "bias.optimizer": "optimizer[0]",
    }
    assert settings["1"] == {"p": "0.25", "inplace": "False"}
    assert [settings["2"][f"{name}.optimizer"] for name in ("weight", "bias")] == ["frozen", "none"]
    assert (settings["3"]["weight"], settings["3"]["bias.optimizer"]) == ("float64 [2, 2]", "optimizer[1]")
    assert settings["4"] == {
        "scale": "0.125",
        "sizes": "[2, None]",
        "function": "relu",
        "norm_layer": "LayerNorm",
        "mode": "mean",
        "gain": "2.0",
        "count": "3",
        "weight": "that of 0.weight",
        "weight.optimizer": "optimizer[0]",
    }


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_parameters_that_are_equal_before_the_first_step_are_settings() -> None:
    """A constant tells nothing, and neither does a parameter of another dtype or shape, or one whose elements cannot be read."""
    model = nn.Sequential(
        nn.Linear(5, 5), nn.LayerNorm(5), nn.LayerNorm(5), nn.Linear(5, 5), nn.Linear(5, 5).double(), nn.PReLU(5)
    )
    values = torch.rand(5, 5)
    for at in (0, 3, 4):
        model[at].weight.data.copy_(values)
    model[3].bias.data.copy_(model[0].bias).add_(1e-6)
    model.extend(copy.deepcopy(model[3:4]))
    model[6].bias.data[-1].mul_(1 + 2**-23)
    for at in (1, 2):
        quantized = torch.quantize_per_tensor(values, 0.1, 0, torch.qint8)
        model[at].quantized = nn.Parameter(quantized, requires_grad=False)
        model[at].freed = nn.Parameter(values.clone())
        model[at].freed.untyped_storage().resize_(0)  # as of a sharded parameter
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        model[0].weight.data.add_(1)  # an update
        probe.end_step()
        settings = dict(zip(probe.layers["layer"], probe.layers["settings"], strict=True))
    equal = {
        f"{layer}.{name}": text for layer, own in settings.items() for name, text in own.items() if "equals" in name
    }
    assert equal == {"3.weight.equals": "0.weight", "6.weight.equals": "0.weight"}


@pytest.mark.parametrize("passes_loss", [False, True])
def test_mode_of_a_layer_that_is_not_that_of_its_parent_at_the_loss_is_a_setting(passes_loss: bool) -> None:
    """A layer in the mode of its parent has none, and neither has a root in training mode."""
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout()), nn.Linear(2, 1), nn.Dropout())
    model[0].eval()
    model[0][1].train()
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        loss = model(torch.ones(3, 2)).sum()
        if not passes_loss:
            loss.backward()
            model.eval()  # such as for an evaluation before the end of the step
        probe.end_step(loss=loss if passes_loss else None)
        settings = dict(zip(probe.layers["layer"], probe.layers["settings"], strict=True))
    modes = {layer: dict(own)["training"] for layer, own in settings.items() if "training" in dict(own)}
    assert modes == {"0": "False", "0.1": "True"}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:FutureWarning", "ignore::instrument.InstrumentWarning")
def test_frozen_torchscript_module_has_no_mode() -> None:
    model = nn.Sequential(torch.jit.freeze(torch.jit.script(nn.Linear(2, 2).eval())), nn.Linear(2, 1))
    with instrument.attach(model, {"a": {**RECORD, "layers": "1"}}) as probe:
        model(torch.ones(3, 2)).sum().backward()
        probe.end_step()
    assert "training" not in dict(probe.layers["settings"].iloc[1])


def test_conjugate_and_negated_parameters_are_equal_to_their_values() -> None:
    values = torch.complex(torch.arange(6.0), -torch.arange(6.0)).conj()
    model = nn.ParameterList([values, values.resolve_conj(), values.imag, torch.arange(6.0)])
    assert equal_parameters(Layers.of(model)) == {"": {"1.equals": "0", "3.equals": "2"}}


@pytest.mark.gpu
def test_equal_parameters_on_several_devices_have_the_first_one() -> None:
    model = nn.ParameterList(torch.arange(4.0, device=device) for device in ("cpu", "cuda", "cpu"))
    assert equal_parameters(Layers.of(model)) == {"": {"1.equals": "0", "2.equals": "0"}}


class _Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3, bias=False, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).relu()
        return x[:, -2:].select(1, 0)


OF_LAYER = {"graph.AccumulateGrad": "1", "graph.MmBackward0": "1", "graph.TBackward0": "1"}
OPERATORS = {
    "": {
        "loss.ExpBackward0": "1",
        "loss.LogSoftmaxBackward0": "1 (dim=1)",
        "loss.NllLossBackward0": "1 (ignore_index=-7, reduction=1)",
        "loss.ReluBackward0": "1",
        "loss.SelectBackward0": "1 (dim=1, index=0)",
        "loss.SliceBackward0": "1 (dim=1, end=9223372036854775807, start=-2, step=1)",
        "loss.UnsqueezeBackward0": "1 (dim=0)",
    },
    "layers.0": {**OF_LAYER, "graph.ReluBackward0": "1", "no_grad.MmBackward0": "1"},
    "layers.1": {**OF_LAYER, "graph.ReluBackward0": "1"},
    "layers.2": OF_LAYER,
}


def _operators_of(probe: AttachedProbe) -> dict[str, dict[str, str]]:
    rows = zip(probe.layers["layer"], probe.layers["settings"], strict=True)
    found = {
        layer: {name: text for name, text in settings.items() if name.startswith(GRAPH_PARTS)}
        for layer, settings in rows
    }
    return {layer: operators for layer, operators in found.items() if operators}


@pytest.mark.parametrize("passes", ["loss", "detached", "nothing"])
@pytest.mark.parametrize("calls", ["backward", "grad"])
def test_layers_have_the_operators_of_the_first_loss(passes: str, calls: str) -> None:
    model = _Stack()
    with instrument.attach(model, {"a": {**RECORD, "layers": "layers.*"}}) as probe:
        for ignored in (-7, -100):
            output = model(torch.ones(2, 3, dtype=torch.float64))
            loss = nn.functional.cross_entropy(output[None].exp(), torch.tensor([1]), ignore_index=ignored)
            if calls == "backward":
                loss.backward()
            else:
                torch.autograd.grad(loss, [*model.parameters()])
            probe.end_step(loss={"loss": loss, "detached": loss.detach()}.get(passes))
    expected = OPERATORS if calls == "backward" or passes == "loss" else {}
    assert _operators_of(probe) == expected


tells_numbers = pytest.mark.skipif(
    not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"),
    reason="PyTorch does not tell whether saved tensors have hooks",
)


@tells_numbers
def test_numbers_in_the_losses_of_the_first_step_are_settings() -> None:
    model, other, given = nn.Linear(2, 1, bias=False), nn.Linear(2, 1), Tensor.backward
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        for _ in range(2):  # accumulated gradients
            (2 * ((model(torch.ones(4, 2)).square() * 0.25).mean() / 3)).backward()
        with torch.autograd.graph.save_on_cpu():  # hooks on saved tensors, which are not for numbers
            (2 * model(torch.ones(1, 2)) * torch.tensor(5.0)).abs().backward(torch.ones(1, 1))
        (7 * other(torch.ones(1, 2))).sum().backward()  # of another model
        assert Tensor.backward is not given
        probe.end_step()
        settings = {name: text for name, text in probe.layers["settings"][0].items() if name.startswith("loss.")}
    assert Tensor.backward is given
    assert settings == {
        "loss.AbsBackward0": "1",
        "loss.MeanBackward0": "1",
        "loss.MulBackward0": "1, 1 (other=0.25), 1 (other=2)",
        "loss.PowBackward0": "1 (exponent=2)",
        "loss.factor.DivBackward0": "1 (other=3)",
        "loss.factor.MulBackward0": "1 (other=2)",
    }


@tells_numbers
def test_weights_of_classes_are_settings() -> None:
    model, weights = nn.Linear(2, 40, bias=False), 1 + torch.arange(40.0)
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        output = model(torch.ones(3, 2))
        loss = nn.functional.cross_entropy(output[:, :3], torch.tensor([0, 1, 2]), weights[:3] / 3)
        loss += nn.functional.binary_cross_entropy_with_logits(
            output, torch.ones(3, 40), torch.rand(40), pos_weight=weights
        )
        loss.backward()
        probe.end_step()
    settings = probe.layers["settings"][0]
    assert settings["loss.NllLossBackward0"] == "1 (ignore_index=-100, reduction=1, weight=[0.3333, 0.6667, 1.0])"
    sample = [float(each) for each in range(1, 41, 3)]  # weights of samples are not among them
    assert settings["loss.BinaryCrossEntropyWithLogitsBackward0"] == f"1 (pos_weight={sample}, reduction=1)"


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.name = "its own"
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * gradient


def test_graph_that_cannot_be_read_does_not_end_the_training() -> None:
    """PyTorch frees the memory of parameters that it shards, until the backward pass needs them."""
    model, weights = nn.Linear(2, 3, bias=False), torch.ones(3)
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}, rules="default") as probe:
        output = Named.apply(model(torch.ones(3, 2)))
        loss = nn.functional.cross_entropy(output, torch.tensor([0, 1, 2]))
        loss += nn.functional.binary_cross_entropy_with_logits(output, torch.ones(3, 3), pos_weight=weights)
        (storage := weights.untyped_storage()).resize_(0)
        loss.register_hook(lambda _: storage.resize_(12) and None)
        loss.backward()
        probe.end_step()
    settings = probe.layers["settings"][0]
    assert settings["loss.BinaryCrossEntropyWithLogitsBackward0"] == "1 (reduction=1)"
    assert settings["loss.NamedBackward"] == "1"
    assert {"NllLossBackward0.target", "BinaryCrossEntropyWithLogitsBackward0.target"} <= {*probe.relations["path"]}


@tells_numbers
def test_loss_before_its_backward_precedes_what_the_loop_makes_of_it() -> None:
    model = nn.Linear(2, 1, bias=False)
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        (2 * probe.loss(model(torch.ones(3, 2)).mean() * 0.5)).backward()
        probe.end_step()
    assert probe.layers["settings"][0]["loss.factor.MulBackward0"] == "1 (other=0.5)"


def test_backward_of_a_reentrant_checkpoint_is_no_loss() -> None:
    model = nn.Linear(2, 1, bias=False)
    with instrument.attach(model, {"a": {**RECORD, "layers": "."}}) as probe:
        x = torch.ones(3, 2, requires_grad=True)
        checkpoint(lambda x: 3 * model(x).exp(), x, use_reentrant=True).sum().backward()
        probe.end_step()
    names = probe.layers["settings"][0]
    assert not any("Exp" in name or "Mul" in name for name in names)


def test_attributes_that_cannot_be_read_are_no_settings() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    items: list[object] = []
    items.append(items)
    model.items, model.number = items, 10**5000
    model.nested = torch.nested.nested_tensor([torch.ones(1)])
    model.buffer = nn.parameter.UninitializedBuffer()
    model.kept, model[0].type = 2, "dense"
    with instrument.attach(model, {"a": {**RECORD, "layers": "0"}}) as probe:
        probe.end_step()
        settings = probe.layers["settings"]
    assert settings[0] == {"kept": "2"}
    assert "type" not in settings[1]
    assert settings[2]["weight"] == "float32 lazy"


class _Double(torch.autograd.Function):
    table = torch.ones(3)

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return 2 * gradients[0]


def test_operators_of_a_loss_keep_no_class(few_objects: None) -> None:
    weight = torch.ones(2, requires_grad=True)
    function = type("Function", (_Double,), {"table": torch.ones(3)})
    table = weakref.ref(function.table)
    losses = LossOperators(Layers.of(nn.Linear(1, 1)), Clock(StepContext(0, 0, 0, "train")))
    losses.note(function.apply(weight * 2).mean([-1]))
    assert losses.settings[""]["loss.MeanBackward1"] == "1 (dim=[-1], keepdim=False)"
    del function
    gc.collect()
    assert table() is None


def test_operators_of_a_very_deep_loss_are_left_out() -> None:
    losses = LossOperators(Layers.of(nn.Linear(1, 1)), Clock(StepContext(0, 0, 0, "train")))
    loss = torch.ones(1, requires_grad=True)
    for _ in range(200_000):
        loss = loss + 1
    losses.note(loss)
    assert losses.settings == {}


# ----------------------------------------------------------------------------------- steps and metrics


def test_step_after_steps_in_a_phase_starts_at_the_end_of_the_block(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("instrument.probe.probe.time", SimpleNamespace(perf_counter=lambda: now[0]))
    with probe_of(model, h=RECORD) as probe:
        now[0] += 1.0
        with probe.evaluating():
            now[0] += 8.0
            probe.end_step()
            now[0] += 2.0
        now[0] += 0.5
        probe.end_step()
    assert [row["seconds"] for row in probe.sink.records("metrics")] == [9.0, 0.5]


def test_end_step_returns_and_writes_the_metrics(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("instrument.probe.probe.time", SimpleNamespace(perf_counter=lambda: now[0]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with probe_of(model, optimizer, h=RECORD) as probe:
        probe.epoch = 3
        now[0] += 0.5
        row = probe.end_step(loss=torch.tensor(1.5, requires_grad=True), accuracy=torch.tensor(0.5), grad_norm=2.0)
        assert probe.step == 1
        optimizer.param_groups[0]["lr"] = 0.125
        now[0] += 0.25
        probe.end_step(lr=0.75)
        probe.end_step()
    assert (row["loss"], row["accuracy"], row["grad_norm"], row["lr"]) == (1.5, 0.5, 2.0, 0.25)
    first, second, third = probe.sink.records("metrics")
    columns = ("step", "epoch", "phase", "loss", "accuracy", "grad_norm", "lr")
    assert [first[name] for name in columns] == [0, 3, "train", 1.5, 0.5, 2.0, 0.25]
    assert (second["step"], second["loss"], second["lr"]) == (1, None, 0.75)
    assert (first["seconds"], second["seconds"]) == (0.5, 0.25), "each step is timed from the end of the previous one"
    assert third["lr"] == 0.125


def test_rows_reach_the_sink_when_the_step_ends(model: nn.Module) -> None:
    with probe_of(model, h={**RECORD, "tensors": True}) as probe:
        model(X)
        assert probe.sink.rows["stats"] == []
        assert len(probe.sink.rows["tensors"]) == 1  # copied immediately, written by the end of the step
        probe.end_step()
        assert (len(probe.sink.rows["stats"]), len(probe.sink.rows["tensors"])) == (1, 1)
        assert probe.sink.steps == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("samples_per_second", "has its own column 'samples_per_second'"),
        ("skipped", "has its own column 'skipped'"),
        ("step", "has its own column 'step'"),
        ("Loss", "has its own column 'loss'"),
        ("val loss", "is not a valid name of a metric"),
    ],
)
def test_name_of_a_metric_is_checked(model: nn.Module, name: str, message: str) -> None:
    with probe_of(model, h=RECORD) as probe:
        for call in (probe.end_step, probe.log, partial(probe.write_metrics, seconds=1.0)):
            with pytest.raises(TypeError, match=rf"{name}.*{message}"):
                call(**{name: 2.0})
        assert probe.step == 0
        model(X)
        probe.end_step(loss=1.0)
    assert [(row["loss"], row["custom"]) for row in probe.sink.records("metrics")] == [(1.0, None)]


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3.0),
        (True, 1.0),
        (np.float32(0.5), 0.5),
        (np.array(0.1), 0.1),
        (np.array([7]), 7.0),
        (np.array([[2.5]], np.float16), 2.5),
        ([4], 4.0),
        (torch.tensor([1.5], dtype=torch.float64, requires_grad=True), 1.5),
        (torch.tensor(3), 3.0),
        (math.inf, math.inf),
        (None, None),
    ],
)
def test_loss_and_metric_of_any_kind_of_number(model: nn.Module, value: object, number: float | None) -> None:
    with probe_of(model, h=RECORD) as probe:
        model(X)
        probe.end_step(loss=value, score=value)
    (row,) = probe.sink.records("metrics")
    assert (row["loss"], row["custom"]) == (number, {"score": number})


@pytest.mark.parametrize(
    "value",
    ["0.5", torch.zeros(2), np.zeros(2), [], {}, 1j, torch.tensor(1j), np.array("x"), np.array(None), [[1], [2, 3]]],
)
def test_loss_or_metric_that_is_no_number_is_named(model: nn.Module, value: object) -> None:
    given = "a tensor of shape " if isinstance(value, torch.Tensor) else f"of type {type(value).__name__}[:,] "
    with probe_of(model, h=RECORD) as probe:
        for name in ("loss", "episode_return", "samples"):
            with pytest.raises(TypeError, match=rf"^{name} must be one real number, but is {given}"):
                probe.end_step(**{name: value})
        assert probe.step == 0


@pytest.mark.parametrize("value", ["1", 1.5, None])
def test_epoch_that_is_no_integer_is_refused(model: nn.Module, value: Any) -> None:
    with probe_of(model, h=RECORD) as probe:
        with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
            probe.epoch = value
        probe.epoch = torch.tensor(2)
        probe.end_step()
    assert probe.sink.records("metrics")[0]["epoch"] == 2


def test_logged_metrics_are_in_the_next_row_of_their_phase(model: nn.Module) -> None:
    number = torch.tensor(1.0)
    with probe_of(model, h=RECORD) as probe:
        for step in range(2):
            model(X)
            probe.log(entropy=9.0, clipped=number)
            number += 1  # later changes do not count
            with probe.evaluating():
                probe.log(entropy=float(step))
            probe.log(entropy=0.25, reward=1.0)
            probe.end_step(loss=0.5, reward=2.0 + step)
        model(X)
        probe.end_step()
    found = [(row["step"], row["phase"], row["loss"], row["custom"]) for row in probe.sink.records("metrics")]
    assert found == [
        (0, "eval", None, {"entropy": 0.0}),
        (0, "train", 0.5, {"entropy": 0.25, "clipped": 1.0, "reward": 2.0}),
        (1, "eval", None, {"entropy": 1.0}),
        (1, "train", 0.5, {"entropy": 0.25, "clipped": 2.0, "reward": 3.0}),
        (2, "train", None, None),
    ]


def test_metric_logged_after_the_last_step_is_an_event(model: nn.Module) -> None:
    expected = pytest.warns(instrument.InstrumentWarning, match="table: reward; log those of an evaluation inside")
    with expected, instrument.attach(model, {"h": RECORD}) as probe:
        model(X)
        probe.end_step(loss=1.0)
        probe.log(reward=1.0)


def test_evaluation_has_its_own_phase_and_micro_steps(model: nn.Module) -> None:
    with probe_of(model, train=RECORD, eval={**RECORD, "phase": "eval"}) as probe:
        for _ in range(2):
            model(X)
            probe.end_step()
        with probe.evaluating():
            assert probe.phase == "eval"
            for _ in range(2):
                model(X)
                probe.end_micro_step()
            probe.log(recall=0.5)
            row = probe.write_metrics(loss=1.0, seconds=0.5, samples=3)
            assert (row["recall"], row["loss"]) == (0.5, 1.0)
        assert (probe.phase, probe.step) == ("train", 2)
        model(X)
        probe.end_step()
    rows = [(row["hook"], row["phase"], row["step"], row["micro_step"]) for row in probe.sink.records("stats")]
    assert rows == [
        *[("train", "train", step, 0) for step in range(2)],
        *[("eval", "eval", 2, micro_step) for micro_step in range(2)],
        ("train", "train", 2, 0),
    ]
    metrics = probe.sink.records("metrics")[2]
    assert [metrics[name] for name in ("step", "phase", "seconds", "samples_per_second")] == [2, "eval", 0.5, 6.0]
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(3, 3), (2, 2)]


def test_failed_evaluation_or_phase_restores_the_phase(model: nn.Module) -> None:
    with probe_of(model, h=RECORD) as probe:
        with pytest.raises(ValueError, match="no"), probe.evaluating():
            raise ValueError("no")
        with pytest.raises(ValueError, match="'rollout', 'sanity', not 'test'"):
            probe.phase = "test"
        assert probe.phase == "train"


def test_schedules_that_change_before_the_first_step_hold(model: nn.Module) -> None:
    probe = probe_of(model, h={**RECORD, "every": 2})
    probe.phase = "sanity"
    probe.phase = "train"
    probe.change_hooks(parse_hooks({"h": {**RECORD, "every": 3}}), ())
    with probe:
        for _ in range(4):
            model(X)
            probe.end_step()
    assert [row[0] for row in probe.sink.rows["stats"]] == [0, 3]


# ------------------------------------------------------------------------------------------------ coverage


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({}, 12),
        ({"every": 5}, 3),
        ({"every": 5, "start": 2}, 2),
        ({"start": 10}, 2),
        ({"stop": 3}, 3),
        ({"steps": [0, 7, 99]}, 2),
        ({"phase": "eval"}, 4),
        ({"phase": "eval", "every": 8}, 2),
    ],
    ids=str,
)
def test_expected_count_follows_the_schedule(model: nn.Module, schedule: dict[str, Any], expected: int) -> None:
    with probe_of(model, h={**RECORD, **schedule}) as probe:
        for step in range(12):
            model(X)
            probe.end_step()
            if step % 4 == 3:
                with probe.evaluating():
                    model(X)
                    if step == 7:
                        probe.end_micro_step()
                        model(X)
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"], row["cause"]) == (expected, expected, "")
    assert probe.sink.rows["events"] == []


def test_expected_count_with_gradient_accumulation(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["forward", "full_backward_pre", "post_accumulate_grad", "parameter_grad", "step_post"]
    specs = {kind: {"layers": ".", "kind": kind, "action": "record", "every": 2} for kind in kinds}
    with probe_of(model, optimizer, **specs) as probe:
        for _ in range(4):
            for _ in range(3):
                model(X).sum().backward()
                probe.end_micro_step()
            optimizer.step()
            probe.end_step()
    counts = {row["hook"]: (row["expected"], row["fired"]) for row in probe.coverage()}
    assert counts == dict.fromkeys(kinds[:3], (6, 6)) | dict.fromkeys(kinds[3:], (2, 2))


@pytest.mark.parametrize("schedule", [{"start": 100}, {"steps": [1]}], ids=str)
def test_hook_that_is_never_scheduled_is_reported(model: nn.Module, schedule: dict[str, Any]) -> None:
    with probe_of(model, late={**RECORD, **schedule}, now=RECORD) as probe:
        model(X)
        probe.end_step()
    late, now = probe.sink.records("coverage")
    assert (late["expected"], late["fired"], late["cause"]) == (0, 0, NEVER_DUE)
    assert (now["expected"], now["fired"], now["cause"]) == (1, 1, "")
    (event,) = probe.sink.records("events")
    assert "'late'" in event["message"]
    assert event["layer"] == ""


def test_layers_with_one_cause_share_one_event() -> None:
    model = nn.Sequential(nn.ModuleList(nn.Linear(1, 1) for _ in range(7)), nn.Linear(2, 1))
    model.forward = model[1].forward
    with probe_of(model, h={**RECORD, "layers": "0.*"}) as probe:
        model(X)
        probe.end_step()
    (event,) = probe.sink.records("events")
    for part in ("hook 'h' (forward) fired 0 of 7 times", "0.0, 0.1, 0.2, 0.3, 0.4 and 2 more", "not called"):
        assert part in event["message"]
    assert event["layer"] is None
    assert event["severity"] == "warning"


def test_interrupted_step_is_not_counted_as_missed(model: nn.Module) -> None:
    with pytest.raises(KeyError), probe_of(model, h={**RECORD, "kind": "tensor"}) as probe:  # noqa: PT012
        model(X).sum().backward()
        probe.end_step()
        model(X)
        raise KeyError
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"], row["cause"]) == (1, 1, "")


@pytest.mark.parametrize("error", [None, KeyError], ids=str)
def test_unfinished_first_step_is_not_reported_as_unscheduled(model: nn.Module, error: type[Exception] | None) -> None:
    probe = probe_of(model, now=RECORD, at_the_end={**RECORD, "kind": "tensor"}, late={**RECORD, "start": 1})
    with pytest.raises(error) if error else nullcontext(), probe:
        model(X)
        if error is not None:
            raise error
    causes = {row["hook"]: row["cause"] for row in probe.sink.records("coverage")}
    assert causes == {"now": "", "at_the_end": "", "late": NEVER_DUE}


@pytest.mark.parametrize("announced", [0, 1, 2], ids=lambda n: f"{n} micro-steps announced")
def test_evaluation_inside_a_step_is_not_a_micro_step(model: nn.Module, announced: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    specs = {kind: {**RECORD, "kind": kind} for kind in ("forward", "tensor", "post_accumulate_grad", "parameter_grad")}
    with probe_of(model, optimizer, **specs, eval={**RECORD, "phase": "eval"}) as probe:
        for _ in range(2):
            for i in range(2):
                model(X).sum().backward()
                if i < announced:
                    probe.end_micro_step()
            optimizer.step()
            with probe.evaluating():
                model(X)
            probe.end_step()
    counts = {row["hook"]: (row["expected"], row["fired"], row["cause"]) for row in probe.coverage()}
    twice = dict.fromkeys(("parameter_grad", "eval"), (2, 2, ""))
    assert counts == dict.fromkeys(("forward", "tensor", "post_accumulate_grad"), (4, 4, "")) | twice
    rows = [
        (row["step"], row["micro_step"], row["call"]) for row in probe.sink.records("stats") if row["hook"] == "forward"
    ]
    one_step = {0: [(0, 0), (0, 1)], 1: [(0, 0), (1, 0)], 2: [(0, 0), (1, 0)]}[announced]
    assert rows == [(step, *each) for step in range(2) for each in one_step]


@pytest.mark.parametrize(("ends_last", "evaluates"), [(False, False), (True, True)])
def test_micro_steps_continue_until_the_step_ends(model: nn.Module, ends_last: bool, evaluates: bool) -> None:
    with probe_of(model, h=RECORD) as probe:
        for _ in range(2):
            for i in range(3):
                model(X)
                if i < 2 or ends_last:
                    probe.end_micro_step()
                if i == 1 and evaluates:
                    with probe.evaluating():
                        model(X)
            probe.end_step()
    rows = [(row["step"], row["micro_step"], row["call"]) for row in probe.sink.records("stats")]
    assert rows == [(step, micro_step, 0) for step in range(2) for micro_step in range(3)]
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(6, 6)]


def test_run_without_steps_has_coverage(model: nn.Module) -> None:
    with probe_of(model, h=RECORD) as probe:
        pass
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"]) == (0, 0)


def test_custom_event_has_the_step(model: nn.Module) -> None:
    with probe_of(model, h=RECORD) as probe:
        probe.end_step()
        probe.event("fallback", "words", severity="info", layer="x")
    event = probe.sink.records("events")[0]
    columns = ("step", "rule", "message", "severity", "layer")
    assert [event[name] for name in columns] == [1, "fallback", "words", "info", "x"]


def test_module_with_two_hooks_is_called_once(model: nn.Module) -> None:
    calls: list[nn.Module] = []
    counted = Calls(lambda layer, x: (calls.append(layer), layer(x))[1], layer=model)
    with instrument.attach(counted, {"a": RECORD, "b": {**RECORD, "role": "input"}}) as probe:
        counted(X)
        probe.end_step()
    assert calls == [model]
    assert [row["fired"] for row in probe.coverage()] == [1, 1]


def test_learning_rate_is_the_one_used_by_the_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    with instrument.attach(model, {"h": RECORD}, optimizer=optimizer) as probe:
        for _ in range(3):
            model(X).sum().backward()
            optimizer.step()
            scheduler.step()
            probe.end_step()
    assert [row["lr"] for row in probe.sink.records("metrics")] == [0.5, 0.25, 0.125]
    assert not optimizer._optimizer_step_pre_hooks


def test_learning_rate_is_that_of_the_first_group_that_is_not_zero(model: nn.Module) -> None:
    groups = [{"params": [model.weight], "lr": 0.0}, {"params": [model.bias]}]
    optimizer = torch.optim.SGD(groups, lr=0.5)
    with instrument.attach(model, {"h": RECORD}, optimizer=optimizer) as probe:
        for rate in (0.5, 0.0):
            optimizer.param_groups[1]["lr"] = rate
            optimizer.step()
            probe.end_step()
    assert [row["lr"] for row in probe.sink.records("metrics")] == [0.5, 0.0]


def test_optimizer_without_parameters_of_the_model_is_reported(model: nn.Module) -> None:
    updates = {"layers": ".", "kind": "step_post", "role": "update", "action": "record"}
    stale = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    with probe_of(model, stale, h=updates) as probe:
        probe.end_step()
    assert [row[3] for row in probe.sink.rows["events"]].count("optimizer") == 1
    assert "the optimizer holds none of the model's 2 parameters" in probe.warnings[0]
    half = torch.optim.SGD([model.get_parameter("bias"), *nn.Linear(2, 1).parameters()], lr=0.1)
    with probe_of(model, half, h=updates) as probe:
        probe.end_step()
    assert not any("holds none" in warning for warning in probe.warnings)


@pytest.mark.parametrize("is_copied", [False, True])
def test_parameters_that_are_copied_from_those_of_the_optimizer_are_reported_as_changed(is_copied: bool) -> None:
    """A training in bfloat16 with weights in float32 that the program keeps."""
    model = nn.Linear(2, 1).bfloat16()
    copies = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    with probe_of(model, optimizer, h=RECORD) as probe:
        for _ in range(2):
            for parameter, each in zip(model.parameters(), copies, strict=True):
                each.grad = torch.ones_like(each)
                optimizer.step()
                if is_copied:
                    parameter.data.copy_(each)
            probe.end_step()
    rows = probe.sink.records("events")
    severities = [row["severity"] for row in rows if row["rule"] == "optimizer"]
    assert severities == ["warning", *["info"] * is_copied]


def test_evaluation_before_the_backward_pass_leaves_its_micro_step_open(model: nn.Module) -> None:
    kinds = ("forward", "full_backward", "parameter_grad_micro")
    hooks = {kind: {**RECORD, "kind": kind} for kind in kinds} | {"phase": {**RECORD, "phase": "eval"}}
    inputs = torch.ones(3, 2, requires_grad=True)
    with instrument.attach(model, hooks) as probe:
        for _ in range(2):
            for _ in range(2):
                loss = model(inputs).sum()
                with probe.evaluating():
                    model(X)
                loss.backward()
                probe.end_micro_step()
            probe.end_step()
    rows = [row for row in probe.sink.records("stats") if row["phase"] == "train"]
    steps = {(row["hook"], row["path"]): [] for row in rows}
    for row in rows:
        steps[row["hook"], row["path"]].append((row["step"], row["micro_step"]))
    assert steps.keys() == {
        ("forward", ""),
        ("full_backward", "0"),
        *(("parameter_grad_micro", name) for name in ("weight", "bias")),
    }
    assert {tuple(places) for places in steps.values()} == {((0, 0), (0, 1), (1, 0), (1, 1))}
    assert [row["cause"] for row in probe.coverage()] == [""] * 5


def test_evaluation_after_a_backward_pass_ends_the_micro_step_also_if_no_gradient_is_expected(model: nn.Module) -> None:
    model.requires_grad_(False)
    hooks = {kind: {**RECORD, "kind": kind} for kind in ("forward", "full_backward")}
    with instrument.attach(model, hooks) as probe:
        for _ in range(2):
            model(X)
            with probe.evaluating():
                model(X)
        probe.end_step()
    assert [row["micro_step"] for row in probe.sink.records("stats") if row["phase"] == "train"] == [0, 1]
