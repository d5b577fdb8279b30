"""Definitions of the statistics: names, units, the sums that they need, and formulas.

Statistics are computed over the n finite values x of a tensor. NaN and infinities are counted separately. If no value
is finite (an empty tensor, or only NaN), every statistic except the counts is null. Integers and booleans are converted
to numbers, complex values to their magnitude.

Three statistics depend on more than the values, and are null where they are not defined. A unit is a channel of an
image (dimension 1 of a tensor with 4 or 5 dimensions, and with 3 for a Conv1d and similar), a feature of a vector or of
a sequence element (the last of 2 or 3 dimensions, and always for Linear, LayerNorm and Embedding), or a row of a
parameter or its gradient (dimension 0). `unit_dim` selects another dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ..fields.registry import Registry


@dataclass(frozen=True)
class Sum:
    """A sum over the n finite values x of a tensor: one column of the slab (`instrument.stats.slab`).

    Attributes:
        name: The name of the column.
        term: The summand, a function of y = x / unit and of the mean of y, which are both arrays of NumPy or both tensors. With power
            0, of x and its mean instead. None for a sum that is formed in another way.
        power: The power of the unit that the sum is divided by.
        is_central: Whether the summand is (y - mean)^power.
        function: The path of the function that forms the sum, if it depends on more than the values. Its arguments are the tensor, the
            context of the call, and the `unit_dim` of the spec; it returns the numbers of all sums that name it, or none: floats, or
            scalars on the device of the tensor. The number for a batch is the sum of the numbers for its parts.
    """

    name: str
    term: Callable[[Any, Any], Any] | None = None
    power: int = 0
    is_central: bool = False
    function: str = ""


@dataclass(frozen=True)
class Statistic:
    """The definition of one statistic of a tensor.

    Attributes:
        name: The value in `stats:`, and the name of the column.
        meaning: The formula over the n finite values x.
        unit: `count` or `elements`: a number of elements; `bits`: an integer that is only compared; `fraction` of the
            finite values (0 to 1); `units`: fraction of the units; `ratio`; `nats`; or `value`: the unit of the tensor; `custom`:
            unknown. Counts, minimum and maximum are exact; the others agree with float64 to 1e-5.
        formula: Computes it from the `instrument.stats.sums.Sums` of many tensors, arrays [rows]; NaN for no value.
        needs: The sums that not every tensor has, in addition to those that all statistics share.
        merged: How the values of several tensors are combined into one.
        only: The kinds and roles that have it; empty for all.
    """

    name: str
    meaning: str
    unit: Literal["count", "elements", "bits", "fraction", "units", "ratio", "nats", "value", "custom"]
    formula: Callable[[Any], Any] = lambda sums: sums.n * float("nan")
    needs: tuple[Sum, ...] = ()
    merged: Literal["mean", "min", "max"] = "mean"
    only: tuple[tuple[str, str], ...] = ()

    @property
    def dtype(self) -> Literal["int64", "float64"]:
        return "int64" if self.unit in ("count", "elements", "bits") else "float64"


def _formed_by(function: str, *names: str) -> tuple[Sum, ...]:
    return tuple(Sum(name, function=f"instrument.{function}") for name in names)


MAGNITUDES = Sum("magnitudes", lambda y, mean: abs(y), power=1)
BITS_LOW, BITS_HIGH, FORM = _formed_by("stats.fingerprint:sums_of_bits", "bits_low", "bits_high", "form")
(SATURATED,) = _formed_by("actions.measurement:saturated_elements", "saturated")
DEAD, UNITS = _formed_by("actions.measurement:count_dead_units", "dead", "units")
PRODUCT, PREVIOUS = _formed_by("actions.context_sums:product_with_previous", "product", "previous")
NOISE, SIGNAL = _formed_by("actions.context_sums:noise_of_micro_batches", "noise", "signal")
(RATE,) = _formed_by("actions.context_sums:rate_of_update", "rate")
(WEIGHT,) = _formed_by("actions.measurement:norm_of_value", "weight")
ROWS, ROW_ENTROPIES, WIDE_ROWS, UNIFORMITIES, FIRST = _formed_by(
    "stats.attention_rows:row_sums", "rows", "row_entropies", "wide_rows", "row_uniformities", "first"
)
_OF_ATTENTION = (("function", "attention"),)
UNIT_NORMS, NORMED_UNITS = _formed_by("actions.measurement:norms_of_units", "unit_norms", "normed_units")
INPUT_SQUARES, OUTPUT_SQUARES, PRODUCTS = _formed_by(
    "actions.context_sums:sums_with_input", "input_squares", "output_squares", "products"
)
TOKEN_COSINES, SEQUENCES = _formed_by("actions.context_sums:token_cosines", "token_cosines", "sequences")
ENTROPIES, LOG_PARTITION_SQUARES, LOGIT_ROWS = _formed_by(
    "actions.context_sums:logit_sums", "entropies", "log_partition_squares", "logit_rows"
)
_CUBES = Sum("cubes", lambda y, mean: (y - mean) ** 3, power=3, is_central=True)
_FOURTHS = Sum("fourths", lambda y, mean: (y - mean) ** 4, power=4, is_central=True)

_CHANGE = (("forward", "change"),)
_ACTIVATIONS = (
    *(("forward", "output"), ("forward", "input"), ("forward_pre", "input")),
    *(("function", "output"), ("function", "input")),
)

_STATISTICS = (
    Statistic("numel", "number of elements, including NaN and infinity", "count", lambda s: s.numel, merged="max"),
    Statistic("mean", "sum(x) / n", "value", lambda s: s.mean * s.unit),
    Statistic("std", "sqrt(sum((x - mean)^2) / n) (population)", "value", lambda s: s.variance**0.5 * s.unit),
    Statistic("rms", "sqrt(sum(x^2) / n)", "value", lambda s: (s.squares / s.n) ** 0.5 * s.unit),
    Statistic("min", "min(x)", "value", lambda s: s.low, merged="min"),
    Statistic("max", "max(x)", "value", lambda s: s.high, merged="max"),
    Statistic("abs_max", "max(|x|)", "value", lambda s: s.largest, merged="max"),
    Statistic("l1", "sum(|x|)", "value", lambda s: s.magnitudes * s.unit, needs=(MAGNITUDES,)),
    Statistic("l2", "sqrt(sum(x^2))", "value", lambda s: s.squares**0.5 * s.unit),
    Statistic("zero_fraction", "count(x = 0) / n", "fraction", lambda s: s.zeros / s.n),
    Statistic("nan_count", "number of NaN", "count", lambda s: s.nan, merged="max"),
    Statistic("inf_count", "number of +inf and -inf", "count", lambda s: s.numel - s.n - s.nan, merged="max"),
    Statistic(
        "fingerprint",
        "64 bits that depend on dtype, shape, and all bits of the elements with their positions, also those of NaN, but not on strides",
        "bits",
        lambda s: s.fingerprint,
        needs=(BITS_LOW, BITS_HIGH, FORM),
    ),
    Statistic(
        "dead_fraction",
        "fraction of units that are zero for every sample and position; null for activations with fewer than two dimensions",
        "units",
        lambda s: s.dead / s.units,
        needs=(DEAD, UNITS),
    ),
    Statistic(
        "saturated_fraction",
        "count(x within 1.5% of the output range from one of its ends) / n, |x| > 0.97 for Tanh; null for "
        "modules other than Tanh, Sigmoid, Hardtanh, ReLU6 (upper end only), Hardsigmoid, Softsign",
        "fraction",
        lambda s: s.saturated / s.n,
        needs=(SATURATED,),
        only=(("forward", "output"),),
    ),
    Statistic(
        "update_ratio",
        "l2 of the update / l2 of the parameter after it",
        "ratio",
        lambda s: s.squares**0.5 * s.unit / s.weight,
        needs=(WEIGHT,),
        only=(("step_post", "update"),),
    ),
    Statistic(
        "update_ratio_per_rate",
        "update_ratio / learning rate of the parameter's group at this step; null if the rate is 0",
        "ratio",
        lambda s: s.squares**0.5 * s.unit / s.weight / (s.rate / s.numel),
        needs=(WEIGHT, RATE),
        only=(("step_post", "update"),),
    ),
    Statistic(
        "previous_cosine",
        "cosine of the tensor and the previous recorded one of this parameter, with 0 for NaN and infinity; null for the first one "
        "after the start or a resume, for zeros, and for sparse tensors. Each parameter keeps one copy of the tensor in memory",
        "ratio",
        lambda s: s.product / (s.squares**0.5 * s.unit * s.previous**0.5),
        needs=(PRODUCT, PREVIOUS),
        only=(("parameter_grad", "param_grad"), ("parameter_grad_micro", "param_grad"), ("step_post", "update")),
    ),
    Statistic(
        "gradient_noise",
        "estimated variance of the gradient of the step's batch, summed over the elements, from the gradients of micro-batches or "
        "processes of equal size (McCandlish et al. 2018, appendix A.1); null without several of them, and if a micro-step has no "
        "gradient or several",
        "value",
        lambda s: s.noise,
        needs=(NOISE, SIGNAL),
        only=(("parameter_grad", "param_grad"),),
    ),
    Statistic(
        "gradient_signal",
        "estimated squared L2 norm of the expected gradient, as gradient_noise. The noise scale in batches of a step is the sum of "
        "gradient_noise over parameters and steps / the sum of gradient_signal",
        "value",
        lambda s: s.signal,
        needs=(NOISE, SIGNAL),
        only=(("parameter_grad", "param_grad"),),
    ),
    Statistic(
        "negative_fraction",
        "count(x < 0) / n",
        "fraction",
        lambda s: s.negatives / s.n,
        needs=(Sum("negatives", lambda y, mean: y < 0),),
    ),
    Statistic(
        "skewness",
        "sum((x - mean)^3) / (n std^3) (Fisher-Pearson, population)",
        "ratio",
        lambda s: s.cubes / s.n / s.variance**1.5,
        needs=(_CUBES,),
    ),
    Statistic(
        "kurtosis",
        "sum((x - mean)^4) / (n std^4) - 3 (excess, population): 0 for a normal distribution",
        "ratio",
        lambda s: s.fourths / s.n / s.variance**2 - 3,
        needs=(_CUBES, _FOURTHS),
    ),
    Statistic("l0", "count(x != 0)", "elements", lambda s: s.n - s.zeros, merged="max"),
    Statistic(
        "row_entropy",
        "mean over queries of the entropy -sum(p ln p) of their attention weights p, in nats, without masked queries and those with NaN",
        "nats",
        lambda s: s.row_entropies / s.rows,
        needs=(ROWS, ROW_ENTROPIES),
        only=_OF_ATTENTION,
    ),
    Statistic(
        "row_uniformity",
        "mean over queries with k > 1 nonzero attention weights of the entropy / ln(k): 1 for uniform weights",
        "ratio",
        lambda s: s.row_uniformities / s.wide_rows,
        needs=(WIDE_ROWS, UNIFORMITIES),
        only=_OF_ATTENTION,
    ),
    Statistic(
        "first_fraction",
        "mean attention weight of the first key over queries with several nonzero weights (attention sink, Xiao et al. 2023)",
        "ratio",
        lambda s: s.first / s.wide_rows,
        needs=(WIDE_ROWS, FIRST),
        only=_OF_ATTENTION,
    ),
    Statistic(
        "branch_ratio",
        "l2 of the change / l2 of the module's input, over the elements at which both are finite",
        "ratio",
        lambda s: s.squares**0.5 * s.unit / s.input_squares**0.5,
        needs=(INPUT_SQUARES,),
        only=_CHANGE,
    ),
    Statistic(
        "input_cosine",
        "cosine of the module's input and output, over the elements at which both are finite",
        "ratio",
        lambda s: s.products / s.input_squares**0.5 / s.output_squares**0.5,
        needs=(INPUT_SQUARES, OUTPUT_SQUARES, PRODUCTS),
        only=_CHANGE,
    ),
    Statistic(
        "token_cosine",
        "mean over the samples of [N, T, D] of the mean cosine of two different tokens, (|sum of u|^2 - T) / (T (T - 1)) with "
        "u = x / |x|; tokens that are zero or not finite do not count, padding does (rank collapse: Dong et al. 2021)",
        "ratio",
        lambda s: s.token_cosines / s.sequences,
        needs=(TOKEN_COSINES, SEQUENCES),
        only=_ACTIVATIONS,
    ),
    Statistic(
        "softmax_entropy",
        "mean over the rows (the last dimension) of the entropy of softmax(x), in nats; rows with NaN do not count",
        "nats",
        lambda s: s.entropies / s.logit_rows,
        needs=(ENTROPIES, LOGIT_ROWS),
        only=_ACTIVATIONS,
    ),
    Statistic(
        "z_loss",
        "mean over the rows (the last dimension) of logsumexp(x)^2, without a coefficient (ST-MoE, Zoph et al. 2022; PaLM, "
        "Chowdhery et al. 2022); rows with NaN do not count",
        "ratio",
        lambda s: s.log_partition_squares / s.logit_rows,
        needs=(LOG_PARTITION_SQUARES, LOGIT_ROWS),
        only=_ACTIVATIONS,
    ),
    Statistic(
        "unit_norm_cv",
        "coefficient of variation of the l2 norms of the units, such as the rows of an embedding: population standard deviation / "
        "mean; null for vectors, and with NaN or infinity",
        "ratio",
        lambda s: abs(s.squares * s.unit**2 / s.normed_units * (s.normed_units / s.unit_norms) ** 2 - 1.0) ** 0.5,
        needs=(UNIT_NORMS, NORMED_UNITS),
        only=(("step_pre", "param"), ("step_post", "param"), ("step_post", "update")),
    ),
)

STATISTICS: dict[str, Statistic] = {statistic.name: statistic for statistic in _STATISTICS}
"""The built-in statistics, which have columns."""
ALL: tuple[str, ...] = tuple(STATISTICS)
REGISTERED: Registry[Statistic] = Registry("statistics", "statistic")
"""The statistics of `instrument.statistic` and of installed packages. In files, they are custom statistics."""


NONNEGATIVE = (
    *("std", "rms", "abs_max", "l1", "l2", "update_ratio", "update_ratio_per_rate", "l0"),
    *("row_entropy", "row_uniformity", "first_fraction"),
    *("branch_ratio", "softmax_entropy", "z_loss", "unit_norm_cv"),
)
"""The statistics of values that are never negative."""


def unreachable_bound(name: str, above: float | None, below: float | None) -> str | None:
    """Return why a built-in statistic can never be above or below a number; None if it can."""
    unit = statistic_of(name).unit
    is_fraction = unit in ("fraction", "units")
    if unit == "bits":
        return f"{name} is no quantity: its values can only be equal or not"
    if is_fraction and above is not None and above >= 1:
        return f"above ({above:g}) cannot be reached: {name} is at most 1"
    if (is_fraction or unit == "count" or name in NONNEGATIVE) and below is not None and below <= 0:
        return f"below ({below:g}) cannot be reached: {name} is at least 0"
    return None


def statistic_of(name: str) -> Statistic:
    """Return the definition of a built-in, registered or custom statistic."""
    return STATISTICS.get(name) or REGISTERED.get(name) or Statistic(name, "a custom statistic", "custom")


COUNTS: tuple[str, ...] = tuple(name for name, statistic in STATISTICS.items() if statistic.unit == "count")
"""The counts of elements that all statistics leave out. They are recorded with every other statistic.

Without them, a gradient that is NaN except for a few zeros would look like a small one.
"""
WITHOUT_VALUES = (*COUNTS, "fingerprint")
"""The statistics that a tensor without a finite element has."""
DEFAULT = (*("numel", "mean", "std", "rms", "min", "max", "abs_max", "l2", "zero_fraction"), "nan_count", "inf_count")
"""The statistics of `stats: default`."""
USUAL_UPDATE_RATIOS = (1e-4, 1e-2)
"""The usual range of `update_ratio` in a healthy training, "about 1e-3". CS231n, https://cs231n.github.io/neural-networks-3/#ratio"""

REMAINDERS = {name: f"{name}_remainder" for name in ("min", "max", "abs_max")}
"""For each statistic of 64-bit integers that float64 rounds beyond 2^53, the name of its remainder among the custom statistics.

The exact integer is the sum of both.
"""
