"""The tables of a run. The entry of a table drives everything that handles its rows.

The files are written with its columns. A record hook has its fields, the plan estimates its size, readers and the live view find it
by its name, and the documentation is generated from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from inspect import cleandoc
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ..fields.field_types import Bins, Count, Edges, Levels
from ..fields.registry import Registry
from .formats import CastField
from .statistics import REMAINDERS, STATISTICS

if TYPE_CHECKING:
    import pyarrow as pa  # imported with the first file; errors in a configuration are reported without it


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    name: str
    type_name: str  # the name of the Arrow type; `label` for text that is stored as a dictionary
    unit: str  # the unit; empty if it has none
    meaning: str  # what the column contains

    @cached_property
    def type(self) -> pa.DataType:
        import pyarrow as pa

        outer, _, inner = self.type_name.rstrip(">").partition("<")
        if outer == "label":
            return pa.dictionary(pa.int32(), pa.string())
        if outer == "map":
            return pa.map_(*map(pa.type_for_alias, inner.split(", ")))
        return pa.list_(pa.type_for_alias(inner)) if inner else pa.type_for_alias(outer)


def _columns(text: str, before: tuple[Column, ...] = (), *after: Column) -> tuple[Column, ...]:
    """Return columns, of which lines describe some: name | type | unit | meaning. Further lines of one are indented."""
    lines = re.sub(r"\n +", " ", cleandoc(text)).splitlines()
    return (*before, *(Column(*(cell.strip() for cell in line.split("|", 3))) for line in lines), *after)


@dataclass(frozen=True)
class Table:
    """One table: a folder of Parquet files in the folder of a run."""

    name: str  # the name of the table and its folder
    row: str  # what a row describes
    columns: tuple[Column, ...]  # the columns that a row is created with
    is_sorted: bool = False  # whether its files are sorted by `ORDER` and have the column `POSITION` in addition
    # Whether its numbers are averaged over steps: by charts, trackers, and the comparison of runs.
    has_numbers: bool = False
    # The types of the fields of `record` that request its rows, by name. They are None by default.
    fields: Mapping[str, Any] = field(default_factory=dict)
    roles: tuple[str, ...] = ()  # the roles of tensors of which it can have rows; empty for all
    least_dimensions: int = 0  # the number of dimensions that a tensor needs for a row
    # What computes its rows: the path of a class that implements `instrument.stats.table_rows.Measure`. Its arguments are the values of
    # those `fields` that are set.
    measured_by: str = ""

    @cached_property
    def has_identity(self) -> bool:
        """Whether a row describes one tensor at one firing of a hook."""
        return self.columns[: len(IDENTITY)] == IDENTITY

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The columns with one number that is averaged over steps."""
        others = [c for c in self.columns if c not in IDENTITY and c.unit != _UNITS["bits"]]
        numeric = [c.name for c in others if c.type_name in ("int64", "double", "bool")]
        return tuple(numeric) if self.has_numbers else ()

    @property
    def joins_statistics(self) -> bool:
        """Whether charts and the live view show its numbers as statistics of the same tensors."""
        return self.has_numbers and (bool(self.fields) or self.name == "stats")

    @property
    def shared_names(self) -> set[str]:
        """The fields of `record`, and the numbers that are shown together with those of other tables."""
        return {*self.fields, *(self.numbers if self.joins_statistics else ())}

    @property
    def stored(self) -> tuple[Column, ...]:
        """The columns of its files."""
        return (*self.columns, POSITION) if self.is_sorted else self.columns

    @cached_property
    def schema(self) -> pa.Schema:
        """The Arrow schema of its files. The metadata of each column contains unit and meaning."""
        import pyarrow as pa

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
        import pyarrow as pa

        types = [c.type.value_type if pa.types.is_dictionary(c.type) else c.type for c in self.columns]
        return pa.schema(list(zip(self.names, types, strict=True)))

    @cached_property
    def plain_struct(self) -> pa.DataType:
        """The type of one row of the journal as a single value."""
        import pyarrow as pa

        return pa.struct(list(self.plain_schema))


ORDER = ("step", "layer")
"""The sort order of files of sorted tables. Readers can skip row groups that they do not need."""
(POSITION,) = _columns(
    """
    position | int32 | | index among the rows of its step, from 0, in the order in which hooks fired; the files are sorted by
        step, then layer
    """
)
AS_WRITTEN = ("rank", "step", "phase", POSITION.name)
"""The sort order that restores the order in which the rows of a sorted table were written."""

MOMENT = _columns(
    """
    step | int64 | step | optimizer step, or batch in mode: forward, from 0; for an evaluation and the probe batch, the
        number of steps completed before it
    micro_step | int32 | batch | micro-batch in the step, or batch in the evaluation, from 0
    epoch | int32 | epoch | pass over the data, from 0
    phase | label | | train, eval, probe (the probe batch), rollout, or forward (mode: forward)
    rank | int32 | | process of a distributed run, from 0
    """
)
IDENTITY = _columns(
    """
    hook | label | | name of the spec
    layer | label | | name of the module; empty for the root, which is `.` in patterns and messages
    module_type | label | | short name of the module's class
    kind | label | | kind of the hook
    role | label | | role of the tensor: which of the kind's tensors it is
    path | label | | location of the tensor in a nested value; the name of a parameter or buffer in its module; the name and
        number of a function call
    call | int32 | call | index of the module's call in the micro-step, or of the optimizer's step in the step, from 0; -1
        if it is unknown which call is recomputed
    backward | int32 | pass | index of the tensor's gradient in this call, from 0; a double backward pass or a retained
        graph gives several
    recompute | bool | | whether activation checkpointing recomputed the forward pass
    mesh | label | | names of the dimensions of the device mesh of the processes, such as dp,tp; their indices if they have no
        names; empty without a mesh
    placement | label | | how the tensor is placed along each dimension of the mesh, such as replicate,shard(1): shard(DIMENSION),
        replicate, partial (a summand), or unknown; a row that `reduce: global` merges describes the complete tensor
    scope | label | | what the numbers describe: global: the complete batch; with several processes also local: this rank's
        batch shard; averaged: a value that is equal on every rank; shard: this rank's shard of a tensor
    """,
    MOMENT,
)
(SHAPE,) = _columns(
    """
    shape | list<int32> | elements | shape of the tensor; null for a row that `reduce: global` merges from the tensors of
        several processes
    """
)
(CUSTOM,) = _columns(
    """
    custom | map<string, double> | | custom statistics by name, or custom metrics; null without any. Readers of this package
        replace it by one column per name
    """
)
_UNITS = {
    "count": "elements",
    "elements": "elements",
    "bits": "64 bits",
    "fraction": "fraction of the finite values",
    "units": "fraction of the units",
    "ratio": "",
    "nats": "nats",
    "value": "the tensor's own",
}
_ARROW = {"int64": "int64", "float64": "double"}


def _of_statistics(names: Iterable[str]) -> tuple[Column, ...]:
    """Return the columns of a table that have these statistics."""
    return tuple(Column(s.name, _ARROW[s.dtype], _UNITS[s.unit], s.meaning) for s in map(STATISTICS.__getitem__, names))


OPERATOR_STATISTICS = ("nan_count", "inf_count", "min", "max", "mean", "std", "l2")
"""The statistics of each output of an operator."""


def _clash(table: Table) -> str | None:
    """Return which columns, fields of `record` or numbers clash; None if all are unique."""
    taken = dict.fromkeys(("run", "seed"), "readers of several runs add it")
    for index, column in enumerate(table.stored):
        if column.name in taken:
            return f"cannot have the column {column.name!r} at index {index}: {taken[column.name]}"
        taken[column.name] = f"it has one at index {index}"
    for name, place in TABLES.places.items():
        if shared := sorted(table.shared_names & TABLES[name].shared_names):
            return f"cannot have the field or number {shared[0]!r}, which table {name!r} has ({place})"
    return None


TABLES: Registry[Table] = Registry("tables", "table", check=_clash)
"""All tables by name. The order determines the files with row counts: new tables come last."""

for _table in (
    Table(
        "stats",
        "one tensor at one firing",
        (
            *IDENTITY,
            *_of_statistics(STATISTICS),
            SHAPE,
            CUSTOM,
        ),
        is_sorted=True,
        has_numbers=True,
    ),
    Table(
        "distributions",
        "the quantiles or the histogram of one tensor at one firing",
        _columns(
            """
            sampled | int64 | elements | finite elements from which the quantiles are computed; null without quantiles
            levels | list<double> | fraction | levels of the quantiles, ascending
            quantiles | list<double> | the tensor's own | one per level; computed from all elements if there are at most
                32,768, otherwise from a sample of 16,384; null if none is finite
            low | double | the tensor's own | lower end of the histogram: the smallest finite value
            high | double | the tensor's own | upper end of the histogram: the largest finite value
            counts | list<int64> | elements | finite elements in each of the equal-width bins from low to high; null without
                a histogram
            """,
            IDENTITY,
        ),
        is_sorted=True,
        fields={"quantiles": Levels, "histogram": Bins},
        measured_by="instrument.stats.table_rows:Distributions",
    ),
    Table(
        "tensors",
        "one recorded tensor",
        _columns(
            """
            dtype | label | | dtype of the recorded tensor; int8_scaled for 8-bit integers with a scale for each row of the last dimension
            shape | list<int64> | elements | shape of the recorded tensor
            source_shape | list<int64> | elements | shape of the tensor in the model
            block | int64 | | number of the block file of this rank with the bytes of data; null if they are in this row
            offset | int64 | bytes | position of the bytes in the block file
            size | int64 | bytes | size of the bytes
            checksum | int64 | | CRC-32 of the sums of each 4 KB (of 64-bit words, modulo 2^64), followed by the other bytes
            values | list<float> | the tensor's own | the elements, flattened in C order; null if they are in data
            data | large_binary | | the elements as little-endian bytes in C order; null if they are in values. Those in a block file
                are null in the Parquet file, and are added when the table is read with run.tensors or run.sql
            """,
            IDENTITY,
        ),
    ),
    Table(
        "effects",
        "one intervention at one firing",
        _columns(
            """
            numel | int64 | elements | elements of the tensor
            changed | int64 | elements | elements that the intervention changed
            changed_fraction | double | fraction | changed / numel
            norm_before | double | the tensor's own | L2 norm of the finite values before
            norm_after | double | the tensor's own | L2 norm of the finite values after
            factor | double | | factor by which the tensor was multiplied; null if it is not one number
            held | bool | | whether the condition of `when` held; null without a condition
            """,
            IDENTITY,
        ),
        is_sorted=True,
        has_numbers=True,
    ),
    Table(
        "metrics",
        "one step, or one evaluation",
        (
            *(column for column in MOMENT if column.name != "micro_step"),
            *_columns(
                """
                loss | double | the loss's own | mean over the samples of the step or the evaluation
                accuracy | double | fraction | fraction of the samples whose most likely class is the target
                lr | double | | learning rate of the first optimizer's first parameter group whose rate is not 0, as used by its step
                grad_norm | double | | L2 norm of all gradients together, before hooks at the optimizer boundary run
                seconds | double | s | wall-clock time of the step or the evaluation
                samples_per_second | double | 1/s | samples / seconds
                skipped | bool | | whether a gradient scaler skipped the step; with several optimizers, the steps of all of
                    them; null without a scaler
                """
            ),
            CUSTOM,
        ),
        has_numbers=True,
    ),
    Table(
        "coverage",
        "one (spec, layer, parameter)",
        (
            *(column for column in IDENTITY if column.name in ("hook", "layer", "module_type", "kind", "role")),
            *_columns(
                """
                path | label | | name of a parameter or buffer in its module; otherwise empty
                """
            ),
            *(column for column in IDENTITY if column.name == "rank"),
            *_columns(
                """
                expected | int64 | firings | expected number of firings: one per call in each micro-step in which the hook was
                    scheduled, or one if there was no call; steps at which its parameter is frozen or not in the optimizer do
                    not count
                fired | int64 | firings | actual number of firings
                dropped | int64 | tensors | recorded tensors that were dropped because no buffer was available
                cause | string | | why it fired less often than expected or was not expected to fire; the most frequent cause
                    first; empty if it fired as expected
                """
            ),
        ),
    ),
    Table(
        "layers",
        "one module",
        _columns(
            """
            layer | string | | name of the module; empty for the root, which is `.` in patterns and messages
            aliases | list<string> | | other names of the same module
            module_type | string | | short name of its class
            depth | int32 | | number of segments in its name
            parameters | int64 | elements | elements of the parameters of the module itself and of its parametrizations,
                without those of its submodules
            trainable | int64 | elements | trainable elements among them
            hooks | list<string> | | hooks that match it
            settings | map<string, string> | | at the end of the first step: its public attributes that are numbers, names or
                functions; dtype and shape of its parameters, the optimizer of each (`none` or `frozen` without one), and the first
                parameter to which it is equal before the first step, such as `weight.equals`, unless it is constant; `training` of
                a module in another mode than its parent, such as a frozen one, at the first loss; the number of each operator of the
                backward graphs that uses its parameters, or follows it, with its arguments and the number by which it multiplies or
                divides, such as `graph.AddmmBackward0`, and how many have an input without a gradient, such as `no_grad.AddmmBackward0`;
                in the row of the root also the settings of the optimizers, such as `optimizer.lr`, and the operators after the last
                layers, such as `loss.NllLossBackward0`, with weights of classes
            """
        ),
    ),
    Table(
        "events",
        "a warning, or an error",
        _columns(
            """
            step | int64 | step | optimizer step; null before the first one
            rank | int32 | | process of a distributed run, from 0
            layer | string | | the layer of the event; null if it concerns no layer
            rule | label | | name of the rule in the configuration that fired, such as non_finite; of other events:
                coverage, dropped, metrics, budget, fallback, hidden_module, fast_path, replaced, added, optimizer, clipping,
                init_from, data, output, no_end_step, ranks, compiled, graph_break, device_statistics, statistics,
                flight_recorder, placement, recording, tracking, remote, control, resumed, restarted, replay, counterfactual, error,
                interrupted
            message | string | | the message
            severity | label | | info, warning or error
            location | string | | tensor at which a rule fired, such as encoder.0 output (activations); otherwise null
            value | double | the rule's own | value at which a rule fired; otherwise null
            threshold | double | the rule's own | threshold that it exceeded; null if it has none
            """
        ),
    ),
    Table(
        "generated",
        "the continuation of one prompt by a language model",
        _columns(
            """
            sample | int32 | | index of the prompt in the batch of this process, from 0
            prompt | string | | the prompt; null without a tokenizer
            text | string | | the generated text; null without a tokenizer
            prompt_tokens | list<int64> | tokens | token ids of the prompt
            tokens | list<int64> | tokens | generated token ids; their indices are those of `call` in rows of modules that
                run once per token
            """,
            MOMENT,
        ),
    ),
    Table(
        "samples",
        "one sample of a batch in which a tensor was recorded; with `data.ids=all`, of any batch",
        _columns(
            """
            position | int32 | | index of the sample in this process's batch, from 0: its index in dimension 0 of the
                batch's tensors
            sample | int64 | | index of the sample in the complete dataset, or the id that the loop passed; null if ids are
                strings
            id | string | | id of the sample if ids are strings; otherwise null
            target | double | the target's own | target of the sample; null if it is not one number
            target_dtype | label | | dtype of the targets; null without targets
            """,
            MOMENT,
        ),
    ),
    Table(
        "spectra",
        "the singular values of one tensor at one firing, viewed as a matrix of its units and all other dimensions",
        _columns(
            """
            values | list<double> | the tensor's own | the largest singular values, descending; null if an element is not
                finite
            spectral_norm | double | the tensor's own | the largest singular value; null without values
            stable_rank | double | | squared Frobenius norm / squared spectral norm (Rudelson and Vershynin, 2007), from 1
                to the rank; null if the norm is 0
            effective_rank | double | | exponential of the entropy of all singular values divided by their sum (Roy and
                Vetterli, 2007), from 1 to the rank; null if the norm is 0
            """,
            IDENTITY,
            SHAPE,
        ),
        is_sorted=True,
        has_numbers=True,
        fields={
            "spectrum": Annotated[
                Count | None, Field(description="Number of singular values to record: the largest ones.")
            ]
        },
        roles=("param", "param_grad", "update", "output", "input", "change", "grad_output", "grad_input"),
        least_dimensions=2,
        measured_by="instrument.stats.spectrum:Spectrum",
    ),
    Table(
        "experts",
        "the load of the experts of a mixture of experts in one call of a router",
        _columns(
            """
            load | list<double> | fraction | share of the assignments of tokens to experts for each expert; their sum is 1;
                null without an assignment
            cv | double | | coefficient of variation of the load: population standard deviation / mean (Shazeer et al. 2017)
            dead_experts | int64 | experts | number of experts without a token
            router_entropy | double | nats | mean over the tokens of the entropy of softmax(logits); null for indices of experts
            dropped_fraction | double | fraction | share of the assignments beyond the capacity of their expert, which is
                capacity_factor * assignments / experts, rounded up (Fedus et al. 2021); null without capacity_factor
            """,
            IDENTITY,
            SHAPE,
        ),
        is_sorted=True,
        has_numbers=True,
        fields={
            "experts": Annotated[
                Literal["module"] | Count | None,
                Field(
                    description="Record the load of experts from the output of a router, logits [..., experts] or indices [..., experts "
                    "per token]. The number of experts per token, or 'module' for the module's attribute top_k or num_experts_per_tok."
                ),
            ],
            "capacity_factor": Annotated[
                float | None,
                Field(
                    gt=0,
                    description="Also record the share of dropped assignments, if an expert takes at most this multiple of the mean load.",
                ),
            ],
        },
        roles=("output", "input"),
        least_dimensions=1,
        measured_by="instrument.stats.experts:Experts",
    ),
    Table(
        "position_losses",
        "the cross entropy of a language model by position, in one call of the module that returns its logits",
        _columns(
            """
            first_positions | list<int64> | positions | first position of each bin in the sequence; a bin ends before the next one
            losses | list<double> | nats | mean of logsumexp(logits) - logit of the target over the targets in each bin; null
                without any
            targets | list<int64> | targets | number of targets in each bin; those of -100, and with a loss that is not finite,
                do not count
            """,
            IDENTITY,
            SHAPE,
        ),
        is_sorted=True,
        fields={"position_losses": Edges},
        roles=("output",),
        least_dimensions=3,
        measured_by="instrument.stats.position_losses:PositionLosses",
    ),
    Table(
        "relations",
        "a relation that does not hold at one tensor, the first check of a relation, or how often values occur in a tensor",
        _columns(
            """
            relation | label | | name of the relation, which is that of its rule, such as tied_weights; counts for the targets of a loss and
                the indices of an embedding in a recorded step: how many values are in each of 64 buckets
            layer | label | | name of the module; empty for the root or the run as a whole
            path | label | | name of a parameter or buffer in its module, of a loss function, or location of a tensor; otherwise empty
            holds | bool | | whether it holds; null if it could not be checked, and for counts
            value | double | the relation's own | how much was compared, or how far the relation is violated; null without a number
            text | string | | what was compared, how the relation is violated, or why it could not be checked; the 64 numbers of counts
            """,
            tuple(column for column in MOMENT if column.name in ("step", "phase", "rank")),
        ),
    ),
    Table(
        "collectives",
        "a tensor of a collective operation at one firing of a record hook of kind collective",
        _columns(
            """
            operation | label | | name of the operation, such as all_reduce
            reduction | label | | how it combines tensors: sum, avg, product, min, max, ...; null if it does not
            ranks | list<int32> | | the processes of its group, by rank
            dtype | label | | dtype of the tensor
            bytes | int64 | B | size of the tensor
            seconds | double | s | wall-clock time from the call to the end of the operation in this process, with the time in
                which it waits for other processes. For a tensor on a device, between the events of its current stream before the
                call and after the code has waited for the result; null for a device without such events
            """,
            IDENTITY,
        ),
        is_sorted=True,
    ),
    Table(
        "casts",
        "what the cast of one tensor to a narrow format would lose, at one firing",
        _columns(
            """
            format | label | | the format, such as float8_e4m3fn
            scale | double | | factor of the elements before the cast; the smallest one if `reduce: global` merges several; null for MX
                formats. With `scale: previous`, it and the following columns are null for the first tensor
            underflow_fraction | double | fraction of the finite values | count(x != 0 whose cast is 0) / n
            overflow_fraction | double | fraction of the finite values | count(|x| that is rounded to more than the largest
                number) / n. A cast returns the largest number, infinity or NaN there
            quantization_error | double | | sum((cast(x) - x)^2) / sum(x^2), where an overflow gives the largest number; null if all
                x are 0. The signal-to-noise ratio in dB is -10 log10(quantization_error)
            block_errors | list<double> | | quantiles over the blocks of their quantization_error, at the levels 0.01, 0.1, 0.25, 0.5,
                0.75, 0.9, 0.99; computed as in `distributions`; null for formats without blocks
            """,
            IDENTITY,
            SHAPE,
        ),
        is_sorted=True,
        has_numbers=True,
        fields={"cast": CastField},
        measured_by="instrument.stats.casts:Casts",
    ),
    Table(
        "operators",
        "one output of one call of an ATen operator, in steps of `replay --ops` and in blocks of `probe.record_operators()`",
        _columns(
            """
            number | int32 | | index of the operator call in its step, from 0
            part | label | | part of the step: forward (inside a module), recompute (a forward pass that checkpointing repeats),
                backward, optimizer, or loop (other code, such as a loss function)
            layer | label | | name of the innermost module that runs; in the backward pass, that of the operator that made the node,
                or of the parameter whose gradient is accumulated; empty for the root; null if none is known
            operator | label | | name and overload, such as aten.mm.default
            source | label | | file and line of the innermost Python code outside of PyTorch and this package; in the backward pass,
                that of the operator that made the node; null if unknown
            output | int32 | | index of the tensor among those that the operator returned or changed, from 0
            dtype | label | | dtype of the tensor; numbers describe this process's shard of a sharded tensor
            shape | list<int32> | elements | shape of the tensor; null for a nested tensor
            random | bool | | whether the operator draws random numbers
            inputs | int64 | | hash of the bits of all tensors that the operator reads; 0 if it reads none or returns no new values;
                null for operators of compiled code
            nan_inputs | int64 | elements | number of NaN in these tensors; null for operators of compiled code
            fingerprint | int64 | | hash of the bits of all elements and their positions; null without new values: views,
                uninitialized memory, collectives and tensors that cannot be read
            projection | double | | sum of the elements with pseudo-random signs, which are the same for each tensor of this size; null
                if `fingerprint` is null, and for integers
            """,
            MOMENT,
            *_of_statistics(OPERATOR_STATISTICS),
        ),
    ),
):
    TABLES.register(_table.name)(_table)

RESERVED_COLUMNS = frozenset(
    [
        *("run", "seed", *REMAINDERS.values()),
        *(column.name for table in ("stats", "metrics") for column in TABLES[table].stored),
    ]
)
"""The names that no custom statistic can have: readers could not distinguish their values."""


def joined_table(number: str) -> str | None:
    """Return the table whose number rules and charts read like a statistic of the same tensor; None if no table has it."""
    tables = (table for table in TABLES.values() if table.joins_statistics and table.name != "stats")
    return next((table.name for table in tables if number in table.numbers), None)
