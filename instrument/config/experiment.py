"""The sections of a run's configuration, after Hydra has composed it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializeAsAny,
    SkipValidation,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from ..fields.field_types import Count, Index, Seed, Spec, Target, number_to_text
from ..fields.registry import Registry
from .apply import ApplySpec
from .base import parse_slice
from .hook_specs import HookSpec
from .parallel import Data, ParallelConfig, parse_parallel
from .rules import RuleBase

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _parse_fraction(value: Any) -> Any:
    """Convert `5%` to 0.05."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*%\s*", value)):
        return float(match[1]) / 100
    if isinstance(value, bool | str):
        raise ValueError("must be a fraction of the step time, such as 5% or 0.05")
    return value


def _parse_size(value: Any) -> Any:
    """Convert `2GB` to 2,000,000,000 and `2GiB` to 2 * 2^30."""
    if not isinstance(value, bool | str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", str(value))
    if match is None or match[2].upper() not in _UNITS:
        raise ValueError("must be a size, such as 500MB, 2GB or 1GiB")
    return round(float(match[1]) * _UNITS[match[2].upper()])


TimeLimit = Annotated[float, Field(gt=0, le=10), BeforeValidator(_parse_fraction, json_schema_input_type=float | str)]
SizeLimit = Annotated[int, Field(ge=1), BeforeValidator(_parse_size, json_schema_input_type=int | str)]


class BudgetConfig(Spec):
    """Limits for the cost of record hooks. Hooks over budget are sampled less often. Interventions always run."""

    time: TimeLimit | None = Field(
        None,
        description="Maximum overhead, relative to a step without hooks: 5% or 0.05. It is measured during the run.",
    )
    bytes: SizeLimit | None = Field(
        None, description="Approximate maximum size of all recorded data on disk: 500MB, 2GB."
    )


RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$"), BeforeValidator(number_to_text)]


def _empty_if_none(value: Any) -> Any:
    return {} if value is None else value


class SliceSpec(Spec):
    """A slice of a dataset. The fields apply in this order, each to the result of the previous one."""

    split: str | None = Field(
        None,
        min_length=1,
        description="The name of the split. null: the first one that the dataset accepts, of `train` and `trainval` for `slice`, "
        "and of `test`, `val`, `validation` and `valid` for `eval_slice`.",
    )
    classes: tuple[Index, ...] | None = Field(None, min_length=1, description="Only targets of these classes.")
    indices: tuple[Index, ...] | None = Field(
        None, min_length=1, description="These indices only. Replaces start, stop and stride."
    )
    start: Index = Field(0, description="The first index.")
    stop: Count | None = Field(None, description="The index after the last one.")
    stride: Count = Field(1, description="Every N-th sample.")
    per_class: Count | None = Field(None, description="At most N samples of each class.")
    shuffle: bool = Field(False, description="Shuffle before start, stop and stride apply.")
    seed: Seed = Field(0, description="The seed of the shuffle.")

    @model_validator(mode="after")
    def _validate_range(self) -> SliceSpec:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"the slice is empty: stop ({self.stop}) must be larger than start ({self.start})")
        if self.indices is not None and {"start", "stop", "stride"} & self.model_fields_set:
            raise ValueError("'indices' cannot be combined with start, stop or stride")
        return self


def _probe_slice(value: Any) -> Any:
    if isinstance(value, Mapping) and "split" in value:
        raise ValueError("the probe batch consists of samples of data.eval_slice, which has the split")
    if isinstance(value, int) and not isinstance(value, bool):
        return {"stop": value}
    if isinstance(value, Mapping | SliceSpec | None):
        return value
    raise ValueError("must be a number of samples, or a slice such as {per_class: 1}")


class DataConfig(Spec):
    """The dataset, and its slices for training and evaluation."""

    dataset: Target = Field(
        description="A callable that returns a dataset with a length, or an iterable one. It gets the split of a slice as "
        "`train=True` or `False`, or else as `split`, if it has this parameter and the configuration does not set it."
    )
    root: str = Field(
        "data", description="The folder of datasets on disk. The environment variable INSTRUMENT_DATA overrides it."
    )
    slice: SliceSpec = Field(default_factory=SliceSpec, description="The training samples.")
    eval_slice: SliceSpec = Field(default_factory=SliceSpec, description="The evaluation samples.")
    probe_batch: Annotated[
        SliceSpec | None, BeforeValidator(_probe_slice, json_schema_input_type=Count | SliceSpec | None)
    ] = Field(
        None,
        description="Samples of the evaluation slice that hooks of phase `probe` see as one fixed batch: the first N, or "
        "a slice of them such as {per_class: 1}.",
    )
    fallback: Literal["digits"] | None = Field(
        None, description="The dataset to use, with a warning, if the dataset is missing."
    )
    collate_fn: Target | None = Field(
        None,
        description="A function that joins a list of items into a batch, or a class whose instances do. null: PyTorch's default_collate.",
    )
    sampler: Target | None = Field(
        None,
        description="Called with the training slice; returns the indices of an epoch. null: all samples in random order.",
    )
    num_workers: Index = Field(0, description="Processes that load batches ahead; 0: batches are loaded in the loop.")
    pin_memory: bool = Field(False, description="Copy batches to pinned memory while they are loaded, for a GPU.")
    ids: Literal["recorded", "all"] = Field(
        "recorded",
        description="The samples in the table `samples`: those of batches in which a tensor is recorded, or those of all batches.",
    )


class CheckpointConfig(Spec):
    """When checkpoints of the training state are saved."""

    every: Index = Field(
        0, description="Save a checkpoint every N steps and after the last step; 0 disables checkpoints."
    )
    keep: Count | None = Field(
        1,
        description="The number of checkpoints that are kept, the latest ones; null: all, so that instrument.replay begins close to "
        "any step.",
    )


class CompileConfig(Spec):
    """The options of `torch.compile`."""

    graph_breaks: bool = Field(
        False, description="Whether hooks that cannot be part of a graph may break it. Otherwise, they are refused."
    )
    fullgraph: bool = Field(False, description="Whether it is an error if the code of the model breaks the graph.")
    dynamic: bool | None = Field(None, description="Whether sizes are variables. null: those that have changed.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = Field(
        "default", description="The mode of torch.compile."
    )


def _compile_options(value: Any) -> Any:
    if isinstance(value, bool):
        return {} if value else None
    if isinstance(value, Mapping | CompileConfig | None):
        return value
    raise ValueError("must be true, false, or options of torch.compile such as {dynamic: true}")


class TrainConfig(Spec):
    """The length of the training, and its batches."""

    steps: Count | None = Field(
        None, description="Number of optimizer steps. The dataset is repeated as often as needed."
    )
    epochs: Count | None = Field(None, description="Number of passes over the dataset; instead of steps.")
    batch_size: Count = Field(64, description="Samples in a micro-batch, summed over all processes.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16 use autocast; fp16 also uses a gradient scaler."
    )
    parallel: Annotated[
        ParallelConfig | None, BeforeValidator(parse_parallel, json_schema_input_type=Data | ParallelConfig | None)
    ] = Field(
        None,
        description="How processes started by torchrun train together: ddp (DistributedDataParallel), fsdp2 (fully_shard), or a mesh.",
    )
    find_unused_parameters: bool | None = Field(
        None, description="For ddp: whether a step can leave parameters unused. null: decided with the first batch."
    )
    compile: Annotated[
        CompileConfig | None, BeforeValidator(_compile_options, json_schema_input_type=bool | CompileConfig)
    ] = Field(
        None, description="Compile the model with torch.compile: true, or its options. Hooks are part of the graph."
    )
    accumulate: Count = Field(1, description="Micro-batches per optimizer step; their gradients are averaged.")
    eval_every: Index = Field(
        0, description="Evaluate every N steps and after the last step; 0: only after the last step."
    )
    eval_batch_size: Count = Field(256, description="Samples in an evaluation batch, summed over all processes.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="Checkpoints from which a stopped run is resumed."
    )
    save: bool = Field(
        False,
        description="Save the final weights of the model to the file weights.pt in the run folder, for init_from.",
    )
    fingerprint: str | None = Field(
        None,
        pattern=r"^[0-9a-f]{16}-[0-9a-f]{16}$",
        description="The fingerprint of an equal training, from its run.json. If another one is found, the exit code is 4.",
    )

    @field_validator("steps", "epochs", mode="before")
    @classmethod
    def _validate_not_zero(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("must be at least 1; to run the model without training, set mode=forward")
        return value

    @model_validator(mode="after")
    def _validate_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            given = "neither is set" if self.steps is None else f"steps is {self.steps} and epochs is {self.epochs}"
            raise ValueError(f"exactly one of steps and epochs must be set, the other must be null; {given}")
        return self


OUTPUT_UNIT = re.compile(r"(?P<path>[^\[\]]*)(?:\[(?P<slice>[^\[\]]*)\])?")


def output_unit_text(text: str) -> str:
    """Return the text of a part of a model's output, a path with an optional slice, without spaces around it."""
    match = OUTPUT_UNIT.fullmatch(text.strip())
    if not match or not text.strip():
        example = "such as 'logits[:, 3]', or '[:, 3]' for a tensor"
        raise ValueError(f"{text!r} is not a part of the model's output {example}")
    if match["slice"] is not None:
        parse_slice(match["slice"])
    return text.strip()


class ForwardConfig(Spec):
    """The passes over the data in `mode: forward`, which change no parameter and no buffer."""

    passes: Count = Field(1, description="Number of passes over data.slice, in order.")
    grad: bool = Field(
        False, description="Compute gradients, with respect to the inputs too, without an optimizer step."
    )
    of: Annotated[str, AfterValidator(output_unit_text)] | None = Field(
        None,
        description="Compute gradients of this part of the model's output, summed over its elements, instead of the loss: "
        "'logits[:, 3]', or '[:, 3]' if the output is a tensor.",
    )
    from_sample: Annotated[int, Field(ge=0)] | None = Field(
        None,
        description="Index of the clean sample of each batch, for attribution patching; the other samples are corrupted.",
    )
    integrate: bool = Field(
        False,
        description="Multiply the floating-point inputs by one of `passes` points between 0 and 1 in each pass, for integrated "
        "gradients with a baseline of zeros.",
    )

    @model_validator(mode="after")
    def _validate_of(self) -> ForwardConfig:
        given = {"of": self.of is not None, "from_sample": self.from_sample is not None, "integrate": self.integrate}
        for name, is_set in given.items():
            if is_set and not self.grad:
                raise ValueError(f"{name!r} requires 'grad: true', since no gradients are computed otherwise")
        if self.integrate and self.from_sample is not None:
            raise ValueError("'integrate' and 'from_sample' are parts of different methods; remove one of them")
        return self

    def __str__(self) -> str:
        """Describe the passes: `1 pass in order, gradients of logits[:, 3]`."""
        gradients = f"gradients of {self.of or 'the loss'}" if self.grad else "no gradients"
        return f"{self.passes:,} pass{'es' * (self.passes > 1)} in order, {gradients}"


def _path_as_mapping(value: Any) -> Any:
    if isinstance(value, Mapping | InitFromConfig | None):
        return _empty_if_none(value)
    if isinstance(value, str):
        return {"path": value}
    raise ValueError("must be a path, or a mapping with the fields path and strict")


class InitFromConfig(Spec):
    """The weights with which a run starts."""

    path: str | None = Field(
        None,
        min_length=1,
        description="A .pt, .pth or .safetensors file with a state dict, or the folder of a run; null: no weights are loaded.",
    )
    strict: bool = Field(True, description="Raise an error for missing and unexpected names in the state dict.")


TRACKERS: Registry[Any] = Registry(
    "trackers",
    "tracker",
    builtin={
        "tensorboard": "instrument.trackers.tensorboard:TensorBoard",
        "wandb": "instrument.trackers.wandb:WeightsAndBiases",
        "mlflow": "instrument.trackers.mlflow:Mlflow",
        "trackio": "instrument.trackers.trackio:Trackio",
    },
)
"""Further destinations of rows, in addition to Parquet: classes with the methods of `instrument.trackers.tracking.Tracker`."""

TASKS: Registry[Any] = Registry("tasks", "task")
"""The tasks of installed packages: options of the group `task` without a file in `conf`."""


def _custom_sink_schema(schema: dict[str, Any]) -> None:
    """Allow the arguments of a custom sink next to the other fields."""
    del schema["additionalProperties"]
    schema["if"] = {"not": {"required": ["_target_"]}}
    schema["then"] = {"propertyNames": {"enum": [*schema["properties"]]}}


class SinkConfig(Spec):
    """Where and how rows are written."""

    model_config = ConfigDict(json_schema_extra=_custom_sink_schema)

    tensors: Literal["list", "bytes"] | None = Field(
        None,
        description="Store recorded values as list<float> in Parquet, or as raw bytes in block files. Default: as bytes for hooks with "
        "'dtype' or without statistics, otherwise as lists.",
    )
    when_full: Literal["wait", "drop"] = Field(
        "wait", description="If tensors arrive faster than they can be written: wait, or drop and count them."
    )
    durability: Literal["process", "power"] = Field(
        "process",
        description="What the rows of finished steps survive: the end of the process, or a power loss (one fsync per step).",
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="If writing fails: stop the run, or continue training without recording."
    )
    remote: str | None = Field(
        None,
        description="An address such as s3://bucket/prefix to which the run's files are copied. It must not contain credentials.",
    )
    keep_local: bool = Field(
        True, description="false: delete local files after their upload, for runs larger than the disk."
    )
    tensorboard: bool = Field(False, description="Also write the rows for TensorBoard, into the run folder.")
    wandb: bool = Field(
        False, description="Also log the rows to Weights & Biases, configured by its environment variables."
    )
    mlflow: bool = Field(False, description="Also log the rows to MLflow, configured by its environment variables.")
    trackio: bool = Field(False, description="Also log the rows to Trackio, configured by its environment variables.")

    custom: Annotated[Target | None, WithJsonSchema({"type": "string"})] = Field(
        None,
        alias="_target_",
        description="A custom sink that also receives all rows: a class with the methods of `instrument.Sink`. Further keys are its "
        "arguments.",
    )

    _installed: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _collect_others(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Move the arguments of a custom sink into its target. Without one, other keys can name installed trackers."""
        if not isinstance(value, Mapping):
            return validate(value)
        others = {key: item for key, item in value.items() if key not in cls.model_fields}
        if isinstance(value.get("_target_"), str):
            return validate({**{key: item for key, item in value.items() if key not in others}, "_target_": others})
        installed = {key: item for key, item in others.items() if isinstance(item, bool) and key in TRACKERS}
        config = validate({key: item for key, item in value.items() if key not in installed})
        config._installed = tuple(name for name, is_on in installed.items() if is_on)
        return config

    @model_validator(mode="after")
    def _validate_remote(self) -> SinkConfig:
        if self.remote is None and not self.keep_local:
            raise ValueError("'keep_local: false' requires 'remote', since local files are deleted after their upload")
        return self

    @property
    def trackers(self) -> tuple[str, ...]:
        """The requested trackers."""
        return (*(name for name in TRACKERS.builtin if getattr(self, name)), *self._installed)


class RunConfig(Spec):
    """The configuration of a run."""

    name: RunName = Field("run", description="The name of the run's folder under runs/.")
    vars: Annotated[dict[str, Any], BeforeValidator(_empty_if_none)] = Field(
        default_factory=dict,
        description="Values that several keys share: `vars: {length: 4}` is used as `${vars.length}`.",
    )
    seed: Seed = Field(0, description="Seed of Python, NumPy, PyTorch, and the hooks' own random generators.")
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = Field(
        "auto", description="auto: a CUDA GPU if one is available, otherwise cpu."
    )
    deterministic: bool = Field(False, description="Raise an error for nondeterministic algorithms.")
    mode: Literal["train", "forward"] = Field(
        "train", description="train, or forward: run the model on data.slice without training."
    )
    forward: Annotated[ForwardConfig, BeforeValidator(_empty_if_none)] = Field(
        default_factory=ForwardConfig, description="The passes of mode: forward."
    )
    init_from: Annotated[
        InitFromConfig, BeforeValidator(_path_as_mapping, json_schema_input_type=str | InitFromConfig | None)
    ] = Field(
        default_factory=InitFromConfig,
        description="Weights to load before the first step: the path of a file with a state dict, or the folder of a run.",
    )
    plan: bool | Literal["json"] = Field(
        False, description="Dry run: print the matching hooks and the predicted cost, or as JSON; do not train."
    )
    resume: str | None = Field(None, description="The folder of a stopped run to resume from its latest checkpoint.")
    objective: str = Field(
        "loss",
        description="The value that a sweeper optimizes: a metric of the last evaluation, or a number from a table, as in "
        "max(stats.abs_max where layer = 'decoder.2').",
    )
    quiet: bool = Field(False, description="Print warnings and errors only.")
    report: bool = Field(False, description="Write report.html into the folder of the run or sweep at its end.")
    reduce: Literal["none", "global"] = Field(
        "none",
        description="Rows of several processes: none: each process writes its own; global: one row for the global batch.",
    )
    model: Target = Field(description="The model, a torch.nn.Module.")
    data: DataConfig
    task: Target = Field(description="The task: computes the loss of a batch.")
    optimizer: Target = Field(
        description="The optimizer. It is called with the trainable parameters, or with the model if it takes one."
    )
    scheduler: Target | None = Field(
        None,
        description="The learning-rate scheduler. It is called with the optimizer and steps once per training step.",
    )
    train: TrainConfig
    apply: SkipValidation[dict[str, ApplySpec]] = Field(
        default_factory=dict, description="Changes to modules, made once before step 0."
    )
    hooks: SkipValidation[dict[str, SerializeAsAny[HookSpec]]] = Field(
        default_factory=dict, description="The hooks, by name."
    )
    rules: SkipValidation[dict[str, RuleBase]] = Field(
        default_factory=dict,
        description="The rules, by name: conditions on the recorded rows, and what happens when one of them holds.",
    )
    budget: Annotated[BudgetConfig, BeforeValidator(_empty_if_none)] = Field(
        default_factory=BudgetConfig,
        description="Limits for the cost of record hooks. Hooks over budget are sampled less often.",
    )
    sink: Annotated[SinkConfig, BeforeValidator(_empty_if_none)] = Field(default_factory=SinkConfig)
