"""Trap: hooks that never fire report the cause, and models whose hooks all fire give no warning.

Silent cases: whatever prevents a hook from firing is a row of `coverage` with its cause, and a warning at the end.
Clean models: ordinary networks with hooks of all kinds on all modules give no cause and no warning.
"""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hook_runs import Calls, run_step, scale
from tiers import tiered
from torch import Tensor, nn

import instrument
from instrument import InstrumentWarning, Probe
from instrument.tables import reasons
from instrument.tables.reasons import NEVER_DUE

LOOK = {"action": "record", "stats": ["l2"]}
Step = Callable[[nn.Module, torch.optim.Optimizer, Probe], None]


def full_step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    optimizer.zero_grad()
    loss = model(torch.randn(3, 2, 4)).square().mean()
    loss.backward()
    optimizer.step()


def clear_before_step(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    model(torch.randn(3, 2, 4)).square().mean().backward()
    optimizer.zero_grad()
    optimizer.step()


def forward_only(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    with torch.no_grad():
        model(torch.randn(3, 2, 4))


def evaluate_only(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    with probe.evaluating(), torch.no_grad():
        model(torch.randn(3, 2, 4))


def sanity_check_only(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    probe.phase = "sanity"
    forward_only(model, optimizer, probe)
    probe.phase = "train"


def train_then_enter_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    full_step(model, optimizer, probe)
    with probe.evaluating():
        pass


def forward_in_inference_mode(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    with torch.inference_mode():
        model(torch.randn(3, 2, 4))


def raise_in_forward(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.randn(3, 2, 5, requires_grad=True))


def call_copy(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    copy.deepcopy(model)(torch.randn(3, 2, 4))


def call_with_tokens(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    model(**tokens())


def replace_module(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    full_step(model, optimizer, probe)
    model.used = nn.Linear(4, 4)


def vmap_over_samples(model: nn.Module, optimizer: torch.optim.Optimizer, probe: Probe) -> None:
    torch.func.vmap(model)(torch.randn(3, 1, 2, 4))


class Net(nn.Module):
    """A network in which each child prevents its hooks from firing in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.never_called = nn.Linear(4, 4)
        self.dead_end = nn.Linear(4, 4)
        self.without_graph = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.bypassed = nn.Linear(4, 4)
        self.functional = nn.Linear(4, 4)
        self.walked = nn.ModuleDict({"0": nn.Linear(4, 4), "spare": nn.Linear(4, 4)})
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.counting = nn.Sequential(OrderedDict(integers=Calls(lambda x: x.detach().long()), number=Calls(to_number)))

    def forward(self, x: Tensor) -> Tensor:
        self.dead_end(x)
        with torch.no_grad():
            self.without_graph(x)
        x = self.used(self.frozen(x))
        self.counting(x)
        x = self.bypassed.forward(x)
        x = nn.functional.linear(x, self.functional.weight, self.functional.bias)
        x = self.walked["0"](x)
        return self.attention(x, x, x, need_weights=False)[0]


class Steps(nn.Linear):
    """A layer that is updated and whose gradients are cleared inside of the backward pass."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        for parameter in self.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)
            parameter.register_post_accumulate_grad_hook(partial(self.update, optimizer))

    def update(self, optimizer: torch.optim.Optimizer, _: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()


def to_number(x: Tensor) -> int:
    return int(x.sum())


def fourier() -> nn.Module:
    """Return a layer with a complex result inside of its output."""
    parts = {"layer": nn.Linear(4, 4), "transform": Calls(torch.fft.fft), "real": Calls(torch.real)}
    return nn.Sequential(OrderedDict(parts))


class Attention(nn.Module):
    """As in timm: `fused_attn` determines whether the dropout module is called."""

    fused_attn = True

    def __init__(self) -> None:
        super().__init__()
        self.attn_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=self.attn_drop.p)


@dataclass(frozen=True)
class Silent:
    """A hook that cannot fire.

    Attributes:
        spec: The hook.
        cause: The cause in `coverage`, or a part of it.
        step: The function that runs a step.
        model: The factory of the model.
        expected: How often the hook should have fired.
        optimized: The part of the model that the optimizer holds.
    """

    spec: dict[str, Any]
    cause: str
    step: Step = full_step
    model: Callable[[], nn.Module] = Net
    expected: int = 1
    optimized: str = ""


def hook(layers: str, kind: str, **more: Any) -> dict[str, Any]:
    return {"layers": layers, "kind": kind, **LOOK, **more}


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(2, 40, (2, 6)), "use_cache": False}


def of_transformers(name: str, **sizes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model = getattr(transformers, name)
        return model(model.config_class(vocab_size=40, bos_token_id=0, eos_token_id=1, pad_token_id=0, **sizes))

    return make


GPT2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}


def attention_with_unused_adapter() -> nn.Module:
    attention = Attention()
    attention.adapter = nn.ModuleDict({"dropout": nn.Dropout()})
    return nn.Sequential(nn.Linear(4, 4), attention)


SILENT = {
    "a module that is never called": Silent(hook("never_called", "forward"), reasons.NOT_CALLED),
    "its output gradients": Silent(hook("never_called", "full_backward"), reasons.NOT_CALLED),
    "its parameter gradients": Silent(hook("never_called", "post_accumulate_grad"), reasons.NO_PARAMETER_GRADIENT),
    ".forward() called directly": Silent(hook("bypassed", "forward"), reasons.NOT_CALLED),
    "weights used functionally": Silent(hook("functional", "tensor"), reasons.NOT_CALLED),
    "attention's projection": Silent(hook("attention.out_proj", "forward"), reasons.PROJECTION),
    "an unused entry of a container": Silent(hook("walked.spare", "forward_pre"), reasons.NOT_CALLED),
    "an output that the loss does not depend on": Silent(hook("dead_end", "full_backward_pre"), reasons.NO_GRADIENT),
    "a parameter that the loss does not depend on": Silent(
        hook("dead_end", "parameter_grad_micro"), reasons.NO_PARAMETER_GRADIENT
    ),
    "under no_grad": Silent(hook("without_graph", "full_backward_pre"), reasons.NO_GRAD),
    "a forward pass under no_grad": Silent(hook("used", "tensor"), reasons.NO_GRAD, step=forward_only),
    "a forward pass under inference_mode": Silent(
        hook("used", "full_backward"), reasons.INFERENCE, step=forward_in_inference_mode
    ),
    "a forward pass that raised": Silent(hook("dead_end", "forward"), reasons.RAISED, step=raise_in_forward),
    "gradients of a forward pass that raised": Silent(
        hook("dead_end", "full_backward_pre"), reasons.RAISED, step=raise_in_forward
    ),
    "an input gradient in a forward pass that raised": Silent(
        hook(".", "full_backward"), reasons.RAISED, step=raise_in_forward
    ),
    "a module after one that raised": Silent(hook("attention", "forward"), reasons.NOT_CALLED, step=raise_in_forward),
    "no backward pass": Silent(hook("used", "post_accumulate_grad"), reasons.NO_PARAMETER_GRADIENT, step=forward_only),
    "a frozen subtree": Silent(hook("frozen", "full_backward_pre"), reasons.NO_GRAPH),
    "an intervention on an input without gradient": Silent(scale("full_backward", 2.0, "used"), reasons.NO_GRAPH),
    "an integer output": Silent(hook("counting.integers", "full_backward_pre"), reasons.NO_GRAPH),
    "an intervention on an integer output": Silent(scale("forward", 2.0, "counting.integers"), "the value has int64"),
    "an intervention on an integer input": Silent(
        {"layers": "counting.number", "kind": "forward_pre", "action": "clip", "value": 1.0}, "the value has int64"
    ),
    "an intervention on an integer result of a function": Silent(
        {"layers": "counting.integers", "kind": "function", "functions": ["long"], "role": "output"}
        | {"action": "modify", "fn": "zero"},
        "the value has int64",
    ),
    "an intervention on a complex output": Silent(
        scale("forward", 2.0, "transform"),
        "changes floating-point tensors only, and the value has complex64",
        model=fourier,
    ),
    "a path that an intervention does not find": Silent(
        scale("forward", 2.0, "transform", path="1"),
        reasons.NO_TENSOR,
        model=fourier,
    ),
    "a gradient that another hook cleared": Silent(hook(".", "post_accumulate_grad"), reasons.CLEARED, model=Steps),
    "an intervention on a gradient that another hook cleared": Silent(
        {"layers": ".", "kind": "post_accumulate_grad", "action": "clip", "norm": 1.0}, reasons.CLEARED, model=Steps
    ),
    "a gradient that is cleared before the step": Silent(
        hook("used", "parameter_grad"), reasons.NO_GRADIENT_AT_STEP, step=clear_before_step
    ),
    "a gradient that is cleared before the hook of the step": Silent(
        hook("used", "step_pre", role="param_grad"), reasons.NO_GRADIENT_AT_STEP, step=clear_before_step
    ),
    "an output that is not a tensor": Silent(hook("counting.number", "forward"), reasons.NO_TENSOR),
    "a path that does not exist": Silent(hook("attention", "forward", path="7"), reasons.NO_TENSOR),
    "a parameter that the optimizer does not hold": Silent(
        hook("walked.0", "parameter_grad", params="weight"), reasons.NOT_OPTIMIZED, expected=0, optimized="used"
    ),
    "an optimizer that makes no step": Silent(hook("used", "step_post"), reasons.NO_STEP, step=forward_only),
    "the optimizer state of a parameter without gradient": Silent(
        hook("never_called", "step_post", role="state.momentum_buffer"), reasons.NO_STATE
    ),
    "a loss that is not passed to the probe": Silent(hook(".", "loss"), reasons.NO_LOSS),
    "a state dict that is never saved": Silent(hook("used", "state_dict_post"), reasons.NOT_SAVED),
    "a state dict that is never loaded": Silent(hook("used", "load_state_dict_pre"), reasons.NOT_LOADED),
    "a transform of torch.func": Silent(
        hook("0", "forward"), reasons.TRANSFORMED, step=vmap_over_samples, model=lambda: nn.Sequential(nn.Linear(4, 4))
    ),
    "a schedule without a step": Silent(hook("used", "forward", start=5), NEVER_DUE, expected=0),
    "a phase that is never entered": Silent(
        hook("used", "forward", phase="eval"), reasons.phase_never_entered("eval"), expected=0
    ),
    "training hooks in an evaluation": Silent(
        hook("used", "forward"),
        "the module was called in phase eval only, but the hook is for phase train",
        step=evaluate_only,
    ),
    "evaluation hooks in training": Silent(
        hook("used", "forward_pre", phase="eval"),
        "the module was called in phase train only, but the hook is for phase eval",
        step=train_then_enter_evaluation,
    ),
    "training hooks in a sanity check": Silent(
        hook("used", "full_backward"),
        "the module was called in the sanity check before training only, but the hook is for phase train",
        step=sanity_check_only,
    ),
    "a frozen parameter": Silent(hook("frozen", "parameter_grad_micro"), reasons.FROZEN, expected=0),
    "a frozen parameter at the optimizer": Silent(hook("frozen", "parameter_grad"), reasons.FROZEN, expected=0),
    "the gradient of a frozen parameter": Silent(
        hook("frozen", "step_pre", role="param_grad"), reasons.FROZEN, expected=0
    ),
    "a copy of the model is called": Silent(hook("used", "forward"), reasons.NOT_CALLED_COPIED, step=call_copy),
    "fused attention of transformers": Silent(
        hook("**.attn_dropout", "forward"),
        'runs with attn_implementation="sdpa", which computes softmax and dropout in one function and calls no module for '
        'them; with attn_implementation="eager", it calls',
        step=call_with_tokens,
        model=of_transformers("GPT2LMHeadModel", **GPT2, attn_implementation="sdpa"),
    ),
    "eager attention of transformers": Silent(
        hook("**.attn_dropout", "forward"),
        reasons.NOT_CALLED,
        step=call_with_tokens,
        model=of_transformers("GPT2LMHeadModel", **GPT2, attn_implementation="eager"),
    ),
    "fused attention of timm": Silent(
        hook("1.attn_drop", "forward"),
        "fused_attn=True",
        model=lambda: nn.Sequential(nn.Linear(4, 4), Attention()),
    ),
    "an unused adapter in fused attention": Silent(
        hook("1.adapter.dropout", "forward"), reasons.NOT_CALLED, model=attention_with_unused_adapter
    ),
    "a replaced module": Silent(hook("used", "forward"), reasons.REPLACED, step=replace_module, expected=2),
}


@pytest.mark.spread(6)
@pytest.mark.parametrize("name", SILENT)
def test_silent_hook_is_reported_with_its_cause(name: str) -> None:
    case = SILENT[name]
    torch.manual_seed(0)
    model = case.model()
    held = model.get_submodule(case.optimized)
    optimizer = torch.optim.SGD(held.parameters(), lr=0.01, momentum=0.9)
    attached = instrument.attach(model, {"mine": case.spec}, optimizer=optimizer)
    with pytest.warns(InstrumentWarning) as warned, attached as probe:
        for _ in range(max(1, case.expected)):
            case.step(model, optimizer, probe)
            probe.end_step()
    rows = probe.sink.records("coverage")
    assert rows
    assert len({row["cause"] for row in rows}) == 1
    assert case.cause in rows[0]["cause"]
    assert {row["expected"] for row in rows} == {case.expected}
    assert all(row["fired"] == max(0, case.expected - 1) for row in rows)
    assert any("hook 'mine'" in str(one.message) and case.cause in str(one.message) for one in warned)


def test_module_called_at_other_steps_is_reported() -> None:
    model = Net()
    warned = pytest.warns(InstrumentWarning, match="it was called at other steps")
    with warned, instrument.attach(model, {"mine": hook("used", "forward", every=2)}) as probe:
        for step in range(4):
            if step != 2:
                model(torch.randn(3, 2, 4))
            probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"], row["cause"]) == (2, 1, reasons.AT_OTHER_STEPS)


def test_module_that_some_passes_skip_is_reported() -> None:
    model = Net()
    with instrument.attach(model, {"mine": hook("used", "forward")}) as probe:
        for step in range(3):
            (model if step != 1 else model.dead_end)(torch.randn(3, 2, 4))
            probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"], row["cause"]) == (3, 2, reasons.NOT_ALWAYS_CALLED)


def test_several_causes_are_all_reported() -> None:
    model, optimizer = Net(), torch.optim.SGD([torch.zeros(1)])
    warned = pytest.warns(InstrumentWarning, match="fired 1 of 4 times")
    with warned, instrument.attach(model, {"mine": hook("used", "full_backward_pre")}) as probe:
        model(torch.randn(3, 2, 4)).sum().backward()
        probe.end_step()
        for step in (forward_in_inference_mode, forward_only, forward_only):
            step(model, optimizer, probe)
            probe.end_step()
    (row,) = probe.coverage()
    assert row["cause"] == f"{reasons.NO_GRAD}; {reasons.INFERENCE}"


def features(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"": torch.randn(*shape)}


def image(size: int = 32) -> Callable[[], dict[str, Any]]:
    return lambda: {"": torch.randn(4, 3, size, size)}


def vision(name: str, **more: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        from torchvision.models import get_model

        return get_model(name, weights=None, num_classes=5, **more)

    return make


WIDE = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WIDE |= {"attn_implementation": "eager"}
CLEAN: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "linear": (lambda: nn.Linear(4, 2), features(3, 4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), features(3, 4)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5, inplace=True), nn.Linear(8, 2)), features(3, 4)),
    "normed": (lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2)), features(3, 4)),
    "conv": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(3600, 2)
        ),
        image(),
    ),
    "shared": (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 3), features(3, 4)),
    "identity": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Identity(), nn.Tanh()), features(3, 4)),
    "lstm": (lambda: nn.LSTM(4, 5), features(6, 2, 4)),
    "gru": (lambda: nn.GRU(4, 5, bidirectional=True), features(6, 2, 4)),
    "data made flat": (lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Flatten(), nn.Linear(4, 2)), features(3, 4)),
    "resnet18": (vision("resnet18"), image()),
    "mobilenet_v3_small": (vision("mobilenet_v3_small"), image(64)),
    "densenet121": (vision("densenet121"), image()),
    "squeezenet1_1": (vision("squeezenet1_1"), image(64)),
    "mnasnet0_5": (vision("mnasnet0_5"), image(64)),
    "mobilenet_v2": (vision("mobilenet_v2"), image(64)),
    "encoder": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), features(3, 2, 4)),
    "regnet_x_400mf": (vision("regnet_x_400mf"), image(64)),
    "convnext_tiny": (vision("convnext_tiny"), image(64)),
    "gpt2": (of_transformers("GPT2LMHeadModel", **GPT2, attn_implementation="eager"), tokens),
    "llama": (of_transformers("LlamaForCausalLM", **WIDE), tokens),
    "bert": (of_transformers("BertLMHeadModel", is_decoder=True, **WIDE), tokens),
}
NEVER_CALLED = {  # used functionally, or only for the type of their input: silent, and reported as such
    "gpt2": ["**.attn_dropout"],
    "llama": ["**.rotary_emb"],
    "bert": ["**.self.dropout"],
}
ALL_HOOKS = {
    "before": hook("**", "forward_pre"),
    "after": hook("**", "forward"),
    "own": hook("**", "full_backward"),
    "inwards": hook("**", "full_backward_pre"),
    "whole": hook("**", "tensor"),
    "micro": hook("**", "parameter_grad_micro"),
    "sums": hook("**", "post_accumulate_grad"),
    "used": hook("**", "parameter_grad"),
    "state": hook("**", "step_post", role="state.exp_avg"),
    "update": hook("**", "step_post", role="update"),
    "loss": hook(".", "loss"),
    "saved": hook("**", "state_dict_post"),
}


def total(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.float().square().mean()
    found = output.values() if isinstance(output, dict) else output
    return torch.stack([total(part) for part in found if isinstance(part, Tensor | tuple | dict)]).sum()


LARGE = {"resnet18", "densenet121", "convnext_tiny", "mobilenet_v2", "mnasnet0_5", "regnet_x_400mf"}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", tiered(CLEAN, CLEAN.keys() - LARGE))
def test_clean_model_gives_no_false_alarm(name: str) -> None:
    make, inputs = CLEAN[name]
    torch.manual_seed(0)
    model = make().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InstrumentWarning)
        hooks = {key: {**spec, "exclude": NEVER_CALLED.get(name, [])} for key, spec in ALL_HOOKS.items()}
        hooks["loss"] = ALL_HOOKS["loss"]
        with instrument.attach(model, hooks, optimizer=optimizer) as probe:
            for _ in range(2):
                optimizer.zero_grad()
                given = inputs()
                probe.loss(total(model(given.pop("")) if "" in given else model(**given))).backward()
                optimizer.step()
                probe.end_step()
            model.state_dict()
    assert not probe.warnings
    assert not [row for row in probe.sink.records("events") if row["severity"] == "warning"]
    silent = {row["cause"] for row in probe.sink.records("coverage") if row["fired"] != row["expected"]}
    assert silent == ({reasons.PROJECTION_OF_MATCHED_ATTENTION} if name == "encoder" else set())
    assert set(probe.sink.frame("stats").hook) >= set(ALL_HOOKS) - {
        "own"
    }  # a module whose input is data has no input gradient


@pytest.mark.parametrize("fields", [{"layers": ["attention", "attention.out_proj"]}, {"types": "Linear"}], ids=str)
def test_projection_of_attention_that_is_named_or_alone_warns(fields: dict[str, Any]) -> None:
    model = Net()
    with (
        pytest.warns(InstrumentWarning, match="hook the attention module or the parameters"),
        instrument.attach(model, {"seen": {**LOOK, **fields, "kind": "forward"}}) as probe,
    ):
        model(torch.randn(3, 2, 4))
        probe.end_step()
    (row,) = (row for row in probe.coverage() if row["layer"] == "attention.out_proj")
    assert row["cause"] == reasons.PROJECTION


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)).tanh()


GRAPHS: dict[str, tuple[Callable[[], nn.Module], list[str], list[str]]] = {
    "fx": (lambda: torch.fx.symbolic_trace(Encoder()), ["layers"], ["layers.0", "layers.1", "head"]),
    "export": (
        lambda: torch.export.export(Encoder(), (torch.ones(3, 4),)).module(check_guards=False),
        ["layers", "layers.0", "head"],
        [],
    ),
}


@pytest.mark.parametrize("name", tiered(GRAPHS, quick=["fx"]))
def test_modules_that_a_graph_inlines_are_reported(name: str) -> None:
    make, inlined, called = GRAPHS[name]
    model, batch = make(), torch.randn(3, 4)
    baseline = model(batch)
    hooks = {"seen": hook("**", "forward"), "functions": {**hook(".", "function"), "functions": "*"}}
    with pytest.warns(InstrumentWarning, match="runs its operations itself"), instrument.attach(model, hooks) as probe:
        assert torch.equal(model(batch), baseline)
        probe.end_step()
    coverage = {row["layer"]: (row["fired"], row["cause"]) for row in probe.coverage() if row["hook"] == "seen"}
    assert coverage == {"": (1, ""), **dict.fromkeys(called, (1, "")), **dict.fromkeys(inlined, (0, reasons.INLINED))}
    seen = [row["path"].partition(".")[0] for row in probe.sink.records("stats") if row["hook"] == "functions"]
    assert seen == ["linear", "relu", "linear", "tanh"]
    with pytest.raises(instrument.ConfigError, match="use kind function at the module of the graph"):
        instrument.attach(model, {"seen": hook(inlined[-1], "forward")}).__enter__()


class OwnCall(Encoder):
    """Calls `forward` itself, as the modules of gpytorch do."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.forward(x)


def test_class_that_overrides_the_call_is_reported() -> None:
    model = OwnCall()
    hooks = {"seen": hook([".", "head"], "forward")}
    with pytest.warns(InstrumentWarning, match="overrides __call__"), instrument.attach(model, hooks) as probe:
        model(torch.randn(3, 4))
        probe.end_step()
    assert [(row["fired"], row["cause"]) for row in probe.coverage()] == [(0, reasons.OWN_CALL), (1, "")]


def test_fast_path_disabled_by_hooks_is_reported() -> None:
    """An encoder in eval mode runs one fused kernel, unless a module inside it has hooks."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2).eval()
    batch = torch.randn(3, 2, 4)
    with torch.no_grad():
        baseline = model(batch)
        output, probe = run_step(model, {"seen": hook("layers.0.linear1", "forward")}, batch)
    assert torch.allclose(output, baseline, atol=1e-6)
    assert [(row["fired"], row["cause"]) for row in probe.sink.records("coverage")] == [(1, "")]
    (event,) = probe.sink.records("events")
    assert (event["rule"], event["severity"], event["layer"]) == ("fast_path", "info", "layers.0")
    assert "disable PyTorch's fast path" in event["message"]
    with torch.no_grad():
        output, probe = run_step(model, {"seen": hook(".", "function", functions="linear")}, batch)
    assert torch.allclose(output, baseline, atol=1e-6)
    (event,) = probe.sink.records("events")
    assert event["message"].startswith("hooks inside layers.0, layers.1 disable")
    with torch.no_grad():
        output, probe = run_step(model, {"seen": hook(".", "forward")}, batch)
    assert torch.equal(output, baseline)  # the fast path is restored
    assert not probe.sink.records("events")
