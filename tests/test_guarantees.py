"""The four guarantees: recording changes nothing, silent hooks are reported, hooks are removed, effects are correct."""

from __future__ import annotations

import copy
import hashlib
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from architectures import of_torchvision, small_vgg
from attached_runs import train_step
from hook_locations import LOCATIONS
from tiers import tiered
from torch import Tensor, nn

import instrument
from instrument import MemorySink, Probe
from instrument.config.parse import parse_hooks
from instrument.plan.hook_plan import make_plan
from instrument.tables.reasons import FROZEN, NO_INPUT_GRAPH, ONLY_IN_OTHER_MODULES
from instrument.training.models import MLP, MnistCNN

# ------------------------------------------------------------------------------------------------ 1: recording


class Tagger(nn.Module):
    """Embedding, LSTM with dropout, and a head on the last output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.embed(tokens))
        return self.head(hidden[:, -1])


class Encoder(nn.Module):
    """Transformer encoder with dropout; query, key and value are the same tensor."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 10)

    def forward(self, sequence: Tensor) -> Tensor:
        return self.head(self.encoder(sequence).mean(1))


class Tied(nn.Module):
    """One block called three times, Identity before an in-place ReLU, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Identity(), nn.ReLU(inplace=True), nn.Dropout(0.1))
        self.again = self.block
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens).mean(1)
        hidden = self.again(self.block(self.block(hidden))) + hidden
        return self.head(self.norm(hidden))


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(16, 4, 2, 2, 16, 32, dropout=0.1, attention_dropout=0.1, num_classes=10)


def images(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mnist_cnn": (MnistCNN, images(8, 1, 28, 28)),
    "mlp": (MLP, images(8, 1, 28, 28)),
    "resnet18": (lambda: of_torchvision("resnet18").make(), images(2, 3, 64, 64)),
    "lstm": (Tagger, lambda: torch.randint(20, (6, 5))),
    "transformer": (Encoder, images(4, 6, 16)),
    "vgg": (small_vgg, images(4, 3, 16, 16)),
    "vit": (small_vit, images(4, 3, 16, 16)),
    "tied": (Tied, lambda: torch.randint(10, (6, 5))),
}

KINDS_AND_ROLES = [
    *LOCATIONS,
    ("forward", "input"),
    ("parameter_grad", "param_grad"),
    ("post_accumulate_grad", "param_grad"),
    ("step_post", "param"),
    ("step_post", "param_grad"),
    ("step_post", "update"),
    ("step_post", "state.momentum_buffer"),
]


def record_everything(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return record hooks of every kind and role on every module, with all statistics and tensors."""
    locations = [*KINDS_AND_ROLES, ("step_post", "buffer")] if any(True for _ in model.buffers()) else KINDS_AND_ROLES
    every = {"layers": "**", "action": "record", "stats": "all", "tensors": True}
    hooks = {f"h{i}": {**every, "kind": kind, "role": role} for i, (kind, role) in enumerate(locations)}
    functions = {**every, "functions": "*"}
    return {**hooks, "f": {**functions, "kind": "function"}, "g": {**functions, "kind": "function_grad"}}


class RecordingSink(MemorySink):
    """Sink that remembers which hooks wrote to which table, and drops the rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[str, str]] = set()

    def write(self, table: str, rows: Any) -> None:
        if table == "stats":
            self.seen.update((table, row[5]) for row in rows)

    def keep(self, key: tuple[Any, ...], *tensor: Any) -> bool:
        self.seen.add(("tensors", key[5]))
        return True


def digest(tensor: Tensor) -> str:
    return hashlib.blake2b(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def random_state() -> str:
    return repr((digest(torch.random.get_rng_state()), random.getstate(), np.random.get_state()[1].tolist()))


def train(model: nn.Module, batches: list[Tensor], make_probe: Callable[[torch.optim.Optimizer], Any]) -> list[Any]:
    """Train with a fixed seed; return digests of loss, gradients, state and random state for each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    trace: list[Any] = []
    with make_probe(optimizer) as probe:
        for batch in batches:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), torch.arange(len(batch)) % 10)
            loss.backward()
            gradients = {name: digest(p.grad) for name, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
            if probe is not None:
                probe.end_step(loss=loss)
            state = {name: digest(value) for name, value in model.state_dict().items()}
            trace.append({"loss": digest(loss), "gradients": gradients, "state": state, "random": random_state()})
    return trace


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(MODELS, ("mnist_cnn", "lstm", "transformer", "tied")))
def test_recording_everything_is_bit_identical(name: str) -> None:
    torch.manual_seed(0)
    build, draw = MODELS[name]
    model = build()
    batches = [draw() for _ in range(2)]
    baseline = train(copy.deepcopy(model), batches, lambda optimizer: nullcontext())

    specs = parse_hooks(record_everything(model))
    sink = RecordingSink()
    probes: list[Probe] = []

    def make_probe(optimizer: torch.optim.Optimizer) -> Probe:
        probes.append(Probe(make_plan(specs, model), sink, optimizer=optimizer))
        return probes[0]

    recorded = train(model, batches, make_probe)
    for step, (with_hooks, without) in enumerate(zip(recorded, baseline, strict=True)):
        for key in without:
            assert with_hooks[key] == without[key], f"{key} differs at step {step}"
    assert sink.seen == {(table, hook) for table in ("stats", "tensors") for hook in specs}
    fired = {row["hook"]: row["fired"] for row in probes[0].coverage() if row["fired"]}
    assert set(fired) == set(specs)


def test_recording_in_an_evaluation_is_bit_identical() -> None:
    torch.manual_seed(0)
    model = MnistCNN().eval()
    batch = torch.randn(4, 1, 28, 28)
    before = {name: digest(value) for name, value in model.state_dict().items()}
    with torch.no_grad():
        baseline = digest(model(batch))
        specs = {"all": {"layers": "**", "kind": "forward", "action": "record", "tensors": True, "phase": "eval"}}
        with instrument.attach(model, specs) as probe, probe.evaluating():
            assert digest(model(batch)) == baseline
    assert {name: digest(value) for name, value in model.state_dict().items()} == before
    assert len(probe.sink.rows["tensors"]) == len(list(model.modules()))


# ------------------------------------------------------------------------------------------------ 2: coverage


class SilentHooks(nn.Module):
    """Model whose children each have a different reason for a hook not to fire."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.never_called = nn.Linear(4, 4)
        self.output_unused = nn.Linear(4, 4)
        self.under_no_grad = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.behind_frozen = nn.Linear(4, 4)
        self.called_by_forward = nn.Linear(4, 4)
        self.walked = nn.Sequential(nn.Linear(4, 4))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.not_in_the_loss = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.output_unused(x)
        with torch.no_grad():
            x = x + self.under_no_grad(x)
        x = self.behind_frozen(self.frozen(x))
        x = self.called_by_forward.forward(self.used(x))
        for layer in self.walked:
            x = layer(x)
        return self.attention(x, x, x, need_weights=False)[0]


NOT_CALLED = "the module was not called"
NO_GRADIENT = "no gradient arrived"
NO_PARAMETER_GRADIENT = "the parameter had no gradient"
NO_GRAPH = "requires no gradient"
NO_GRAD = "under torch.no_grad()"


def one_step(model: nn.Module, specs: Any, batch: Tensor) -> Probe:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        probe.end_step(loss=loss)
    return probe


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("layer", "kind", "cause"),
    [
        ("never_called", "forward", NOT_CALLED),
        ("never_called", "full_backward", NOT_CALLED),
        ("never_called", "post_accumulate_grad", NO_PARAMETER_GRADIENT),
        ("never_called", "parameter_grad", "had no gradient"),
        ("called_by_forward", "forward", NOT_CALLED),
        ("called_by_forward", "tensor", NOT_CALLED),
        ("walked", "forward", NOT_CALLED),
        ("attention.out_proj", "forward", NOT_CALLED),
        ("attention.out_proj", "full_backward_pre", NOT_CALLED),
        ("output_unused", "full_backward_pre", NO_GRADIENT),
        ("output_unused", "tensor", NO_GRADIENT),
        ("output_unused", "parameter_grad", "had no gradient"),
        ("under_no_grad", "full_backward_pre", NO_GRAD),
        ("under_no_grad", "tensor", NO_GRAD),
        ("frozen", "full_backward_pre", NO_GRAPH),
        (".", "parameter_grad", "had no gradient"),
        (".", "post_accumulate_grad", NO_PARAMETER_GRADIENT),
    ],
)
def test_silent_hook_is_reported_with_its_cause(layer: str, kind: str, cause: str) -> None:
    probe = one_step(SilentHooks(), {"h": {"layers": layer, "kind": kind, "action": "record"}}, torch.randn(3, 2, 4))
    rows = probe.sink.records("coverage")
    assert rows
    for row in rows:
        assert (row["layer"], row["fired"]) == ("" if layer == "." else layer, 0)
        assert row["expected"] == 1
        assert cause in row["cause"]
    (event,) = probe.sink.records("events")
    assert (event["rule"], event["severity"]) == ("coverage", "warning")
    assert "hook 'h'" in event["message"]
    assert rows[0]["cause"] in event["message"]
    for row in rows:
        assert ".".join(part for part in (row["layer"], row["path"]) if part) in event["message"]
    assert not probe.sink.rows["stats"]


@pytest.mark.spread(2)
@pytest.mark.parametrize("layer", ["frozen", "behind_frozen", "under_no_grad", "."])
def test_missing_input_gradient_is_recorded_but_not_missed(layer: str) -> None:
    spec = {"layers": layer, "kind": "full_backward"}
    batch = torch.randn(3, 2, 4)
    probe = one_step(SilentHooks(), {"h": {**spec, "action": "record"}}, batch)
    (row,) = probe.sink.records("coverage")
    no_grad = layer == "under_no_grad"  # no hook on this module can fire
    assert (row["expected"], row["fired"]) == (int(no_grad), 0)
    assert (NO_GRAD if no_grad else NO_GRAPH) in row["cause"]
    assert len(probe.sink.rows["events"]) == int(no_grad)

    probe = one_step(SilentHooks(), {"h": {**spec, "action": "scale", "factor": 2.0}}, batch)
    (row,) = probe.sink.records("coverage")
    assert (row["expected"], row["fired"]) == (1, 0)  # an intervention that cannot act is reported
    assert (NO_GRAD if no_grad else NO_GRAPH) in row["cause"]
    assert len(probe.sink.rows["events"]) == 1


def test_frozen_parameter_is_reported() -> None:
    probe = one_step(
        SilentHooks(), {"h": {"layers": "*", "kind": "parameter_grad", "action": "record"}}, torch.randn(3, 2, 4)
    )
    causes = {(row["layer"], row["path"]): row["cause"] for row in probe.sink.records("coverage")}
    assert causes["frozen", "weight"] == FROZEN
    assert causes["used", "weight"] == ""


def test_hook_that_fires_in_some_steps_is_counted() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            return self.a(x) if self.turn % 2 else self.b(self.a(x))

    model = Sometimes()
    with instrument.attach(model, {"h": {"layers": "*", "kind": "forward", "action": "record"}}) as probe:
        for _ in range(6):
            model(torch.randn(3, 2))
            probe.end_step()
    a, b = probe.sink.records("coverage")
    assert (a["expected"], a["fired"], a["cause"]) == (6, 6, "")
    assert (b["expected"], b["fired"]) == (6, 3)
    assert NOT_CALLED in b["cause"]


@pytest.mark.parametrize("name", tiered(["mnist_cnn", "mlp", "vgg"], ["mnist_cnn"]))
def test_healthy_model_has_full_coverage_and_no_events(name: str) -> None:
    build, draw = MODELS[name]
    model = build()
    probe = one_step(model, record_everything(model), draw().requires_grad_())
    rows = probe.sink.records("coverage")
    assert {row["cause"] for row in rows} <= {"", ONLY_IN_OTHER_MODULES, NO_INPUT_GRAPH}
    assert all(row["fired"] == row["expected"] == (not row["cause"]) for row in rows)
    assert [row[3] for row in probe.sink.rows["events"]] == ["statistics"]  # some statistics read a tensor again


# ------------------------------------------------------------------------------------------------ 3: removal


MODULE_HOOK_ATTRIBUTES = (
    *("_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_load_state_dict_pre_hooks"),
)


def hooks_of(model: nn.Module, optimizer: torch.optim.Optimizer, *tensors: Tensor) -> list[Any]:
    """Return all hooks on a model, its parameters and its optimizer."""
    found: list[Any] = []
    for module in model.modules():
        found += [list(getattr(module, name).items()) for name in MODULE_HOOK_ATTRIBUTES]
    for tensor in (*model.parameters(), *tensors):
        found += [list((tensor._backward_hooks or {}).values())]
        found += [list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())]
    found += [list(optimizer._optimizer_step_pre_hooks.items()), list(optimizer._optimizer_step_post_hooks.items())]
    return found


def hook_configuration() -> dict[str, dict[str, Any]]:
    records = record_everything(nn.BatchNorm1d(4))
    records["scale"] = {"layers": "0", "kind": "parameter_grad", "action": "scale", "factor": 0.5}
    return records


def interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@dataclass
class Loop:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor

    def run(self, probe: Probe, steps: int = 2) -> None:
        for _ in range(steps):
            train_step(self.model, self.optimizer, probe, self.batch)


@pytest.fixture
def loop() -> Loop:
    """A model with hooks of other code at all locations."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model[0].register_forward_hook(lambda module, args, output: None)
    model[2].register_forward_pre_hook(lambda module, args, kwargs: None, with_kwargs=True)
    model[2].register_full_backward_hook(lambda module, into, out: None)
    model[2].register_full_backward_pre_hook(lambda module, out: None)
    model[3].weight.register_hook(lambda gradient: None)
    model[3].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    optimizer.register_step_pre_hook(lambda *args: None)
    optimizer.register_step_post_hook(lambda *args: None)
    return Loop(model, optimizer, torch.randn(5, 4, requires_grad=True))


@pytest.mark.slow
def test_exit_restores_the_original_hooks(loop: Loop) -> None:
    before = hooks_of(loop.model, loop.optimizer, loop.batch)
    with instrument.attach(loop.model, hook_configuration(), optimizer=loop.optimizer) as probe:
        loop.run(probe)
        assert hooks_of(loop.model, loop.optimizer, loop.batch) != before
    assert hooks_of(loop.model, loop.optimizer, loop.batch) == before


@pytest.mark.slow
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_error_in_the_loop_removes_all_hooks(loop: Loop, error: type[BaseException]) -> None:
    before = hooks_of(loop.model, loop.optimizer, loop.batch)

    def broken() -> None:
        with instrument.attach(loop.model, hook_configuration(), optimizer=loop.optimizer) as probe:
            loop.run(probe, 1)
            loop.model(loop.batch)
            raise error

    with pytest.raises(error):
        broken()
    assert hooks_of(loop.model, loop.optimizer, loop.batch) == before


def raise_value_error(tensor: Tensor, context: instrument.Context) -> Tensor:
    raise ValueError("no")


def raise_keyboard_interrupt(tensor: Tensor, context: instrument.Context) -> Tensor:
    raise KeyboardInterrupt


@pytest.mark.spread(2)
@pytest.mark.combinations
@pytest.mark.parametrize(
    ("function", "error"),
    [("raise_value_error", instrument.HookError), ("raise_keyboard_interrupt", KeyboardInterrupt)],
    ids=str,
)
@pytest.mark.parametrize("kind", ["forward", "full_backward", "post_accumulate_grad", "parameter_grad", "step_post"])
def test_error_in_a_hook_removes_all_hooks(loop: Loop, kind: str, function: str, error: type[BaseException]) -> None:
    before = hooks_of(loop.model, loop.optimizer, loop.batch)
    specs = hook_configuration()
    target = {"_target_": f"{__name__}.{function}"}
    specs["bad"] = {"layers": "0", "kind": kind, "action": "modify", "fn": target, "start": 1}
    with pytest.raises(error), instrument.attach(loop.model, specs, optimizer=loop.optimizer) as probe:
        loop.run(probe)
    assert probe.step == 1
    assert hooks_of(loop.model, loop.optimizer, loop.batch) == before


def test_failed_attachment_removes_all_hooks(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = hooks_of(loop.model, loop.optimizer)
    monkeypatch.setattr(loop.optimizer, "register_step_pre_hook", interrupt)  # Ctrl-C while hooks are registered
    with (
        pytest.raises(KeyboardInterrupt),
        instrument.attach(loop.model, hook_configuration(), optimizer=loop.optimizer),
    ):
        pass
    assert hooks_of(loop.model, loop.optimizer) == before


def test_graph_that_outlives_the_probe_is_not_changed(loop: Loop) -> None:
    specs = {
        "t": {"layers": "3", "kind": "full_backward", "action": "scale", "factor": 100.0},
        "i": {"layers": "0", "kind": "tensor", "role": "input", "action": "scale", "factor": 100.0},
    }
    with instrument.attach(loop.model, specs) as probe:
        loss = loop.model(loop.batch).square().mean()
    loss.backward()
    after = loop.batch.grad
    loop.batch.grad = None
    loop.model(loop.batch).square().mean().backward()
    assert after is not None
    assert torch.equal(after, loop.batch.grad)
    assert probe.sink.rows["effects"] == []


# ------------------------------------------------------------------------------------------------ 4: effects

GRADIENT = torch.tensor([[3.0, -4.0], [0.0, 0.0], [6.0, 8.0]])


@pytest.fixture
def effects() -> Callable[..., list[dict[str, Any]]]:
    """Function that returns the effects of an intervention on the output [[3, -4], [0, 0], [6, 8]]."""

    def of(**spec: Any) -> list[dict[str, Any]]:
        model = nn.Identity()
        with instrument.attach(model, {"h": {"layers": ".", "kind": "forward", **spec}}, seed=3) as probe:
            model(GRADIENT)
            probe.end_step()
        return probe.sink.records("effects")

    return of


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("spec", "changed", "after", "factor"),
    [
        ({"action": "scale", "factor": 0.5}, 4, math.sqrt(125) / 2, 0.5),
        ({"action": "scale", "factor": 1.0}, 0, math.sqrt(125), 1.0),
        ({"action": "clip", "value": 4.0}, 2, math.sqrt(9 + 16 + 16 + 16), None),
        ({"action": "clip", "max": 3.0}, 2, math.sqrt(9 + 16 + 9 + 9), None),
        ({"action": "clip", "min": 0.0}, 1, math.sqrt(9 + 36 + 64), None),
        ({"action": "clip", "norm": 1.0}, 4, 1.0, 1 / math.sqrt(125)),
        ({"action": "clip", "norm": 100.0}, 0, math.sqrt(125), 1.0),
        ({"action": "clip", "norm": 6.0, "scope": "sample"}, 2, math.sqrt(25 + 36), None),
        ({"action": "modify", "fn": "zero"}, 4, 0.0, None),
        ({"action": "modify", "fn": "sign"}, 4, 2.0, None),
        ({"action": "modify", "fn": "mean", "dim": None}, 6, 13 / math.sqrt(6), None),
    ],
    ids=str,
)
def test_effect_row_has_the_change(
    effects: Any, spec: dict[str, Any], changed: int, after: float, factor: float | None
) -> None:
    (row,) = effects(**spec)
    assert (row["hook"], row["layer"], row["kind"], row["role"], row["step"]) == ("h", "", "forward", "output", 0)
    assert (row["numel"], row["changed"], row["changed_fraction"]) == (6, changed, changed / 6)
    assert row["norm_before"] == pytest.approx(math.sqrt(125), rel=1e-6)
    assert row["norm_after"] == pytest.approx(after, rel=1e-6)
    assert row["factor"] == (None if factor is None else pytest.approx(factor, rel=1e-6))


def test_every_gradient_intervention_has_an_effect_row() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = ["full_backward_pre", "full_backward", "tensor", "post_accumulate_grad", "parameter_grad", "step_post"]
    specs = {kind: {"layers": "1", "kind": kind, "action": "scale", "factor": 0.5} for kind in kinds}
    before = copy.deepcopy(model)
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        loss = model(torch.eye(2)).sum()
        loss.backward()
        optimizer.step()
        probe.end_step()
    table = probe.sink.frame("effects").set_index(["hook", "path"])
    assert len(table) == 3 * 1 + 3 * 2  # one tensor each, and weight and bias each
    assert set(table.factor) == {0.5}
    assert torch.allclose(torch.tensor(table.norm_after.values), torch.tensor(table.norm_before.values) / 2)
    # d loss / d output is ones [2, 2], of norm 2; full_backward_pre and tensor both halve it
    assert table.norm_before["full_backward_pre", ""] == 2.0
    assert table.norm_before["tensor", ""] == 1.0
    flows = torch.full((2, 2), 0.25) @ before[1].weight
    assert table.norm_before["full_backward", "0"] == pytest.approx(flows.norm().item())
    assert table.norm_before["post_accumulate_grad", "bias"] == pytest.approx(math.sqrt(2 * 0.5**2))
    assert table.norm_before["parameter_grad", "bias"] == pytest.approx(math.sqrt(2 * 0.25**2))
    bias = before[1].bias - 0.1 * 0.125
    assert table.norm_before["step_post", "bias"] == pytest.approx(bias.norm().item())
    assert torch.allclose(model[1].bias, bias / 2)


def test_effect_norms_use_finite_values_and_nan_is_unchanged() -> None:
    model = nn.Identity()
    with instrument.attach(model, {"h": {"layers": ".", "kind": "forward", "action": "scale", "factor": 2.0}}) as probe:
        model(torch.tensor([math.nan, math.inf, 3.0, 4.0]))
        model(torch.empty(0, 3))
        probe.end_step()
    some, empty = probe.sink.records("effects")
    assert (some["changed"], some["norm_before"], some["norm_after"]) == (2, 5.0, 10.0)
    assert (empty["numel"], empty["changed"], empty["changed_fraction"]) == (0, 0, 0.0)
    assert (empty["norm_before"], empty["norm_after"]) == (None, None)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.softmax(self.query(hidden) @ self.key(hidden).T, -1) @ self.value(hidden)


class ParallelBlock(nn.Module):
    """A tensor with several consumers, so that the order of gradient accumulation changes the last bits."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.attention, self.dense = nn.Linear(16, 16), Attention(), nn.Linear(16, 16)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.into(inputs)
        return self.attention(hidden) + self.dense(hidden) + self.attention(hidden)


def test_recording_keeps_the_order_of_gradient_accumulation() -> None:
    def gradients(hooks: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(3)
        model = ParallelBlock()
        with instrument.attach(model, hooks) as probe:
            model(torch.randn(64, 16) * 7).square().sum().backward()
            probe.end_step()
        assert not hooks or {row["layer"] for row in probe.sink.records("stats")} >= {"attention", "dense"}
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    observed = gradients({"own": {"layers": "**", "kind": "full_backward", "action": "record"}})
    assert all(torch.equal(ours, baseline) for ours, baseline in zip(observed, gradients({}), strict=True))
