"""The parts of a transformer, found by the structure of a model: its modules, the shapes of their weights, and their names.

Nothing is called. Names count less than shapes, since every library has its own. The rules:

- `attention`: `nn.MultiheadAttention`, and modules whose children or own matrices are projections to queries, keys and values: by
  their names (`q_proj`, `to_k`, `value`, `wq`; together `qkv`, `kv`, `query_key_value`, `in_proj_weight`), or one matrix with three
  times as many outputs as inputs at which a name contains `attn` or similar. Of nested ones, the outermost. As the last resort, the
  innermost modules whose name or class contains `attention` or similar and which contain at least three matrices.
- `block`: around each attention, the innermost called module that is an item of a ModuleList, ModuleDict or Sequential, or one of
  several siblings of the same class, and that contains an MLP or a mixture of experts; without any MLP, that contains the attention.
  Siblings of the same class, and items of the same list with an MLP, are blocks too. In a model without any of these, the innermost
  module with one attention and an MLP.
- `mlp`: the feed-forward part of a block outside its attentions: the innermost called module with a matrix from d to h features
  (or 2 h, for a gated unit) and a later one from h to d, or the module with a router and its experts. If only the block itself holds
  both matrices, the last of them: its output is that of the MLP.
- `norm`: LayerNorm and RMSNorm of torch.nn, and modules without submodules whose class is named `...Norm...` and whose parameters, if
  any, are vectors; not BatchNorm, GroupNorm and InstanceNorm.
- `embedding`: `nn.Embedding` and modules without submodules whose class is named `...Embedding` and whose only parameter is a
  matrix `weight`; with more than one row, and outside of attentions, where they are relative positions.
- `head`: the matrix to classes or to the vocabulary, outside of blocks: those whose weight has the shape of an embedding outside of
  blocks, tied or not. Without one, the last matrix after the last block, if no name contains `pool`, and its siblings of the same shape.
- `experts`: the items of a list of at least two modules of the same class with matrices, or the module with parameters
  [experts, ., .], if a router is found. With parameters of three dimensions, one module contains all experts.
- `router`: a matrix with as many outputs as there are experts, in a module next to the experts (or their parent), whose name
  contains `gate`, `rout` or `switch`; with any name next to a module whose name contains `expert`.
- `model`: the whole model, or the outermost modules that are called if it is a ModuleList or ModuleDict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parameter import UninitializedParameter

from ..fields.field_types import StructureName
from .modules import Layer, Layers

ATTENTION = re.compile("att(entio)?n|mha", re.IGNORECASE)
_AFFIX = r"(?:to|w|in|linear|lin|attn|att|c|fc|conv|proj|projection|mat|dense)"
_PROJECTION = re.compile(
    rf"(?:{_AFFIX}_?)*?(query_key_value|query_key|key_value|quer(?:y|ies)|keys?|values?|qkv|kqv|qk|kv|[qkv])s?"
    r"(?:_?(?:a|b|with_mqa|head|heads|proj|projection|projector|lin|linear|layer|net|conv|dense|weight|w|mat|matrix|transform|bn))*"
)
_ROUTER = re.compile("gate|gating|rout|switch", re.IGNORECASE)
_EXPERT = re.compile("expert", re.IGNORECASE)
_OTHER_NORM = re.compile("batch|group|instance|weight|spectral|local", re.IGNORECASE)
_LEVELS = 3  # how far above its experts a router is searched


def find_structure(layers: Layers, names: Iterable[StructureName]) -> dict[StructureName, list[Layer]]:
    """Return the modules of a model with these roles, in the order of the model."""
    if layers not in _FOUND:
        _FOUND[layers] = _Structure(layers)
    structure = _FOUND[layers]
    found = {name: {id(layer) for layer in getattr(structure, name)} for name in names}
    return {name: [layer for layer in layers if id(layer) in keys] for name, keys in found.items()}


@dataclass(frozen=True)
class _Matrix:
    """A matrix, and the layer that multiplies by it."""

    layer: Layer
    inputs: int
    outputs: int


class _Structure:
    def __init__(self, layers: Layers) -> None:
        self.layers = [layer for layer in layers if layer.parametrized is None]
        self.by_name = {layer.name: layer for layer in self.layers}
        self.children: dict[str, list[Layer]] = {}
        for layer in self.layers[1:]:
            self.children.setdefault(layer.name.rpartition(".")[0], []).append(layer)

    def inside(self, layer: Layer, skip: Callable[[Layer], bool] = lambda layer: False) -> Iterator[Layer]:
        """Yield a layer and those below it, in order, without the subtrees to skip."""
        yield layer
        for child in self.children.get(layer.name, ()):
            if not skip(child):
                yield from self.inside(child, skip)

    def above(self, layer: Layer) -> Iterator[Layer]:
        name = layer.name
        while name:
            name = name.rpartition(".")[0]
            yield self.by_name[name]

    @cached_property
    def model(self) -> list[Layer]:
        return [*self._called(self.layers[0])]

    def _called(self, layer: Layer) -> Iterator[Layer]:
        for each in self.children.get(layer.name, ()) if layer.is_container else ():
            yield from self._called(each)
        if not layer.is_container:
            yield layer

    def is_in(self, layer: Layer, parts: Iterable[Layer]) -> bool:
        keys = {id(part) for part in parts}
        return id(layer) in keys or any(id(other) in keys for other in self.above(layer))

    @cached_property
    def matrix(self) -> dict[str, _Matrix]:
        """The layers that multiply by one matrix (Linear, convolution, Conv1D of transformers, look-alikes), by name."""
        alone = [
            layer for layer in self.layers if "weight" in layer.module._parameters or not self.children.get(layer.name)
        ]
        sizes = {layer.name: _sizes(layer.module) for layer in alone}
        return {name: _Matrix(self.by_name[name], *size) for name, size in sizes.items() if size is not None}

    def matrices(self, layer: Layer, skip: Callable[[Layer], bool] = lambda layer: False) -> list[_Matrix]:
        return [self.matrix[part.name] for part in self.inside(layer, skip) if part.name in self.matrix]

    @cached_property
    def attention(self) -> list[Layer]:
        named = [layer for layer in self.layers if not layer.is_container and self._projects(layer)]
        outermost = [layer for layer in named if not any(other in named for other in self.above(layer))]
        fallback = [
            layer
            for layer in self.layers
            if not layer.is_container
            and ATTENTION.search(f"{layer.name.rpartition('.')[2]} {layer.type}")
            and sum(isinstance(part.layer.module, nn.Linear) for part in self.matrices(layer)) >= 3
            and not self.is_in(layer, outermost)
        ]
        inner = [*outermost, *fallback]
        return outermost + [
            layer for layer in fallback if not any(other is not layer and layer in self.above(other) for other in inner)
        ]

    def _projects(self, layer: Layer) -> bool:
        if isinstance(layer.module, nn.MultiheadAttention):
            return True
        own = {name: parameter for name, parameter in layer.own_parameters() if _dimensions(parameter) >= 2}
        children = [child for child in self.children.get(layer.name, ()) if self._holds_matrix(child)]
        names = [*own, *(child.name.rpartition(".")[2] for child in children)]
        if {*"qkv"} <= {letter for name in names for letter in _letters(name)}:
            return True
        fused = [self.matrix[child.name] for child in children if child.name in self.matrix]
        return any(
            part.outputs == 3 * part.inputs and ATTENTION.search(f"{part.layer.name.rpartition('.')[2]} {layer.type}")
            for part in fused
        ) or any(name == "in_proj_weight" for name in own)

    def _holds_matrix(self, layer: Layer) -> bool:
        return any(_dimensions(parameter) >= 2 for parameter in layer.module.parameters())

    @cached_property
    def block(self) -> list[Layer]:
        blocks: dict[int, Layer] = {}
        around: list[Layer] = []
        for attention in self.attention:
            path = [layer for layer in (attention, *self.above(attention)) if layer.name and not layer.is_container]
            items = [layer for layer in path if self._is_repeated(layer)]
            proper = [layer for layer in items if layer is not attention]
            found = next((layer for layer in items if self.feed_forward(layer)), None) or next(iter(proper), None)
            if found is not None:
                blocks |= {id(layer): layer for layer in self._alike(found)}
                if self._parent(found).is_container:  # a hybrid model has blocks without attention
                    siblings = [other for other in self._siblings(found) if not other.is_container]
                    blocks |= {id(layer): layer for layer in siblings if self.feed_forward(layer)}
            around += [layer for layer in path if self.feed_forward(layer)][:1]
        several = {id(layer) for layer in around if sum(self.is_in(each, [layer]) for each in self.attention) > 1}
        return list(blocks.values()) or [layer for layer in around if id(layer) not in several]

    def _parent(self, layer: Layer) -> Layer:
        return self.by_name[layer.name.rpartition(".")[0]]

    def _siblings(self, layer: Layer) -> list[Layer]:
        """Return the children of the parent of a layer, which include the layer."""
        return self.children[self._parent(layer).name]

    def _alike(self, layer: Layer) -> list[Layer]:
        return [other for other in self._siblings(layer) if type(other.module) is type(layer.module)]

    def _is_repeated(self, layer: Layer) -> bool:
        parent = self._parent(layer)
        return isinstance(parent.module, nn.Sequential) or parent.is_container or len(self._alike(layer)) > 1

    @cached_property
    def mlp(self) -> list[Layer]:
        return [layer for block in self.block for layer in self.feed_forward(block)]

    def feed_forward(self, block: Layer) -> list[Layer]:
        """Return the feed-forward part of a block: MLPs, and modules with a router and experts."""
        mixtures = [layer for layer, _, _ in self.mixtures if self.is_in(layer, [block])]
        skipped = [*mixtures, *(layer for layer in self.attention if layer is not block)]
        if mixtures and self.is_in(block, mixtures):
            return mixtures
        return [*mixtures, *self._perceptrons(block, block, skipped)]

    def _perceptrons(self, layer: Layer, block: Layer, skipped: list[Layer]) -> list[Layer]:
        is_attention = layer in self.attention

        def skip(part: Layer) -> bool:
            return part in skipped or (is_attention and _letters(part.name.rpartition(".")[2]) != "")

        downs = _down(self.matrices(layer, skip), equal=not is_attention)
        if not downs:
            return []
        below = [part for part in self.children.get(layer.name, ()) if not skip(part)]
        deeper = [found for part in below for found in self._perceptrons(part, block, skipped)]
        if deeper:
            return deeper
        return [downs[-1].layer] if layer is block or layer.is_container else [layer]

    @cached_property
    def mixtures(self) -> list[tuple[Layer, Layer, list[Layer]]]:
        """Each module that contains a router and its experts, with the router and the experts."""
        found: list[tuple[Layer, Layer, list[Layer]]] = []
        for layer in self.layers:
            count, experts = self._experts_in(layer)
            if count < 2:
                continue
            for depth, parent in zip(range(_LEVELS), (layer, *self.above(layer)), strict=False):
                router = self._router(parent, layer, count) if depth or not layer.is_container else None
                if router is not None and not parent.is_container:
                    found.append((parent, router, experts))
                    break
        return found

    def _experts_in(self, layer: Layer) -> tuple[int, list[Layer]]:
        """Return the number of experts that a layer contains directly, and the modules that compute them."""
        counts = {parameter.shape[0] for _, parameter in layer.own_parameters() if _dimensions(parameter) == 3}
        if len(counts) == 1 and not hasattr(layer.module, "kernel_size"):
            return counts.pop(), [layer]
        items = self.children.get(layer.name, [])
        is_list = layer.is_container or isinstance(layer.module, nn.ModuleList | nn.ModuleDict)
        alike = len({type(item.module) for item in items}) == 1 and not isinstance(items[0].module, nn.ModuleList)
        if is_list and alike and all(self._holds_matrix(item) for item in items):
            return len(items), items
        return 0, []

    def _router(self, parent: Layer, experts: Layer, count: int) -> Layer | None:
        """Return the router of experts inside a module; None without one."""
        is_named = _EXPERT.search(f"{experts.name.rpartition('.')[2]} {experts.type}") is not None
        for part in self.matrices(parent, lambda layer: layer is experts):
            name = part.layer.name.removeprefix(parent.name)
            if part.outputs == count and (is_named or _ROUTER.search(f"{name} {part.layer.type}")):
                return part.layer
        return None

    @cached_property
    def router(self) -> list[Layer]:
        return [router for _, router, _ in self.mixtures]

    @cached_property
    def experts(self) -> list[Layer]:
        return [expert for _, _, experts in self.mixtures for expert in experts]

    @cached_property
    def norm(self) -> list[Layer]:
        return [layer for layer in self.layers if not self.children.get(layer.name) and _is_norm(layer)]

    @cached_property
    def embedding(self) -> list[Layer]:
        return [layer for layer in self.layers if self._rows(layer) > 1 and not self.is_in(layer, self.attention)]

    def _rows(self, layer: Layer) -> int:
        parameters = dict(layer.own_parameters())
        alike = layer.type.endswith("Embedding") and [*parameters] == ["weight"] and not self.children.get(layer.name)
        is_embedding = isinstance(layer.module, nn.Embedding) or alike
        weight = parameters.get("weight")
        return int(weight.shape[0]) if is_embedding and weight is not None and _dimensions(weight) == 2 else 0

    @cached_property
    def head(self) -> list[Layer]:
        outside = [part for part in self.matrix.values() if not self.is_in(part.layer, [*self.block, *self.attention])]
        heads = [part for part in outside if "pool" not in f"{part.layer.name} {part.layer.type}".lower()]
        tables = {tuple(dict(layer.own_parameters())["weight"].shape) for layer in self.embedding}
        tables -= {shape for shape in tables if shape[0] == shape[1]}
        if tied := [part.layer for part in heads if (part.outputs, part.inputs) in tables]:
            return tied
        last = self.layers.index(self.block[-1]) if self.block else len(self.layers)
        heads = [part for part in heads if self.layers.index(part.layer) > last]
        if not heads or heads[-1] is not outside[-1]:
            return []
        parent, shape = heads[-1].layer.name.rpartition(".")[0], (heads[-1].outputs, heads[-1].inputs)
        return [
            part.layer
            for part in heads
            if part.layer.name.rpartition(".")[0] == parent and (part.outputs, part.inputs) == shape
        ]


_FOUND: WeakKeyDictionary[Layers, _Structure] = WeakKeyDictionary()  # several specs of one plan use the same parts


def _letters(name: str) -> str:
    """Return which of the projections q, k and v a name stands for: `qkv` for `to_qkv`, `k` for `key`."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.removesuffix(".weight")).lower()
    found = _PROJECTION.fullmatch(words)
    if found is None:
        return "qkv" if words in ("c_attn", "qkv_weight") else ""
    return found[1] if {*found[1]} <= {*"qkv"} else "".join(word[0] for word in found[1].split("_"))


def _sizes(module: nn.Module) -> tuple[int, int] | None:
    """Return the numbers of inputs and of outputs of a module that multiplies by one matrix; None for another module."""
    for first, second in (("in_features", "out_features"), ("in_channels", "out_channels")):
        sizes = getattr(module, first, None), getattr(module, second, None)
        if all(isinstance(size, int) for size in sizes):
            return sizes if getattr(module, "groups", 1) == 1 else None  # type: ignore[return-value]
    weight = module._parameters.get("weight")
    if weight is None or _dimensions(weight) != 2 or hasattr(module, "num_embeddings"):
        return None
    rows, columns = weight.shape
    return (rows, columns) if type(module).__name__ == "Conv1D" else (columns, rows)


def _dimensions(parameter: nn.Parameter) -> int:
    """Return the number of dimensions of a parameter; 0 if its shape is not known before the first call."""
    return 0 if isinstance(parameter, UninitializedParameter) else parameter.dim()


def _down(matrices: list[_Matrix], *, equal: bool) -> list[_Matrix]:
    """Return the matrices from h to d features that follow one from d to h, or to 2 h; h = d only with `equal`."""
    return [
        down
        for position, down in enumerate(matrices)
        if any(up.inputs == down.outputs and up.outputs in (down.inputs, 2 * down.inputs) for up in matrices[:position])
        and (equal or down.inputs != down.outputs)
    ]


def _is_norm(layer: Layer) -> bool:
    if isinstance(layer.module, nn.LayerNorm | nn.RMSNorm):
        return True
    is_vector = all(_dimensions(parameter) <= 1 for _, parameter in layer.own_parameters())
    return "norm" in layer.type.lower() and not _OTHER_NORM.search(layer.type) and is_vector
