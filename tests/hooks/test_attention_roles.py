"""Roles attention and scores of kind function: the attention weights and the logits of each way to compute attention."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hook_runs import Calls, assert_close, assert_equal, counts, gradients, keep, record, refused, run_step, run_steps
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.config.parse import parse_hooks
from instrument.errors import ConfigError
from instrument.hooks import functions
from instrument.plan.attention_weights import _SoftmaxArguments
from instrument.plan.hook_plan import make_plan
from instrument.plan.shape_inference import calls_at, infer_shapes
from instrument.plan.tensor_checks import check_functions
from instrument.tables.reasons import (
    ATTENTION_ELSEWHERE,
    FAST_PATH,
    NO_ATTENTION,
    NOT_ATTENTION,
    OTHER_SOFTMAX,
    TRANSFORMED,
    is_incomplete,
)

ROLES = ("attention", "scores")
VALUES = {role: keep("function", "**", role=role) for role in ROLES}
sdpa = F.scaled_dot_product_attention


def recorded(probe: Any, role: str) -> list[Tensor]:
    return [row["values"] for row in probe.sink.records("tensors") if row["role"] == role]


def causes(probe: Any) -> dict[tuple[str, str], str]:
    return {(row["hook"], row["layer"]): row["cause"] for row in probe.coverage()}


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return causal attention in the operations of most models."""
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(~mask, -math.inf)
    return F.dropout(F.softmax(scores, dim=-1), 0.0) @ value


def heads(*sizes: tuple[int, int], width: int = 4, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return one tensor [2, heads, positions, width] for each pair of heads and positions."""
    torch.manual_seed(0)
    return [torch.randn(2, count, length, width).to(dtype) for count, length in sizes]


MASK = torch.tensor([[True, False, True], [True, True, True], [False, False, False], [False, True, False]])


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (eager, heads((3, 5), (3, 5), (3, 5))),
        (sdpa, heads((3, 5), (3, 5), (3, 5))),
        (partial(sdpa, is_causal=True), heads((3, 5), (3, 5), (3, 5))),
        (partial(sdpa, is_causal=True), heads((3, 3), (3, 6), (3, 6))),
        (partial(sdpa, attn_mask=MASK, scale=0.9), heads((3, 4), (3, 3), (3, 3))),
        (partial(sdpa, attn_mask=torch.randn(2, 1, 4, 3)), heads((3, 4), (3, 3), (3, 3))),
        (partial(sdpa, enable_gqa=True), heads((6, 5), (2, 5), (2, 5))),
        (sdpa, heads((3, 5), (3, 5), (3, 5), dtype=torch.float64)),
        (partial(sdpa, is_causal=True), heads((3, 5), (3, 5), (3, 5), dtype=torch.bfloat16)),
        (sdpa, heads((3, 4), (3, 0), (3, 0))),
        (partial(sdpa, is_causal=True), [each[0, 0] for each in heads((3, 5), (3, 5), (3, 5))]),
    ],
    ids=[
        "eager",
        "sdpa",
        "causal",
        "cross",
        "masked row",
        "float mask",
        "gqa",
        "float64",
        "bfloat16",
        "no key",
        "one head",
    ],
)
def test_weights_give_the_output_of_the_attention(function: Callable[..., Tensor], arguments: list[Tensor]) -> None:
    output, probe = run_step(Calls(function), VALUES, *arguments)
    assert counts(probe) == [(1, 1), (1, 1)]
    (weights,), (scores,) = (recorded(probe, role) for role in ROLES)
    query, _, value = arguments
    assert weights.dtype == scores.dtype == torch.promote_types(query.dtype, torch.float32)
    repeated = value if value.dim() < 3 else value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    tolerance = 2e-2 if query.dtype == torch.bfloat16 else 1e-5
    assert_close(
        [weights.view(*repeated.shape[:-2], *weights.shape[-2:]) @ repeated.to(weights.dtype)],
        [output.to(weights.dtype)],
        rtol=tolerance,
        atol=tolerance,
    )
    sums = weights.sum(-1)
    assert ((sums - 1).abs() < 1e-5).logical_or(sums == 0).all()
    assert_close([scores.softmax(-1).nan_to_num(0.0)], [weights], rtol=1e-5, atol=1e-6)


def test_autocast_weights_are_those_of_the_rounded_arguments() -> None:
    query, key, value = heads((3, 5), (3, 5), (3, 5))
    with torch.autocast("cpu", torch.bfloat16):
        _, probe = run_step(Calls(sdpa), VALUES, query, key, value)
    rounded = [each.bfloat16().float() for each in (query, key)]
    expected = (rounded[0] @ rounded[1].mT / 2).softmax(-1)
    assert_close(recorded(probe, "attention"), [expected], rtol=1e-6, atol=1e-6)


def padded_batch() -> dict[str, Any]:
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[1, 3:] = True
    return {"key_padding_mask": mask}


@pytest.mark.spread(2)
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(
    ("options", "lengths", "arguments"),
    [
        ({}, (5, 5), {}),
        ({"batch_first": True}, (5, 5), padded_batch()),
        ({"batch_first": True, "add_bias_kv": True}, (4, 5), padded_batch()),
        ({"batch_first": True, "kdim": 6, "vdim": 6}, (4, 5), {}),
        ({"batch_first": True}, (5, 5), {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5)}),
    ],
    ids=["plain", "padded", "cross", "other width", "causal"],
)
def test_weights_of_multihead_attention_are_those_that_it_returns(
    options: dict[str, Any], lengths: tuple[int, int], arguments: dict[str, Any], need_weights: bool
) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(8, 2, dropout=0.5, **options)
    query, key = torch.randn(2, lengths[0], 8), torch.randn(2, lengths[1], options.get("kdim", 8))
    if not options.get("batch_first"):
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    _, probe = run_step(module, VALUES, query, key, key, need_weights=need_weights, **arguments)
    _, expected = module.eval()(query, key, key, average_attn_weights=False, **arguments)
    assert_close(recorded(probe, "attention"), [expected], rtol=1e-5, atol=1e-6)
    assert_close([recorded(probe, "scores")[0].softmax(-1)], [expected], rtol=1e-5, atol=1e-6)
    assert causes(probe) == {(role, "out_proj"): ATTENTION_ELSEWHERE for role in ROLES} | {
        (role, ""): "" for role in ROLES
    }
    assert not any(map(is_incomplete, probe.coverage()))


@pytest.mark.parametrize("need_weights", [True, False])
def test_masked_queries_of_multihead_attention_are_those_of_its_path(need_weights: bool) -> None:
    module, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    mask = torch.zeros(5, 5, dtype=torch.bool)
    mask[2] = True
    (output, _), probe = run_step(module, VALUES, x, x, x, attn_mask=mask, need_weights=need_weights)
    (weights,) = recorded(probe, "attention")
    assert weights[:, :, 2].isnan().all() == output[:, 2].isnan().all() == need_weights
    assert need_weights or (weights[:, :, 2] == 0).all()


def test_compiler_is_not_imported_for_multihead_attention() -> None:
    method = _SoftmaxArguments.__torch_dispatch__  # if PyTorch wraps it, the first call imports the compiler
    assert not hasattr(method, "__wrapped__")


def transformers_model(family: str, how: str) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 32}
    config: Any = {
        "gpt2": lambda: transformers.GPT2Config(
            n_layer=2, n_head=4, n_embd=32, vocab_size=50, bos_token_id=0, eos_token_id=0
        ),
        "llama": lambda: transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=50),
        "bert": lambda: transformers.BertConfig(**sizes, vocab_size=50),
    }[family]()
    torch.manual_seed(0)
    model: nn.Module = transformers.AutoModel.from_config(config, attn_implementation=how)
    return model.eval()


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_weights_of_transformers_are_their_attentions(family: str) -> None:
    ids, mask = torch.arange(14).reshape(2, 7), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    hooks = {**VALUES, "rows": record("function", "**", role="attention", stats=["row_entropy"])}
    arguments = {"input_ids": ids, "attention_mask": mask}
    output, probe = run_step(transformers_model(family, "eager"), hooks, **arguments, output_attentions=True)
    assert_equal(recorded(probe, "attention"), output.attentions)
    entropies = [torch.special.entr(each.double()).sum(-1).mean().item() for each in output.attentions]
    assert [row["row_entropy"] for row in probe.sink.records("stats")] == pytest.approx(entropies, rel=1e-6)
    _, fused = run_step(transformers_model(family, "sdpa"), hooks, **arguments)
    assert_close(recorded(fused, "attention"), output.attentions, rtol=1e-5, atol=1e-6)
    assert not any(is_incomplete(row) for each in (probe, fused) for row in each.coverage())


@pytest.mark.slow
def test_weights_of_timm_do_not_depend_on_its_implementation() -> None:
    import timm

    seen = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
        model.blocks[0].attn.fused_attn = fused
        _, probe = run_step(model, VALUES, torch.ones(1, 3, 32, 32))
        (path,) = {row["path"] for row in probe.sink.records("tensors")}
        assert path == ("scaled_dot_product_attention.0" if fused else "softmax.0")
        seen.append([*recorded(probe, "attention"), *recorded(probe, "scores")])
    assert_close(*seen, rtol=1e-5, atol=1e-6)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("function", "shape", "cause"),
    [
        (lambda x: x.softmax(-1), (4, 3), NOT_ATTENTION),
        (lambda x: x.softmax(1), (2, 3, 4, 4), NOT_ATTENTION),
        (lambda x: F.softmax(x, 0), (3, 3, 3), NOT_ATTENTION),
        (lambda x: torch.softmax(input=x, dim=2), (2, 3, 4), OTHER_SOFTMAX),
        (lambda x: x.log_softmax(-1), (2, 3, 4, 4), NO_ATTENTION),
    ],
)
def test_other_softmax_is_not_attention(function: Callable[..., Tensor], shape: tuple[int, ...], cause: str) -> None:
    _, probe = run_step(Calls(function), VALUES, torch.randn(shape))
    assert recorded(probe, "attention") == recorded(probe, "scores") == []
    assert {*causes(probe).values()} == {cause}
    assert all(map(is_incomplete, probe.coverage()))


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (6, 4, 4), (2, 2, 3, 4, 4)])
def test_softmax_over_keys_is_attention(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    output, probe = run_step(Calls(lambda x: torch.softmax(x, x.dim() - 1)), VALUES, x)
    wanted = [each if each.dim() > 3 else each[:, None] for each in (output, x)]  # one head
    assert_equal([*recorded(probe, "attention"), *recorded(probe, "scores")], wanted)


def test_router_next_to_attention_is_no_warning() -> None:
    model = nn.ModuleDict({"attention": Calls(sdpa), "router": Calls(lambda x: x.softmax(-1)), "unused": nn.Dropout()})
    step = lambda: (model["attention"](*heads((1, 2), (1, 2), (1, 2))), model["router"](torch.ones(4, 3)))  # noqa: E731
    probe = run_steps(model, {"h": record("function", ["attention", "router", "unused"], role="attention")}, step)
    found = {layer: cause for (_, layer), cause in causes(probe).items()}
    assert found == {"attention": "", "router": ATTENTION_ELSEWHERE, "unused": ATTENTION_ELSEWHERE}
    assert not any(map(is_incomplete, probe.coverage()))


@pytest.mark.spread(3)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("functional", [False, True])
def test_recording_attention_changes_nothing(functional: bool, dropout: float) -> None:
    torch.manual_seed(0)
    model: nn.Module = nn.TransformerEncoderLayer(8, 2, 8, dropout, batch_first=True)
    if functional:
        attend = lambda linear, x: sdpa(*linear(x)[:, None].chunk(3, -1), dropout_p=dropout)  # noqa: E731
        model = Calls(attend, linear=nn.Linear(8, 24))
    twin, x = copy.deepcopy(model), torch.randn(2, 5, 8)
    torch.manual_seed(1)
    expected = twin(x)
    expected.sum().backward()
    state = torch.get_rng_state()
    torch.manual_seed(1)
    output, probe = run_step(model, VALUES, x, loss=torch.sum)
    assert torch.equal(torch.get_rng_state(), state)
    assert_equal([output, *gradients(model)], [expected, *gradients(twin)])
    assert len(recorded(probe, "attention")) == 1
    assert not recorded(probe, "attention")[0].requires_grad


def test_weights_are_computed_only_while_the_hook_is_scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    def attention_of(name: str, *rest: Any) -> Any:
        seen.append(name)
        return original(name, *rest)

    original = functions.attention_of
    monkeypatch.setattr(functions, "attention_of", attention_of)
    model, arguments = Calls(sdpa), heads((1, 2), (1, 2), (1, 2))
    hooks = {
        "w": record("function", role="attention", every=2),
        "other": record("function", functions="scaled_dot_product_attention"),
    }
    run_steps(model, hooks, lambda: model(*arguments), 3)
    assert seen == ["scaled_dot_product_attention"] * 2


def test_condition_reads_the_entropy_of_attention() -> None:
    model, x = Calls(lambda x: x.softmax(-1)), torch.eye(4)[None, None]
    sharp = record("function", role="attention", when={"stat": "row_entropy", "below": 0.5})
    with instrument.attach(model, {"sharp": sharp}) as probe:
        for factor in (1.0, 9.0):
            model(factor * x)
            probe.end_step()
    assert [row["step"] for row in probe.sink.records("stats")] == [1]


@pytest.mark.spread(1)
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_attention_is_recorded_once(reentrant: bool) -> None:
    inner = Calls(lambda linear, x: sdpa(*linear(x)[:, None].chunk(3, -1)), linear=nn.Linear(8, 24))
    model = Calls(lambda inner, x: checkpoint(inner, x, use_reentrant=reentrant), inner=inner)
    _, probe = run_step(model, VALUES, torch.randn(2, 5, 8, requires_grad=True), loss=torch.sum)
    assert len(recorded(probe, "attention")) == len(recorded(probe, "scores")) == 1
    assert [row["fired"] for row in probe.coverage() if row["layer"] == "inner"] == [1, 1]


def test_masked_scores_are_not_reported_as_infinite() -> None:
    model, arguments = Calls(partial(sdpa, is_causal=True)), heads((1, 4), (1, 4), (1, 4))
    with instrument.attach(model, {"s": record("function", role="scores", stats="max")}) as probe:
        model(*arguments)
        probe.end_step()
    assert not probe.sink.records("events")
    (row,) = probe.sink.records("stats")
    scores = arguments[0] @ arguments[1].mT / 2
    assert row["max"] == pytest.approx(scores.masked_fill(torch.ones(4, 4).triu(1).bool(), -math.inf).max().item())
    assert row["inf_count"] == 12


def test_coverage_gives_the_cause() -> None:
    x = torch.randn(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    with torch.no_grad():
        _, probe = run_step(attention, {"h": record("function", role="attention")}, x, x, x)
    assert {*causes(probe).values()} == {FAST_PATH}
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 2, 4)])
    for function, arguments in ((sdpa, [nested] * 3), (lambda x: x.softmax(-1), [nested])):
        _, probe = run_step(Calls(function), {"h": record("function", role="attention")}, *arguments)
        assert "nested tensors" in causes(probe)["h", ""]
    from torch.nn.attention.bias import causal_lower_right

    biased = partial(sdpa, attn_mask=causal_lower_right(5, 5))
    _, probe = run_step(Calls(biased), {"h": record("function", role="attention")}, *heads((1, 5), (1, 5), (1, 5)))
    assert "CausalBias" in causes(probe)["h", ""]
    assert all(map(is_incomplete, probe.coverage()))
    model = Calls(eager)
    step = lambda: torch.func.vmap(model)(*heads((1, 2), (1, 2), (1, 2)))  # noqa: E731
    assert {*causes(run_steps(model, {"h": record("function", role="attention")}, step)).values()} == {TRANSFORMED}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"action": "scale", "factor": 0.0}, "with functions: softmax, role output changes the weights"),
        ({"action": "record", "functions": "matmul"}, "'matmul' matches no function with role attention"),
        ({"action": "record", "kind": "forward"}, "kind forward has no role 'attention'"),
        ({"action": "record", "kind": "function_grad"}, "kind function_grad has no role 'attention'"),
    ],
)
def test_invalid_specs_are_refused(spec: dict[str, Any], message: str) -> None:
    hooks = {"h": {"layers": "**", "kind": "function", "role": "attention", **spec}}
    assert message in refused(nn.Linear(2, 2), hooks)


@pytest.mark.parametrize("role", ROLES)
def test_shape_inference_lists_attention(role: str) -> None:
    model = Calls(sdpa)
    plan = make_plan(parse_hooks({"h": record("function", role=role)}), model)
    infer = partial(infer_shapes, model, training=True, function_sites=plan.sites)
    inferred = infer(lambda: model(*heads((3, 4), (3, 5), (3, 5))))
    ((info,),) = calls_at(plan.sites[0], inferred)
    assert (info.path, info.shape) == ("scaled_dot_product_attention.0", (2, 3, 4, 5))
    check_functions(plan, {"train": inferred})
    model.function = torch.relu
    with pytest.raises(ConfigError, match=f"hooks.h.role: the matched modules call no function with role {role}"):
        check_functions(plan, {"train": infer(lambda: model(torch.ones(2)))})
