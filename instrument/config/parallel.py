"""How the processes of a run train together: `train.parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ..fields.field_types import Count, Glob, Spec, Target

Data = Literal["ddp", "fsdp2"]
Style = Literal["colwise", "rowwise", "sequence"]
Layout = Annotated[str, Field(pattern=r"^(replicate|shard\(-?\d+\))$")]
Declared = dict[Glob, dict[str, dict[str, Annotated[str, Field(pattern=r"^(replicate|partial|shard\(-?\d+\))$")]]]]
"""Placements by pattern of module names, then by `input`, `output` or the name of a parameter, then by dimension of the mesh."""
DIMENSIONS = {"pp": "pipeline", "dp": "data", "tp": "tensor"}
"""The dimensions of a mesh, from the slowest to the fastest varying rank. The processes of a `tp` group communicate most."""


class LayerStyle(Spec):
    """How a module is parallelized over the dimension `tp`, with the classes of `torch.distributed.tensor.parallel`."""

    style: Style = Field(
        description="colwise (ColwiseParallel), rowwise (RowwiseParallel) or sequence (SequenceParallel)."
    )
    input: Layout | None = Field(
        None, description="Layout of the input: replicate or shard(DIM). null: that of the class."
    )
    output: Layout | None = Field(
        None, description="Layout of the output: replicate or shard(DIM). null: that of the class."
    )

    @model_validator(mode="after")
    def _validate_sequence(self) -> Self:
        if self.style == "sequence" and (self.output is not None or self.input == "replicate"):
            raise ValueError("style sequence has the same layout before and after: set only input: shard(DIM)")
        return self


def _parse_style(value: Any) -> Any:
    if isinstance(value, str):
        value = {"style": value}
    if isinstance(value, Mapping) and "_target_" not in value and not callable(value):
        return LayerStyle.model_validate(value)
    return value if isinstance(value, LayerStyle) else Target.model_validate(value)


class PipelineConfig(Spec):
    """How the layers are distributed over the dimension `pp`."""

    split: tuple[str, ...] = Field(
        min_length=1,
        description="The names of the layers at which the second and each further stage begins. The stage receives the input of this "
        "layer; no other tensor with a gradient may pass from one stage to another.",
    )
    schedule: Literal["gpipe", "1f1b"] = Field(
        "1f1b", description="The order of the micro-batches of a step: gpipe (ScheduleGPipe) or 1f1b (Schedule1F1B)."
    )


class PlacementConfig(Spec):
    """Where the tensors of modules are, if neither a DTensor nor a style nor the graph shows it."""

    placement: Declared = Field(
        default_factory=dict,
        description="Where plain tensors are placed on the mesh, such as {'**.act': {output: {tp: shard(-1)}}}: by glob of module names, "
        "then input, output or the name of a parameter, then dimension of the mesh: shard(DIM), replicate or partial.",
    )


class ParallelConfig(PlacementConfig):
    """A mesh of processes, and what each of its dimensions distributes."""

    mesh: dict[str, Count] | None = Field(
        None,
        min_length=1,
        description="The sizes of the dimensions of the mesh: pp (pipeline), dp (data) and tp (tensor), from the slowest to the fastest "
        "varying rank. null: all processes are in dp.",
    )
    data: Data = Field(
        "ddp", description="What dp does: ddp sums gradients, fsdp2 (fully_shard) also shards parameters."
    )
    plan: dict[
        Glob,
        Annotated[
            LayerStyle | Target, BeforeValidator(_parse_style, json_schema_input_type=Style | LayerStyle | Target)
        ],
    ] = Field(
        default_factory=dict,
        description="For tp: the style of the modules that a glob matches: colwise, rowwise or sequence; a mapping of style, input and "
        "output; or the _target_ of a ParallelStyle.",
    )
    experts: dict[Glob, Target] = Field(
        default_factory=dict,
        description="For dp: the _target_ of a ParallelStyle that distributes the experts in the modules that a glob matches, and sends "
        "tokens to them and back.",
    )
    pipeline: PipelineConfig | None = Field(None, description="For pp: the stages.")

    @field_validator("mesh")
    @classmethod
    def _sort(cls, value: dict[str, int] | None) -> dict[str, int] | None:
        """Check the names, and sort the dimensions: `fully_shard` requires dp before tp."""
        for name in value or ():
            if name == "cp":
                reason = "has no attention kernel for CPU and fails there with is_causal"
                fix = "call it in your own loop on CUDA, with instrument.attach"
                raise ValueError(f"'cp': context_parallel of PyTorch {reason}; {fix}")
            if name not in DIMENSIONS:
                known = ", ".join(f"{each} ({what})" for each, what in DIMENSIONS.items())
                raise ValueError(f"{name!r} is not a dimension of a mesh; allowed: {known}")
        return value and {name: value[name] for name in DIMENSIONS if name in value}

    @model_validator(mode="after")
    def _validate_dimensions(self) -> Self:
        for name, key, given in (("tp", "plan", bool(self.plan)), ("pp", "pipeline", self.pipeline is not None)):
            if given and name not in self.sizes:
                raise ValueError(f"'{key}' requires the dimension {name} in 'mesh', such as mesh: {{{name}: 2}}")
            if not given and name in self.sizes and not (name == "tp" and self.placement):
                raise ValueError(f"the dimension {name} of 'mesh' requires '{key}'")
        if self.placement and not self.mesh:
            raise ValueError("'placement' requires 'mesh', such as mesh: {tp: 2}")
        uses_data = "experts" if self.experts else "data: fsdp2" if self.mesh and self.data == "fsdp2" else None
        if uses_data and "dp" not in self.sizes:
            raise ValueError(f"'{uses_data}' requires the dimension dp in 'mesh'")
        if self.data == "fsdp2" and (self.pipeline is not None or self.experts):
            raise ValueError(f"'data: fsdp2' does not support {'experts' if self.experts else 'pp'}; set data: ddp")
        if self.pipeline is not None and (named := len(self.pipeline.split)) != (splits := self.sizes["pp"] - 1):
            raise ValueError(f"pp: {splits + 1} stages require {splits} layers in pipeline.split, got {named}")
        return self

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes of the dimensions by name; empty if all processes are in `dp`."""
        return self.mesh or {}

    @property
    def size(self) -> int | None:
        """The number of processes; None if any number is allowed."""
        return prod(self.mesh.values()) if self.mesh else None

    @property
    def label(self) -> str:
        """The sizes of the mesh, such as `dp 2 tp 2`; the value of `data` without a mesh."""
        return " ".join(f"{name} {size}" for name, size in self.sizes.items()) or self.data

    def __str__(self) -> str:
        if not self.mesh:
            return self.data
        sizes = ", ".join(f"{name}: {size}" for name, size in self.mesh.items())
        return f"{{mesh: {{{sizes}}}" + (f", data: {self.data}}}" if "dp" in self.mesh else "}")


def parse_parallel(value: Any) -> Any:
    if isinstance(value, str) and value in get_args(Data):
        return ParallelConfig(data=value)
    if isinstance(value, Mapping | ParallelConfig | None):
        return value
    raise ValueError("must be ddp, fsdp2, or a mapping such as {mesh: {dp: 2, tp: 2}, plan: {...}}")
