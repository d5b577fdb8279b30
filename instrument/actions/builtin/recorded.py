"""Functions of `modify` that insert recorded tensors of another run, or values of another sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from ...config.base import SELECTION, Misfit
from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import Dimension, Index

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Archive, Context


@FUNCTIONS.register("replace", "patch")
class RecordedSpec(ModifySpec):
    """Insert a tensor that another run recorded at the same layer, path, call, phase and batch: all of it, or the selected part (patch).

    With `match: id`, each sample gets the values that were recorded for it, in any batch. With `from_sample`, patch inserts the
    values of another sample of the same batch.
    """

    fn: Literal["replace", "patch"]
    run: str | None = Field(None, min_length=1, description="The folder of the other run.")
    from_sample: Dimension | None = Field(
        None,
        description="For patch, instead of 'run': the index of the sample of this batch whose values replace those of the others. "
        "Gradients flow to that sample.",
    )
    hook: str | None = Field(
        None,
        description="The record hook of the other run. Required if several hooks recorded the tensor, and to use tensors of another "
        "phase.",
    )
    step: Index | None = Field(
        None, description="The step in the other run. Default: the current step; with `match: id`, all steps."
    )
    match: Literal["batch", "id"] = Field(
        "batch",
        description="Which recorded values are used: those of the same batch of the same step (batch), or for each sample those of "
        "the sample with the same id (id). Batch size and order may differ then.",
    )

    @model_validator(mode="after")
    def _validate_source(self) -> RecordedSpec:
        if self.match == "id" and self.run is None:
            raise ValueError("'match' requires 'run'")
        if self.match == "id" and self.definition.family != "module":
            raise ValueError(f"'match: id' requires a batch, which the tensors of kind {self.kind} do not have")
        if self.fn == "patch" and not self.selection:
            raise ValueError(f"patch requires the elements to replace: one of {', '.join(SELECTION)}")
        if self.fn == "replace" and self.selection:
            raise ValueError(f"{self.selection[0]!r} requires fn patch")
        if self.fn == "replace" and self.from_sample is not None:
            raise ValueError("'from_sample' requires fn patch")
        if (self.run is None) == (self.from_sample is None):
            alternative = " or 'from_sample', and not both" if self.fn == "patch" else ""
            raise ValueError(f"{self.fn} requires 'run'{alternative}")
        if self.run is None and not self.model_fields_set.isdisjoint({"hook", "step"}):
            raise ValueError("'hook' and 'step' require 'run'")
        if self.from_sample is not None and self.definition.family != "module":
            raise ValueError(f"'from_sample' requires a batch, which the tensors of kind {self.kind} do not have")
        return self

    def misfits(self, shape: Sequence[int], complete: Sequence[int]) -> Iterator[Misfit]:  # noqa: ARG002
        size = complete[0] if complete else 0
        if self.from_sample is not None and not -size <= self.from_sample < size:
            yield "from_sample", f"{self.from_sample} is out of range for dimension 0 of", f"{-size} to {size - 1}"

    def function(self, archive: Archive) -> Callable[[Tensor, Context], Tensor]:
        from ..tensor_selection import patch

        if self.run is None:
            return self._from_sample
        run = self.run
        archive.open(run, self.hook, f"hooks.{self.name}")

        def replace(tensor: Tensor, context: Context) -> Tensor:
            if self.match == "id":
                complete = tensor.shape if context.selection is None else context.selection.shape
                values = _with_shape(archive.of_samples(run, self.hook, self.step, context), complete, tensor.shape)
            else:
                values = archive.find(run, self.hook, self.step, context, pinned=tensor.is_cuda)
            return patch(tensor, values, context.selection)

        return replace

    def _from_sample(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Return the values of one sample (dimension 0) in place of each sample. Gradients flow to that sample."""
        assert self.from_sample is not None, "checked by the spec"
        assert context.selection is not None, "patch requires a selection"
        assert context.complete is not None, "it is given with the selection"
        complete = context.complete
        sample = complete[range(len(complete))[self.from_sample]]
        return context.selection.of(sample.expand_as(complete)).clone()


def _with_shape(values: Tensor, *shapes: Sequence[int]) -> Tensor:
    """Return values of samples with the first shape from which they differ only by dimensions of size 1 at the end."""
    count = values.dim()
    for shape in shapes:
        if tuple(shape[1:count]) == values.shape[1:] and all(size == 1 for size in shape[count:]):
            return values.reshape(len(values), *shape[1:])
    return values
