"""Trap: activation checkpointing runs a forward pass again, inside the backward pass.

Interventions have to repeat there what they did in the first pass, or the gradients belong to another function.
"""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hook_locations import LOCATIONS
from hook_runs import Calls, assert_equal, counts, gradients, record, run_step, scale
from tiers import portions, tiered
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import instrument
from instrument.errors import HookError

# PyTorch warns of a nested reentrant segment, which has no gradient in its first pass.
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
VARIANTS = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
NOISE = {"action": "modify", "fn": "noise", "std": 0.5}
DROPOUT = {"action": "modify", "fn": "dropout", "p": 0.5}


class Segments(nn.Module):
    """One block, called in several segments, twice in one of them, inside another one, and outside of all."""

    def __init__(self, runner: Callable[..., Tensor], activation: nn.Module | None = None) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(5, 5), activation or nn.Tanh())
        self.runner = runner

    def twice(self, x: Tensor) -> Tensor:
        return self.block(self.block(x))

    def nested(self, x: Tensor) -> Tensor:
        return self.block(self.runner(self.twice, self.block(x)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.runner(self.block, x)
        x = self.runner(self.twice, x)
        x = self.block(x)
        x = self.runner(self.nested, x)
        return self.runner(self.block, x)


CALLS = 1 + 2 + 1 + 4 + 1


def call_directly(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return function(x)


def checkpointed(reentrant: bool) -> Callable[..., Tensor]:
    return lambda function, x: checkpoint(function, x, use_reentrant=reentrant)


def train(model: nn.Module, specs: dict[str, Any], batch: Tensor, backwards: int = 1) -> tuple[list[Tensor], list[Any]]:
    """Run two steps; return the gradients of parameters and batch at each, and the effects of the first pass."""
    gradients = []
    leaf = batch.clone().requires_grad_()
    with instrument.attach(model, specs, seed=3) as probe:
        for _ in range(2):
            model.zero_grad()
            leaf.grad = None
            loss = model(leaf).square().sum()
            for i in range(backwards):
                loss.backward(retain_graph=i < backwards - 1)
            gradients += [part.grad.clone() for part in (*model.parameters(), leaf)]
            probe.end_step()
    effects = sorted(
        (row["step"], row["layer"], row["call"], row["norm_before"], row["norm_after"])
        for row in probe.sink.records("effects")
    )
    return gradients, effects


def gradients_match(gradients: list[Tensor], expected: list[Tensor], reentrant: bool = False) -> bool:
    """Bit-identical, or close in float64 where reentrant checkpointing sums a shared gradient in another order."""
    if not reentrant:
        return len(gradients) == len(expected) and all(map(torch.equal, gradients, expected))
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-13) for a, b in zip(gradients, expected, strict=True))


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.spread(1)
@pytest.mark.combinations
@VARIANTS
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"])
@pytest.mark.parametrize("change", [NOISE, DROPOUT], ids=["noise", "dropout"])
def test_segments_repeat_the_random_draws_of_their_first_pass(
    change: dict[str, Any], kind: str, reentrant: bool
) -> None:
    torch.manual_seed(0)
    model = Segments(checkpointed(reentrant))
    plain = copy.deepcopy(model)
    plain.runner = call_directly
    batch = torch.randn(4, 5)
    specs = {"draw": {"layers": ["block.0", "block"], "kind": kind, **change}}
    gradients, effects = train(model, specs, batch)
    expected, plain_effects = train(plain, specs, batch)
    assert gradients_match(gradients, expected, reentrant)
    assert effects == plain_effects
    assert len(effects) == 2 * 2 * CALLS
    assert {call for _, _, call, *_ in effects} == set(range(CALLS))
    assert not gradients_match(gradients, train(copy.deepcopy(plain), {}, batch)[0])


def test_second_backward_pass_repeats_the_same_calls() -> None:
    torch.manual_seed(0)
    model = Segments(checkpointed(reentrant=False))
    plain = copy.deepcopy(model)
    plain.runner = call_directly
    batch = torch.randn(4, 5)
    specs = {"draw": {"layers": "block.0", "kind": "forward", **NOISE}}
    gradients, expected = (train(each, specs, batch, backwards=2)[0] for each in (model, plain))
    assert gradients_match(gradients, expected)


@VARIANTS
def test_checkpoint_sequential_with_a_shared_activation(reentrant: bool) -> None:
    torch.manual_seed(0)
    shared = nn.Tanh()
    layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), shared)]
    body = nn.Sequential(*layers)
    batch = torch.randn(4, 5)
    specs = {"draw": {"layers": "1", "kind": "forward", **NOISE}}
    expected, plain_effects = train(copy.deepcopy(body), specs, batch)
    body.forward = lambda x: checkpoint_sequential(layers, 3, x, use_reentrant=reentrant)
    gradients, effects = train(body, specs, batch)
    assert gradients_match(gradients, expected, reentrant)
    assert effects == plain_effects


@VARIANTS
def test_module_that_calls_itself_through_a_checkpoint(reentrant: bool) -> None:
    class Recursive(nn.Module):
        def __init__(self, runner: Callable[..., Tensor]) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.runner = runner
            self.depth = 0

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x).tanh()
            if self.depth == 2:
                return x
            self.depth += 1
            try:
                return self.runner(self, x) * 2
            finally:
                self.depth -= 1

    torch.manual_seed(0)
    # Checkpointing repeats a function of its arguments: the depth is an argument here, not module state.
    plain = Recursive(call_directly)

    def deeper(module: Recursive, x: Tensor) -> Tensor:
        depth = module.depth

        def at_depth(x: Tensor) -> Tensor:
            before, module.depth = module.depth, depth
            try:
                return module(x)
            finally:
                module.depth = before

        return checkpoint(at_depth, x, use_reentrant=reentrant)

    model = copy.deepcopy(plain)
    model.runner = deeper
    batch = torch.randn(4, 5)
    specs = {"draw": {"layers": ".", "kind": "forward", **NOISE}}
    gradients, effects = train(model, specs, batch)
    expected, plain_effects = train(plain, specs, batch)
    assert gradients_match(gradients, expected, reentrant)
    assert effects == plain_effects


# The method name since transformers 4.46; the newest versions have another one.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.parametrize("reentrant", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", tiered(["GPT2LMHeadModel", "LlamaForCausalLM"], ["GPT2LMHeadModel"]))
def test_checkpointing_of_transformers(name: str, reentrant: bool) -> None:
    """Records are bit-identical, and noise in every block equals that of the model without checkpointing."""
    import transformers

    wide = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    narrow = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
    sizes: dict[str, Any] = narrow if name == "GPT2LMHeadModel" else wide
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    plain = model_class(model_class.config_class(vocab_size=32, use_cache=False, **sizes)).train()
    model = copy.deepcopy(plain)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    tokens = torch.arange(10).view(2, 5)

    def gradients(each: nn.Module, specs: dict[str, Any]) -> list[Tensor]:
        each.zero_grad()
        torch.manual_seed(1)  # GPT-2 has dropout
        with instrument.attach(each, specs, seed=3) as probe:
            each(input_ids=tokens, labels=tokens).loss.backward()
            probe.end_step()
        assert not [each for each in probe.warnings if "not called" not in each and "no gradient" not in each]
        return [parameter.grad.clone() for parameter in each.parameters()]

    kinds = ("forward_pre", "forward", "full_backward", "full_backward_pre", "tensor")
    records = {kind: {"layers": "**", "kind": kind, "action": "record"} for kind in kinds}
    baseline = gradients(model, {})
    assert gradients_match(gradients(model, records), baseline)
    noise = {"draw": {"types": "*MLP", "kind": "forward", **NOISE}}
    assert gradients_match(gradients(model, noise), gradients(plain, noise), reentrant)
    assert not gradients_match(gradients(model, noise), baseline)


class CustomCheckpoint(torch.autograd.Function):
    """A checkpoint implementation as some libraries write it."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor) -> Tensor:
        ctx.module = module
        ctx.save_for_backward(x)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor | None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.module(x).backward(gradients[0])
        return None, x.grad


def test_custom_checkpoint_is_correct_or_reported() -> None:
    torch.manual_seed(0)
    block = nn.Linear(5, 5)
    model = nn.Sequential(block)
    plain = copy.deepcopy(model)
    batch = torch.randn(4, 5)
    specs = {"draw": {"layers": "0", "kind": "forward", **NOISE}}
    expected, _ = train(plain, specs, batch)
    model.forward = lambda x: CustomCheckpoint.apply(block, x)
    assert gradients_match(train(model, specs, batch)[0], expected)
    model.forward = lambda x: CustomCheckpoint.apply(block, CustomCheckpoint.apply(block, x))
    plain.forward = lambda x: plain[0](plain[0](x))
    assert gradients_match(train(model, specs, batch)[0], train(plain, specs, batch)[0])
    model.forward = lambda x: CustomCheckpoint.apply(block, x) * CustomCheckpoint.apply(block, x)
    with pytest.raises(
        HookError,
        match=r"'draw' \(forward\) on layer '0' at step 0.*cannot reproduce the random numbers of the original call",
    ):
        train(model, specs, batch)


@pytest.mark.spread(1)
@VARIANTS
def test_records_write_each_call_once_and_mark_recomputation(reentrant: bool) -> None:
    locations = [*LOCATIONS, ("forward", "input")]
    specs = {f"{kind}_{role}": record(kind, "block.*", role=role) for kind, role in locations}
    model = Segments(checkpointed(reentrant), nn.ELU(inplace=True))
    baseline = copy.deepcopy(model)
    batch = torch.randn(4, 5, requires_grad=True)
    baseline(batch).sum().backward()
    _, probe = run_step(model, specs, batch, loss=torch.sum)
    assert_equal(gradients(model), gradients(baseline))
    groups = dict([*probe.sink.frame("stats").groupby(["hook", "layer"])])
    assert groups.keys() == {(hook, layer) for hook in specs for layer in ("block.0", "block.1")}
    for (hook, _), rows in groups.items():
        assert sorted(rows.call) == list(range(CALLS))
        assert rows.recompute.sum() == (CALLS - 1 if reentrant and not hook.startswith("forward") else 0)
    assert not probe.warnings
    assert counts(probe) == [(CALLS, CALLS)] * len(groups)


@VARIANTS
def test_gradients_in_a_segment_of_another_type_are_recorded_once(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
    model.forward = lambda x: checkpoint(inner, x, use_reentrant=reentrant)

    def inner(x: Tensor) -> Tensor:
        return checkpoint(model[1], checkpoint(model[0], x, use_reentrant=not reentrant), use_reentrant=not reentrant)

    kinds = ["full_backward_pre", "full_backward", "tensor"]
    _, probe = run_step(
        model, {kind: record(kind, "*") for kind in kinds}, torch.randn(4, 5, requires_grad=True), loss=torch.sum
    )
    assert counts(probe) == [(1, 1)] * 2 * len(kinds)
    assert not probe.warnings


@pytest.mark.parametrize(
    "hook",
    [
        record("forward", "**", stats=["kurtosis"], quantiles=True),
        record("function", "**", role="attention", stats=["row_entropy"]),
        record("function", "**", role="scores", split_dim=1),
        scale("forward", 1.0, "**", when={"stat": "kurtosis", "above": 1e9}),
    ],
)
def test_selective_checkpointing_does_not_save_results_of_hooks(hook: dict[str, Any]) -> None:
    saved = {each.default for each in (torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten._softmax)}
    saved |= {torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList}

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in saved else CheckpointPolicy.PREFER_RECOMPUTE

    def inside(attention: nn.Module, linear: nn.Module, x: Tensor) -> Tensor:
        x = attention(x, x, x)[0]
        return torch.bmm(x, x.mT).softmax(-1) @ linear(x) * x.sum(dtype=torch.float64).float()

    parts = {"attention": nn.MultiheadAttention(8, 2, batch_first=True), "linear": nn.Linear(8, 8)}
    selective = partial(create_selective_checkpoint_contexts, policy)
    segment = partial(checkpoint, use_reentrant=False, context_fn=selective)
    model = Calls(segment, inner=Calls(inside, **parts))
    baseline, x = copy.deepcopy(model), torch.randn(2, 5, 8)
    baseline(x).sum().backward()
    _, probe = run_step(model, {"h": hook}, x, loss=torch.sum)
    assert probe.sink.records("stats" if hook["action"] == "record" else "effects")
    assert_equal(gradients(model), gradients(baseline))


@pytest.mark.slow
def test_checkpointed_graph_is_freed_while_hooked(few_objects: None) -> None:
    """An aborted recomputation leaves calls that never return; nothing of their graph is kept."""
    specs = {kind: record(kind, "**") for kind in ("full_backward", "tensor")}
    kept: list[weakref.ref[Tensor]] = []

    def sine(x: Tensor) -> Tensor:
        kept.append(weakref.ref(x))  # the graph saves it, so it lives as long as the graph
        return x.sin()

    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), Calls(sine))
    with instrument.attach(model, specs) as probe:
        batch = torch.randn(4, 5, requires_grad=True)
        checkpoint(model, batch, use_reentrant=False).sum().backward()
        gc.collect()
        assert [tensor() for tensor in kept] == [None, None]
        probe.end_step()


class RandomSegments(nn.Module):
    """Blocks with dropout, called in nested segments drawn from a seed."""

    def __init__(self, seed: int, runner: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.seed = seed
        self.runner = runner
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Dropout(0.3)) for _ in range(3)])

    def segment(self, drawn: random.Random, depth: int = 0) -> Callable[[Tensor], Tensor]:
        count = drawn.randint(1, 4)
        inner = [depth < 2 and drawn.random() < 0.4 for _ in range(count)]
        steps = [self.segment(drawn, depth + 1) if deeper else drawn.choice(list(self.blocks)) for deeper in inner]
        repeated = [drawn.random() < 0.6 for _ in range(count)]

        def run(x: Tensor) -> Tensor:
            for step, again in zip(steps, repeated, strict=True):
                x = self.runner(step, x) if again else step(x)
            return x

        return run

    def forward(self, x: Tensor) -> Tensor:
        return self.segment(random.Random(self.seed))(x)


@pytest.mark.spread(1)
@pytest.mark.combinations
@VARIANTS
@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre", "tensor"])
@pytest.mark.parametrize("seeds", portions(2, 12, 10))
def test_any_nesting_of_segments_equals_plain_training(seeds: range, kind: str, reentrant: bool) -> None:
    specs = {"draw": {"layers": ["blocks.*.0", "blocks.1"], "kind": kind, **NOISE}}
    for seed in seeds:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model, plain = RandomSegments(seed, checkpointed(reentrant)), RandomSegments(seed, call_directly)
        seen = []
        for each in (model, plain):
            leaf = batch.clone().requires_grad_()
            torch.manual_seed(7)
            with instrument.attach(each, specs, seed=2) as probe:
                each(leaf).square().sum().backward()
                probe.end_step()
            gradients = [torch.zeros(()) if p.grad is None else p.grad for p in (*each.parameters(), leaf)]
            rows = {(row["layer"], row["call"], round(row["norm_after"], 9)) for row in probe.sink.records("effects")}
            seen.append((gradients, rows, probe.warnings))
        (gradients, effects, records), (expected, plain_effects, plain_records) = seen
        assert gradients_match(gradients, expected, reentrant), seed
        assert effects == plain_effects, seed
        assert records == plain_records, seed
