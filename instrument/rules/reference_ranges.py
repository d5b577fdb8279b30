"""The ranges of statistics in healthy runs, by location and phase of training, and their file."""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tables.statistics import NONNEGATIVE
from .step_rows import FloatArray, IndexArray, Location

if TYPE_CHECKING:
    import pyarrow as pa  # imported with the first file; errors in a configuration are reported without it

KEY = ("hook", "layer", "kind", "role", "path", "phase")
"""The columns that identify a location in a reference. Those of metrics are empty, except `phase`."""
MEAN_LOSS = "mean_loss"
"""The mean loss of all training steps of a phase of training."""
METRICS = ("lr", "loss", "accuracy", "grad_norm", MEAN_LOSS)
RATIOS = frozenset({*NONNEGATIVE, "lr", "grad_norm"})
"""The statistics and metrics that are never negative and not fractions."""
ModuleSettings = Mapping[str, Mapping[str, str]]
"""The settings of each module by its name; see the column `settings` of the table `layers`."""
NO_GRAD = "no_grad."
"""The beginning of the settings that are the number of the operators that have an input without a gradient."""
GRAPH_PARTS = ("loss.", "graph.", NO_GRAD)
"""The beginnings of the settings that are operators of the backward graph of the loss: after the model, of it, and of both."""
FACTORS = "loss.factor."
"""The beginning of the settings of the root that multiply or divide a complete loss: if its value is usual, they scale only gradients."""
COUNTS = "counts"
"""The name in the table `relations` of how often values occur in what enters a training; see `ValueCounts`."""
BUCKETS = 64  # of these values
METADATA = b"instrument_reference"
FORMAT = 1
STARTS: IndexArray = np.unique([0, *np.ceil(2.0 ** (np.arange(80) / 2)).astype(np.int64)])
"""The first step of each phase of training, int64 [phases]: 0, 1, 2, 3, 4, 6, 8, 12, 16, 23, ..., two in each octave.

A training changes in proportion to the logarithm of the step: fast at first, slowly later.
"""
FIRST_STEPS = 4  # each is a phase of training of one step
SMALL_RATE = 1e-3  # relative to the largest learning rate: a smaller one is as good as none
CHANGE_OF_RATE = 0.02  # relative to the learning rate: a smaller one is not stored
# Neither the number of operators, nor an argument such as `reduction=1`.
NUMBER = re.compile(r"(?<![=\w.+-])-?\d+(\.\d+)?(e[+-]?\d+)?(?![\w.]| \()")
ABOUT, CHANGE_OF_WEIGHTS = "about ", 2.0
"""The beginning of a setting that has about these numbers in all runs: weights of classes that are computed from different data. A
smaller factor is not a difference."""
BITS = 8  # of the stored numbers, which are rounded outwards by at most 1 / 2^8


@cache
def schema() -> pa.Schema:
    import pyarrow as pa

    labels = [(name, pa.dictionary(pa.int32(), pa.string())) for name in (*KEY, "statistic")]
    return pa.schema([*labels, ("step", pa.int64()), *((name, pa.float32()) for name in ("low", "high", "spread"))])


def phase_of(step: int | IndexArray) -> Any:
    """Return the index in `STARTS` of the phase of training of each step."""
    return np.searchsorted(STARTS, step, side="right") - 1


class Reference:
    """The ranges of statistics in healthy runs.

    Args:
        table: One row for each location, statistic and phase of training, with the columns of `schema`: the first step of the phase,
            the smallest and the largest value, and the margin: a factor for statistics that are never negative, otherwise a
            difference.
        about: The entries `runs` (the names of the runs), `last_step`, `versions`, `config`, `settings`, `varied`, `rates` and
            `counts`.

    Attributes:
        index: The index of each location, given as the values of `KEY`.
        settings: The settings of each module that it has in all runs; None for one that differs between them.
        varied: The locations of inputs that differ in successive steps of the first ones, in all runs.
        counts: Of each tensor of targets or indices: `counts`, how often values occur in each phase of training in all runs, by its index
            as text, and `largest`, the largest difference of a run from the others in two successive steps; see `difference_of_counts`.
        rates: The steps at which the learning rate changes, and its values, float64 [2, changes]: none if it differs between the runs.
    """

    def __init__(self, table: pa.Table, about: Mapping[str, Any]) -> None:
        self.table, self.about = table, about
        self.settings: Mapping[str, Mapping[str, str | None]] = about.get("settings") or {}
        self.varied = {tuple(key) for key in about.get("varied") or ()}
        self.counts: Mapping[str, Mapping[str, Any]] = about.get("counts") or {}
        self.rates: FloatArray = np.array(about.get("rates") or [], np.float64).reshape(-1, 2).T
        *columns, names = (table[name].cast("string").to_pylist() for name in (*KEY, "statistic"))
        keys = list(zip(*columns, strict=True))
        self.index = {key: at for at, key in enumerate(dict.fromkeys(keys))}
        self.statistics = tuple(dict.fromkeys(names))
        phases = phase_of(table["step"].to_numpy())
        at = [self.index[key] for key in keys], [self.statistics.index(name) for name in names], phases
        self._ranges = np.full((3, len(self.index), len(self.statistics), phases.max(initial=0) + 1), np.nan)
        for numbers, name in zip(self._ranges, ("low", "high", "spread"), strict=True):
            numbers[at] = table[name].to_numpy()

    @classmethod
    def parse(cls, content: bytes) -> Reference:
        """Read the content of a file.

        Raises:
            ValueError: It is not a reference.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.read_table(io.BytesIO(content))
            about = json.loads(table.schema.metadata[METADATA])
            if about["format"] != FORMAT:
                raise ValueError(f"its format {about['format']} is not supported: it was made by a later version")
            return cls(table.cast(schema()), about)
        except (pa.ArrowException, KeyError, TypeError) as error:
            raise ValueError("it was not made by python -m instrument.reference") from error

    def content(self) -> bytes:
        import pyarrow.parquet as pq

        about = json.dumps({"format": FORMAT, **self.about}, default=str)
        stream = io.BytesIO()
        packed = ["low", "high", "spread"]
        options: dict[str, Any] = {"use_dictionary": [*KEY, "statistic", "step"], "use_byte_stream_split": packed}
        pq.write_table(self.table.replace_schema_metadata({METADATA: about}), stream, compression="zstd", **options)
        return stream.getvalue()

    @property
    def digest(self) -> str:
        """The first 16 hexadecimal digits of the SHA-256 of all that is compared."""
        digest = hashlib.sha256(repr((list(self.index), self.statistics, self._ranges.shape)).encode())
        digest.update(self._ranges.tobytes())
        digest.update(json.dumps(self.settings).encode() if self.settings else b"")
        digest.update(json.dumps(sorted(self.varied)).encode() if self.varied else b"")
        digest.update(json.dumps(self.counts).encode() if self.counts else b"")
        digest.update(self.rates.tobytes() if "rates" in self.about else b"")
        return digest.hexdigest()[:16]

    @property
    def locations(self) -> list[tuple[str, ...]]:
        """The values of `KEY` of each location of statistics."""
        return [key for key in self.index if key[0]]

    @property
    def of_metrics(self) -> dict[str, int]:
        """The index of the metrics of each phase of the loop."""
        return {key[-1]: at for key, at in self.index.items() if not key[0]}

    def ranges(self, statistics: Sequence[str]) -> tuple[FloatArray, FloatArray]:
        """Return the smallest and largest values, float64 [locations, statistics, phases]; NaN for no range."""
        low, high, _ = self._ranges[:, :, [self.statistics.index(name) for name in statistics]]
        return low, high

    def limits(self, statistics: Sequence[str], margin: float) -> tuple[FloatArray, FloatArray]:
        """Return the ranges with their margin, multiplied by a factor: float64 [locations, statistics, phases + 1].

        Infinite for no range, as in the last phase, which follows the last step of the runs.
        """
        at = [self.statistics.index(name) for name in statistics]
        low, high, spread = np.pad(self._ranges[:, :, at], [(0, 0)] * 3 + [(0, 1)], constant_values=np.nan)
        is_ratio = np.array([name in RATIOS for name in statistics], np.bool_)[:, None]
        low = np.where(is_ratio, low / spread**margin, low - margin * spread)
        high = np.where(is_ratio, high * spread**margin, high + margin * spread)
        return np.where(np.isnan(low), -np.inf, low), np.where(np.isnan(high), np.inf, high)


def steps_of(phase: int) -> range:
    """Return the steps of a phase of training."""
    return range(int(STARTS[phase]), int(STARTS[phase + 1]))


def sums_of_counts(counts: Mapping[int, FloatArray]) -> Iterator[tuple[str, FloatArray]]:
    """Yield for each step with counts its phase of training, as text, and the sum of the counts in this phase until this step."""
    last, total = "", np.zeros(BUCKETS)
    for step in sorted(counts):
        phase = str(phase_of(step))
        last, total = phase, counts[step] + (total if phase == last else 0)
        yield phase, total


def difference_of_counts(counts: FloatArray, healthy: FloatArray) -> tuple[float, int]:
    """Return by how many standard deviations the chi-square of two lists of counts is above its mean, and the bucket that differs most.

    Chance changes a rare value by some counts, so that a variance below 1/2 counts as 1/2.
    """
    total = counts + healthy
    expected = total * counts.sum() / total.sum()
    terms = (counts - expected) ** 2 / np.maximum(expected * healthy.sum() / total.sum(), 0.5)
    freedom = max(int(np.count_nonzero(total)) - 1, 1)
    return float(terms.sum() - freedom) / math.sqrt(2 * freedom), int(terms.argmax())


def setting_name(layer: str, name: str) -> str:
    """Return the full name of a setting, such as `encoder.0.dropout.p`."""
    return f"{layer}.{name}" if layer else name


def is_of_graph(name: str) -> bool:
    """Return whether a setting is an operator, and not one of a parameter whose name is `graph` or `loss`."""
    return name.startswith(GRAPH_PARTS) and not name.endswith((".optimizer", ".equals"))


def are_near(one: str | None, other: str | None, factor: float) -> bool:
    """Return whether two settings have equal texts, apart from values that differ by no more than a factor."""
    texts = [(each or "").removeprefix(ABOUT) for each in (one, other)]
    shapes = {NUMBER.sub("0", text) for text in texts}
    pairs = zip(*([float(each[0]) for each in NUMBER.finditer(text)] for text in texts), strict=False)
    return len(shapes) == 1 and all(math.isclose(*pair, rel_tol=1 - 1 / factor) for pair in pairs)


def has_graph(settings: Mapping[str, Mapping[str, str | None]]) -> bool:
    return any(is_of_graph(name) for own in settings.values() for name in own)


def key_of(location: Location) -> tuple[str, ...]:
    return tuple(getattr(location, name) for name in KEY)


def rounded(values: FloatArray, *, up: bool) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Round numbers to `BITS` significant bits, which compress well."""
    mantissas, exponents = np.frexp(values)
    whole = (np.ceil if up else np.floor)(mantissas * 2**BITS)
    result: np.ndarray[Any, np.dtype[np.float32]] = np.ldexp(whole, exponents - BITS).astype(np.float32)
    return result
