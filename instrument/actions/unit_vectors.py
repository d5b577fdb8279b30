"""Vectors along the units of a tensor: from a file, or computed from the recorded tensors of other runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, Problem, similar_names
from ..stats.unit_statistics import unit_dim
from ..tables.kinds import KINDS
from ..values.nested import to_device
from .base import Archive, Context

FORMATS = (".npy", ".safetensors")


class UnitVectors:
    """The vectors of a spec. They are found once per site, and copied to a device once.

    Raises:
        ConfigError: A file or a run does not exist, or does not contain vectors.
    """

    def __init__(self, spec: Any, archive: Archive) -> None:
        self.spec = spec
        self.archive = archive
        self.where = f"hooks.{spec.name}"
        self._from_file: Tensor | None = None
        self._on_device: dict[tuple[object, ...], Tensor] = {}
        if getattr(spec, "vector", None) is not None:
            self._from_file = load_vectors(spec.vector, spec.key, self.where)
            if spec.fn == "add" and len(self._from_file) > 1:
                message = f"add requires one vector, but this file has {len(self._from_file)}"
                raise ConfigError(Problem(f"{self.where}.vector", message, given=spec.vector))
        for field, run in spec.sources.items():
            archive.open(run, spec.hook, self.where, field=field)

    def at(self, tensor: Tensor, context: Context) -> tuple[Tensor, int]:
        """Return the vectors for a tensor (complete, or the selected part), and the dimension of its units.

        Returns:
            The vectors on the device of the tensor, [vectors, units], in float32 or the wider dtype of the tensor; and
            the dimension.

        Raises:
            ConfigError: The vectors do not fit the tensor, or the runs have no tensors of this layer.
        """
        shape = tensor.shape if context.selection is None else context.selection.shape
        full_dim = self._dimension(len(shape), context)
        dropped = () if context.selection is None else context.selection.index
        if full_dim is None or (full_dim < len(dropped) and isinstance(dropped[full_dim], int)):
            place = f"{self._name(context)}, of shape {list(tensor.shape)}"
            message = f"{self.spec.fn} requires a dimension of units in {place}"
            raise ConfigError(Problem(f"{self.where}.fn", message, given=self.spec.fn))
        dim = full_dim - sum(isinstance(part, int) for part in dropped[:full_dim])
        wide = torch.promote_types(tensor.dtype, torch.float32)
        key = (context.layer, context.path, shape[full_dim], tensor.shape[dim], wide, tensor.device)
        if key not in self._on_device:
            vectors = self._of_part(self._find(context), tensor, context, full_dim, dim)
            with torch.inference_mode(False):
                self._on_device[key] = to_device(vectors.to(wide), tensor.device)
        return self._on_device[key], dim

    def _of_part(self, vectors: Tensor, tensor: Tensor, context: Context, full_dim: int, dim: int) -> Tensor:
        """Return the vectors along the units of the changed tensor, [vectors, units]; orthonormal ones for a projection."""
        given, part = vectors.shape[1], tensor.shape[dim]
        selection = context.selection
        if selection is not None and given == selection.shape[full_dim]:
            index = torch.arange(given).view(-1, *[1] * (len(selection.shape) - full_dim - 1)).expand(selection.shape)
            vectors = vectors[:, selection.of(index).movedim(dim, 0).reshape(part, -1)[:, 0]]
        elif given != part:
            complete = "" if selection is None else f", or the {selection.shape[full_dim]} of the complete tensor"
            allowed = f"one number for each of the {part} units{complete}"
            message = f"the vector has {given} numbers, but {self._name(context)} has {part} units: shape {list(tensor.shape)}"
            raise ConfigError(Problem(f"{self.where}.{self._field}", message, self._given, allowed))
        if not self.spec.fn.startswith("project"):
            return vectors
        basis = orthonormal(vectors)
        if not len(basis):
            where = "" if selection is None else " in the selected units"
            raise ConfigError(Problem(f"{self.where}.{self._field}", f"all directions are zero{where}", self._given))
        return basis

    def _find(self, context: Context) -> Tensor:
        """Return the vectors of a site in float64, [vectors, units]. Those of runs are computed once per archive."""
        if self._from_file is not None:
            return self._from_file
        memo, key = self.archive.memo, (self.spec.name, context.layer, context.role, context.path)
        if key not in memo:
            memo[key] = self._from_runs(context)
        return memo[key]

    def _from_runs(self, context: Context) -> Tensor:
        spec = self.spec
        sources = {field: self._recorded(run, field, context) for field, run in spec.sources.items()}
        if spec.fn == "add":
            return (mean_of_units(sources["plus"]) - mean_of_units(sources["minus"]))[None]
        if spec.fn == "mean_ablate":
            return mean_of_units(sources["run"])[None]
        components = spec.components or 1
        directions = principal_components(sources["run"])
        if components > len(directions):
            message = f"{self._name(context)} has {len(directions)} components"
            raise ConfigError(Problem(f"{self.where}.components", message, components, f"1 to {len(directions)}"))
        return directions[:components]

    def _recorded(self, run: str, field: str, context: Context) -> Iterator[Tensor]:
        """Yield the recorded tensors of a site as [units, elements], float64."""
        layer = context.layer if self.spec.layer is None else self.spec.layer
        where, is_empty = f"{self.where}.{field}", True
        for tensor in self.archive.tensors_at(run, self.spec.hook, layer, context, where=where):
            dim = self._dimension(tensor.dim(), context)
            if dim is None or not tensor.isfinite().all():
                what = "no units" if dim is None else "values that are not finite"
                message = f"the recorded tensor of layer {layer or '.'!r} has {what}: shape {list(tensor.shape)}"
                raise ConfigError(Problem(where, message, given=run))
            units = tensor.to(torch.float64).movedim(dim, 0)
            is_empty &= not units.numel()
            yield units.flatten(1) if units.dim() > 1 else units[:, None]
        if is_empty:
            raise ConfigError(Problem(where, f"the recorded tensors of layer {layer or '.'!r} are empty", given=run))

    def _dimension(self, dims: int, context: Context) -> int | None:
        """Return the dimension of the units of a tensor; None if it has none."""
        if self.spec.unit_dim is not None:
            return self.spec.unit_dim % dims if -dims <= self.spec.unit_dim < dims else None
        return unit_dim(dims, context.module, of_parameter=KINDS[context.kind].family != "module")

    @property
    def _field(self) -> str:
        return "vector" if self._from_file is not None else next(iter(self.spec.sources))

    @property
    def _given(self) -> object:
        return getattr(self.spec, self._field)

    def _name(self, context: Context) -> str:
        path = f" at path {context.path!r}" if context.path else ""
        return f"the {context.role} of {context.layer or '.'!r}{path}"


def mean_of_units(tensors: Iterator[Tensor]) -> Tensor:
    """Return the mean of each unit, float64 [units], over at least one tensor, each float64 [units, elements]."""
    total, count = torch.zeros(()), 0
    for tensor in tensors:
        total, count = total + tensor.sum(1), count + tensor.shape[1]
    return total / count


def principal_components(tensors: Iterator[Tensor]) -> Tensor:
    """Return the directions of the largest variance: the eigenvectors of the covariance of the units.

    Args:
        tensors: At least one tensor, float64, each [units, elements]. Each element is an observation.

    Returns:
        Orthonormal directions in descending order of variance, float64 [units, units].
    """
    total, products, count = torch.zeros(()), torch.zeros(()), 0
    origin = None
    for tensor in tensors:
        origin = tensor[:, :1] if origin is None or not origin.numel() else origin
        values = tensor - origin  # the products of values far from zero would hide their variance
        total, products, count = total + values.sum(1), products + values @ values.T, count + values.shape[1]
    mean = total / count
    ascending: Tensor = torch.linalg.eigh(products / count - torch.outer(mean, mean)).eigenvectors
    return ascending.T.flip(0)


def orthonormal(vectors: Tensor) -> Tensor:
    """Return an orthonormal basis of the space that vectors span, float64 [dimensions, units].

    Linearly dependent vectors span fewer dimensions. The rank is that of `torch.linalg.matrix_rank`.
    """
    _, sizes, basis = torch.linalg.svd(vectors, full_matrices=False)
    tolerance = sizes.max() * max(vectors.shape) * torch.finfo(vectors.dtype).eps
    kept: Tensor = basis[sizes > tolerance]
    return kept.contiguous()


def load_vectors(path: str, key: str | None, where: str) -> Tensor:
    """Load vectors, float64 [vectors, units], from a `.npy` or `.safetensors` file.

    Args:
        key: The name of the tensor in a `.safetensors` file; None if it has only one.

    Raises:
        ConfigError: The file or the key does not exist, or the array has no numbers of shape [units] or [vectors, units].
    """
    file = Path(path)
    if file.suffix not in FORMATS:
        raise ConfigError(Problem(f"{where}.vector", "unknown type of file", path, "a .npy or .safetensors file"))
    if key is not None and file.suffix == ".npy":
        raise ConfigError(Problem(f"{where}.key", "a .npy file has no keys", key))
    if not file.is_file():
        others = [str(other) for other in file.parent.glob("*") if other.suffix in FORMATS]
        message = "this file does not exist"
        raise ConfigError(Problem(f"{where}.vector", message, path, similar=similar_names(path, others)))
    try:
        array = torch.from_numpy(np.load(file)) if file.suffix == ".npy" else _from_safetensors(file, key, where)
    except (ValueError, OSError, TypeError) as error:
        raise ConfigError(Problem(f"{where}.vector", f"cannot read the file: {error}", given=path)) from None
    vectors = array.to(torch.float64) if not array.is_complex() else array
    if vectors.is_complex() or vectors.dim() not in (1, 2) or not vectors.numel() or not vectors.isfinite().all():
        non_finite = ", with NaN or infinity" * (not vectors.isfinite().all())
        message = f"the array has shape {list(array.shape)} and {array.dtype}{non_finite}"
        allowed = "finite real numbers of shape [units] or [vectors, units]"
        raise ConfigError(Problem(f"{where}.vector", message, path, allowed))
    return vectors if vectors.dim() == 2 else vectors[None]


def _from_safetensors(file: Path, key: str | None, where: str) -> Tensor:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError:
        message = "reading .safetensors files requires the package safetensors"
        raise ConfigError(Problem(f"{where}.vector", message, str(file), fix="pip install safetensors")) from None
    try:
        tensors = load_file(file)
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if key is None and len(tensors) == 1:
        (key,) = tensors
    if key is None or key not in tensors:
        allowed = [f"{name} {list(tensor.shape)}" for name, tensor in sorted(tensors.items())]
        message = "requires the name of a tensor in the file" if key is None else "the file has no such tensor"
        raise ConfigError(Problem(f"{where}.key", message, key, allowed, similar_names(key or "", tensors)))
    tensor: Tensor = tensors[key]
    return tensor
