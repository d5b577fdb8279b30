"""The operators of code that `torch.compile` generates, compared with those of the same model without compilation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

import instrument
from instrument.comparison.operators import OperatorDifferences

aten = torch.ops.aten
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")]


@pytest.fixture(autouse=True)
def _compile_again() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)  # type: ignore[no-any-return]


def perceptron() -> tuple[nn.Module, Tensor]:
    layers = nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4), nn.Softmax(-1)
    return nn.Sequential(*layers), torch.randn(16, 8)


def convolutions() -> tuple[nn.Module, Tensor]:
    first = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.Hardswish()), torch.randn(4, 3, 12, 12)


class Cached(nn.Module):
    """Concatenates with an empty tensor, which a compiler leaves out, as the cache of a transformer does."""

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.cat([x.new_empty(0), x * 3], 0)
        return kept + torch.cat([-kept[:, 8:], kept[:, :8]], -1).exp()


def cached() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(
        nn.Linear(16, 16), Cached(), nn.Tanh(), nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 4)
    ), torch.randn(8, 16)


def transformer() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Embedding(20, 16), Attention(), Attention(), nn.RMSNorm(16), nn.Linear(16, 20))
    return model, torch.randint(0, 20, (2, 6))


def recorded(model: nn.Module, batch: Tensor, *, record: bool = True) -> Any:
    """Train one step, in compiled code if the model is compiled, and return the run."""
    module = getattr(model, "_orig_mod", model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with instrument.attach(module, {}, optimizer=optimizer) as probe:
        with probe.record_operators() if record else torch.enable_grad():
            model(batch).square().mean().backward()
            optimizer.step()
        probe.end_step()
    return probe.run


def eager_and_compiled(make: Callable[[], tuple[nn.Module, Tensor]]) -> tuple[OperatorDifferences, Any, str]:
    torch.manual_seed(0)
    model, batch = make()
    eager = recorded(copy.deepcopy(model), batch)
    compiled = recorded(torch.compile(model), batch)  # type: ignore[arg-type]
    difference = instrument.diff(eager, compiled)
    assert difference.operators is not None
    return difference.operators, compiled, str(difference)


@contextmanager
def decomposed(operator: Any, function: Callable[..., Any]) -> Iterator[None]:
    """Let Inductor compile an operator as a function."""
    from torch._inductor import decomposition

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(decomposition.decompositions, operator, function)
        decomposition.fast_random_decomps.cache_clear()
        yield
    decomposition.fast_random_decomps.cache_clear()


@pytest.mark.parametrize("make", [perceptron, convolutions, transformer, cached])
def test_equal_computations_differ_only_by_rounding(make: Callable[[], tuple[nn.Module, Tensor]]) -> None:
    operators, compiled, text = eager_and_compiled(make)
    assert operators.above is None, text
    assert operators.compared > 20
    assert operators.different > 0  # Inductor rounds in another order
    rows = compiled.operators
    fused = rows[rows["operator"].isin(["aten.relu.default", "aten.gelu.default"])]
    assert fused["layer"].notna().all()
    assert not rows["operator"].str.startswith("instrument.").any()
    assert not rows.duplicated(["step", "number", "output"]).any()


def layer_norm(x: Tensor, _shape: Any, weight: Tensor, bias: Tensor, _eps: float) -> tuple[Tensor, Tensor, Tensor]:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + 1e-3)
    return (x - mean) * scale * weight + bias, mean, scale


FAULTS = {
    "epsilon": (transformer, aten.native_layer_norm, layer_norm, "1.norm"),
    "tanh": (transformer, aten.gelu, lambda x, approximate="none": x * torch.sigmoid(1.702 * x), "1.mlp.2"),
    "scale": (perceptron, aten._softmax, lambda x, dim, _: (1.01 * x).exp() / (1.01 * x).exp().sum(dim, True), "5"),
    "gradient": (perceptron, aten.silu_backward, lambda g, x: g * torch.sigmoid(x), "3"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_operator_that_is_compiled_wrongly_is_named(fault: str) -> None:
    make, operator, function, layer = FAULTS[fault]
    with decomposed(operator.default, function):
        operators, _, text = eager_and_compiled(make)
    assert operators.above is not None
    for row in (operators.above.a, operators.above.b):
        assert (row["operator"], row["layer"]) == (str(operator.default), layer)
    assert f"{operator.default} in {layer} (" in text


def test_code_compiled_outside_of_the_block_is_used_again() -> None:
    model, batch = perceptron()
    compiled: Any = torch.compile(model)
    graphs = []
    for record in (False, True, False, True):
        recorded(compiled, batch, record=record)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs == [1, 2, 2, 2]


def test_recording_operators_of_compiled_code_changes_nothing() -> None:
    model, batch = perceptron()
    states = []
    for record in (False, True):
        other = copy.deepcopy(model)
        recorded(torch.compile(other), batch, record=record)
        states.append({**other.state_dict(), "random": torch.get_rng_state()})
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_blocks_compiled_alone_have_their_names() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x.exp()

    model = Outer()
    for block in model.blocks:
        block.compile()
    rows = recorded(model, torch.rand(2, 4)).operators
    for operator in ("aten.tanh.default", "aten.tanh_backward.default"):
        assert {*rows[rows["operator"] == operator]["layer"]} == {"blocks.0.1", "blocks.1.1"}


def test_interface_of_the_compiler_is_unchanged() -> None:
    """Private parts of PyTorch: a pass gets the graph, and its nodes say from which operator and in which module they were traced."""
    from torch._inductor import config

    graphs: list[Any] = []
    with config.patch(post_grad_custom_post_pass=graphs.append):
        recorded(torch.compile(nn.Sequential(nn.Linear(4, 4), nn.GELU())), torch.rand(2, 4), record=False)  # type: ignore[arg-type]
    forward, backward = graphs
    about = [node.meta for node in forward.nodes if str(node.meta.get("original_aten")) == "aten.gelu.default"]
    assert len(about) > 1
    assert {"seq_nr", "nn_module_stack", "partitioner_tag", "val"} <= {*about[0]}
    assert any(node.name.startswith("tangents") for node in backward.nodes if node.op == "placeholder")
    assert any(node.meta.get("fwd_nn_module_stack") for node in backward.nodes)
