"""Functions of `modify` along the units of a tensor: vectors from a file, or computed from the recorded tensors of runs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import Count, Number

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Archive, Context

_VECTOR = "A .npy or .safetensors file with a vector of shape"
_KEY = "The name of the tensor in a .safetensors file that has several."
_LAYER = "The layer whose recorded tensors are used. The default is the layer that the hook changes."
_HOOK = "The record hook of the run. Required if several hooks recorded the tensors."


class _VectorSpec(ModifySpec):
    """A function with vectors along the units."""

    @property
    def _uses_units(self) -> bool:
        return True

    @property
    def sources(self) -> dict[str, str]:
        """The folders of runs, by field."""
        folders = {field: getattr(self, field, None) for field in ("run", "plus", "minus")}
        return {field: folder for field, folder in folders.items() if folder is not None}

    def function(self, archive: Archive) -> Callable[[Tensor, Context], Tensor]:
        from ..unit_vectors import UnitVectors

        vectors = UnitVectors(self, archive)
        return lambda tensor, context: self.along_units(tensor, *vectors.at(tensor, context))

    @abstractmethod
    def along_units(self, tensor: Tensor, vectors: Tensor, dim: int) -> Tensor:
        """Return a changed tensor.

        `vectors`: [vectors, units], in float32 or the wider dtype of the tensor; those of a projection are orthonormal. `dim`: the
        dimension of the units.
        """


def _along(tensor: Tensor, vectors: Tensor, dim: int) -> Tensor:
    """Return the only vector with a shape that broadcasts to the tensor."""
    shape = [1] * tensor.dim()
    shape[dim] = vectors.shape[1]
    return vectors[0].view(shape)


@FUNCTIONS.register("add")
class AddSpec(_VectorSpec):
    """Add a number, or a vector with one number per unit: from a file, or the mean of one run minus that of another (steering)."""

    fn: Literal["add"]
    value: Number | None = Field(None, description="The number to add to each element.")
    vector: str | None = Field(None, min_length=1, description=f"{_VECTOR} [units] to add.")
    key: str | None = Field(None, description=_KEY)
    plus: str | None = Field(
        None, min_length=1, description="The folder of a run. The mean of its recorded tensors per unit is added."
    )
    minus: str | None = Field(
        None, min_length=1, description="The folder of a run. The mean of its recorded tensors per unit is subtracted."
    )
    scale: Number = Field(1.0, description="The factor of the number or vector.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    @model_validator(mode="after")
    def _validate_source(self) -> AddSpec:
        given = [self.value is not None, self.vector is not None, self.plus is not None or self.minus is not None]
        if sum(given) != 1 or (self.plus is None) != (self.minus is None):
            raise ValueError("requires exactly one of value, vector, and both plus and minus")
        _check_source(self, "plus")
        return self

    def function(self, archive: Archive) -> Callable[[Tensor, Context], Tensor]:
        if self.value is None:
            return super().function(archive)
        number = self.value * self.scale
        return lambda tensor, _: tensor + number

    def along_units(self, tensor: Tensor, vectors: Tensor, dim: int) -> Tensor:
        return tensor + (_along(tensor, vectors, dim) * self.scale).to(tensor.dtype)


@FUNCTIONS.register("project_out", "project_onto")
class ProjectSpec(_VectorSpec):
    """Remove the part of the values along directions of the units (project_out), or keep only that part (project_onto)."""

    fn: Literal["project_out", "project_onto"]
    vector: str | None = Field(
        None, min_length=1, description=f"{_VECTOR} [units] or [directions, units]. Their lengths do not matter."
    )
    key: str | None = Field(None, description=_KEY)
    run: str | None = Field(
        None,
        min_length=1,
        description="The folder of a run. The directions are the principal components of its recorded tensors.",
    )
    components: Count | None = Field(None, description="The number of principal components. Default: 1.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    @model_validator(mode="after")
    def _validate_source(self) -> ProjectSpec:
        if (self.vector is None) == (self.run is None):
            raise ValueError("requires exactly one of vector and run")
        _check_source(self, "run")
        return self

    def along_units(self, tensor: Tensor, vectors: Tensor, dim: int) -> Tensor:
        import torch

        values, device = tensor.movedim(dim, -1).to(vectors.dtype), tensor.device.type
        # Autocast would multiply in half precision.
        with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
            part = values @ vectors.T @ vectors
        return (values - part if self.fn == "project_out" else part).movedim(-1, dim).to(tensor.dtype)


@FUNCTIONS.register("mean_ablate")
class MeanAblateSpec(_VectorSpec):
    """Replace the values of each unit by its mean over the recorded tensors of another run. No gradient flows through it."""

    fn: Literal["mean_ablate"]
    run: str = Field(min_length=1, description="The folder of the run.")
    layer: str | None = Field(None, description=_LAYER)
    hook: str | None = Field(None, description=_HOOK)

    def along_units(self, tensor: Tensor, vectors: Tensor, dim: int) -> Tensor:
        from ..tensor_selection import patch

        return patch(tensor, _along(tensor, vectors, dim).expand(tensor.shape))


def _check_source(spec: AddSpec | ProjectSpec, run: str) -> None:
    """Raise a ValueError if fields of files and runs are mixed."""
    of_run = [name for name in ("layer", "hook", "components") if getattr(spec, name, None) is not None]
    if of_run and not spec.sources:
        raise ValueError(f"{of_run[0]!r} requires {run!r}")
    if spec.key is not None and spec.vector is None:
        raise ValueError("'key' requires 'vector'")
