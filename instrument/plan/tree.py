"""The module tree of a model with the hooks at each module. Identical blocks are shown once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text
from rich.tree import Tree

from .modules import Layer
from .sites import HookPlan

LEAST_SAVED = 2  # the minimum number of lines saved for which identical blocks are combined


@dataclass
class _Node:
    """A module with its children, and a signature that is equal for identical blocks."""

    layer: Layer
    hooks: list[list[str]]
    sites: tuple[tuple[str, str], ...]
    below: list[_Node] = field(default_factory=list)
    size: int = 1
    signature: tuple[object, ...] = ()

    @property
    def own(self) -> str:
        return self.layer.name.rpartition(".")[2] or "."

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for _, parameter in self.layer.own_parameters())

    def sign(self) -> None:
        """Compute the signatures of this node and of all its descendants."""
        for node in self.below:
            node.sign()
        self.size = 1 + sum(node.size for node in self.below)
        of_those_below = tuple((node.own, node.signature) for node in self.below)
        self.signature = (self.layer.type, self.parameters, self.layer.aliases, self.sites, of_those_below)


def module_tree(plan: HookPlan, colours: Mapping[str, str]) -> Tree:
    """Build a tree of all modules with their types, numbers of parameters, and matching specs in execution order."""
    nodes: dict[str, _Node] = {}
    for layer in plan.layers:
        sites = tuple((site.spec.name, site.own_name) for site in plan.at(layer))
        node = nodes[layer.name] = _Node(layer, acting_order(plan, layer), sites)
        if layer.name:
            parent = layer.name.rpartition(".")[0]
            nodes[parent if parent in nodes else ""].below.append(node)
    root = nodes[""]
    root.sign()
    tree = Tree(_label(root, colours))
    _grow(tree, root.below, colours)
    return tree


def _grow(tree: Tree, nodes: Sequence[_Node], colours: Mapping[str, str]) -> None:
    for first, others in _alike(nodes):
        _grow(tree.add(_label(first, colours)), first.below, colours)
        if others:
            names = f"{others[0].own} ... {others[-1].own}" if len(others) > 1 else others[0].own
            tree.add(Text.assemble(names, (f" {first.layer.type}  like {first.own}", "dim")))


def _alike(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, list[_Node]]]:
    """Group adjacent identical nodes if that saves enough lines. Yield the first of each group and the others."""
    for _, group in groupby(nodes, key=lambda node: node.signature):
        first, *others = group
        if sum(node.size for node in others) - 1 >= LEAST_SAVED:
            yield first, others
        else:
            yield from ((node, []) for node in (first, *others))


def acting_order(plan: HookPlan, layer: Layer) -> list[list[str]]:
    """Return the specs at a layer, grouped by kind and role. Those of a group run in the order of the configuration."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in plan.at(layer):
        names = places.setdefault((site.spec.kind, site.spec.tensor_role), [])
        if site.spec.name not in names:
            names.append(site.spec.name)
    return list(places.values())


def _label(node: _Node, colours: Mapping[str, str]) -> Text:
    layer = node.layer
    label = Text.assemble((node.own, "" if node.hooks else "dim"), " ", (layer.type, "dim"))
    if node.parameters:
        label.append(f"  {node.parameters:,} parameters", "dim")
    if layer.aliases:
        label.append(f"  also {', '.join(layer.aliases)}", "dim")
    for i, names in enumerate(node.hooks):
        for j, hook in enumerate(names):
            label.append(" → " if j else ", " if i else "  ")
            label.append(hook, colours[hook])
    return label
