"""The root of a run's configuration, as it is after Hydra has composed it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, SkipValidation, model_validator

from .apply import ApplySpec
from .budget import BudgetConfig
from .fields import Count, Index, Seed, Spec, Target, spelled
from .hooks import HookSpec

RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.\-]*$"), BeforeValidator(spelled)]


def _mapping(value: Any) -> Any:
    if value is None:
        return {}
    return value


def _of_test(value: Any) -> Any:
    """What is evaluated on is of the other split, also where an override names another field of it alone."""
    return {"split": "test", **value} if isinstance(value, Mapping) else value


class SliceSpec(Spec):
    """Which part of a dataset: taken in this order, each on what the one before left."""

    split: Literal["train", "test"] = Field("train", description="The dataset's own split.")
    classes: tuple[Index, ...] | None = Field(None, min_length=1, description="Only targets of these classes.")
    indices: tuple[Index, ...] | None = Field(
        None, min_length=1, description="Just these, in place of start, stop and stride."
    )
    start: Index = Field(0, description="The first one.")
    stop: Count | None = Field(None, description="The first one that is out again.")
    stride: Count = Field(1, description="Every N-th.")
    per_class: Count | None = Field(None, description="No more than N of each class.")
    shuffle: bool = Field(False, description="Put them into a random order before start, stop and stride are counted.")
    seed: Seed = Field(0, description="The seed of that order.")

    @model_validator(mode="after")
    def _possible(self) -> SliceSpec:
        if self.stop is not None and self.stop <= self.start:
            raise ValueError(f"the slice is empty: stop ({self.stop}) has to be larger than start ({self.start})")
        if self.indices is not None and {"start", "stop", "stride"} & self.model_fields_set:
            raise ValueError("'indices' stands alone: it cannot be joined with start, stop or stride")
        return self


class DataConfig(Spec):
    """The dataset, and the slices of it to train on and to evaluate on."""

    dataset: Target = Field(description="Called with split='train' or 'test'; gives a dataset of (input, target).")
    root: str = Field("data", description="The folder that datasets on disk lie in; INSTRUMENT_DATA where it is set.")
    slice: SliceSpec = Field(default_factory=SliceSpec, description="What is trained on.")
    eval_slice: Annotated[SliceSpec, BeforeValidator(_of_test)] = Field(
        default_factory=lambda: SliceSpec(split="test"), description="What is evaluated on; of the split test."
    )
    fallback: Literal["digits"] | None = Field(None, description="What is used, loudly, where the dataset is missing.")


class CheckpointConfig(Spec):
    """When a training's whole state is kept."""

    every: Index = Field(0, description="Every N steps, and after the last one; 0: never. The last one is kept.")


class TrainConfig(Spec):
    """How long, in what portions."""

    steps: Count | None = Field(None, description="Optimizer steps; the dataset is gone through as often as it takes.")
    epochs: Count | None = Field(None, description="Times through the dataset, in place of steps.")
    batch_size: Count = Field(64, description="Samples in a micro-batch, over all processes together.")
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="bf16 and fp16: autocast; fp16 with a gradient scaler."
    )
    parallel: Literal["ddp", "fsdp2"] | None = Field(
        None,
        description="How the processes that torchrun starts train together: DistributedDataParallel, or fully_shard (FSDP2).",
    )
    find_unused_parameters: bool | None = Field(
        None,
        description="With ddp: whether a step may not use all parameters; null: as with the first batch.",
    )
    compile: bool = Field(False, description="Compile the model with torch.compile; hooks stay outside the graph.")
    accumulate: Count = Field(1, description="Micro-batches whose gradients are averaged into one optimizer step.")
    eval_every: Index = Field(
        0, description="Evaluate every N steps and after the last one; 0: after the last one only."
    )
    eval_batch_size: Count = Field(256, description="Samples in a batch of an evaluation, over all processes together.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="What a run that was stopped is resumed from."
    )

    @model_validator(mode="after")
    def _one_length(self) -> TrainConfig:
        if (self.steps is None) == (self.epochs is None):
            has = "none of them" if self.steps is None else f"both: steps {self.steps} and epochs {self.epochs}"
            raise ValueError(f"needs one of steps and epochs, the other one null; it has {has}")
        return self


TRACKERS = ("tensorboard", "wandb", "mlflow")  # where rows can go besides Parquet


class SinkConfig(Spec):
    """How rows are written."""

    tensors: Literal["list", "bytes"] = Field(
        "list", description="Recorded values as list<float>, or as raw bytes for volume."
    )
    when_full: Literal["wait", "drop"] = Field(
        "wait", description="Where tensors come faster than they can be written: wait, or drop them and count them."
    )
    durability: Literal["process", "power"] = Field(
        "process", description="What finished steps outlive: the process, or a loss of power (an fsync a step)."
    )
    on_error: Literal["stop", "continue"] = Field(
        "stop", description="Where nothing can be written any more: stop, or go on training without recording."
    )
    remote: str | None = Field(
        None,
        description="An address such as s3://bucket/prefix, below which the run's files are sent too; no credentials.",
    )
    keep_local: bool = Field(
        True, description="false: parts that are in the remote folder are removed here, for runs larger than the disk."
    )
    tensorboard: bool = Field(False, description="The same rows for TensorBoard too, in the run's folder.")
    wandb: bool = Field(False, description="The same rows for Weights & Biases too, where its environment says.")
    mlflow: bool = Field(False, description="The same rows for MLflow too, where its environment says.")

    @model_validator(mode="after")
    def _kept_somewhere(self) -> SinkConfig:
        if self.remote is None and not self.keep_local:
            raise ValueError("'keep_local' is false, and there is no 'remote' folder that keeps what is removed here")
        return self

    @property
    def trackers(self) -> tuple[str, ...]:
        """Those besides Parquet that are asked for."""
        return tuple(name for name in TRACKERS if getattr(self, name))


class RunConfig(Spec):
    """Everything that a run is made from."""

    name: RunName = Field("run", description="The folder under runs/.")
    seed: Seed = Field(0, description="Of Python's, NumPy's and PyTorch's random state, and of everything drawn here.")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one.")
    deterministic: bool = Field(False, description="Refuse algorithms that give other results from run to run.")
    plan: bool = Field(False, description="Print what would be hooked, recorded and spent; run nothing.")
    resume: str | None = Field(
        None, description="The folder of a run that was stopped: it goes on from its last checkpoint."
    )
    objective: str = Field(
        "loss",
        description="What a sweeper makes smaller or larger: a metric of the last evaluation, or one number of a table, as in "
        "max(stats.abs_max where layer = 'decoder.2').",
    )
    quiet: bool = Field(False, description="No progress and no tables; warnings and errors only.")
    report: bool = Field(False, description="Write report.html into the run's folder, and a sweep's, when it ends.")
    reduce: Literal["none", "global"] = Field(
        "none",
        description="Rows of several processes: none, each writes its own; global, one row for the batch of all of them.",
    )
    model: Target = Field(description="The torch.nn.Module.")
    data: DataConfig
    task: Target = Field(description="What a batch and a model make a loss of.")
    optimizer: Target = Field(
        description="Called with the parameters that train, or with the model where it takes one."
    )
    scheduler: Target | None = Field(None, description="Called with the optimizer; one step of it a training step.")
    train: TrainConfig
    apply: SkipValidation[dict[str, ApplySpec]] = Field(
        default_factory=dict, description="Changes made once, before step 0."
    )
    hooks: SkipValidation[dict[str, HookSpec]] = Field(
        default_factory=dict, description="What is seen and changed, by name."
    )
    budget: Annotated[BudgetConfig, BeforeValidator(_mapping)] = Field(
        default_factory=BudgetConfig, description="What record hooks may cost; what costs more is looked at less often."
    )
    sink: Annotated[SinkConfig, BeforeValidator(_mapping)] = Field(default_factory=SinkConfig)
