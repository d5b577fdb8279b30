"""Definitions of all tables of a run: the name, dtype, unit and meaning of every column.

The files are written with these schemas. The documentation is generated from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from ..kinds.reasons import NO_INPUT_GRAPH, NOT_TURNED_ON, OLD_NO_INPUT_GRAPH, ONLY_IN_OTHER_MODULES
from ..spec.statistics import STATISTICS

NEVER_DUE = "never scheduled: its schedule contains none of the completed steps"  # a reason in the coverage table

_LABEL = pa.dictionary(pa.int32(), pa.string())


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        name: The name.
        type: The Arrow type.
        unit: The unit; empty if it has none.
        meaning: What the column contains.
    """

    name: str
    type: pa.DataType
    unit: str
    meaning: str


@dataclass(frozen=True)
class Table:
    """One table: a folder of Parquet files in the folder of a run.

    Attributes:
        name: The name of the table and its folder.
        row: What a row describes.
        columns: The columns that a row is created with.
        is_sorted: Whether its files are sorted by `ORDER` and have the column `POSITION` in addition.
    """

    name: str
    row: str
    columns: tuple[Column, ...]
    is_sorted: bool = False

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns of its files."""
        return (*self.columns, POSITION) if self.is_sorted else self.columns

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its files. The metadata of each column contains unit and meaning."""
        return pa.schema(
            [pa.field(c.name, c.type, metadata={"unit": c.unit, "meaning": c.meaning}) for c in self.stored]
        )

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that a row is created with, in order."""
        return tuple(column.name for column in self.columns)

    @cached_property
    def plain_schema(self) -> pa.Schema:
        """The schema of the journal, in which labels are plain strings."""
        types = [c.type.value_type if pa.types.is_dictionary(c.type) else c.type for c in self.columns]
        return pa.schema(list(zip(self.names, types, strict=True)))

    @cached_property
    def plain_struct(self) -> pa.DataType:
        """The type of one row of the journal as a single value."""
        return pa.struct(list(self.plain_schema))


ORDER = ("step", "layer")
"""The sort order of files of sorted tables. Readers can skip row groups that they do not need."""
POSITION = Column(
    "position",
    pa.int32(),
    "",
    "index among the rows of its step, from 0, in the order in which hooks fired; the files are sorted by step, then layer",
)
AS_WRITTEN = ("rank", "step", "phase", POSITION.name)
"""The sort order that restores the order in which the rows of a sorted table were written."""

MOMENT = (
    Column(
        "step",
        pa.int64(),
        "step",
        "optimizer step, or batch in mode: forward, from 0; for an evaluation and the probe batch, the number of steps "
        "completed before it",
    ),
    Column("micro_step", pa.int32(), "batch", "micro-batch in the step, or batch in the evaluation, from 0"),
    Column("epoch", pa.int32(), "epoch", "pass over the data, from 0"),
    Column("phase", _LABEL, "", "train, eval, probe (the probe batch), or forward (mode: forward)"),
    Column("rank", pa.int32(), "", "process of a distributed run, from 0"),
)
IDENTITY = (
    *MOMENT,
    Column("hook", _LABEL, "", "name of the spec"),
    Column("layer", _LABEL, "", "name of the module; empty for the root"),
    Column("module_type", _LABEL, "", "short name of the module's class"),
    Column("kind", _LABEL, "", "kind of the hook"),
    Column("role", _LABEL, "", "role of the tensor: which of the kind's tensors it is"),
    Column(
        "path",
        _LABEL,
        "",
        "location of the tensor in a nested value; the name of a parameter or buffer in its module; the name and number of a "
        "function call",
    ),
    Column(
        "call",
        pa.int32(),
        "call",
        "index of the module's call in the micro-step, or of the optimizer's step in the step, from 0; -1 if it is unknown which "
        "call is recomputed",
    ),
    Column(
        "backward",
        pa.int32(),
        "pass",
        "index of the tensor's gradient in this call, from 0; a double backward pass or a retained graph gives several",
    ),
    Column("recompute", pa.bool_(), "", "whether activation checkpointing recomputed the forward pass"),
    Column(
        "scope",
        _LABEL,
        "",
        "what the numbers describe: global: the complete batch; with several processes also local: this rank's batch shard; "
        "averaged: a value that is equal on every rank; shard: this rank's shard of a tensor",
    ),
)
SHAPE = Column(
    "shape",
    pa.list_(pa.int32()),
    "elements",
    "shape of the tensor; null for a row that `reduce: global` merges from the tensors of several processes",
)
CUSTOM = Column(
    "custom",
    pa.map_(pa.string(), pa.float64()),
    "",
    "custom statistics by name, or custom metrics; null without any. Readers of this package replace it by one column per name",
)
_UNITS = {
    "count": "elements",
    "fraction": "fraction of the finite values",
    "units": "fraction of the units",
    "ratio": "",
    "value": "the tensor's own",
}
_ARROW = {"int64": pa.int64(), "float64": pa.float64()}

TABLES: dict[str, Table] = {
    table.name: table
    for table in (
        Table(
            "stats",
            "one tensor at one firing",
            (
                *IDENTITY,
                *(Column(s.name, _ARROW[s.dtype], _UNITS[s.unit], s.formula) for s in STATISTICS.values()),
                SHAPE,
                CUSTOM,
            ),
            is_sorted=True,
        ),
        Table(
            "distributions",
            "the quantiles or the histogram of one tensor at one firing",
            (
                *IDENTITY,
                Column(
                    "sampled",
                    pa.int64(),
                    "elements",
                    "finite elements from which the quantiles are computed; null without quantiles",
                ),
                Column("levels", pa.list_(pa.float64()), "fraction", "levels of the quantiles, ascending"),
                Column(
                    "quantiles",
                    pa.list_(pa.float64()),
                    "the tensor's own",
                    "one per level; computed from all elements if there are at most 32,768, otherwise from a sample of "
                    "16,384; null if none is finite",
                ),
                Column(
                    "low", pa.float64(), "the tensor's own", "lower end of the histogram: the smallest finite value"
                ),
                Column(
                    "high", pa.float64(), "the tensor's own", "upper end of the histogram: the largest finite value"
                ),
                Column(
                    "counts",
                    pa.list_(pa.int64()),
                    "elements",
                    "finite elements in each of the equal-width bins from low to high; null without a histogram",
                ),
            ),
            is_sorted=True,
        ),
        Table(
            "tensors",
            "one recorded tensor",
            (
                *IDENTITY,
                Column("dtype", _LABEL, "", "dtype of the recorded tensor"),
                Column("shape", pa.list_(pa.int64()), "elements", "shape of the recorded tensor"),
                Column("source_shape", pa.list_(pa.int64()), "elements", "shape of the tensor in the model"),
                Column(
                    "values",
                    pa.list_(pa.float32()),
                    "the tensor's own",
                    "the elements, flattened in C order; null if they are in data",
                ),
                Column(
                    "data",
                    pa.large_binary(),
                    "",
                    "the elements as little-endian bytes in C order; null if they are in values",
                ),
            ),
        ),
        Table(
            "effects",
            "one intervention at one firing",
            (
                *IDENTITY,
                Column("numel", pa.int64(), "elements", "elements of the tensor"),
                Column("changed", pa.int64(), "elements", "elements that the intervention changed"),
                Column("changed_fraction", pa.float64(), "fraction", "changed / numel"),
                Column("norm_before", pa.float64(), "the tensor's own", "L2 norm of the finite values before"),
                Column("norm_after", pa.float64(), "the tensor's own", "L2 norm of the finite values after"),
                Column(
                    "factor",
                    pa.float64(),
                    "",
                    "factor by which the tensor was multiplied; null if it is not one number",
                ),
                Column("held", pa.bool_(), "", "whether the condition of `when` held; null without a condition"),
            ),
            is_sorted=True,
        ),
        Table(
            "metrics",
            "one step, or one evaluation",
            (
                *(column for column in MOMENT if column.name != "micro_step"),
                Column("loss", pa.float64(), "the loss's own", "mean over the samples of the step"),
                Column(
                    "accuracy",
                    pa.float64(),
                    "fraction",
                    "fraction of the samples whose most likely class is the target",
                ),
                Column(
                    "lr",
                    pa.float64(),
                    "",
                    "learning rate of the first optimizer's first parameter group, as used by its step",
                ),
                Column(
                    "grad_norm",
                    pa.float64(),
                    "",
                    "L2 norm of all gradients together, before hooks at the optimizer boundary run",
                ),
                Column("seconds", pa.float64(), "s", "wall-clock time of the step or the evaluation"),
                Column("samples_per_second", pa.float64(), "1/s", "samples / seconds"),
                Column(
                    "skipped",
                    pa.bool_(),
                    "",
                    "whether a gradient scaler skipped the step; with several optimizers, the steps of all of them; null without a scaler",
                ),
                CUSTOM,
            ),
        ),
        Table(
            "coverage",
            "one (spec, layer, parameter)",
            (
                *(column for column in IDENTITY if column.name in ("hook", "layer", "module_type", "kind", "role")),
                Column("path", _LABEL, "", "name of a parameter or buffer in its module; otherwise empty"),
                *(column for column in IDENTITY if column.name == "rank"),
                Column(
                    "expected",
                    pa.int64(),
                    "firings",
                    "expected number of firings: one per call in each micro-step in which the hook was scheduled, or one if there was no "
                    "call; steps at which its parameter is frozen or not in the optimizer do not count",
                ),
                Column("fired", pa.int64(), "firings", "actual number of firings"),
                Column(
                    "dropped",
                    pa.int64(),
                    "tensors",
                    "recorded tensors that were dropped because no buffer was available",
                ),
                Column(
                    "cause",
                    pa.string(),
                    "",
                    "why it fired less often than expected or was not expected to fire; the most frequent cause first; empty if it "
                    "fired as expected",
                ),
            ),
        ),
        Table(
            "layers",
            "one module",
            (
                Column("layer", pa.string(), "", "name of the module; empty for the root"),
                Column("aliases", pa.list_(pa.string()), "", "other names of the same module"),
                Column("module_type", pa.string(), "", "short name of its class"),
                Column("depth", pa.int32(), "", "number of segments in its name"),
                Column(
                    "parameters",
                    pa.int64(),
                    "elements",
                    "elements of the parameters of the module itself and of its parametrizations, without those of its submodules",
                ),
                Column("trainable", pa.int64(), "elements", "trainable elements among them"),
                Column("hooks", pa.list_(pa.string()), "", "hooks that match it"),
            ),
        ),
        Table(
            "events",
            "a warning, or an error",
            (
                Column("step", pa.int64(), "step", "optimizer step; null before the first one"),
                Column("rank", pa.int32(), "", "process of a distributed run, from 0"),
                Column("layer", pa.string(), "", "the layer of the event; null if it concerns no layer"),
                Column(
                    "rule",
                    _LABEL,
                    "",
                    "name of the rule in the configuration that fired, such as non_finite; of other events: coverage, dropped, metrics, "
                    "budget, fallback, hidden_module, fast_path, replaced, optimizer, clipping, init_from, data, output, no_end_step, "
                    "hook_order, ranks, compiled, graph_break, device_statistics, flight_recorder, recording, tracking, remote, control, "
                    "resumed, restarted, replay, counterfactual, error, interrupted",
                ),
                Column("message", pa.string(), "", "the message"),
                Column("severity", _LABEL, "", "info, warning or error"),
                Column(
                    "location",
                    pa.string(),
                    "",
                    "tensor at which a rule fired, such as encoder.0 output (activations); otherwise null",
                ),
                Column("value", pa.float64(), "the rule's own", "value at which a rule fired; otherwise null"),
                Column("threshold", pa.float64(), "the rule's own", "threshold that it exceeded; null if it has none"),
            ),
        ),
        Table(
            "generated",
            "the continuation of one prompt by a language model",
            (
                *MOMENT,
                Column("sample", pa.int32(), "", "index of the prompt in the batch of this process, from 0"),
                Column("prompt", pa.string(), "", "the prompt; null without a tokenizer"),
                Column("text", pa.string(), "", "the generated text; null without a tokenizer"),
                Column("prompt_tokens", pa.list_(pa.int64()), "tokens", "token ids of the prompt"),
                Column(
                    "tokens",
                    pa.list_(pa.int64()),
                    "tokens",
                    "generated token ids; their indices are those of `call` in rows of modules that run once per token",
                ),
            ),
        ),
        Table(
            "samples",
            "one sample of a batch in which a tensor was recorded; with `data.ids=all`, of any batch",
            (
                *MOMENT,
                Column(
                    "position",
                    pa.int32(),
                    "",
                    "index of the sample in this process's batch, from 0: its index in dimension 0 of the batch's tensors",
                ),
                Column(
                    "sample",
                    pa.int64(),
                    "",
                    "index of the sample in the complete dataset, or the id that the loop passed; null if ids are strings",
                ),
                Column("id", pa.string(), "", "id of the sample if ids are strings; otherwise null"),
                Column(
                    "target", pa.float64(), "the target's own", "target of the sample; null if it is not one number"
                ),
                Column("target_dtype", _LABEL, "", "dtype of the targets; null without targets"),
            ),
        ),
    )
}


def as_batch(table: Table, *groups: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Convert rows, tuples in the order of the columns, to a record batch with labels as strings.

    A group of rows that has a method `to_batch` converts itself.
    """
    batches = [
        group.to_batch()
        if hasattr(group, "to_batch")
        else pa.RecordBatch.from_struct_array(pa.array(group, table.plain_struct))
        for group in groups
    ]
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def with_positions(table: Table, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Add the position of each row within a batch, if the files of the table have it."""
    if not table.is_sorted:
        return batch
    positions = pa.array(np.arange(batch.num_rows, dtype=np.int32))
    return batch.append_column(pa.field(POSITION.name, POSITION.type), positions)


def as_table(table: Table, plain: Sequence[pa.RecordBatch] | pa.Table) -> pa.Table:
    """Convert plain rows to the dtypes of the files, with labels as dictionaries.

    Args:
        table: The table.
        plain: Batches of rows, or rows that have their positions if the table requires them.
    """
    if not isinstance(plain, pa.Table):
        plain = pa.Table.from_batches([with_positions(table, batch) for batch in [*plain, _empty_batch(table)]])
    columns = [
        cells.combine_chunks().dictionary_encode() if pa.types.is_dictionary(column.type) else cells
        for column, cells in zip(table.stored, plain.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def _empty_batch(table: Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([], table.plain_schema)


def markdown() -> str:
    """Return the documentation of all columns in Markdown. Columns that several tables share are described once."""
    names = [f"`{table.name}`" for table in TABLES.values() if all(c in table.columns for c in IDENTITY)]
    parts = [f"### Columns that {', '.join(names[:-1])} and {names[-1]} share\n\n{_rows(IDENTITY)}"]
    for table in TABLES.values():
        shared = [f"`{c.name}`" for c in table.columns if c in IDENTITY]
        all_or_some = (
            "all shared columns" if len(shared) == len(IDENTITY) else f"the shared columns {', '.join(shared)}"
        )
        note = f"In addition, it has {all_or_some}.\n\n" if shared else ""
        own = [c for c in table.stored if c not in IDENTITY]
        parts.append(f"### `{table.name}/`: a row is {table.row}\n\n{note}{_rows(own)}")
    return "\n\n".join(parts) + "\n"


def _rows(columns: Sequence[Column]) -> str:
    """Return a Markdown table that describes columns."""
    rows = [
        f"| `{c.name}` | {_type_name(c.type)} | {c.unit} | {c.meaning.replace('|', chr(92) + '|')} |" for c in columns
    ]
    return "\n".join(["| column | type | unit | meaning |", "|---|---|---|---|", *rows])


def _type_name(kind: pa.DataType) -> str:
    if pa.types.is_dictionary(kind):
        return "string (dictionary)"
    if pa.types.is_list(kind):
        return f"list<{kind.value_type}>"
    if pa.types.is_map(kind):
        return f"map<{kind.key_type}, {kind.item_type}>"
    return str(kind)


def is_incomplete(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the coverage table requires a warning: a hook fired less often than expected, or never.

    A record of a gradient that cannot exist, such as that of the input data, requires none. Neither does a module without the
    functions of a hook that other modules call, and a hook that waits for a rule.
    """
    if row["expected"]:
        return bool(row["fired"] < row["expected"])
    return row["cause"] not in ("", NO_INPUT_GRAPH, NOT_TURNED_ON, OLD_NO_INPUT_GRAPH, ONLY_IN_OTHER_MODULES)
