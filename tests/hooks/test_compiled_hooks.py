"""Hooks inside graphs of torch.compile: their rows are those of PyTorch's hooks on the uncompiled model, and no graph breaks."""

from __future__ import annotations

import copy
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from hook_runs import Calls, assert_close, assert_equal, keep, record, run_step, run_steps, scale, tensors_by
from tiers import tiered
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import instrument
from instrument import ConfigError
from instrument.hooks import compiled_hooks

VALUES = {"inputs": keep("forward_pre", "**"), "outputs": keep("forward", "**")}
GRADIENTS = {f"grad_{role}": keep("full_backward", "**", role=f"grad_{role}") for role in ("output", "input")}
compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
STEPS, WIDTH = 3, 8
KEY = ["step", "hook", "layer", "path", "call"]


@pytest.fixture(autouse=True)
def reset_compiler() -> Iterator[None]:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


def pairs(*, as_dict: bool) -> nn.Module:
    """Return a model whose module gets a tensor by keyword, and returns tensors in a tuple, or also in a dictionary."""

    def inner(first: nn.Module, second: nn.Module, x: Tensor, *, other: Tensor) -> Any:
        one, two = first(x), second(other)
        return {"first": one, "rest": (two, x.long())} if as_dict else (one, two, x.long())

    def outer(pair: nn.Module, x: Tensor) -> Tensor:
        found = pair(x, other=x.tanh())
        return found["first"] + found["rest"][0] if as_dict else found[0] + found[1]

    return Calls(outer, pair=Calls(inner, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH)))


def checkpointed() -> nn.Module:
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    return Calls(lambda inner, x: checkpoint(inner, x, use_reentrant=False), inner=inner)


def repeated() -> nn.Module:
    """Return a model that calls one layer three times."""
    return Calls(lambda layer, x: layer(layer(layer(x))), layer=nn.Linear(WIDTH, WIDTH))


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.GELU(), nn.Identity(), nn.Linear(WIDTH, WIDTH)
    )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "layers": layers,
    "pairs": lambda: pairs(as_dict=False),
    "nested": lambda: pairs(as_dict=True),
    "checkpointed": checkpointed,
    "repeated": repeated,
    "small": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
    "encoder": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True, dropout=0.0),
}


def make(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def batches(steps: int = STEPS, size: int = 4) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(steps, size, WIDTH))


def train(model: nn.Module, called: nn.Module, specs: Any, **options: Any) -> Any:
    """Train for some steps with hooks. Return the probe."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with instrument.attach(called, specs, optimizer=optimizer, **options) as probe:
        for batch in batches():
            called(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()
    return probe


def steps_of(model: nn.Module) -> Iterator[int]:
    """Train without hooks, as `train` does. Yield the number of each step before it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step, batch in enumerate(batches()):
        yield step
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_pytorch(model: nn.Module) -> dict[tuple[str, int, str, int, int], Tensor]:
    """Return what PyTorch's hooks see in the training of `train`: by hook, step, layer, call and index of the tensor.

    A recomputed forward pass is left out: `seen` has the tensors of the first one.
    """
    seen: dict[tuple[str, int, str, int, int], Tensor] = {}
    calls: dict[str, int] = {}
    step = 0

    def note(hook: str, name: str, call: int, value: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(value)
        for index, tensor in enumerate(leaf for leaf in leaves if isinstance(leaf, Tensor)):
            seen.setdefault((hook, step, name, call, index), tensor.detach().clone())

    for name, module in model.named_modules():

        def before(_: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls[name] = calls.get(name, -1) + 1
            note("inputs", name, calls[name], (args, kwargs))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            note("outputs", name, calls[name], output)

        def backward(_: nn.Module, given: Any, gradients: Any, name: str = name) -> None:
            call = calls[f"{name} left"] = calls.get(f"{name} left", calls[name] + 1) - 1
            note("grad_output", name, call, gradients)
            note("grad_input", name, call, given)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True)
        module.register_full_backward_hook(backward)
    for step in steps_of(model):  # noqa: B007  # the hooks read the step
        calls.clear()
    return seen


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *(pytest.param(name, "aot_eager", marks=pytest.mark.slow) for name in ("layers", "pairs", "encoder")),
        *((name, "aot_eager") for name in ("nested", "checkpointed", "repeated")),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("encoder", "checkpointed")),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_rows_are_those_of_pytorch_hooks(name: str, backend: str) -> None:
    # PyTorch's hooks on gradients support no dictionaries, and see a recomputed forward pass.
    expected = {} if name in ("nested", "checkpointed") else by_pytorch(make(name))
    model, plain = make(name), make(name)
    eager = train(plain, plain, VALUES | GRADIENTS)
    torch._dynamo.utils.counters.clear()
    probe = train(model, torch.compile(model, backend=backend, fullgraph=True), VALUES | GRADIENTS)
    assert graphs() == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    rows = pd.DataFrame(probe.sink.records("tensors"))
    paths: dict[tuple[str, int, str, int], list[str]] = {}
    for row in rows.itertuples():
        paths.setdefault((row.hook, row.step, row.layer, row.call), []).append(row.path)
    close = {} if backend == "aot_eager" else {"rtol": 1e-4, "atol": 1e-6}
    for row in rows.itertuples() if expected else ():
        index = paths[row.hook, row.step, row.layer, row.call].index(row.path)
        found = expected[row.hook, row.step, row.layer, row.call, index]
        torch.testing.assert_close(row.values, found, **(close or {"rtol": 0, "atol": 0}))
    assert len(rows) == len(expected) or not expected
    reference = pd.DataFrame(eager.sink.records("tensors"))
    assert sorted(rows[KEY].itertuples(index=False)) == sorted(reference[KEY].itertuples(index=False))
    assert probe.coverage() == eager.coverage()
    assert_close(model.parameters(), plain.parameters(), **(close or {"rtol": 0, "atol": 0}))


def stepwise(tensor: Tensor, ctx: Any) -> Tensor:
    """A function that the compiler cannot trace: it depends on the step and on the values."""
    return tensor * (0.5 if ctx.step % 2 and tensor.abs().max().item() > 0 else 0.75)


def damped(tensor: Tensor, ctx: Any) -> Tensor:
    """A change of a gradient by the tensor that it belongs to."""
    return tensor * ctx.value.tanh()


CHANGES = {
    "output": scale("forward", 0.5, "*"),
    "clipped": {"layers": "*", "kind": "forward", "action": "clip", "min": -0.2, "max": 0.2},
    "input": scale("forward_pre", 0.5, "*"),
    "gradient": {"layers": "*", "kind": "full_backward_pre", "action": "clip", "value": 1e-3},
    "input_gradient": scale("full_backward", 0.5, "*", role="grad_input"),
    "function": {"layers": "*", "kind": "forward", "action": "modify", "fn": stepwise},
    "function_of_value": {"layers": "*", "kind": "full_backward_pre", "action": "modify", "fn": damped},
    "every": scale("forward", 0.5, "*", every=2),
    "when": scale("forward", 0.5, "*", when={"stat": "std", "above": 0.4}),
}


def change_by_hand(module: nn.Module, name: str, step: Callable[[], int]) -> None:
    """Register PyTorch's hooks that do the same as a change of `CHANGES`."""
    outputs: dict[str, Callable[[Tensor], Tensor]] = {
        "output": lambda y: y * 0.5,
        "clipped": lambda y: y.clamp(-0.2, 0.2),
        "function": lambda y: y * (0.5 if step() % 2 else 0.75),
        "every": lambda y: y * 0.5 if step() % 2 == 0 else y,
        "when": lambda y: y * 0.5 if y.std(correction=0) > 0.4 else y,
    }
    if name in outputs:
        module.register_forward_hook(lambda m, args, y: outputs[name](y))
    elif name == "input":
        module.register_forward_pre_hook(lambda m, args: (args[0] * 0.5,))
    elif name == "gradient":
        module.register_full_backward_pre_hook(lambda m, gradients: (gradients[0].clamp(-1e-3, 1e-3),))
    elif name == "input_gradient":
        module.register_full_backward_hook(
            lambda m, given, gradients: tuple(g if g is None else g * 0.5 for g in given)
        )
    else:
        value: list[Tensor] = []
        module.register_forward_hook(lambda m, args, y: value.__setitem__(slice(None), [y.detach()]))
        module.register_full_backward_pre_hook(lambda m, gradients: (gradients[0] * value[0].tanh(),))


@pytest.mark.spread(1)
@pytest.mark.parametrize("change", tiered(list(CHANGES), quick=["gradient", "function", "when"]))
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_interventions_train_like_pytorch_hooks(change: str) -> None:
    by_hand, model, plain = make("layers"), make("layers"), make("layers")
    step = 0
    for module in by_hand.children():
        change_by_hand(module, change, lambda: step)
    for step in steps_of(by_hand):  # noqa: B007  # the hooks read the step
        pass
    specs = {change: CHANGES[change]}
    probe = train(model, compiled(model), specs)
    assert_close(model.parameters(), by_hand.parameters(), rtol=0, atol=0)
    eager = train(plain, plain, specs)
    assert probe.coverage() == eager.coverage()
    order = ["step", "layer", "call"]
    effects, expected = (
        each.effects.sort_values(order).reset_index(drop=True).drop(columns="position") for each in (probe, eager)
    )
    pd.testing.assert_frame_equal(effects, expected, check_exact=True)


def recomputed(*, reentrant: bool) -> nn.Module:
    """Return a model of two compiled blocks. Each calls a layer twice, and is recomputed, outside of its graph if `reentrant`."""

    def block(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(layer(x)) if reentrant else checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False)

    def blocks(one: nn.Module, two: nn.Module, x: Tensor) -> Tensor:
        for each in (one, two):
            x = checkpoint(each, x, use_reentrant=True) if reentrant else each(each(x))
        return x

    torch.manual_seed(0)
    return Calls(blocks, **{name: Calls(block, layer=nn.Linear(WIDTH, WIDTH)) for name in ("one", "two")})


def second(tensor: Tensor, ctx: Any) -> Tensor:
    return tensor * 0.5 if ctx.call == 1 else tensor


RECOMPUTED = {
    "calls": scale("forward", 0.5, "*.layer", calls=1),
    "function": {"layers": "*.layer", "kind": "forward", "action": "modify", "fn": second},
    "noise": {"layers": "*.layer", "kind": "forward", "action": "modify", "fn": "noise", "std": 0.1},
    "when": scale("forward", 0.5, "*.layer", when={"stat": "std", "above": 0.3}),
}


@pytest.mark.parametrize("change", tiered(list(RECOMPUTED), quick=["calls"]))
def test_recomputed_calls_in_a_graph_are_the_original_ones(change: str) -> None:
    model, plain = recomputed(reentrant=False), recomputed(reentrant=False)
    specs = GRADIENTS | {change: RECOMPUTED[change]}
    eager = train(plain, plain, specs)
    for block in model.children():
        block.compile(backend="aot_eager", fullgraph=True)
    probe = train(model, model, specs)
    assert_close(model.parameters(), plain.parameters(), rtol=1e-6, atol=1e-7)
    assert probe.coverage() == eager.coverage()
    rows, expected = (pd.DataFrame(each.sink.records("tensors")) for each in (probe, eager))
    assert sorted(rows[KEY].itertuples(index=False)) == sorted(expected[KEY].itertuples(index=False))


@pytest.mark.parametrize("change", ["gradient", "input_gradient"])
def test_hooks_act_on_gradients_of_results_of_a_graph_that_share_memory(change: str) -> None:
    def block(layer: nn.Module, flat: nn.Module, same: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        hidden = layer(x)
        return hidden, flat(hidden), same(hidden)

    def model() -> nn.Module:
        torch.manual_seed(0)
        parts = {"layer": nn.Linear(WIDTH, WIDTH), "flat": nn.Flatten(0), "same": nn.Identity()}
        return Calls(lambda block, x: torch.cat([each.flatten() for each in block(x)]), block=Calls(block, **parts))

    one, plain = model(), model()
    specs = GRADIENTS | {change: {**CHANGES[change], "layers": ["block.flat", "block.same"]}}
    eager = train(plain, plain, specs)
    one.get_submodule("block").compile(backend="aot_eager", fullgraph=True)
    probe = train(one, one, specs)
    assert_close(one.parameters(), plain.parameters(), rtol=1e-6, atol=1e-7)
    assert probe.coverage() == eager.coverage()
    assert len(probe.effects) == len(eager.effects) == 2 * STEPS


def returns_twice(*, as_view: bool) -> nn.Module:
    """Return a model that modifies one of two outputs of a module in place, and reads the other one: the same tensor, or a view of it."""

    def twice(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = layer(x)
        return hidden, hidden.view(-1) if as_view else hidden

    def forward(twice: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        one, other = twice(x)
        one += 1.0
        return last(other.view(-1, WIDTH))

    return Calls(forward, twice=Calls(twice, layer=nn.Linear(WIDTH, WIDTH)), last=nn.Linear(WIDTH, WIDTH))


def test_a_tensor_that_a_module_returns_twice_stays_one_tensor() -> None:
    torch.manual_seed(0)
    model = returns_twice(as_view=False)
    plain, bare = copy.deepcopy(model), copy.deepcopy(model)
    assert len([*steps_of(bare)]) == STEPS
    specs = {**GRADIENTS, "second": keep("full_backward", "twice", role="grad_output", path="1")}
    eager, probe = train(plain, plain, specs), train(model, compiled(model), specs)
    assert_equal(model.parameters(), bare.parameters())
    assert probe.coverage() == eager.coverage()
    found, expected = tensors_by(probe, *KEY), tensors_by(eager, *KEY)
    assert found.keys() == expected.keys()
    assert_close((found[key] for key in expected), expected.values(), rtol=0, atol=0)
    other = returns_twice(as_view=True)
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        train(other, compiled(other), GRADIENTS)


def test_interventions_act_on_complex_gradients() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        parts = {"layer": nn.Linear(WIDTH, WIDTH), "spectrum": Calls(torch.fft.fft)}
        return Calls(lambda layer, spectrum, x: spectrum(layer(x)).abs(), **parts)

    one, plain = model(), model()
    specs = {"half": scale("full_backward_pre", 0.5, "spectrum")}
    eager, probe = train(plain, plain, specs), train(one, compiled(one), specs)
    assert_close(one.parameters(), plain.parameters(), rtol=1e-6, atol=1e-7)
    assert probe.coverage() == eager.coverage()
    assert len(probe.effects) == len(eager.effects) == STEPS


def test_blocks_that_reentrant_checkpointing_recomputes_have_known_calls() -> None:
    torch.manual_seed(0)
    model = Calls(lambda block, x: checkpoint(block, x, use_reentrant=True), block=make("small"))
    called = copy.deepcopy(model)
    called.block.compile(backend="aot_eager", fullgraph=True)
    noise = {"noise": {"layers": "block.*", "kind": "forward", "action": "modify", "fn": "noise", "std": 0.1}}
    rows = {}
    for each in (model, called):
        with instrument.attach(each, GRADIENTS | noise) as probe:
            each(batches()[0].requires_grad_()).square().mean().backward()
            probe.end_step()
        rows[each] = tensors_by(probe, *KEY)
    assert rows[called].keys() == rows[model].keys()
    assert_equal((rows[called][key] for key in rows[model]), rows[model].values())
    assert_equal((p.grad for p in called.parameters()), (p.grad for p in model.parameters()))


def groups() -> list[compiled_hooks.GraphHooks]:
    return [each for each in gc.get_objects() if type(each) is compiled_hooks.GraphHooks]


def test_calls_without_steps_take_no_more_memory(few_objects: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_hooks, "MAX_CALLS", 3)
    model = compiled(make("small"))
    earlier = {*groups()}
    with instrument.attach(model, GRADIENTS), torch.no_grad():
        for _ in range(9):
            model(batches()[0])
        assert {len(each._traced) for each in {*groups()} - earlier} == {3}


def test_interventions_in_unknown_calls_are_refused() -> None:
    model = recomputed(reentrant=True)
    for block in model.children():
        block.compile(backend="aot_eager", fullgraph=True)
    change = {"change": RECOMPUTED["calls"]}
    with (
        pytest.raises(instrument.HookError, match=r"layer '(one|two).layer' at step 0: .* call is unknown: .* 'calls'"),
        instrument.attach(model, change),
    ):
        model(batches()[0].requires_grad_()).mean().backward()


@pytest.mark.slow
def test_schedules_switch_between_two_graphs() -> None:
    called = compiled(make("small"))
    specs = {
        "often": record("forward", "*", every=2),
        "rarely": record("forward", "*", every=4),
        "halved": scale("forward", 0.5, "0", every=4),
        "doubled": scale("full_backward_pre", 2.0, "1", steps=[2]),
    }
    probe = run_steps(called, specs, lambda: called(torch.ones(4, WIDTH)).sum().backward(), 9)
    assert graphs() == 2
    rows = pd.concat([probe.stats, probe.effects])
    found = {name: sorted(set(of_hook.step)) for name, of_hook in rows.groupby("hook")}
    assert found == {"often": [0, 2, 4, 6, 8], "rarely": [0, 4, 8], "halved": [0, 4, 8], "doubled": [2]}


@pytest.mark.slow
def test_one_operator_records_an_output_and_one_its_gradient() -> None:
    found: Counter[str] = Counter()

    def count_operators(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        for each in graph.modules():
            nodes = each.graph.nodes if isinstance(each, torch.fx.GraphModule) else ()
            found.update(str(node.target) for node in nodes if str(node.target).startswith("instrument."))
        return graph.forward

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), repeated())
    model.compile(backend=count_operators, fullgraph=True)
    layers = ["0", "1", "2.layer"]
    specs = {"outputs": record("forward", layers), "gradients": record("tensor", layers)}
    _, probe = run_step(model, specs, torch.ones(2, WIDTH), loss=torch.sum)
    calls = 1 + 1 + 3
    assert found == {"instrument.end": calls, "instrument.observe": calls}
    assert len(probe.stats) == 2 * calls


def called_by_its_hook() -> nn.Module:
    """Return a model with a layer that a forward hook calls again."""
    layer, inside = nn.Linear(WIDTH, WIDTH), []

    def call_again(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        if inside:
            return None
        inside.append(True)
        output = module(output)
        inside.clear()
        return output

    layer.register_forward_hook(call_again)
    return Calls(lambda layer, x: layer(x), layer=layer)


@pytest.mark.slow
def test_calls_that_a_hook_of_other_code_makes_have_the_indices_of_the_uncompiled_model() -> None:
    rows = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = called_by_its_hook()
        if compiled:
            model.compile(backend="aot_eager")
        _, probe = run_step(model, {"outputs": keep("forward", "layer")}, torch.ones(2, WIDTH))
        rows.append(tensors_by(probe, "call"))
    assert [*rows[0]] == [*rows[1]] == [1, 0]
    assert_equal(rows[0].values(), rows[1].values())


@pytest.mark.slow
def test_compiled_blocks_share_their_graph() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(12)])
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
    specs = {"out": keep("forward", "*.*"), "flow": {**GRADIENTS["grad_output"], "layers": "*.*"}}
    expected: dict[str, Tensor] = {}
    reference = copy.deepcopy(model)
    for name, module in reference.named_modules():
        module._compiled_call_impl = None
        module.register_forward_hook(lambda m, args, y, name=name: expected.__setitem__(name, y.detach()))
    batch = torch.ones(2, WIDTH)
    reference(batch)
    _, probe = run_step(model, specs, batch, loss=torch.sum)
    assert graphs() == 2  # the input of the first block requires no gradient
    rows = [row for row in probe.sink.records("tensors") if row["hook"] == "out"]
    assert len(rows) == 24
    assert all(torch.equal(row["values"], expected[row["layer"]]) for row in rows)
    assert [row["fired"] for row in probe.coverage()] == [1] * 48


@pytest.mark.slow
def test_sizes_are_dynamic() -> None:
    model = make("small").eval()
    called = compiled(model, dynamic=True)
    with instrument.attach(called, VALUES) as probe:
        for size in (3, 5, 7):
            called(torch.ones(size, WIDTH))
            probe.end_step()
    assert graphs() == 1
    sizes = {(row["step"], row["values"].shape[0]) for row in probe.sink.records("tensors")}
    assert sizes == {(0, 3), (1, 5), (2, 7)}


@pytest.mark.slow
def test_gradients_are_those_of_the_loss_under_a_gradient_scaler() -> None:
    model, plain = make("layers"), make("layers")
    results = []
    for called in (plain, compiled(model)):
        own = getattr(called, "_orig_mod", called)
        optimizer, scaler = torch.optim.SGD(own.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
        with instrument.attach(called, GRADIENTS, optimizer=optimizer, scaler=scaler) as probe:
            for batch in batches():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = called(batch).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                probe.end_step()
        results.append(tensors_by(probe, *KEY))
    eager, found = results
    assert eager.keys() == found.keys()
    assert_close(found.values(), (eager[key] for key in found), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_compiled_rows_on_a_gpu_equal_uncompiled_rows(mode: str) -> None:
    """With `reduce-overhead`, CUDA graphs are replayed from the third step on: the rows are those of each step's own batch."""

    def record(mode: str | None) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if mode is not None:
            model.compile(mode=mode, fullgraph=True)
        hooks = {
            "outputs": record("forward", "**"),
            "grads": record("full_backward", "**", role="grad_output"),
            "clip": {"layers": "1.0", "kind": "forward", "action": "clip", "value": 0.2},
        }
        with instrument.attach(model, hooks, optimizer=optimizer) as probe:
            for step in range(6):
                torch.compiler.cudagraph_mark_step_begin()
                loss = model(torch.full((8, 32), 1.0 + step, device="cuda")).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                probe.end_step(loss=loss)
        assert probe.warnings == []
        rows = [row for table in ("stats", "effects") for row in probe.sink.records(table)]  # type: ignore[attr-defined]
        return sorted(rows, key=lambda row: (row["step"], row["hook"], row["layer"]))

    expected, found = record(None), record(mode)
    assert len(found) == len(expected) == 6 * (10 + 10 + 1)
    for row, wanted in zip(found, expected, strict=True):
        assert row == {
            name: pytest.approx(value, rel=1e-4, abs=1e-6) if isinstance(value, float) else value
            for name, value in wanted.items()
        }


@pytest.mark.slow
def test_other_models_of_the_class_keep_their_code() -> None:
    with instrument.attach(nn.Linear(1, 1), VALUES):
        pass  # from here on, code is compiled with guards on hooks
    bare, hooked = make("small"), make("small")
    batch = torch.ones(4, WIDTH)
    called = [compiled(model) for model in (bare, hooked)]
    specs = {"half": CHANGES["output"], **VALUES}
    outputs = []
    probe = run_steps(hooked, specs, lambda: outputs.extend(model(batch) for model in called))
    assert graphs() == 2
    assert torch.equal(outputs[0], make("small")(batch))
    assert {row["fired"] for row in probe.coverage()} == {1}


@pytest.mark.slow
def test_nothing_is_left_after_detach(few_objects: None) -> None:
    model = make("small").eval()
    called = compiled(model)
    batch = torch.ones(4, WIDTH)
    expected = make("small").eval()(batch)
    with instrument.attach(called, {"half": CHANGES["output"]}) as probe:
        assert not torch.equal(called(batch), expected)
        probe.end_step()
    rows = len(probe.effects)
    del probe
    gc.collect()
    assert torch.equal(called(batch), expected)
    assert rows == 2


@pytest.mark.slow
def test_modules_without_tensors_have_the_reason_of_the_uncompiled_model() -> None:
    model = make("pairs").eval()
    spec = record("forward", "pair", path="9")
    rows = []
    for called in (model, compiled(model)):
        with pytest.warns(instrument.InstrumentWarning):
            _, probe = run_step(called, {"none": spec}, *batches(1))
        rows.append(probe.coverage())
    assert rows[0] == rows[1]
    assert "no tensor" in rows[0][0]["cause"]


def test_passes_without_gradients_have_the_reason_of_the_uncompiled_model() -> None:
    model = make("small").eval()
    (batch,) = batches(1)
    rows = []
    for called in (model, compiled(model)):
        with instrument.attach(called, GRADIENTS) as probe:
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    called(batch)
            probe.end_step()
        rows.append(probe.coverage())
    assert rows[0] == rows[1]
    assert "torch.inference_mode(); the module was called under torch.no_grad()" in rows[0][0]["cause"]


@pytest.mark.slow
def test_code_from_before_the_first_hooks_notices_them() -> None:
    """Here, the hooks are attached to the model itself, so that nothing tells that other code has compiled it."""
    torch._dynamo.config.skip_nnmodule_hook_guards = True  # as in a new process
    model = make("small").eval()
    called = compiled(model)
    (batch,) = batches(1)
    called(batch)
    probe = run_steps(model, VALUES, lambda: called(batch))
    assert {row["fired"] for row in probe.coverage()} == {1}


@pytest.mark.slow
def test_copies_compile_without_hooks() -> None:
    """The hooks of a copy do nothing. The compiler must not look for operators in them."""
    model = make("small").eval()
    (batch,) = batches(1)
    expected = make("small").eval()(batch)
    with instrument.attach(model, {"half": CHANGES["output"]}) as probe:
        copied = compiled(copy.deepcopy(model))
        assert torch.equal(copied(batch), expected)
        probe.end_step()
    assert not len(probe.effects)


@pytest.mark.slow
def test_evaluation_has_its_own_schedule() -> None:
    called = compiled(make("small"))
    with instrument.attach(called, {"seen": record("forward", "0", phase="eval")}) as probe:
        for _ in range(2):
            called(torch.ones(4, WIDTH)).sum().backward()
            probe.end_step()
            with probe.evaluating(), torch.no_grad():
                called(torch.ones(4, WIDTH))
    assert list(probe.stats.phase) == ["eval"] * 2


REFUSED = {
    "kept": (record("forward", "0", keep_as="kept"), "keep_as", "remove 'keep_as'"),
    "total": (record("tensor", "0", role="input"), "role", "role: grad_input"),
    "function": (record("function", "0", functions="linear"), "kind", "hook the modules instead"),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_hooks_that_break_graphs_are_refused_with_the_alternative(name: str, in_place: bool) -> None:
    spec, key, fix = REFUSED[name]
    model = make("small")
    if in_place:
        model.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(ConfigError) as caught, instrument.attach(model if in_place else compiled(model), {"h": spec}):
        pass
    (problem,) = caught.value.problems
    assert problem.where == f"hooks.h.{key}"
    assert "breaks the graphs of torch.compile" in problem.message
    assert fix in problem.fix
    assert ("fullgraph=False" in problem.fix) == (name != "function")


@pytest.mark.slow
def test_hooks_break_graphs_where_that_is_allowed() -> None:
    class Breaks(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return inputs

    called = torch.compile(nn.Sequential(make("small"), Breaks()), backend="aot_eager")
    specs = {"total": record("tensor", "0.1", role="input")}
    _, probe = run_step(called, specs, torch.ones(4, WIDTH), loss=torch.sum)
    assert [row["fired"] for row in probe.coverage()] == [1]
    messages = {row["rule"]: row["message"] for row in probe.sink.records("events")}
    assert "hook 'total' breaks them" in messages["compiled"]
    assert "1 x Call to `torch._dynamo.graph_break()`" in messages["graph_break"]
    assert " x None" not in messages["graph_break"]


@pytest.mark.slow
def test_hooks_on_dtensors_run_outside_of_graphs() -> None:
    """With tensor parallelism, the input of a layer is a DTensor, and its output can be one."""

    def parallel() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (1,)), plan)

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        eager, model = parallel(), parallel()
        specs = {**VALUES, **GRADIENTS}
        expected = train(eager, eager, specs)
        probe = train(model, torch.compile(model, backend="aot_eager"), specs)
    finally:
        dist.destroy_process_group()
    found, wanted = (tensors_by(each, *KEY) for each in (probe, expected))
    assert found.keys() == wanted.keys()
    assert_equal(map(found.get, wanted), wanted.values())
    (message,) = probe.events.query("rule == 'graph_break'").message
    assert message.endswith(f" x {compiled_hooks.SHARDED}")


@pytest.mark.slow
def test_errors_of_hooks_have_their_place() -> None:
    def fails(tensor: Tensor, ctx: Any) -> Tensor:
        raise ValueError("no")

    specs = {"bad": {"layers": "1", "kind": "forward", "action": "modify", "fn": fails}}
    message = r"hook 'bad' \(forward\) on layer '1' at step 0 failed: ValueError: no"
    with pytest.raises(instrument.HookError, match=message):
        run_step(compiled(make("small")), specs, torch.ones(4, WIDTH))


@pytest.mark.slow
def test_every_table_and_statistic_is_that_of_the_uncompiled_model() -> None:
    stats = ["default", "l1", "kurtosis", "negative_fraction", "dead_fraction"]
    spec = record("forward", "*", stats=stats, quantiles=[0.25, 0.5], histogram=5, tensors=True, cast="nvfp4")
    spec["when"] = {"stat": "std", "above": 0.2}
    model, plain = make("layers").eval(), make("layers").eval()
    eager = train(plain, plain, {"all": spec})
    probe = train(model, compiled(model), {"all": spec})
    for table in ("stats", "distributions", "casts"):
        rows, expected = (pd.DataFrame(each.sink.records(table)).to_dict("records") for each in (probe, eager))
        assert rows
        assert [str(row) for row in rows] == [str(row) for row in expected]
    assert len(probe.sink.records("tensors")) == len(eager.sink.records("tensors")) > 0


def in_place_later(module: nn.Module) -> nn.Module:
    """Return a model that modifies an output in place that it also uses before."""

    def forward(first: nn.Module, module: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        hidden = first(x)
        found = module(hidden)
        if isinstance(module, nn.BatchNorm1d):
            found += 1.0
        return last(found) + hidden

    return Calls(forward, first=nn.Linear(WIDTH, WIDTH), module=module, last=nn.Linear(WIDTH, WIDTH))


def appends(*, to_list: bool) -> nn.Module:
    """Return a model whose module writes to the list or the dictionary that it gets."""

    def append(layer: nn.Module, values: Any) -> Any:
        if to_list:
            values.append(layer(values[-1]))
            return values
        values["new"] = layer(values["old"])
        return None

    def forward(first: nn.Module, appends: nn.Module, x: Tensor) -> Any:
        hidden = first(x)
        values: Any = [hidden] if to_list else {"old": hidden}
        appends(values)
        return sum(values if to_list else values.values())

    return Calls(forward, first=nn.Linear(WIDTH, WIDTH), appends=Calls(append, layer=nn.Linear(WIDTH, WIDTH)))


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "in-place module": lambda: in_place_later(nn.ReLU(inplace=True)),
    "output written later": lambda: in_place_later(nn.BatchNorm1d(WIDTH)),
    "list": lambda: appends(to_list=True),
    "dictionary": lambda: appends(to_list=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_code_that_writes_in_place_gives_the_losses_of_the_bare_model(name: str) -> None:
    """Interventions that are not due change nothing either."""
    late = {**CHANGES["input"], "start": STEPS}, {**CHANGES["output"], "start": STEPS}
    specs = {**GRADIENTS, **VALUES, "late_input": late[0], "late_output": late[1]}
    losses, counts = [], []
    for variant in ("bare", "eager", "compiled"):
        torch.manual_seed(0)
        model = WRITERS[name]()
        called = torch.compile(model, backend="aot_eager") if variant == "compiled" else model
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with instrument.attach(called, {} if variant == "bare" else specs, rules=None) as probe:
            for batch in batches():
                loss = called(batch).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                probe.end_step()
                losses.append(loss.item())
        counts.append([(row["hook"], row["layer"], row["fired"]) for row in probe.coverage()])
    assert losses[:STEPS] == losses[STEPS : 2 * STEPS] == losses[2 * STEPS :]
    assert counts[1] == counts[2]


def test_trained_tensors_of_a_function_get_their_gradient() -> None:
    gradients = []
    for compiles in (False, True):
        shift = torch.zeros(WIDTH, requires_grad=True)
        model = make("small").eval()
        called = compiled(model) if compiles else model
        add = lambda tensor, ctx, shift=shift: tensor + shift  # noqa: E731
        spec = {"layers": "0", "kind": "forward", "action": "modify", "fn": add}
        with instrument.attach(called, {"shift": spec}) as probe:
            called(batches()[0]).square().mean().backward()
            probe.end_step()
        gradients.append(shift.grad)
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.slow
def test_backward_pass_after_the_block_repeats_the_interventions() -> None:
    gradients = []
    for compiles in (False, True):
        model = make("small").eval()
        called = compiled(model) if compiles else model
        with instrument.attach(called, {"half": {**CHANGES["output"], "layers": "0", "every": 2}}) as probe:
            loss = called(batches()[0]).square().mean()
            probe.end_step()
        loss.backward()
        gradients.append(model.get_parameter("0.weight").grad)
    assert torch.equal(gradients[0], gradients[1])


@dataclass
class Result:
    """An output that the compiler's containers do not include."""

    values: Tensor


@pytest.mark.slow
def test_outputs_in_unknown_containers_are_recorded_outside_of_the_graph() -> None:
    model = nn.Sequential(Calls(lambda layer, x: Result(layer(x)), layer=nn.Linear(WIDTH, WIDTH)))
    called = torch.compile(model, backend="aot_eager")
    result, probe = run_step(called, {"seen": keep("forward", "0")}, batches()[0])
    (row,) = probe.sink.records("tensors")
    assert row["path"] == "values"
    assert torch.equal(row["values"], result.values)


def test_interfaces_of_pytorch_exist() -> None:
    """If this fails after an update of PyTorch, `lazy_compiler.py`, `compiled_operators.py` or `compiler.py` has to change."""
    from torch._C._dynamo import eval_frame

    assert callable(eval_frame.set_code_exec_strategy), (
        "lazy_compiler._skip: hooks run outside of graphs without being compiled"
    )
    assert {"SKIP", "DEFAULT"} <= set(dir(eval_frame._FrameAction)), "lazy_compiler._skip"
    assert callable(eval_frame.get_eval_frame_callback), "lazy_compiler.exclude_from_graphs"
    assert torch._dynamo.config.skip_nnmodule_hook_guards in (True, False), "compiler._guard_hooks"
    assert hasattr(torch.Tag, "cudagraph_unsafe"), "compiled_operators: CUDA graphs are captured between the operators"
    assert torch.compiler._is_exporting_flag is False, "compiled_hooks, module_hooks: torch.export runs a hook"
    assert callable(torch.utils._pytree.tree_flatten_with_path), "compiled_operators.traced_call: the paths of tensors"
    marked = torch.compiler.assume_constant_result(lambda: 0)
    assert marked._dynamo_marked_constant, "compiled_operators._traced_call_number: a constant in graphs"
