"""`run.dataset`: the items are the values that a hand-written hook keeps; each is yielded once, in an order that can be resumed."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import Calls
from safetensors.torch import load_file
from tiers import tiered
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import instrument
from instrument import ConfigError, Run
from instrument.commands.export import main as export

RECORD = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}
INPUTS = {**RECORD, "layers": ".", "kind": "forward_pre"}
PAD, START = 0, 1
HOOKS = {"layers": {**RECORD, "layers": ["embed", "up"]}, "inputs": INPUTS}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up = nn.Embedding(50, 4), nn.Linear(4, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return self.up(self.embed(input_ids))


def batches(count: int = 7) -> Iterator[dict[str, Tensor]]:
    """Batches of 5 sequences of 6 or 7 tokens, with up to 2 tokens of padding on the right."""
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        tokens = torch.randint(2, 50, (5, 6 + number % 2), generator=generator)
        mask = torch.ones_like(tokens)
        tokens[:, 0] = START
        for i in range(5):
            mask[i, tokens.shape[1] - i % 3 :] = 0
        yield {"input_ids": tokens.where(mask == 1, PAD), "attention_mask": mask}


def record(
    folder: Path | None, hooks: dict[str, Any] = HOOKS, *, names: Callable[[int], Any] = lambda i: i, first: int = 0
) -> Run:
    """Record the batches, with the ids from 100 and targets modulo 3."""
    torch.manual_seed(0)
    model = Model().eval()
    with torch.no_grad(), instrument.attach(model, hooks, out=folder) as probe:
        for step, batch in enumerate(batches()):
            numbers = range(first + 5 * step, first + 5 * step + 5)
            probe.batch(ids=[names(100 + i) for i in numbers], targets=[i % 3 for i in numbers])
            model(**batch)
            probe.end_step()
    return probe.run


def expected(*, special: tuple[int, ...] = ()) -> list[tuple[int, int, int, Tensor, Tensor]]:
    """Return id, position, token and the outputs of both layers of each item."""
    torch.manual_seed(0)
    model = Model().eval()
    items = []
    with torch.no_grad():
        for step, batch in enumerate(batches()):
            embedded = model.embed(batch["input_ids"])
            up = model.up(embedded)
            for i, t in batch["attention_mask"].nonzero().tolist():
                token = int(batch["input_ids"][i, t])
                if token not in special:
                    items.append((100 + 5 * step + i, t, token, embedded[i, t], up[i, t]))
    return items


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("run")
    record(folder)
    return instrument.load(folder)


def places(batches: Any) -> list[tuple[int, int]]:
    """Return id and position of each item."""
    return [pair for batch in batches for pair in zip(batch["id"].tolist(), batch["position"].tolist(), strict=True)]


def test_memory_of_windows_is_aligned(run: Run) -> None:
    for count in (0, 1, 5):
        memory = run.dataset("up", flatten="tokens").empty(count)
        assert {name: (each.dtype, each.shape) for name, each in memory.items()} == {
            "x.up": (torch.float32, (count, 6)),
            "token": (torch.int64, (count,)),
        }
        assert all(each.data_ptr() % 64 == 0 for each in memory.values() if count)


def test_dataset_has_unpadded_tokens(run: Run) -> None:
    data = run.dataset(layers=["up", "embed"], flatten="tokens", special_tokens=[START], with_targets=True)
    items = expected(special=(START,))
    batch = data[:]
    assert len(data) == len(items)
    assert batch["id"].tolist() == [item[0] for item in items]
    assert batch["position"].tolist() == [item[1] for item in items]
    assert batch["token"].tolist() == [item[2] for item in items]
    assert batch["target"].tolist() == [(item[0] - 100) % 3 for item in items]
    assert batch["step"].tolist() == [(item[0] - 100) // 5 for item in items]
    assert batch["run"].eq(0).all()
    assert torch.equal(batch["x"]["embed"], torch.stack([item[3] for item in items]))
    assert torch.equal(batch["x"]["up"], torch.stack([item[4] for item in items]))
    one = data[-2]
    assert (int(one["id"]), int(one["position"])) == items[-2][:2]
    assert torch.equal(one["x"]["up"], items[-2][4])
    for some in ([7, 0, 7], [0, 2, 1, 3], [-1], [], np.array([50, 3])):
        assert places([data[some]]) == [items[i][:2] for i in some]
    with pytest.raises(IndexError, match=f"the dataset has {len(items)} items"):
        data[len(items)]


@pytest.mark.slow
def test_dataset_without_flatten_has_samples() -> None:
    hooks = {"layers": {**RECORD, "layers": "up", "slice": ":, :6"}, "inputs": {**INPUTS, "slice": ":, :6"}}
    run = record(None, hooks)
    data = run.dataset("up")
    batch = data[:]
    assert data[:]["x"].shape == (35, 6, 6)
    assert np.array_equal(batch["x"].numpy(), run.features("up").X)
    every = list(batches())
    assert torch.equal(batch["token"], torch.cat([each["input_ids"][:, :6] for each in every]))
    assert torch.equal(batch["mask"], torch.cat([each["attention_mask"][:, :6] for each in every]))
    assert "position" not in batch


@pytest.mark.slow
def test_recorded_slice_keeps_positions(tmp_path: Path) -> None:
    hooks = {"layers": {**RECORD, "layers": "up", "slice": ":, 1::2"}, "inputs": INPUTS}
    batch = record(tmp_path, hooks).dataset("up", flatten="tokens")[:]
    items = [item for item in expected() if item[1] % 2 == 1]
    assert places([batch]) == [item[:2] for item in items]
    assert batch["token"].tolist() == [item[2] for item in items]
    assert torch.equal(batch["x"], torch.stack([item[4] for item in items]))


@pytest.mark.slow
def test_layers_of_different_samples_are_aligned() -> None:
    hooks = {"few": {**RECORD, "layers": "up", "samples": [3, 1]}, "all": {**RECORD, "layers": "embed"}, "in": INPUTS}
    batch = record(None, hooks).dataset(layers=["up", "embed"], flatten="tokens")[:]
    items = {item[:2]: item for item in expected()}
    assert batch["id"][:12].tolist() == [103] * 6 + [101] * 5 + [108]
    for i, place in enumerate(places([batch])):
        assert torch.equal(batch["x"]["embed"][i], items[place][3])
        assert torch.equal(batch["x"]["up"][i], items[place][4])
        assert batch["token"][i] == items[place][2]


@pytest.mark.spread(1)
@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
def test_mask_has_any_dtype(dtype: torch.dtype) -> None:
    model = Calls(lambda x, attention_mask: x)
    hooks = {"layers": {**RECORD, "layers": "."}, "inputs": {**INPUTS, "path": "attention_mask"}}
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]]).to(dtype)
    with instrument.attach(model, hooks) as probe:
        probe.batch(ids=range(2))
        model(torch.ones(2, 3, 4), attention_mask=mask)
        probe.end_step()
    assert places([probe.dataset(".", flatten="tokens")[:]]) == [(0, 0), (0, 2), (1, 1), (1, 2)]


@pytest.mark.slow
def test_recorded_positions_keep_positions(tmp_path: Path) -> None:
    hooks = {"layers": {**RECORD, "layers": "up", "positions": [1, 3, 5]}, "inputs": INPUTS}
    data = record(tmp_path, hooks).dataset("up", flatten="tokens")
    batch = pickle.loads(pickle.dumps(data))[:]  # for workers that are not forked
    items = [item for item in expected() if item[1] in (1, 3, 5)]
    assert places([batch]) == [item[:2] for item in items]
    assert batch["token"].tolist() == [item[2] for item in items]
    assert torch.equal(batch["x"], torch.stack([item[4] for item in items]))


@pytest.mark.slow
def test_layers_of_different_positions_are_aligned_or_refused() -> None:
    up, embed = {**RECORD, "layers": "up"}, {**RECORD, "layers": "embed"}
    hooks = {
        "up": {**up, "slice": ":, 2:4"},
        "embed": {**embed, "slice": ":, 1:5"},
        "in": {**INPUTS, "slice": ":, 2:6"},
    }
    run = record(None, hooks)
    batch = run.dataset(layers=["up", "embed"], flatten="tokens")[:]
    items = [item for item in expected() if item[1] in (2, 3)]
    assert places([batch]) == [item[:2] for item in items]
    assert batch["token"].tolist() == [item[2] for item in items]
    assert torch.equal(batch["x"]["up"], torch.stack([item[4] for item in items]))
    assert torch.equal(batch["x"]["embed"], torch.stack([item[3] for item in items]))
    with pytest.raises(
        ConfigError, match=r"(?s)layer 'up' has no positions in dimension 1, or not those of layer 'embed'"
    ):
        run.dataset(layers=["embed", "up"], flatten="tokens", mask=None, tokens=None)


def test_layer_can_have_the_name_of_an_entry() -> None:
    model = nn.Sequential()
    model.token = nn.Linear(3, 2)
    hooks = {"layer": {**RECORD, "layers": "token"}, "input": {**RECORD, "kind": "forward_pre", "layers": "."}}
    with instrument.attach(model, hooks) as probe:
        probe.batch(ids=range(4))
        y = model(x := torch.arange(12.0).reshape(4, 3))
        probe.end_step()
    batch = probe.dataset("token", tokens="0")[:]
    assert torch.equal(batch["x"], y)
    assert torch.equal(batch["token"], x)


@pytest.mark.slow
def test_inputs_of_different_lengths_are_refused_without_flatten(tmp_path: Path) -> None:
    run = record(tmp_path, {"layers": {**RECORD, "layers": "up", "slice": ":, 0"}, "inputs": INPUTS})
    with pytest.raises(ConfigError, match=r"(?s)tokens: the input 'input_ids' differs in shape.*pass tokens=None"):
        run.dataset("up")
    assert run.dataset("up", tokens=None, mask=None)[:]["x"].shape == (35, 6)


def test_targets_can_be_a_recorded_input(run: Run) -> None:
    batch = run.dataset("up", flatten="tokens", with_targets="input_ids")[:]
    assert torch.equal(batch["target"], batch["token"])


ORDERS = {
    "sequential": {},
    "window": {"shuffle": 3, "window": 1500},
    "one window": {"shuffle": 3},
    "exact": {"shuffle": 3, "window": None},
}


@pytest.mark.parametrize("options", [pytest.param(each, id=name) for name, each in ORDERS.items()])
def test_each_item_is_yielded_once(run: Run, options: dict[str, Any]) -> None:
    data = run.dataset("up", flatten="tokens")
    items = expected()
    batches = data.batches(16, **options)
    seen = list(batches)
    assert [len(batch["x"]) for batch in seen] == [16] * (len(items) // 16) + [len(items) % 16]
    assert len(batches) == len(seen)
    assert sorted(places(seen)) == [item[:2] for item in items]
    assert (places(seen) == [item[:2] for item in items]) == (not options)
    values = {item[:2]: item[4] for item in items}
    for batch in seen:
        assert torch.equal(batch["x"], torch.stack([values[place] for place in places([batch])]))
    assert places(batches) == places(seen)
    assert places(data.batches(16, **{**options, "shuffle": None if not options else 4})) != places(seen) or not options
    batches.set_epoch(1)
    assert (places(batches) == places(seen)) == (not options)
    assert all(len(batch["x"]) == 16 for batch in data.batches(16, drop_last=True, **options))


@pytest.mark.spread(1)
@pytest.mark.parametrize("options", [pytest.param(each, id=name) for name, each in ORDERS.items()])
def test_ranks_have_equally_many_other_items(
    run: Run, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run.dataset("up", flatten="tokens")
    parts = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    for rank in range(3):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        parts.append(places(data.batches(16, **options)))
    assert {len(part) for part in parts} == {len(data) // 3}
    assert len(set().union(*parts)) == len(data) // 3 * 3


@pytest.mark.spread(1)
@pytest.mark.parametrize("workers", tiered([0, 1, 2, 3], quick=[0, 2]))
@pytest.mark.parametrize("options", [pytest.param(each, id=name) for name, each in ORDERS.items()])
@pytest.mark.combinations
@pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")  # on machines with two cores
def test_iteration_resumes_with_the_next_batch(run: Run, options: dict[str, Any], workers: int) -> None:
    first, other = (run.dataset("up", flatten="tokens") for _ in range(2))

    def start(data: Any) -> tuple[Any, Any]:
        batches = data.batches(16, **options)
        return batches, DataLoader(batches, batch_size=None, num_workers=workers) if workers else batches

    complete = [places([batch]) for batch in start(first)[1]]
    assert sorted(place for batch in complete for place in batch) == [item[:2] for item in expected()]
    for used in (3, len(complete)) if workers else range(len(complete) + 1):
        batches, loader = start(first)
        for _ in zip(range(used), loader, strict=False):
            pass
        state = json.loads(json.dumps(batches.state_dict(used) if workers or used == 0 else batches.state_dict()))
        batches, loader = start(other)
        batches.load_state_dict(state)
        assert [places([batch]) for batch in loader] == complete[used:]
        if used == 3:  # the state holds for one iteration
            assert [places([batch]) for batch in loader] == complete


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_state_is_loaded_while_a_loader_exists(run: Run, persistent: bool) -> None:
    batches = run.dataset("up", flatten="tokens").batches(16, **ORDERS["window"])
    first = [places([batch]) for batch in batches]
    batches.set_epoch(1)
    second = [places([batch]) for batch in batches]
    batches.set_epoch(0)
    loader = DataLoader(batches, batch_size=None, num_workers=2, persistent_workers=persistent)
    assert [places([batch]) for batch in loader] == first
    batches.load_state_dict({**batches.state_dict(3), "epoch": 1})
    batches.set_epoch(1)  # does not change the epoch
    assert [places([batch]) for batch in loader] == second[3:]
    assert [places([batch]) for batch in loader] == second


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata uses deprecated functions
def test_stateful_dataloader_resumes(run: Run) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def start() -> Any:
        batches = run.dataset("up", flatten="tokens").batches(16, **ORDERS["window"])
        return torchdata.StatefulDataLoader(batches, batch_size=None, num_workers=2)

    complete = [places([batch]) for batch in start()]
    loader = start()
    for _ in zip(range(3), loader, strict=False):
        pass
    state = loader.state_dict()
    loader = start()
    loader.load_state_dict(state)
    assert [places([batch]) for batch in loader] == complete[3:]


def test_map_style_loaders_yield_each_item(run: Run) -> None:
    data = run.dataset("up", flatten="tokens")
    items = {item[:2]: item[4] for item in expected()}
    by_batch = DataLoader(data, batch_size=None, sampler=BatchSampler(RandomSampler(data), 16, drop_last=False))
    for loader in (DataLoader(data, 16, shuffle=True), by_batch):
        seen = list(loader)
        assert sorted(places(seen)) == sorted(items)
        for batch in seen:
            assert torch.equal(batch["x"], torch.stack([items[place] for place in places([batch])]))


def test_iteration_leaves_random_state(run: Run) -> None:
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    list(run.dataset("up", flatten="tokens").batches(16, shuffle=0, window=1500))
    assert torch.equal(states[0], torch.get_rng_state())
    assert np.array_equal(states[1], np.random.get_state()[1])
    assert states[2] == random.getstate()


@pytest.mark.slow
def test_iteration_needs_constant_memory(tmp_path: Path) -> None:
    megabytes = 256

    def anonymous() -> float:
        (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
        return int(line.split()[1]) / 1024

    model = nn.Identity()
    values = torch.zeros(16, 256, 1024)  # 16 MB
    with instrument.attach(model, {"f": {**RECORD, "layers": "."}}, out=tmp_path) as probe:
        for step in range(megabytes // 16):
            probe.batch(ids=range(16 * step, 16 * step + 16))
            model(values)
            probe.end_step()
    data = instrument.load(tmp_path).dataset(".", flatten="tokens", mask=None)
    before, most, count = anonymous(), 0.0, 0
    for batch in data.batches(256, shuffle=0, window=8 * 2**20):
        count += len(batch["x"])
        most = max(most, anonymous())
    assert count == len(data) == megabytes * 256
    assert most - before < 2 * 8 + 24  # two windows, batches, and the index


def test_runs_follow_each_other(tmp_path: Path) -> None:
    for name, first in {"a": 0, "b": 35}.items():
        record(tmp_path / name, first=first)
    for run in (instrument.load(tmp_path), instrument.load([tmp_path / "a", tmp_path / "b"])):
        data = run.dataset("up", flatten="tokens")
        batch = data[:]
        count = len(expected())
        assert batch["run"].tolist() == [0] * count + [1] * count
        assert places([batch])[:count] == [(name - 35, position) for name, position in places([batch])[count:]]
        assert sorted(places(data.batches(16, shuffle=0))) == sorted(places([batch]))
    with pytest.raises(ConfigError, match=f"no tensors of this layer were recorded in {tmp_path / 'a'}"):
        run.dataset("down")
    assert instrument.load([tmp_path / "a"]).names == ["."]
    with pytest.raises(ConfigError, match="must be a folder, or a list of local folders"):
        instrument.load([])


@pytest.mark.slow
def test_ids_can_be_strings(tmp_path: Path) -> None:
    data = record(tmp_path, names=lambda i: f"file {i}").dataset("up", flatten="tokens")
    names = [f"file {item[0]}" for item in expected()]
    assert data[:]["id"] == names
    assert [name for batch in data.batches(16) for name in batch["id"]] == names
    assert data[3]["id"] == names[3]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_items_have_the_recorded_dtype(dtype: torch.dtype) -> None:
    values = torch.randn(6, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = nn.Identity()
    with instrument.attach(model, {"f": {**RECORD, "layers": "."}}) as probe:
        for ids in torch.arange(6).split(2):
            probe.batch(ids=ids)
            model(values[ids])
            probe.end_step()
    seen = list(probe.dataset(".").batches(4, shuffle=0))
    assert {batch["x"].dtype for batch in seen} == {dtype}
    order = torch.cat([batch["id"] for batch in seen])
    joined = torch.cat([batch["x"] for batch in seen])
    assert torch.equal(joined.view(torch.uint8), values.view(torch.uint8).view(6, -1)[order])


def test_final_dimensions_of_size_1_are_removed() -> None:
    model = nn.AdaptiveAvgPool2d(1)
    with instrument.attach(model, {"f": {**RECORD, "layers": "."}}) as probe:
        probe.batch(ids=range(4))
        model(torch.ones(4, 3, 5, 5))
        probe.end_step()
    assert probe.dataset(".")[:]["x"].shape == (4, 3)
    assert probe.dataset(".")[0]["x"].shape == (3,)


def test_huggingface_model_is_read_without_padding(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    model = GPT2Model(GPT2Config(vocab_size=60, n_positions=16, n_embd=8, n_layer=2, n_head=2)).eval()
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    tokens = torch.arange(12).reshape(3, 4)
    blocks = {**RECORD, "layers": "h.1"}
    with torch.no_grad(), instrument.attach(model, {"blocks": blocks, "inputs": INPUTS}, out=tmp_path) as probe:
        probe.batch(ids=range(3))
        states = model(input_ids=tokens, attention_mask=mask, output_hidden_states=True).hidden_states
        probe.end_step()
    batch = instrument.load(tmp_path).dataset("h.1", flatten="tokens")[:]
    assert batch["token"].tolist() == tokens[mask == 1].tolist()
    assert len(states) == 3
    with torch.no_grad():
        normed = model.ln_f(batch["x"])
    torch.testing.assert_close(normed, states[-1][mask == 1])


ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"layer": "upp"}, "no tensors of this layer were recorded.*similar  up"),
    "no layer": ({}, "pass one layer, or a list of layers"),
    "two": ({"layer": "up", "layers": ["up"]}, "pass one layer, or a list of layers"),
    "flatten": ({"layer": "up", "flatten": "token"}, "flatten: unknown value.*allowed  'tokens'"),
    "mask": ({"layer": "up", "flatten": "tokens", "mask": "mask"}, "no input of this name.*attention_mask.*mask=None"),
    "tokens": ({"layer": "up", "flatten": "tokens", "tokens": "ids"}, "tokens: no input of this name.*input_ids"),
    "special": (
        {"layer": "up", "special_tokens": [0]},
        "special_tokens: positions are left out only.*flatten='tokens'",
    ),
    "one token": (
        {"layer": "up", "flatten": "tokens", "special_tokens": 3},
        "special_tokens: must be token ids.*given +3",
    ),
    "text": ({"layer": "up", "flatten": "tokens", "special_tokens": "ab"}, "special_tokens: must be token ids.*fix "),
    "fraction": ({"layer": "up", "flatten": "tokens", "special_tokens": [0.5]}, "special_tokens: must be token ids"),
    "mask type": ({"layer": "up", "mask": True}, "mask: must be the name of a recorded input.*given +True"),
    "tokens type": ({"layer": "up", "tokens": 3}, "tokens: must be the name of a recorded input.*a name, or None"),
    "targets type": (
        {"layer": "up", "with_targets": 3},
        "with_targets: must be the name.*allowed  a name, True or False",
    ),
    "nothing": ({"layer": "up", "flatten": "tokens", "special_tokens": range(50)}, "mask: no position is an item"),
    "lengths": ({"layer": "up"}, "differ in shape between batches"),
    "targets": ({"layer": "up", "flatten": "tokens", "with_targets": "labels"}, "with_targets: no input of this name"),
    "list": ({"layer": ["up", "embed"]}, r"layer: pass one layer, or a list of layers.*fix +run\.dataset\(layers="),
    "step": ({"layer": "up", "step": 99}, "step: no recorded tensor of layer 'up' has this step"),
    "role": ({"layer": "up", "role": "input"}, "role: no recorded tensor"),
}


@pytest.mark.spread(16)
@pytest.mark.parametrize("name", ERRORS)
def test_wrong_argument_is_reported(run: Run, name: str) -> None:
    arguments, message = ERRORS[name]
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        run.dataset(**arguments)


def test_schedules_of_layers_must_agree() -> None:
    hooks = {"often": {**RECORD, "layers": "up"}, "rarely": {**RECORD, "layers": "embed", "every": 2}}
    run = record(None, hooks)
    with pytest.raises(ConfigError, match=r"(?s)layer 'embed' has no tensor at step 1, .*'up' was recorded.*schedule"):
        run.dataset(layers=["up", "embed"], flatten="tokens", mask=None)
    assert len(run.dataset(layers=["up", "embed"], flatten="tokens", mask=None, step=[0, 2])) == 2 * 5 * 6


def test_tensors_need_samples_and_positions() -> None:
    model = nn.Sequential(nn.Linear(3, 2), Calls(lambda x: x.flatten()))
    with instrument.attach(model, {"f": {**RECORD, "layers": "*"}}) as probe:
        probe.batch(ids=range(4))
        model(torch.ones(4, 3))
        probe.end_step()
    with pytest.raises(ConfigError, match="have no samples in dimension 0"):
        probe.dataset("1")
    assert probe.dataset("0", flatten="tokens", mask=None)[:]["x"].shape == (8,)
    with pytest.raises(ConfigError, match="targets were recorded"):
        probe.dataset("0", with_targets=True)


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size: must be a positive integer"),
        ({"batch_size": 2.5}, "batch_size: must be a positive integer"),
        *[({"shuffle": seed}, "(?s)shuffle: must be the seed.*fix +shuffle=0") for seed in (True, -1, "a", 1.5)],
        ({"rank": 2, "ranks": 2}, "(?s)rank: no process has this number.*0 to 1"),
    ],
)
def test_wrong_order_is_reported(run: Run, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run.dataset("up", flatten="tokens").batches(**arguments)


def test_state_of_other_batches_is_refused(run: Run) -> None:
    data = run.dataset("up", flatten="tokens")
    state = data.batches(16, shuffle=0).state_dict()
    for other in (
        data.batches(8, shuffle=0),
        data.batches(16),
        run.dataset("up", flatten="tokens", step=0).batches(16, shuffle=0),
    ):
        with pytest.raises(ConfigError, match="the state belongs to other batches"):
            other.load_state_dict(state)
    batches = data.batches(16, shuffle=0)
    list(DataLoader(batches, batch_size=None, num_workers=1))
    with pytest.raises(ConfigError, match=r"pass state_dict\(batches=N\)"):
        batches.state_dict()
    batches.load_state_dict(batches.state_dict(2))
    assert [places([batch]) for batch in batches] == [places([batch]) for batch in data.batches(16, shuffle=0)][2:]


def exported(run: Run, to: str, folder: Path, *options: str) -> int:
    return export([str(run.path), "--to", to, "--out", str(folder), *options])


def test_tensors_are_exported_to_safetensors(run: Run, tmp_path: Path) -> None:
    assert exported(run, "safetensors", tmp_path / "out", "--flatten", "tokens") == 0
    tensors = load_file(tmp_path / "out" / "activations.safetensors")
    items = expected()
    assert torch.equal(tensors["up"], torch.stack([item[4] for item in items]))
    assert torch.equal(tensors["embed"], torch.stack([item[3] for item in items]))
    for name, i in {"id": 0, "position": 1, "token": 2}.items():
        assert tensors[name].tolist() == [item[i] for item in items]


def test_tensors_are_exported_to_datasets(run: Run, tmp_path: Path) -> None:
    from datasets import load_from_disk

    assert exported(run, "hf", tmp_path / "out", "--flatten", "tokens", "--layer", "up", "--select", "step=0") == 0
    rows = load_from_disk(tmp_path / "out").with_format("torch")[:]
    items = [item for item in expected() if item[0] < 105]
    assert torch.equal(rows["up"], torch.stack([item[4] for item in items]))
    for name, i in {"id": 0, "position": 1, "token": 2}.items():
        assert rows[name].tolist() == [item[i] for item in items]


@pytest.mark.parametrize("to", ["safetensors", "hf"])
def test_layer_with_the_name_of_a_column_is_refused(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Calls(lambda step, other, x: other(step(x)), step=nn.Linear(3, 2), other=nn.Linear(2, 2))
    with instrument.attach(model, {"f": {**RECORD, "layers": "*"}}, out=tmp_path / "run") as probe:
        probe.batch(ids=range(4))
        model(torch.ones(4, 3))
        probe.end_step()
    assert exported(probe.run, to, tmp_path / "out") == 2
    assert "a column of the export has the name of this layer\n    given    step" in capsys.readouterr().err
    assert exported(probe.run, to, tmp_path / "out", "--layer", "other") == 0


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("to", "options", "message"),
    [
        ("csv", ("--layer", "up"), "--layer: not supported for csv"),
        ("hf", ("--select", "phas=eval"), "--select: is COLUMN=VALUE"),
        ("hf", ("--select", "step=one"), "step: no recorded tensor of layer"),
        ("hf", ("--flatten", "tokens", "--mask", "padding"), "mask: no input of this name was recorded"),
        ("safetensors", ("--layer", "down"), "no tensors of this layer were recorded"),
    ],
)
def test_wrong_export_is_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, options: tuple[str, ...], message: str
) -> None:
    assert exported(run, to, tmp_path / "out", *options) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
