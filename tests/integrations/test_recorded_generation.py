"""Tensors of generated tokens: those of `generate` with a cache are equal to those of one pass over the complete sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_zoo  # noqa: F401  # sets HF_HUB_OFFLINE
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import train_here

import instrument
from instrument import ConfigError, InstrumentWarning

PROMPTS = {"short": [4, 3], "long": [7, 1, 5, 2, 6], "middle": [9, 8, 3]}
LAYERS = {"gpt2": "transformer.h", "llama": "model.layers"}
WIDTH, NEW = 16, 8
RECORD = {"kind": "forward", "action": "record", "stats": "none", "tensors": True, "phase": "eval"}


def language_model(name: str, eos: int | None = None) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    common: dict[str, Any] = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": eos, "initializer_range": 0.5}
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(**common, n_positions=64, n_embd=WIDTH, n_layer=2, n_head=2)).eval()
    sizes: dict[str, Any] = {
        "hidden_size": WIDTH,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(**common, **sizes)).eval()


def generate(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + [*prompt] for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    common = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    output = model.generate(padded, attention_mask=mask, return_dict_in_generate=True, **{**common, **options})
    return output, output.sequences[:, longest:]


@contextmanager
def outputs_of(module: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the outputs of a module by a hook of PyTorch."""
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, args, output: seen.append(output.detach().clone()))
    yield seen
    handle.remove()


def states(model: nn.Module, layer: str, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
    """Return the output of a layer in one pass without a cache, [tokens, features]."""
    with torch.no_grad(), outputs_of(model.get_submodule(layer)) as seen:
        model(torch.tensor([[*tokens]]), use_cache=False)
    return seen[0][0].numpy()


def expected(
    model: nn.Module, layer: str, prompts: Sequence[Sequence[int]], new: Tensor, calls: range
) -> np.ndarray[Any, Any]:
    """Return the outputs at the tokens that predict the generated ones with these indices, [prompts, calls, features]."""
    return np.stack(
        [
            states(model, layer, [*prompt, *tokens])[len(prompt) - 1 :][calls.start : calls.stop]
            for prompt, tokens in zip(prompts, new.tolist(), strict=True)
        ]
    )


def recorded(model: nn.Module, hooks: Mapping[str, Any], ids: Any, **options: Any) -> tuple[Any, Any, Tensor]:
    """Generate in one evaluation with hooks. Return the probe, and the results of `generate`."""
    prompts = options.pop("prompts", [*PROMPTS.values()])
    with instrument.attach(model, hooks, out=options.pop("out", None)) as probe, probe.evaluating():
        probe.batch(ids=ids)
        output, new = generate(model, prompts, **options)
    return probe, output, new


@pytest.mark.slow
@pytest.mark.combinations
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True}, {"use_cache": False}], ids=["greedy", "sample", "no_cache"]
)
def test_window_of_tokens_is_that_of_one_pass(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    model, layer = language_model(name), f"{LAYERS[name]}.1"
    torch.manual_seed(5)
    bare, random_state = generate(model, [*PROMPTS.values()], **options)[1], torch.get_rng_state()
    torch.manual_seed(5)
    hooks = {"last": {**RECORD, "layers": f"{LAYERS[name]}.*", "slice": ":, -1", "calls": "3:6"}}
    probe, _, new = recorded(model, hooks, [*PROMPTS], out=tmp_path, **options)
    assert torch.equal(new, bare)
    assert torch.equal(torch.get_rng_state(), random_state)
    run = instrument.load(tmp_path)
    assert run.read("tensors", ["call"])["call"].unique().tolist() == [3, 4, 5]
    X, _, ids = run.features(layer, call=range(3, 6))
    assert ids.tolist() == [*PROMPTS]
    np.testing.assert_allclose(X, expected(model, layer, [*PROMPTS.values()], new, range(3, 6)), rtol=1e-4, atol=1e-4)
    assert np.array_equal(run.features(layer, call=[4]).X[:, 0], run.features(layer, call=4).X)
    assert {(row["expected"], row["fired"], row["cause"]) for row in probe.coverage()} == {(3, 3, "")}


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", LAYERS)
def test_rows_of_beams_are_found_by_their_indices(name: str) -> None:
    model, layer = language_model(name), f"{LAYERS[name]}.0"
    hooks = {"last": {**RECORD, "layers": layer, "slice": ":, -1"}}
    ids = [f"{request}/{beam}" for request in PROMPTS for beam in range(3)]
    probe, output, new = recorded(model, hooks, ids, num_beams=3, output_scores=True)
    features = probe.features(layer, call=range(NEW))
    assert features.ids.tolist() == ids
    assert len({*output.beam_indices[0].tolist()} | {*output.beam_indices[1].tolist()}) > 2  # beams were exchanged
    rows = output.beam_indices.numpy()
    X = features.X[rows, np.arange(rows.shape[1])]
    right = expected(model, layer, [*PROMPTS.values()], new, range(NEW))
    np.testing.assert_allclose(X, right, rtol=1e-4, atol=1e-4)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", LAYERS)
def test_positions_tell_the_tokens_of_assisted_decoding(name: str) -> None:
    model, layer = language_model(name), f"{LAYERS[name]}.1"
    prompt = [5, 6, 7, 5, 6, 7, 5, 6]
    position = {**RECORD, "layers": ".", "kind": "forward_pre", "path": "position_ids"}
    hooks = {"all": {**RECORD, "layers": layer}, "positions": position}
    probe, _, new = recorded(model, hooks, [0], prompts=[prompt], prompt_lookup_num_tokens=3)
    tensors = probe.tensors()
    columns = {hook: rows.set_index("call")["values"] for hook, rows in tensors.groupby("hook")}
    assert {len(where[0]) for where in columns["positions"][1:]} >= {1, 4} or len(columns["positions"]) < NEW
    found = {
        int(at): state
        for call, where in columns["positions"].items()
        for at, state in zip(where[0], columns["all"][call][0], strict=True)
    }
    tokens = [*prompt, *new[0].tolist()[:-1]]
    X = np.stack([found[at] for at in range(len(tokens))])
    np.testing.assert_allclose(X, states(model, layer, tokens), rtol=1e-4, atol=1e-4)


def test_batches_of_other_lengths_have_missing_calls() -> None:
    model = language_model("gpt2")
    hooks = {"last": {**RECORD, "layers": "lm_head", "slice": ":, -1, :4", "calls": "2:"}}
    with instrument.attach(model, hooks) as probe, probe.evaluating():
        for ids, count in (([5, 3], 4), ([8, 1], 6)):
            probe.batch(ids=ids)
            generate(model, [[1, 2], [3]], max_new_tokens=count)
            probe.end_micro_step()
    X, _, ids = probe.features("lm_head", call=range(99))
    assert (ids.tolist(), X.shape) == ([1, 3, 5, 8], (4, 4, 4))
    assert np.isnan(X).all(-1).tolist() == [
        [False] * 4,
        [False, False, True, True],
        [False, False, True, True],
        [False] * 4,
    ]
    assert np.array_equal(X[0, :2], X[1, :2])  # the prompt [3], in both batches


def test_finished_requests_are_left_out_by_their_lengths() -> None:
    model = language_model("llama")
    free = generate(model, [*PROMPTS.values()])[1].tolist()
    end = free[1][2]
    model.generation_config.eos_token_id = end
    hooks = {"last": {**RECORD, "layers": "lm_head", "slice": ":, -1"}}
    probe, _, new = recorded(model, hooks, [*PROMPTS])
    lengths = [(tokens.index(end) if end in tokens else len(tokens) - 1) + 1 for tokens in free]
    features = probe.features("lm_head", call=range(NEW))
    is_generated = np.arange(features.X.shape[1]) < np.array(lengths)[:, None]
    assert min(lengths) < max(lengths)
    best = features.X.argmax(-1)
    assert best[is_generated].tolist() == new.numpy()[:, : best.shape[1]][is_generated].tolist()


def test_only_the_selected_part_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept = language_model("llama"), []
    from instrument.storage import memory

    original = memory.MemorySink.keep

    def keep(self: Any, identity: Any, source_shape: Any, tensor: Tensor, dtype: Any) -> Any:
        stored = original(self, identity, source_shape, tensor, dtype)
        kept.append((tensor.numel() * 2, stored))  # float16
        return stored

    monkeypatch.setattr(memory.MemorySink, "keep", keep)
    hooks = {"last": {**RECORD, "layers": "model.layers.0", "slice": ":, -1, :5", "calls": "0:2", "dtype": "float16"}}
    probe, _, _ = recorded(model, hooks, [*PROMPTS])
    assert kept == [(3 * 5 * 2, 3 * 5 * 2)] * 2
    assert [list(shape) for shape in probe.tensors()["source_shape"]] == [[3, 5, WIDTH], [3, 1, WIDTH]]
    assert all(np.asarray(values).nbytes == 30 for values in probe.tensors()["values"])
    bases = [values.base for values in probe.tensors()["values"] if values.base is not None]
    assert all(getattr(base, "nbytes", 30) == 30 for base in bases)


def test_interventions_and_functions_act_in_the_selected_calls() -> None:
    model = language_model("gpt2")
    model.set_attn_implementation("eager")
    hooks = {
        "half": {"layers": "transformer.h.0.mlp", "kind": "forward", "action": "scale", "factor": 0.0, "phase": "eval",
                 "calls": "4:"},
        "weights": {**RECORD, "layers": "transformer.h.*.attn", "kind": "function", "role": "attention", "calls": 2},
        "change": {**RECORD, "layers": "transformer.h.1", "role": "change", "calls": "1:3"},
    }  # fmt: skip
    bare = generate(model, [[5, 6, 7]])[1]
    probe, _, new = recorded(model, hooks, [0], prompts=[[5, 6, 7]])
    assert torch.equal(new[:, :4], bare[:, :4])
    assert not torch.equal(new, bare)
    assert probe.effects["call"].tolist() == [4, 5, 6, 7]
    rows = probe.tensors()
    assert rows[rows.hook == "weights"]["shape"].map(list).tolist() == [[1, 2, 1, 5]] * 2
    assert rows[rows.hook == "change"]["call"].tolist() == [1, 2]
    assert {row["hook"]: (row["expected"], row["fired"]) for row in probe.coverage()} == {
        "half": (4, 4), "weights": (1, 1), "change": (2, 2)
    }  # fmt: skip


def test_inputs_are_copied_only_in_the_calls_whose_change_is_recorded() -> None:
    class Clones(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    model = nn.ReLU()
    hooks = {"change": {**RECORD, "layers": ".", "role": "change", "calls": "1", "tensors": False, "stats": ["l2"]}}
    with instrument.attach(model, hooks) as probe, probe.evaluating(), Clones() as clones:
        for number in range(4):
            model(torch.full((2,), -1.0 - number))
    assert clones.count == 1
    assert probe.stats[["call", "l2"]].to_numpy().tolist() == [[1, pytest.approx(8**0.5)]]


def test_mask_of_all_tokens_does_not_fit_the_new_ones() -> None:
    model = language_model("llama")
    mask = {**RECORD, "layers": ".", "kind": "forward_pre", "path": "attention_mask"}
    for part, flatten, message in (
        (":, -1", None, r"the input 'attention_mask' differs in shape between batches[\s\S]*\['samples', 6\]"),
        (":, -1:", "tokens", r"the input 'attention_mask' has no positions in dimension 1, or not those of layer"),
    ):
        hooks = {"last": {**RECORD, "layers": "model.layers.0", "slice": part, "calls": "1:4"}, "mask": mask}
        probe, _, _ = recorded(model, hooks, [*PROMPTS])
        with pytest.raises(ConfigError, match=rf"mask: {message}[\s\S]*pass mask=None, or record"):
            probe.run.dataset("model.layers.0", call=range(1, 4), flatten=flatten)
        hooks["mask"] = {**mask, "slice": ":, -1:", "calls": "1:4"}
        probe, _, _ = recorded(model, hooks, [*PROMPTS])
        data = probe.run.dataset("model.layers.0", call=range(1, 4), flatten=flatten)
        assert data[:]["x"].shape == (9, WIDTH)


def test_calls_that_no_generation_reaches_are_reported() -> None:
    model = language_model("gpt2")
    hooks = {"late": {**RECORD, "layers": "lm_head", "calls": "10:20"}}
    with pytest.warns(InstrumentWarning, match="none of the calls that 'calls' selects"):
        probe, _, _ = recorded(model, hooks, [*PROMPTS])
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(0, 0)]


@pytest.mark.parametrize(
    ("calls", "kind", "message"),
    [
        ("5:5", "forward", r"hooks.x.calls: '5:5' selects no calls"),
        ("-3:", "forward", r"hooks.x.calls: '-3:' selects no calls"),
        ("1:2, 3", "forward", r"hooks.x.calls: '1:2, 3' selects no calls"),
        ("last", "forward", r"hooks.x.calls: 'last' selects no calls"),
        ([1, 2], "forward", r"hooks.x.calls: '\[1, 2\]' selects no calls: it must be one call, such as 0, or a range"),
        (True, "forward", r"hooks.x.calls: 'True' selects no calls"),
        ("0", "full_backward", r"'calls' requires kind forward_pre, forward or function, not full_backward"),
        ("0", "parameter_grad", r"'calls' requires kind forward_pre, forward or function, not parameter_grad"),
    ],
)
def test_invalid_calls_are_reported(calls: Any, kind: str, message: str) -> None:
    spec = {"layers": ".", "kind": kind, "action": "record", "calls": calls}
    with pytest.raises(ConfigError, match=message), instrument.attach(nn.Linear(2, 2), {"x": spec}):
        pass


@pytest.mark.slow
def test_compiled_code_acts_in_the_selected_calls() -> None:
    model = nn.Linear(2, 2).eval()
    hooks = {
        "seen": {**RECORD, "layers": ".", "calls": "1:"},
        "zero": {"layers": ".", "kind": "forward", "action": "scale", "factor": 0.0, "phase": "eval", "calls": 2},
    }
    compiled: Any = torch.compile(model, backend="eager")
    with instrument.attach(compiled, hooks) as probe, probe.evaluating(), torch.no_grad():
        outputs = [compiled(torch.ones(1, 2)) for _ in range(4)]
    assert [bool(output.any()) for output in outputs] == [True, True, False, True]
    assert probe.tensors()["call"].tolist() == [1, 2, 3]
    assert [(row["expected"], row["fired"]) for row in probe.coverage()] == [(3, 3), (1, 1)]


@pytest.mark.slow
def test_command_line_records_a_window_of_each_prompt(tmp_path: Path) -> None:
    run = train_here(
        tmp_path / "run",
        *("mode=forward", "data=prompts", "data.dataset.prompts=[[5,6,7],[8,9],[3]]", "train.batch_size=2"),
        *("task=generate", "task.max_new_tokens=6", f"+model._target_={__name__}.language_model", "+model.name=gpt2"),
        "+hooks.last={layers: lm_head, kind: forward, action: record, stats: none, tensors: true, slice: '[:, -1]', calls: '2:5'}",
    )
    X, _, ids = run.features("lm_head", call=range(2, 5))
    assert ids.tolist() == [0, 1, 2]
    assert X.argmax(-1).tolist() == [[*tokens[2:5]] for tokens in run.generated["tokens"]]


@pytest.mark.slow
def test_data_set_has_the_tokens_of_each_request(tmp_path: Path) -> None:
    model = language_model("llama")
    hooks = {
        "last": {**RECORD, "layers": "model.layers.*", "slice": ":, -1", "calls": "1:6"},
        "tokens": {**RECORD, "layers": ".", "kind": "forward_pre", "path": "input_ids", "calls": "1:6"},
    }
    _, _, new = recorded(model, hooks, [7, 2, 9], out=tmp_path)
    run = instrument.load(tmp_path)
    data = run.dataset(layers=["model.layers.0", "model.layers.1"], call=range(2, 5))
    assert len(data) == 3 * 3
    X, _, ids = run.features("model.layers.1", call=range(2, 5))
    row_of = {name: row for row, name in enumerate(ids.tolist())}
    for item in data:
        row, call = [7, 2, 9].index(int(item["id"])), int(item["call"])
        assert torch.equal(item["x"]["model.layers.1"], torch.from_numpy(X[row_of[int(item["id"])], call - 2]))
        assert item["token"].flatten().tolist() == [int(new[row, call - 1])]  # the input of call k is token k - 1
    shuffled = next(iter(data.batches(9, shuffle=0)))
    assert sorted(zip(shuffled["id"].tolist(), shuffled["call"].tolist(), strict=True)) == [
        (name, call) for name in (2, 7, 9) for call in (2, 3, 4)
    ]
    assert len(run.dataset("model.layers.0", call=3)) == 3
