"""Tensors in nested values: their paths, mapping, device transfer and number of samples."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from instrument import ConfigError
from instrument.values.nested import iter_tensors, map_tensors, number_of_samples, shapes, structure, to_device


class State(NamedTuple):
    hidden: Any
    cell: Any = None


Point = namedtuple("Point", "x y")


FIELDS = [("logits", Any), ("extra", Any, dataclasses.field(default=None))]
Output = dataclasses.make_dataclass("Output", FIELDS)
Frozen = dataclasses.make_dataclass("Frozen", FIELDS, frozen=True)
Slotted = dataclasses.make_dataclass("Slotted", FIELDS, frozen=True, slots=True)


@dataclasses.dataclass
class UnsetField:
    logits: Any
    cache: Any = dataclasses.field(init=False)  # never set


@dataclasses.dataclass
class ModelOutput(OrderedDict):  # type: ignore[type-arg]
    """Like the outputs of transformers models: a dataclass that is also a dict with the same entries."""

    logits: Any = None
    hidden_states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("a model output does not support update")

    def __reduce__(self) -> Any:
        return type(self), tuple(getattr(self, field.name) for field in dataclasses.fields(self))


T = [torch.full((i + 1,), float(i)) for i in range(4)]

# A value, and the paths of T[0], T[1], ... in it.
CASES: dict[str, tuple[Any, list[str]]] = {
    "tensor": (T[0], [""]),
    "tuple": ((T[0], T[1]), ["0", "1"]),
    "list": ([T[0], None, T[1]], ["0", "2"]),
    "dict": ({"a": T[0], "b": {"c": T[1]}}, ["a", "b.c"]),
    "integer keys": ({0: T[0], 1: T[1]}, ["0", "1"]),
    "equal keys as text": ({1: T[0], "1": T[1]}, ["1", "1"]),
    "ordered dict": (OrderedDict(z=T[0], a=T[1]), ["z", "a"]),
    "default dict": (defaultdict(list, a=[T[0]]), ["a.0"]),
    "read-only mapping": (MappingProxyType({"a": T[0]}), ["a"]),
    "named tuple": (State(T[0], T[1]), ["hidden", "cell"]),
    "old named tuple": (Point(T[0], (T[1],)), ["x", "y.0"]),
    "dataclass": (Output(T[0], extra=[T[1]]), ["logits", "extra.0"]),
    "frozen dataclass": (Frozen(T[0], extra={"a": T[1]}), ["logits", "extra.a"]),
    "frozen dataclass with slots": (Slotted(T[0], extra=(T[1],)), ["logits", "extra.0"]),
    "dataclass with an unset field": (UnsetField(T[0]), ["logits"]),
    "model output": (ModelOutput(T[0], (T[1], T[2])), ["logits", "hidden_states.0", "hidden_states.1"]),
    "lstm": ((T[0], (T[1], T[2])), ["0", "1.0", "1.1"]),
    "mixture": ([{"a": (T[0], State(T[1]))}, 3, "x", Output(None, [T[2]])], ["0.a.0", "0.a.1.hidden", "3.extra.0"]),
    "empty containers": ([(), {}, [], T[0]], ["3"]),
}
NO_TENSORS = {"none": None, "number": 3.0, "words": "abc", "empty": (), "class": Output, "range": range(2)}


@pytest.mark.parametrize(("value", "paths"), CASES.values(), ids=CASES)
def test_leaves_and_map_visit_every_tensor_with_its_path_in_order(value: Any, paths: list[str]) -> None:
    seen: list[tuple[str, Tensor]] = []
    assert map_tensors(value, lambda path, tensor: (seen.append((path, tensor)), tensor)[1]) is value
    for found in (seen, list(iter_tensors(value))):
        assert [path for path, _ in found] == paths
        assert all(tensor is expected for (_, tensor), expected in zip(found, T, strict=False))


@pytest.mark.parametrize(("value", "paths"), CASES.values(), ids=CASES)
def test_map_keeps_the_structure_and_the_original(value: Any, paths: list[str]) -> None:
    new = map_tensors(value, lambda path, tensor: tensor + 10)
    assert type(new) is type(value)
    assert getattr(new, "default_factory", None) is getattr(value, "default_factory", None)
    assert [path for path, _ in iter_tensors(new)] == paths
    assert all(torch.equal(tensor, expected + 10) for (_, tensor), expected in zip(iter_tensors(new), T, strict=False))
    assert all(tensor is expected for (_, tensor), expected in zip(iter_tensors(value), T, strict=False))


@pytest.mark.parametrize(("value", "paths"), CASES.values(), ids=CASES)
def test_map_shares_unchanged_tensors(value: Any, paths: list[str]) -> None:
    last = len(paths) - 1
    counted = iter(range(len(paths)))
    new = map_tensors(value, lambda path, tensor: tensor * 2 if next(counted) == last else tensor)
    found = [tensor for _, tensor in iter_tensors(new)]
    assert all(tensor is expected for tensor, expected in zip(found[:last], T, strict=False))
    assert torch.equal(found[last], T[last] * 2)


@pytest.mark.parametrize("value", NO_TENSORS.values(), ids=NO_TENSORS)
def test_map_returns_a_value_without_tensors_unchanged(value: Any) -> None:
    assert list(iter_tensors(value)) == []
    assert map_tensors(value, lambda path, tensor: tensor + 1) is value


def test_model_output_keeps_attributes_and_entries_equal() -> None:
    old = ModelOutput(logits=T[1], hidden_states=(T[2],))
    new = map_tensors(old, lambda path, tensor: tensor + 1 if path == "logits" else tensor)
    assert new.logits is new["logits"]
    assert torch.equal(new.logits, T[1] + 1)
    assert new.hidden_states is old.hidden_states
    assert old.logits is old["logits"] is T[1]


def test_mapped_packed_sequence_can_be_unpacked() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.zeros(1, 2)])
    assert [path for path, _ in iter_tensors(packed)] == ["data", "batch_sizes"]
    assert map_tensors(packed, lambda path, tensor: tensor) is packed
    new = map_tensors(packed, lambda path, tensor: tensor * 2 if path == "data" else tensor)
    assert isinstance(new, PackedSequence)
    padded, lengths = torch.nn.utils.rnn.pad_packed_sequence(new, batch_first=True)
    assert lengths.tolist() == [3, 1]
    assert padded.sum().item() == 12
    assert packed.data.sum().item() == 6
    moved = to_device({"words": packed}, torch.device("meta"))["words"]
    assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")


def test_torch_return_types_keep_their_type() -> None:
    pair = torch.tensor([[1.0, 3.0, 2.0]]).max(dim=1)
    assert map_tensors(pair, lambda path, tensor: tensor) is pair
    new = map_tensors(pair, lambda path, tensor: tensor * 2 if path == "0" else tensor)
    assert type(new) is type(pair)
    assert (new.values.item(), new.indices.item()) == (6.0, 1)
    assert pair.values.item() == 3.0


tensors = st.integers(0, 9).map(lambda i: torch.tensor(float(i)))
keys = st.text("ab", min_size=1, max_size=2)
nested = st.recursive(
    tensors | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(State, inner, inner)
        | st.builds(Output, inner, inner)
        | st.builds(Frozen, inner, inner)
        | st.builds(Slotted, inner, inner)
    ),
    max_leaves=12,
)


def flat(value: Any) -> Any:
    """Return a comparable form of a value: tensors as numbers, with the types, keys and order of dicts."""
    if isinstance(value, Tensor):
        return ("tensor", value.item())
    if isinstance(value, dict):
        return (type(value), [(key, flat(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [flat(item) for item in value])
    if dataclasses.is_dataclass(value):
        return (type(value), [flat(getattr(value, field.name)) for field in dataclasses.fields(value)])
    return value


@pytest.mark.slow
@given(nested)
def test_map_changes_every_tensor_once_and_nothing_else(value: Any) -> None:
    before = copy.deepcopy(value)
    new = map_tensors(value, lambda path, tensor: tensor + 100)
    assert flat(value) == flat(before)
    assert flat(map_tensors(new, lambda path, tensor: tensor - 100)) == flat(before)
    assert [tensor.item() for _, tensor in iter_tensors(new)] == [
        tensor.item() + 100 for _, tensor in iter_tensors(value)
    ]


@given(nested)
def test_leaves_and_map_leaves_agree_on_paths(value: Any) -> None:
    seen: list[tuple[str, Tensor]] = []
    assert map_tensors(value, lambda path, tensor: (seen.append((path, tensor)), tensor)[1]) is value
    found = list(iter_tensors(value))
    assert [path for path, _ in seen] == [path for path, _ in found]
    assert all(one is other for (_, one), (_, other) in zip(seen, found, strict=True))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(2, 3), "[2, 3]"),
        ((torch.zeros(2), {"a": torch.zeros(())}), "[2], []"),
        (None, "NoneType"),
        ([], "list"),
    ],
)
def test_shapes_are_formatted_for_messages(value: Any, expected: str) -> None:
    assert shapes(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.zeros(4, 2), "float32 [4, 2]"),
        ([torch.zeros(4, 2), (torch.ones(3, dtype=torch.int64), 5)], "[float32 [4, 2], (int64 [3], int)]"),
        ({"a": torch.zeros(2, dtype=torch.bool), "b": "text"}, "{'a': bool [2], 'b': str}"),
        (State(torch.zeros(1), torch.zeros(())), "State(hidden=float32 [1], cell=float32 [])"),
        ([torch.zeros(1)] * 20, f"[{'float32 [1], ' * 8}...]"),
        (None, "NoneType"),
    ],
)
def test_structure_is_formatted_for_messages(value: Any, expected: str) -> None:
    assert structure(value) == expected


def test_to_device_moves_all_tensors() -> None:
    moved = to_device([T[1], {"a": T[2], "n": 1}], torch.device("meta"))
    assert [tensor.device.type for _, tensor in iter_tensors(moved)] == ["meta", "meta"]
    assert moved[1]["n"] == 1
    batch = UserDict(x=T[1], n=1)
    moved = to_device(batch, torch.device("meta"))
    assert (type(moved), moved["x"].device.type, moved["n"]) == (UserDict, "meta", 1)
    assert batch["x"] is T[1]


ROWS = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "batch",
    [
        ROWS,
        [ROWS, torch.zeros(4)],
        {"a": ROWS, "b": ROWS, "c": ROWS},
        UserDict(a=ROWS, scale=torch.tensor(2.0), names=["x", "y"], n=7),
        {"deep": [{"er": (ROWS, None)}], "other": State(ROWS, ROWS)},
        Frozen(ROWS),
        pack_sequence([torch.ones(3, 2), *[torch.ones(1, 2)] * 3]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_number_of_samples_is_dimension_0_of_the_tensors(batch: Any) -> None:
    assert number_of_samples(batch) == 4


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_number_of_samples_of_a_nested_tensor(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.zeros(size, 3) for size in (2, 5, 1, 1)], layout=layout)
    assert number_of_samples([nested, ROWS]) == 4
    assert shapes(nested) == "[4, 5, 3]"
    with pytest.raises(ConfigError, match=r"ambiguous: 0 \[4, 5, 3\], 1 \[3\]"):
        number_of_samples([nested, torch.zeros(3)])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": ROWS, "y": (torch.zeros(3),)}, r"ambiguous: x \[4, 2\], y\.0 \[3\]"),
        ({"x": torch.tensor(1.0), "names": ["a", "b"]}, "no tensor with a dimension 0.*unknown: dict"),
    ],
)
def test_number_of_samples_refuses_ambiguous_batches(batch: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        number_of_samples(batch)
