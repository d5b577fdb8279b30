"""Modification of a tensor by a built-in function or by a custom function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from ..spec.modify import (
    AddSpec,
    DropoutSpec,
    FunctionSpec,
    MeanAblateSpec,
    MeanSpec,
    ModifySpec,
    NanSpec,
    NoiseSpec,
    PenaltySpec,
    ProjectSpec,
    QuantizeSpec,
    RecordedSpec,
    ResampleSpec,
    ShuffleSpec,
    SignSpec,
    SwapSpec,
    ZeroSpec,
)
from . import builtin_functions
from .base import Archive, Context
from .custom_functions import custom_function
from .unit_vectors import UnitVectors, VectorSpec

Function = Callable[[Tensor, Context], Tensor | None]


class Modify:
    """The modify action of a spec.

    Args:
        spec: The spec.
        archive: The tensors of other runs.
    """

    def __init__(self, spec: ModifySpec, archive: Archive) -> None:
        self.straight_through = spec.straight_through
        self.entrywise = isinstance(spec, ZeroSpec | SignSpec | QuantizeSpec)
        if isinstance(spec, FunctionSpec):
            self.function = custom_function(spec.fn, f"hooks.{spec.name}.fn", "tensor", "context")
        elif isinstance(spec, RecordedSpec):
            self.function = _recorded(spec, archive)
        elif isinstance(spec, ProjectSpec | MeanAblateSpec) or (isinstance(spec, AddSpec) and spec.value is None):
            self.function = _along_units(spec, UnitVectors(spec, archive))
        else:
            self.function = partial(_BUILTIN[type(spec)], spec)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: each tensor is changed independently."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, None]:
        new = self.function(tensor, context)
        if new is None:
            return tensor, None
        return (builtin_functions.straight_through(tensor, new) if self.straight_through else new), None


def _zero(spec: ZeroSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.zero(tensor)


def _add(spec: AddSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    assert spec.value is not None, "vectors are added by another function"
    return builtin_functions.add(tensor, spec.value * spec.scale)


def _swap(spec: SwapSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.swap(tensor)


def _noise(spec: NoiseSpec, tensor: Tensor, context: Context) -> Tensor:
    return builtin_functions.noise(tensor, spec.std, spec.mean, context.generator(tensor.device))


def _mean(spec: MeanSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.mean(tensor, spec.dim)


def _resample(spec: ResampleSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.resample(tensor, context.generator(tensor.device))


def _shuffle(spec: ShuffleSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.shuffle(tensor, context.generator(tensor.device))


def _dropout(spec: DropoutSpec, tensor: Tensor, context: Context) -> Tensor:
    return builtin_functions.dropout(tensor, spec.p, context.generator(tensor.device))


def _quantize(spec: QuantizeSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.quantize(tensor, spec.to)


def _sign(spec: SignSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    return builtin_functions.sign(tensor)


def _nan(spec: NanSpec, tensor: Tensor, context: Context) -> Tensor:
    return builtin_functions.insert_value(tensor, float(spec.value), spec.count, context.generator(tensor.device))


def _penalty(spec: PenaltySpec, tensor: Tensor, context: Context) -> Tensor:
    if spec.kind == "loss":
        return builtin_functions.add_penalty(tensor, context.parameters, spec.coefficient, spec.fn)
    assert context.value is not None, "kinds that carry penalties hand over the value"
    formula = {"l1": builtin_functions.l1, "l2": builtin_functions.l2}[spec.fn]
    return formula(tensor, context.value.detach(), spec.coefficient)


_BUILTIN: dict[type[ModifySpec], Callable[..., Tensor]] = {
    ZeroSpec: _zero,
    AddSpec: _add,
    SwapSpec: _swap,
    NoiseSpec: _noise,
    MeanSpec: _mean,
    ResampleSpec: _resample,
    ShuffleSpec: _shuffle,
    DropoutSpec: _dropout,
    QuantizeSpec: _quantize,
    SignSpec: _sign,
    NanSpec: _nan,
    PenaltySpec: _penalty,
}


def _recorded(spec: RecordedSpec, archive: Archive) -> Function:
    if spec.run is None:
        return partial(_from_sample, spec)
    run = spec.run
    archive.open(run, spec.hook, f"hooks.{spec.name}")

    def replace(tensor: Tensor, context: Context) -> Tensor:
        if spec.match == "id":
            complete = tensor.shape if context.selection is None else context.selection.shape
            found = _with_shape(archive.of_samples(run, spec.hook, spec.step, context), complete, tensor.shape)
        else:
            found = archive.find(run, spec.hook, spec.step, context, pinned=tensor.is_cuda)
        return builtin_functions.patch(tensor, found, context.selection)

    return replace


def _with_shape(values: Tensor, *shapes: Sequence[int]) -> Tensor:
    """Return values of samples with the first shape from which they differ only by dimensions of size 1 at the end."""
    count = values.dim()
    for shape in shapes:
        if tuple(shape[1:count]) == values.shape[1:] and all(size == 1 for size in shape[count:]):
            return values.reshape(len(values), *shape[1:])
    return values


def _from_sample(spec: RecordedSpec, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG001
    assert spec.from_sample is not None, "checked by the spec"
    assert context.selection is not None, "patch requires a selection"
    assert context.complete is not None, "it is given with the selection"
    return context.selection.of(builtin_functions.repeat_sample(context.complete, spec.from_sample)).clone()


def _along_units(spec: VectorSpec, vectors: UnitVectors) -> Function:
    """Return the function of a spec with vectors."""

    def change(tensor: Tensor, context: Context) -> Tensor:
        found, dim = vectors.at(tensor, context)
        if isinstance(spec, ProjectSpec):
            return builtin_functions.project(tensor, found, dim, out=spec.fn == "project_out")
        shape = [1] * tensor.dim()
        shape[dim] = found.shape[1]
        vector = found[0].view(shape)
        if isinstance(spec, MeanAblateSpec):
            return builtin_functions.patch(tensor, vector.expand(tensor.shape))
        return builtin_functions.add(tensor, (vector * spec.scale).to(tensor.dtype))

    return change
