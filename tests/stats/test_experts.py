"""The load of the experts of a mixture of experts: the table `experts`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from device_statistics import use_device_statistics
from hook_runs import Calls, record, refused, run_step
from torch import Tensor, nn

import instrument
from instrument.actions.base import Context, StepContext
from instrument.stats.experts import Experts
from instrument.values.dtensor import NOT_SHARDED, Shards

ROUTER: dict[str, Any] = {"stats": "none", "experts": "module"}


class Router(nn.Module):
    """A router that returns given logits."""

    top_k = 2

    def forward(self, logits: Tensor) -> Tensor:
        return logits


def load_of(logits: Tensor, module: nn.Module | None = None, **fields: Any) -> dict[str, Any]:
    """Return the row of a router whose output are logits."""
    _, probe = run_step(module or Router(), {"h": record("forward", **{**ROUTER, **fields})}, logits)
    (row,) = probe.sink.records("experts")
    return row


def assert_load(row: dict[str, Any], chosen: np.ndarray[Any, Any], experts: int) -> None:
    """Check a row against the indices of the chosen experts."""
    counts = np.bincount(chosen.ravel(), minlength=experts)
    assert row["load"] == pytest.approx((counts / counts.sum()).tolist(), rel=1e-12)
    assert row["cv"] == pytest.approx(scipy.stats.variation(counts), rel=1e-12)
    assert row["dead_experts"] == experts - len(np.unique(chosen))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(("shape", "experts"), [((12, 6), 2), ((3, 5, 4), 1), ((40, 16), 8)])
def test_load_of_experts(
    shape: tuple[int, ...], experts: int, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    torch.manual_seed(0)
    logits = torch.randn(shape)
    row = load_of(logits, nn.Identity(), experts=experts)
    rows = logits.double().numpy().reshape(-1, shape[-1])
    assert_load(row, np.argsort(-rows, axis=1)[:, :experts], shape[-1])
    entropies = scipy.stats.entropy(scipy.special.softmax(rows, axis=1), axis=1)
    assert row["router_entropy"] == pytest.approx(entropies.mean(), rel=1e-7)
    assert (row["dropped_fraction"], row["shape"]) == (None, list(shape))


@pytest.mark.parametrize(("factor", "dropped"), [(1.0, 4 / 8), (1.25, 3 / 8), (2.0, 2 / 8), (4.0, 0.0)])
def test_tokens_beyond_the_capacity_are_dropped(factor: float, dropped: float) -> None:
    logits = torch.eye(4)[[0, 0, 0, 0, 0, 0, 1, 2]] * 5  # 6, 1, 1 and 0 tokens; a capacity of 2, 3, 4 and 8
    row = load_of(logits, experts=1, capacity_factor=factor)
    assert (row["load"], row["dead_experts"], row["dropped_fraction"]) == ([0.75, 0.125, 0.125, 0.0], 1, dropped)


def test_capacity_factor_alone_looks_the_number_of_experts_up() -> None:
    row = load_of(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), experts=None, capacity_factor=1.0)
    assert (row["load"], row["dropped_fraction"]) == ([0.5, 0.5, 0.0], 0.0)


def test_tokens_with_nan_do_not_count_and_masked_experts_get_none() -> None:
    logits = torch.tensor([[1.0, -math.inf, 0.0], [math.nan, 0.0, 0.0], [1.0, -math.inf, 2.0]])
    row = load_of(logits, experts=1)
    assert (row["load"], row["dead_experts"]) == ([0.5, 0.0, 0.5], 1)
    p = 1 / (1 + math.exp(-1))
    assert row["router_entropy"] == pytest.approx(
        (scipy.stats.entropy([p, 1 - p]) + scipy.stats.entropy([math.e, math.e**2])) / 2
    )
    row = load_of(logits[1:2], experts=1)
    assert [row[name] for name in ("load", "cv", "dead_experts", "router_entropy")] == [None] * 4


SIZES: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}
LATENT = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4}
GROUPS = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("Mixtral", {"num_local_experts": 6}),
        ("Qwen2Moe", {"num_experts": 6}),
        ("DeepseekV3", {"n_routed_experts": 6, **LATENT, **GROUPS}),
    ],
    ids=["mixtral", "qwen2_moe", "deepseek"],
)
def test_routers_of_transformers(family: str, options: dict[str, Any]) -> None:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    chosen: dict[str, Tensor] = {}
    routers = {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}
    for name, module in routers.items():
        nn.init.normal_(module.weight)
        module.register_forward_hook(lambda module, args, output, name=name: chosen.update({name: output[2]}))
    _, probe = run_step(model, {"h": record("forward", "**.mlp.gate", **ROUTER)}, torch.randint(30, (3, 7)))
    rows = probe.sink.records("experts")
    assert len(routers) == 2
    for row in rows:
        if row["path"] == "2" or family != "DeepseekV3":  # its router does not choose the largest logits
            assert_load(row, chosen[row["layer"]].numpy(), 6)
        assert (row["router_entropy"] is None) == (row["path"] == "2")
    assert {(row["layer"], row["path"]) for row in rows} == {(name, path) for name in routers for path in ("0", "2")}


def test_switch_layer_with_a_linear_router() -> None:
    """The layer of Fedus et al. 2021, with a linear module as its router."""

    def switch(router: nn.Linear, experts: nn.ModuleList, x: Tensor) -> Tensor:
        weights, chosen = router(x).softmax(-1).max(-1)
        return torch.stack([w * experts[int(i)](token) for token, w, i in zip(x, weights, chosen, strict=True)])

    torch.manual_seed(0)
    layer = Calls(switch, router=nn.Linear(8, 4), experts=nn.ModuleList(nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(20, 8)
    _, probe = run_step(layer, {"h": record("forward", "router", stats="none", experts=1)}, x)
    (row,) = probe.sink.records("experts")
    assert_load(row, layer.router(x).argmax(-1).numpy(), 4)


@pytest.mark.parametrize("indices", [False, True])
def test_load_of_parts_of_a_batch_is_that_of_the_batch(indices: bool) -> None:
    torch.manual_seed(0)
    module = Router()
    module.num_experts = 6
    logits = torch.randn(11, 6)
    full = logits.topk(2).indices if indices else logits
    context = Context("h", "forward", "output", "", module, "", StepContext(0, 0, 0, "train"))
    parts = [full[:3], full[3:3], full[3:]]
    (measure,) = {Experts(capacity_factor=1.0).of_call(part, context) for part in parts}
    found = measure.merged(np.stack([measure.part(part, NOT_SHARDED).numpy() for part in parts]))
    expected = measure.cells(measure.values(full).tolist(), None)
    assert found[0] == expected[0]
    assert found[1:] == tuple(pytest.approx(value) for value in expected[1:])
    missing = np.full((1, 8), math.nan)  # a process that recorded nothing
    assert measure.merged(missing) == (None,) * 6
    with pytest.raises(ValueError, match="sharded along its experts"):
        Experts().of_call(full, replace(context, shards=Shards((1,), (11, 3))))


def test_indices_that_are_no_expert_do_not_count() -> None:
    module = Router()
    module.num_experts = 4
    row = load_of(torch.tensor([[0, 3], [-1, 3], [9, 3]]), module)
    assert row["load"] == [0.25, 0.0, 0.0, 0.75]


def test_tensors_that_are_not_of_the_router_have_no_row() -> None:
    module = Calls(lambda x: (x, x[:, :2], x.topk(3).indices, x > 0))
    module.top_k, module.num_experts = 2, 5
    _, probe = run_step(module, {"h": record("forward", **ROUTER)}, torch.randn(4, 5))
    assert [row["path"] for row in probe.sink.records("experts")] == ["0"]


def test_unknown_number_of_experts_per_token_is_refused() -> None:
    message = refused(nn.Linear(3, 4), {"h": record("forward", **ROUTER)})
    assert "hooks.h.experts: the number of experts per token is unknown at . (Linear)" in message
    assert "set it: experts: 2" in message
    assert "experts requires role output or input" in refused(
        nn.Linear(3, 4), {"h": record("parameter_grad", **ROUTER)}
    )
    with pytest.raises(instrument.HookError, match=r"5 experts per token, but the logits have shape \[2, 4\]"):
        load_of(torch.randn(2, 4), nn.Identity(), experts=5)
