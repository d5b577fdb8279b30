"""Containers: repeated and cyclic references, any depth, replacement in place, and copies of custom classes."""

from __future__ import annotations

import dataclasses
from collections import UserDict, UserList, deque
from collections.abc import Callable, Iterator, MutableMapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import attr
import pytest
import torch
from torch import Tensor

from instrument.values.containers import copied_containers, write_back
from instrument.values.nested import iter_tensors, map_tensors, number_of_samples, structure, to_device

DEPTH = 1500  # more than the limit of recursion


class Samples(MutableMapping):  # type: ignore[type-arg]
    """A mapping whose iteration yields samples instead of keys, and that keeps its entries in an attribute."""

    def __init__(self, **entries: Any) -> None:
        self.kept = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self.kept[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.kept[key] = value

    def __delitem__(self, key: str) -> None:
        del self.kept[key]

    def __len__(self) -> int:
        return len(next(iter(self.kept.values())))

    def __iter__(self) -> Iterator[Any]:
        return ({key: value[i] for key, value in self.kept.items()} for i in range(len(self)))

    def keys(self) -> Any:
        return self.kept.keys()

    def items(self) -> Any:
        return self.kept.items()

    def values(self) -> Any:
        return self.kept.values()


@dataclasses.dataclass(eq=False)
class Node:
    x: Tensor
    parent: Any = None
    children: list[Node] = dataclasses.field(default_factory=list)


Frozen = dataclasses.make_dataclass("Frozen", ["x", "y"], frozen=True)
FrozenAttrs = attr.make_class("FrozenAttrs", ["x", "y"], frozen=True, slots=True)
Attrs = attr.make_class("Attrs", ["x", "y"], slots=True)


def graph(**entries: Tensor) -> Any:
    from geometric import Data

    return Data(**entries)


MODIFIABLE: dict[str, Callable[..., Any]] = {
    "dict": dict,
    "UserDict": UserDict,
    "mapping of samples": Samples,
    "namespace": SimpleNamespace,
    "attrs": Attrs,
    "graph": graph,
}
READ_ONLY: dict[str, Callable[..., Any]] = {
    "frozen dataclass": Frozen,
    "frozen attrs": FrozenAttrs,
    "read-only mapping": lambda **entries: MappingProxyType(entries),
}


def plus_one(path: str, tensor: Tensor) -> Tensor:
    return tensor + 1


def values_of(value: Any) -> dict[str, float]:
    return {path: tensor.sum().item() for path, tensor in iter_tensors(value)}


@pytest.mark.parametrize("make", [*MODIFIABLE.values(), *READ_ONLY.values()], ids=[*MODIFIABLE, *READ_ONLY])
def test_map_copies_the_containers_of_any_class(make: Callable[..., Any]) -> None:
    value = make(x=torch.zeros(1), y=torch.ones(1))
    new = map_tensors(value, lambda path, tensor: tensor + 5 if path == "x" else tensor)
    assert type(new) is type(value)
    assert values_of(new) == {"x": 5.0, "y": 1.0}
    assert values_of(value) == {"x": 0.0, "y": 1.0}


@pytest.mark.parametrize("make", [*MODIFIABLE.values(), *READ_ONLY.values()], ids=[*MODIFIABLE, *READ_ONLY])
def test_container_of_the_caller_is_changed_in_place_or_copied(make: Callable[..., Any]) -> None:
    value = make(x=torch.zeros(1), y=torch.ones(1))
    new = map_tensors((value, torch.zeros(1)), plus_one, in_place={"batch": [value]})[0]
    assert values_of(new) == {"x": 1.0, "y": 2.0}
    assert (new is value) == (make in MODIFIABLE.values())
    assert new is value or values_of(value) == {"x": 0.0, "y": 1.0}


@pytest.mark.parametrize("make", [list, deque, UserList], ids=lambda make: make.__name__)
def test_sequences_keep_their_class(make: Callable[..., Any]) -> None:
    value = make([torch.zeros(1), None, (torch.ones(1),)])
    new = map_tensors(value, plus_one)
    assert (type(new), values_of(new)) == (make, {"0": 1.0, "2.0": 2.0})
    assert values_of(value) == {"0": 0.0, "2.0": 1.0}


def test_batch_of_graphs_keeps_its_structure() -> None:
    from geometric import Batch

    edges = torch.tensor([[0, 1], [1, 0]])
    batch = Batch.from_data_list([graph(x=torch.zeros(2, 3), edge_index=edges)] * 2)
    assert [path for path, _ in iter_tensors(batch)] == [*batch.to_dict()]
    new = map_tensors(batch, lambda path, tensor: tensor + 1 if path == "x" else tensor)
    assert (new.num_graphs, new.x.sum().item(), batch.x.sum().item()) == (2, 12.0, 0.0)


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"a": x}, Node], ids=["list", "tuple", "dict", "object"]
)
def test_depth_is_not_limited(wrap: Callable[[Any], Any]) -> None:
    tensor = torch.zeros(1)
    value: Any = tensor
    for _ in range(DEPTH):
        value = wrap(value)
    (path,) = [path for path, _ in iter_tensors(value)]
    assert path.count(".") == DEPTH - 1
    assert map_tensors(value, lambda _, tensor: tensor) is value
    new = map_tensors(value, plus_one)
    assert values_of(new) == {path: 1.0}
    assert tensor.item() == 0.0
    assert len(structure(value)) < 2000
    assert to_device(value, torch.device("cpu")) is value
    assert number_of_samples(value) == 1


def test_cyclic_references_are_visited_once_and_kept() -> None:
    root = Node(torch.zeros(1))
    root.children = [Node(torch.full((1,), float(i)), root) for i in (1, 2)]
    assert values_of(root) == {"x": 0.0, "children.0.x": 1.0, "children.1.x": 2.0}
    assert map_tensors(root, lambda _, tensor: tensor) is root
    new = map_tensors(root, lambda path, tensor: tensor + 10 if path == "children.1.x" else tensor)
    assert new is not root
    assert values_of(new) == {"x": 0.0, "children.0.x": 1.0, "children.1.x": 12.0}
    assert all(child.parent is new for child in new.children)
    assert all(child.parent is root for child in root.children)
    assert structure(root).startswith("Node(x=float32 [1], parent=NoneType, children=[Node(x=float32 [1], parent=...")
    assert map_tensors(root, plus_one, in_place=root) is root
    assert values_of(root) == {"x": 1.0, "children.0.x": 2.0, "children.1.x": 3.0}


def test_cycle_through_tuples_and_read_only_mappings_is_kept() -> None:
    value: dict[str, Any] = {"t": torch.zeros(1)}
    value |= {"own": (value, [value]), "view": MappingProxyType(value)}
    new = map_tensors(value, plus_one)
    assert new["own"][0] is new
    assert new["own"][1][0] is new
    assert new["view"]["t"].item() == 1.0
    assert value["own"][0] is value


def test_shared_container_is_copied_once() -> None:
    shared = {"t": torch.zeros(1)}
    value: Any = [shared]
    for _ in range(100):  # 2 ** 100 paths
        value = (value, value)
    assert len(values_of(value)) == 1
    new = map_tensors(value, plus_one)
    while isinstance(new, tuple):
        assert new[0] is new[1]
        new = new[0]
    assert (new[0]["t"].item(), shared["t"].item()) == (1.0, 0.0)


def test_iterators_are_not_consumed() -> None:
    tensors = iter([torch.zeros(1)])
    assert list(iter_tensors([tensors, {"a": map(abs, [1])}])) == []
    assert next(tensors).item() == 0.0


def test_writes_to_a_copy_reach_the_original() -> None:
    x, kept, replaced = torch.zeros(1), torch.ones(1), torch.full((1,), 2.0)
    node = Node(x)
    node.children.append(node)
    original = {"x": x, "gone": kept, "old": kept, "items": [x, kept, kept], "node": node}
    new = map_tensors(original, lambda _, tensor: tensor + 1 if tensor is x else tensor)
    copies = copied_containers({"0": original}, {"0": new})
    del new["gone"]
    new["old"] = new["h"] = replaced
    new["self"] = new
    new["items"][1] = replaced
    new["items"].append(replaced)
    new["items"].append(kept)
    new["node"].parent = new["node"]
    new["node"].state = replaced  # an attribute that is not a field
    write_back(copies)
    assert [*original] == ["x", "old", "items", "node", "h", "self"]
    assert original["x"] is x
    assert original["old"] is original["h"] is replaced
    assert original["self"] is original
    assert all(
        found is wanted for found, wanted in zip(original["items"], [x, replaced, kept, replaced, kept], strict=True)
    )
    assert node.parent is node.children[0] is original["node"] is node
    assert node.x is x
    assert node.state is replaced  # type: ignore[attr-defined]


def test_deletions_from_a_copy_reach_the_original() -> None:
    x = torch.zeros(1)
    original = ([x, x, x], SimpleNamespace(x=x, y=x))
    new = map_tensors(original, plus_one)
    copies = copied_containers({"0": original}, {"0": new})
    del new[0][1:]
    del new[1].y
    write_back(copies)
    assert original[0] == [x]
    assert vars(original[1]) == {"x": x}
