"""How the tensors of a model are placed on the device mesh of its processes.

A sharded tensor (DTensor) knows its placement. A plain tensor in a model with tensor parallelism can be complete, or a shard, or a
summand. Its placement is, in this order:

1. what the caller declares for its module, for modules that divide their work without DTensors (as Megatron-LM does);
2. what a `ParallelStyle` of torch.distributed.tensor.parallel makes of the outputs and inputs of its module;
3. that of the shards from which it was computed, by its graph: a tensor that depends on no shard is the same in all processes, and
   elementwise operations keep the placement.

Otherwise it is unknown: each process then writes its own rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..config.base import ObservationSpec
from ..config.hook_specs import RecordSpec
from ..config.parallel import Declared
from ..errors import ConfigError, HookError, Problem, raise_problems
from ..fields.globs import matches
from ..plan.hook_plan import HookPlan, Site, no_such_layer
from ..plan.modules import Layer
from ..tables.kinds import Kind
from ..values.dtensor import Shards, is_sharded, own_rank

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_ACTIVATIONS = ("input", "output")
_BOUNDARY = "_ToTorchTensorBackward"  # the node of the graph that makes a local tensor of a DTensor
_OPERATIONS = (
    "Abs Add Alias Clone Copy Div Elu Exp Gelu Hardswish Hardtanh LeakyRelu Log MaskedFill Mul NativeDropout Neg Pow Relu Rsub Sigmoid "
    "Silu Softplus Sqrt Sub Tanh ToCopy Where"
)
# Functions of PyTorch and of hooks that return the tensor, or an elementwise function of it.
_FUNCTIONS = "BackwardHookFunction RegisterPostBackwardFunction _DDPSink _Gradient _Reverse _StraightThrough"
_ELEMENTWISE = {f"{name}Backward0" for name in _OPERATIONS.split()} | {f"{name}Backward" for name in _FUNCTIONS.split()}
# The names of operations of PyTorch. Other functions, such as reentrant checkpoints and compiled code, hide the shards that they use.
_OPERATION = re.compile(r"\w+Backward\d+|(torch::autograd::)?CopySlices")


class MeshDim(NamedTuple):
    """One dimension of a mesh: its name, and the ranks of the processes that differ from this one only along it."""

    name: str
    ranks: tuple[int, ...]

    @property
    def coordinate(self) -> int:
        return self.ranks.index(own_rank())

    def covers(self, other: MeshDim) -> bool:
        """Whether it is another one, or contains it, as the dimension over which `fully_shard` and tensor parallelism flatten two."""
        return self.name == other.name or (len(other.ranks) > 1 and {*other.ranks} <= {*self.ranks})


def mesh_dims(mesh: DeviceMesh) -> list[MeshDim]:
    """Return the dimensions of a mesh that contains this process. Those without names have their indices."""
    at, names = mesh.get_coordinate(), mesh.mesh_dim_names or [str(dim) for dim in range(mesh.ndim)]
    assert at is not None, "this process is in the mesh"
    ranks: Any = mesh.mesh
    lines = (ranks[(*at[:dim], slice(None), *at[dim + 1 :])] for dim in range(mesh.ndim))
    return [MeshDim(name, tuple(line.tolist())) for name, line in zip(names, lines, strict=True)]


class Style(NamedTuple):
    """What a `ParallelStyle` does with a module: its mesh, the placements of the plain tensors at its inputs and outputs, by path, and
    whether its parameters are sharded evenly. If not, its tensors are not either, and their complete shape is unknown.
    """

    mesh: DeviceMesh
    inputs: Mapping[str, Placement]
    outputs: Mapping[str, Placement]
    is_even: bool


class MeshLayout:
    """How the tensors of a model are placed.

    Args:
        declared: The placements of tensors by module. Later patterns replace those of earlier ones. Mesh dimensions that an entry
            does not name replicate.
        data: The dimensions of the mesh along which the processes are known to have other samples, also if experts are divided there.

    Raises:
        ConfigError: A declared placement is invalid, or matches no module.
    """

    def __init__(
        self,
        layers: Iterable[Layer],
        mesh: DeviceMesh,
        declared: Declared | None = None,
        *,
        data: Collection[str] = (),
        reduces: bool = False,
    ) -> None:
        from torch.distributed.tensor import Replicate

        self.reduces = reduces
        self.unknown: dict[tuple[str, str, str], None] = {}  # the sites with a tensor of unknown placement
        self._dims = mesh_dims(mesh)
        styles = {layer.module: style for layer in layers if (style := style_of(layer.module)) is not None}
        self._styles = {
            module: style for module, style in styles.items() if style.inputs or style.outputs or not style.is_even
        }
        self._declared = self._read(layers, declared or {})
        parsed = [each for entries in self._declared.values() for each in entries.values()]
        meshes = {id(style.mesh): style.mesh for style in styles.values()}
        groups = [{*each.mesh.flatten().tolist()} for each in meshes.values()] + _groups_of_shards(layers)
        known = [{*style.mesh.mesh.flatten().tolist()} for style in self._styles.values()]
        names = {name for entry in parsed for name in entry}
        self._model = [
            dim
            for dim in self._dims
            if dim.name in names
            or (dim.name not in data and len(dim.ranks) > 1 and any({*dim.ranks} <= group for group in groups))
        ]
        # A style without layouts, such as that of experts, does not tell whether the processes have the same samples. Shards without one,
        # such as those of Transformers, do not either.
        self._has_unknown_dims = any(
            dim.name not in names and not any({*dim.ranks} <= group for group in known) for dim in self._model
        )
        self.is_model_parallel = bool(self._model)  # whether processes divide the tensors of a sample
        self._replicate = Replicate()
        self._replicated = tuple(self._replicate for _ in self._model)
        self.batches = math.prod(len(dim.ranks) for dim in self._dims if dim not in self._model)
        # The graph shows only what DTensors shard.
        self._infers = not any(
            not placement.is_replicate() and (name not in _ACTIVATIONS or not self._styles)
            for entries in self._declared.values()
            for name, entry in entries.items()
            for placement in entry.values()
        )
        self._mesh = mesh
        if len(meshes) == 1 and not names:
            self._mesh = next(iter(meshes.values()))
        elif len(self._model) < len(self._dims) and self._model:
            self._mesh = mesh[tuple(dim.name for dim in self._model)]
        self._found: dict[tuple[Any, ...], tuple[Placement, ...] | None] = {}
        self._cached = lru_cache(maxsize=1024)(self._shards)
        # Without frozen parameters, each tensor that depends on a shard has a graph.
        self._all_trained = all(
            parameter.requires_grad for module in self._styles for parameter in module.parameters(recurse=False)
        )

    def _read(self, layers: Iterable[Layer], declared: Declared) -> dict[nn.Module, dict[str, dict[str, Placement]]]:
        found: dict[nn.Module, dict[str, dict[str, Placement]]] = {}
        problems, names = [], [dim.name for dim in self._dims]
        for pattern, tensors in declared.items():
            where = f"placement.{pattern}"
            matched = [layer for layer in layers if any(matches(pattern, name) for name in layer.names)]
            if not matched:
                problems.append(no_such_layer(pattern, layers, "placement"))
            for tensor, along in tensors.items():
                for name in along.keys() - {*names}:
                    problems.append(Problem(f"{where}.{tensor}", "the mesh has no such dimension", name, allowed=names))
                for layer in matched:
                    allowed = (*_ACTIVATIONS, *(name for name, _ in layer.own_parameters()))
                    if tensor not in allowed:
                        message = f"module {layer.label!r} has no such tensor"
                        problems.append(Problem(f"{where}.{tensor}", message, tensor, allowed=allowed))
                    found.setdefault(layer.module, {})[tensor] = {name: _parsed(text) for name, text in along.items()}
        raise_problems(problems)
        return found

    def of_plain(self, site: Site) -> Shards:
        """Return the placement of plain tensors at a site, if it does not depend on the tensor."""
        return self._cached(site.spec.definition, self._mesh, self._replicated)

    def of(self, tensor: Tensor, site: Site, path: str, call: int = 0, *, is_complete: bool = False) -> Shards:
        """Return the placement of a tensor at a site. `is_complete`: whether it was gathered from its shards."""
        definition, mesh, placements = site.spec.definition, self._mesh, None
        if is_sharded(tensor):
            mesh, placements = tensor.device_mesh, tensor.placements
        elif definition.family not in BATCH_FAMILIES:
            placements = self._of_entry(site, site.own_name, tensor.dim()) or self._replicated
        elif (placements := self._of_batch(tensor, site, path, call)) is None:
            self.unknown[site.spec.name, site.spec.kind, site.layer.label] = None
        if is_complete and placements is not None:
            placements = tuple(self._replicate for _ in placements)
        return self._cached(definition, mesh, placements, tensor.shape, is_plain=not is_sharded(tensor))

    def _shards(
        self,
        definition: Kind,
        mesh: DeviceMesh,
        placements: tuple[Placement, ...] | None,
        size: Sequence[int] = (),
        *,
        is_plain: bool = True,
    ) -> Shards:
        """Return the placement of a tensor of a kind.

        Args:
            mesh, placements: How it is sharded; None if that is unknown.
            size: Its shape, which is that of the shard for a plain tensor.
        """
        from torch.distributed.tensor import Partial, Shard

        known = self._model if is_plain else mesh_dims(mesh)
        # The dimensions of the mesh with their placements, and whether processes along them have other samples.
        along: list[tuple[MeshDim, Placement | None, bool]]
        along = [(dim, None if placements is None else placements[at], False) for at, dim in enumerate(known)]
        covered = set() if is_plain else {*mesh.mesh.flatten().tolist()}
        is_of_batch, is_of_micro_step = definition.family in BATCH_FAMILIES, definition.frequency == "micro_step"
        for dim in self._dims:
            if dim in known or (len(dim.ranks) > 1 and {*dim.ranks} <= covered):
                continue
            has_other_samples = dim not in self._model and (is_of_batch or is_of_micro_step)
            # Gradients of parameters are summands until they are reduced.
            usual = (Shard(0) if is_of_batch else Partial()) if has_other_samples else self._replicate
            along.append((dim, usual, has_other_samples))
        along.sort(key=lambda entry: next((at for at, dim in enumerate(self._dims) if entry[0].covers(dim)), 0))
        dims, largest, shape = set(), [*size], [*size]
        for placement, count in zip(placements or (), mesh.shape if placements else (), strict=True):
            if (at := getattr(placement, "dim", None)) is not None and count > 1 and size:
                dims.add(at)
                if is_plain:
                    shape[at] *= count
                else:
                    largest[at] = -(-largest[at] // count)
        batch = 0
        for dim in (dim for dim, _, has_other_samples in along if has_other_samples):
            batch = batch * len(dim.ranks) + dim.coordinate
        batches = math.prod(len(dim.ranks) for dim, _, has_other_samples in along if has_other_samples)
        others = [placement for dim, placement, is_data in along if not is_data and len(dim.ranks) > 1]
        is_local = None in others or (batches > 1 and not is_of_batch)  # of one process, and not merged
        is_shard = any(placement is not None and not placement.is_replicate() for placement in others)
        return Shards(
            tuple(sorted(dims)),
            tuple(largest),
            tuple(shape),
            ",".join(dim.name for dim, *_ in along),
            ",".join(_label(placement) for _, placement, _ in along),
            "local" if is_local else "shard" if is_shard else "local" if batches > 1 else "averaged",
            not any(dim.coordinate and getattr(placement, "dim", None) is None for dim, placement, _ in along),
            batch,
            batches,
            mesh if any(not placement.is_replicate() for placement in placements or ()) else None,
            placements or (),
            self.reduces,
        )

    def _of_batch(self, tensor: Tensor, site: Site, path: str, call: int) -> tuple[Placement, ...] | None:
        """Return the placement of a plain tensor along each model-parallel dimension; None if it is unknown."""
        module, role = site.layer.module, site.spec.tensor_role
        side = "input" if role.endswith("input") else "output"
        if (declared := self._of_entry(site, side, tensor.dim())) is not None:
            return declared
        if self._has_unknown_dims:
            return None
        style = self._styles.get(module)
        if style is not None and not site.spec.definition.of_functions:
            of_path = style.inputs if side == "input" else style.outputs
            if (placement := of_path.get(path)) is not None:
                along, group = _positive(placement, tensor.dim()), {*style.mesh.mesh.flatten().tolist()}
                return tuple(along if {*dim.ranks} <= group else self._replicate for dim in self._model)
        if not self._infers:
            return None
        key = module, side, path, call, tensor.dim()
        if key not in self._found:
            found = self._by_graph(tensor)
            if found is None and tensor.grad_fn is None:  # another call can have a graph
                return None
            self._found[key] = found
        return self._found[key]

    def _of_entry(self, site: Site, name: str, dims: int) -> tuple[Placement, ...] | None:
        """Return the declared placement of a tensor with this number of dimensions; None without a declaration."""
        entry = self._declared.get(site.layer.module, {}).get(name)
        if entry is None:
            return None
        for placement in entry.values():
            if not -dims <= getattr(placement, "dim", -dims) < max(dims, 1):
                message = f"placement declares {_label(placement)} for {name} of layer {site.layer.label!r}"
                raise HookError(f"{message}, but the tensor has {dims} dimensions")
        return tuple(_positive(entry.get(dim.name, self._replicate), dims) for dim in self._model)

    def _by_graph(self, tensor: Tensor) -> tuple[Placement, ...] | None:
        if tensor.grad_fn is None:
            is_given = torch.is_grad_enabled() and (self._all_trained or tensor.requires_grad)
            return self._replicated if is_given else None
        boundaries, names = _origins(tensor.grad_fn)
        if not all(name in _ELEMENTWISE or _OPERATION.fullmatch(name) for name in names):
            return None
        shards = [spec for spec in boundaries if not all(p.is_replicate() for p in spec.placements)]
        if not shards:  # those of frozen parameters can have no graph
            return self._replicated if boundaries or self._all_trained else None
        first = shards[0]
        is_kept = (
            names <= _ELEMENTWISE
            and all(spec.placements == first.placements and spec.mesh == self._mesh for spec in shards)
            and not any(p.is_partial() for p in first.placements)
        )
        expected = [*first.shape]
        for placement, size in zip(first.placements, first.mesh.shape, strict=True):
            if (dim := getattr(placement, "dim", None)) is not None:
                is_kept &= expected[dim] % size == 0
                expected[dim] //= size
        return tuple(first.placements) if is_kept and [*tensor.shape] == expected else None

    def messages(self) -> list[str]:
        """Return a message about the tensors of unknown placement, if there are any."""
        if not self.unknown:
            return []
        (hook, kind, layer), others = next(iter(self.unknown)), len(self.unknown) - 1
        more = f" and at {others} more" * bool(others)
        return [
            f"the placement of the tensors of hook {hook!r} ({kind}) on layer {layer!r}{more} on the mesh is not known: each process "
            "writes its own rows. Declare it with 'placement', or record these layers in training steps too"
        ]

    def problems(self, plan: HookPlan, *, is_sampled: bool) -> list[Problem]:
        """Report interventions at tensors whose placement is not known before the model runs, and selections with a budget."""
        records = ((name, spec) for name, spec in plan.specs.items() if isinstance(spec, RecordSpec))
        selecting = [name for name, spec in records if spec.selection or spec.split_dim is not None]
        if is_sampled and self.is_model_parallel and selecting:
            message = "the processes join shards to select parts of tensors, but each would pause this hook at different steps"
            fix = f"remove the budget, or the selection of hook {selecting[0]!r}"
            return [Problem("budget", message, given=selecting[0], fix=fix)]
        found: dict[str, str] = {}
        for site in plan.sites if self.is_model_parallel else ():
            spec, module = site.spec, site.layer.module
            is_known = module in self._styles and self._styles[module].is_even
            if isinstance(spec, ObservationSpec) or spec.definition.family != "module" or is_known:
                continue
            side = "input" if spec.tensor_role.endswith("input") else "output"
            if side not in self._declared.get(module, {}):
                found.setdefault(spec.name, f"{site.layer.label}, {side}")
        dims = ", ".join(dim.name for dim in self._model)
        return [
            Problem(
                f"hooks.{name}.layers",
                f"an intervention acts on complete tensors, but the placement of this one along {dims} is not known before the run",
                where,
                fix="declare it, such as placement={'blocks.*': {'output': {'tp': 'replicate'}}}, or select modules with a ParallelStyle",
            )
            for name, where in found.items()
        ]


BATCH_FAMILIES = ("module", "loss")
"""The families of kinds whose tensors belong to the samples of a process."""


def layout_of(
    plan: HookPlan,
    mesh: DeviceMesh | None,
    declared: Declared,
    *,
    data: Collection[str],
    processes: int,
    reduces: bool,
    is_sampled: bool,
) -> MeshLayout | None:
    """Return how the tensors of a model are placed on a mesh; None if it has none.

    Args:
        mesh: The mesh of the processes that train it. None for that of its parameters, or the mesh that it is a part of.
        is_sampled: Whether a budget pauses record hooks in some steps.

    Raises:
        ConfigError: A declaration is invalid; rows cannot be merged, because the mesh contains only some of the processes; or the
            hooks do not fit the mesh, see `MeshLayout.problems`.
    """
    found = [parameter.device_mesh for parameter in plan.layers.model.parameters() if is_sharded(parameter)]
    if mesh is None:
        if not found:
            if declared:
                message = "placements are declared, but the model has no device mesh"
                raise ConfigError(Problem("placement", message, fix="pass mesh=init_device_mesh(...)"))
            return None
        mesh = max((each._get_root_mesh() for each in found), key=lambda each: each.size())
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(Problem("mesh", "must be a DeviceMesh", mesh, fix="pass mesh=init_device_mesh(...)"))
    if reduces and mesh.size() < processes:
        message = f"the mesh has {mesh.size()} of {processes} processes"
        fix = "create one mesh of all processes, and parallelize over its parts, such as mesh['tp']; or set reduce to none"
        raise ConfigError(Problem("reduce", message, given="global", fix=fix))
    layout = MeshLayout(plan.layers, mesh, declared, data=data, reduces=reduces)
    if problems := layout.problems(plan, is_sampled=is_sampled):
        raise ConfigError(*problems)
    return layout


def style_of(module: nn.Module) -> Style | None:
    """Return what a `ParallelStyle` does with a module; None if it has none.

    A style registers hooks that refer to the mesh and its layouts.
    """
    before, after = (list(_style_cells(hooks)) for hooks in (module._forward_pre_hooks, module._forward_hooks))
    if not (before or after):
        return None
    mesh = (before or after)[0][0]
    inputs: dict[str, Placement] = {}
    outputs: dict[str, Placement] = {}
    for _, style in before:
        if (given := getattr(style, "desired_input_layouts", None)) and style.use_local_output:
            inputs |= {str(at): layout for at, layout in enumerate(given) if layout is not None}
            inputs |= {name: layout for name, layout in style.desired_input_kwarg_layouts.items() if layout is not None}
    for _, style in after:
        if isinstance(style, partial):  # the functions get the layouts and whether the output is a local tensor
            layouts = [*style.args[:-1], *(each.args[0] for _, each in before if isinstance(each, partial))]
            if style.args[-1]:
                outputs[""] = layouts[0][0]
        elif given := getattr(style, "desired_output_layouts", None):
            outputs |= {"" if len(given) == 1 else str(at): layout for at, layout in enumerate(given)}
    is_even = all(
        parameter.shape[dim] % size == 0
        for parameter in module.parameters(recurse=False)
        if is_sharded(parameter)
        # `fully_shard` adds dimensions in front of those of the style, and gathers the parameters before their use.
        for placement, size in zip(parameter.placements[-mesh.ndim :], mesh.shape, strict=True)
        if (dim := getattr(placement, "dim", None)) is not None
    )
    return Style(mesh, inputs if is_even else {}, outputs if is_even else {}, is_even)


def _groups_of_shards(layers: Iterable[Layer]) -> list[set[int]]:
    """Return the ranks over which each parameter is divided; nothing for those of `fully_shard`, which gathers them before their use."""
    from torch.distributed.fsdp import FSDPModule

    if any(isinstance(layer.module, FSDPModule) for layer in layers):
        return []
    return [
        {*dim.ranks}
        for layer in layers
        for _, parameter in layer.own_parameters()
        if is_sharded(parameter)
        for dim, placement in zip(mesh_dims(parameter.device_mesh), parameter.placements, strict=True)
        if not placement.is_replicate()
    ]


def _style_cells(hooks: Mapping[int, Callable[..., Any]]) -> Iterator[tuple[DeviceMesh, Any]]:
    """Yield the mesh, and the style or the function with its layouts, of those hooks that a style has registered."""
    from torch.distributed.device_mesh import DeviceMesh

    for hook in hooks.values():
        if str(getattr(hook, "__module__", "")).startswith("torch.distributed.tensor."):
            cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
            meshes = [each for each in cells if isinstance(each, DeviceMesh)]
            yield from ((meshes[0], each) for each in cells if meshes and not isinstance(each, DeviceMesh))


def _origins(node: Any) -> tuple[list[Any], set[str]]:
    """Return the specs of the shards that a node of the graph depends on, and the names of the nodes between."""
    boundaries, names, seen, waiting = [], set(), set(), [node]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = type(node).name(node)  # the context of a custom function may have another attribute `name`
        if name == _BOUNDARY:
            boundaries.append(node.dtensor_spec)
        elif name != "torch::autograd::AccumulateGrad":
            names.add(name)
            waiting.extend(following for following, _ in node.next_functions)
    return boundaries, names


def _parsed(text: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard

    number = re.search(r"-?\d+", text)
    return Shard(int(number[0])) if number else Partial() if text == "partial" else Replicate()


def _positive(placement: Placement, dims: int) -> Placement:
    """Return a placement whose dimension counts from the first one, of a tensor with this number of dimensions."""
    from torch.distributed.tensor import Shard

    return Shard(placement.dim % dims) if isinstance(placement, Shard) and placement.dim < 0 and dims else placement


def _label(placement: Placement | None) -> str:
    if placement is None:
        return "unknown"
    dim = getattr(placement, "dim", None)
    return "replicate" if placement.is_replicate() else "partial" if dim is None else f"shard({dim})"
