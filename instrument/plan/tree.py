"""The module tree of a model with the hooks at each module, and the functions that it calls. Identical blocks are shown once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text
from rich.tree import Tree

from ..formatting import shorten
from ..tables.kinds import ATTENTION_ROLES
from .function_calls import selects
from .hook_plan import HookPlan, Site
from .modules import Layer
from .shape_inference import FunctionInfo, InferredCalls, calls_of, function_calls_of

MAX_FUNCTIONS = 30  # shown for each module
MIN_LINES_SAVED = 2  # the minimum number of lines saved for which identical blocks are combined


@dataclass
class _Node:
    """A module with its children, and a signature that is equal for identical blocks."""

    layer: Layer
    hooks: list[list[str]]
    shapes: str
    sites: tuple[tuple[str, str], ...]
    functions: list[Text]
    children: list[_Node] = field(default_factory=list)
    size: int = 1
    signature: tuple[object, ...] = ()

    @property
    def own_name(self) -> str:
        return self.layer.name.rpartition(".")[2] or "."

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.layer.counted_parameters())

    def compute_signature(self) -> None:
        for node in self.children:
            node.compute_signature()
        self.size = 1 + len(self.functions) + sum(node.size for node in self.children)
        child_signatures = tuple((node.own_name, node.signature) for node in self.children)
        self.signature = (
            *(self.layer.type, self.parameters, self.layer.aliases),
            *(self.shapes, self.sites, tuple(text.plain for text in self.functions), child_signatures),
        )


def module_tree(plan: HookPlan, inferred: InferredCalls, colours: Mapping[str, str]) -> Tree:
    """Build a tree of all modules: types, numbers of parameters, shapes of outputs, and specs in execution order."""
    nodes: dict[str, _Node] = {}
    for layer in plan.layers:
        sites = tuple((site.spec.name, site.own_name) for site in plan.at(layer))
        sites_of_functions = [site for site in plan.at(layer) if site.spec.definition.of_functions]
        functions = list(_functions(sites_of_functions, inferred, colours))
        outputs = [info for call in calls_of(layer.module, "output", inferred) for info in call]
        shapes = shorten([*dict.fromkeys(str(list(info.shape)) for info in outputs)], 3)
        node = nodes[layer.name] = _Node(layer, execution_order(plan, layer), shapes, sites, functions)
        if layer.name:
            parent = layer.name.rpartition(".")[0]
            nodes[parent if parent in nodes else ""].children.append(node)
    root = nodes[""]
    root.compute_signature()
    tree = Tree(_label(root, colours))
    _add_children(tree, root, colours)
    return tree


def _functions(sites: Sequence[Site], inferred: InferredCalls, colours: Mapping[str, str]) -> Iterator[Text]:
    """Yield lines with the functions that a module calls, in the order of execution, with the shapes of their results.

    For the roles of attention, these are the functions that compute it, with the shapes of the weights.
    """
    groups: dict[tuple[str, ...], list[Site]] = {}
    calls: dict[tuple[str, ...], list[FunctionInfo]] = {}
    for site in sites:
        listed = "output" if site.spec.tensor_role not in ATTENTION_ROLES else site.spec.tensor_role
        functions = [each for each in next(iter(function_calls_of(site, inferred)), []) if each.tensors(listed)]
        key = tuple(map(_describe, functions))
        groups.setdefault(key, []).append(site)
        calls[key] = functions
    for key, group in groups.items():
        if not key:
            continue
        names = [(site.spec.name, colours[site.spec.name]) for site in group]
        line = Text(", ", "dim").join(Text(*name) for name in names).append(": ", "dim")
        for i, function in enumerate(calls[key][:MAX_FUNCTIONS]):
            selecting = (site.spec for site in group if selects(site.spec, function.path.partition(".")[0]))
            spec = next(selecting, None)
            line.append(", " if i else "", "dim")
            line.append(_describe(function), "dim" if spec is None else colours[spec.name])
        if len(key) > MAX_FUNCTIONS:
            line.append(f", ... ({len(key)} in all)", "dim")
        yield line


def _describe(function: FunctionInfo) -> str:
    shapes = dict.fromkeys(str(list(info.shape)) for info in function.attention or function.outputs)
    return f"{function.path} {shorten([*shapes], 3)}"


def _add_children(tree: Tree, node: _Node, colours: Mapping[str, str]) -> None:
    for line in node.functions:
        tree.add(line)
    _add_nodes(tree, node.children, colours)


def _add_nodes(tree: Tree, nodes: Sequence[_Node], colours: Mapping[str, str]) -> None:
    for first, others in _group_identical(nodes):
        _add_children(tree.add(_label(first, colours)), first, colours)
        if others:
            names = f"{others[0].own_name} ... {others[-1].own_name}" if len(others) > 1 else others[0].own_name
            tree.add(Text.assemble(names, (f" {first.layer.type}  like {first.own_name}", "dim")))


def _group_identical(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, list[_Node]]]:
    """Group adjacent identical nodes if that saves enough lines. Yield the first of each group and the others."""
    for _, group in groupby(nodes, key=lambda node: node.signature):
        first, *others = group
        if sum(node.size for node in others) - 1 >= MIN_LINES_SAVED:
            yield first, others
        else:
            yield from ((node, []) for node in (first, *others))


def execution_order(plan: HookPlan, layer: Layer) -> list[list[str]]:
    """Return the specs at a layer, grouped by kind and role. Those of a group run in the order of the configuration."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in plan.at(layer):
        names = places.setdefault((site.spec.kind, site.spec.tensor_role), [])
        if site.spec.name not in names:
            names.append(site.spec.name)
    return list(places.values())


def _label(node: _Node, colours: Mapping[str, str]) -> Text:
    layer = node.layer
    label = Text.assemble((node.own_name, "" if node.hooks else "dim"), " ", (layer.type, "dim"))
    if node.parameters:
        label.append(f"  {node.parameters:,} parameters", "dim")
    if node.shapes:
        label.append(f"  {node.shapes}", "dim")
    if layer.aliases:
        label.append(f"  also {', '.join(layer.aliases)}", "dim")
    for i, names in enumerate(node.hooks):
        for j, hook in enumerate(names):
            label.append(" → " if j else ", " if i else "  ")
            label.append(hook, colours[hook])
    return label
