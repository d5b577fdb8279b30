"""Statistics that users register are measured, merged and used like built-in ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from device_statistics import use_device_statistics
from hook_runs import record, refused, run_step, run_steps
from torch import Tensor, nn

import instrument
from instrument.errors import ConfigError
from instrument.stats import sums
from instrument.stats.measure import measure
from instrument.stats.sums import INDEX, extremes, merged, needs_of, statistics_of, totals
from instrument.tables.statistics import DEFAULT, REGISTERED, STATISTICS, WITHOUT_VALUES

RECORD = record("forward")


@pytest.fixture
def registered() -> Iterator[None]:
    """Register three statistics until the end of the test."""
    before = (dict(REGISTERED._entries), dict(REGISTERED.places), dict(INDEX), [*sums.FURTHER])

    @instrument.statistic(
        "positive_fraction", unit="fraction", needs=[instrument.Sum("positives", lambda x, mean: x > 0)]
    )
    def positive_fraction(given: Any) -> Any:
        return given.positives / given.n

    @instrument.statistic(
        "log_norm",
        needs=[instrument.Sum("logs", lambda x, mean: (1 + abs(x)).log() if hasattr(x, "log") else np.log(1 + abs(x)))],
    )
    def log_norm(given: Any) -> Any:
        return given.logs

    @instrument.statistic("sixth_of_skewness", unit="ratio", needs=["cubes"])
    def sixth_of_skewness(given: Any) -> Any:
        return given.cubes / given.n / given.variance**1.5 / 6

    yield
    entries, places, index, further = before
    for known, original in ((REGISTERED._entries, entries), (REGISTERED.places, places), (INDEX, index)):
        known.clear()
        known.update(original)
    sums.FURTHER[:] = further
    needs_of.cache_clear()


NAMES = ("positive_fraction", "log_norm", "sixth_of_skewness")


def reference(x: np.ndarray) -> list[float]:
    finite = x[np.isfinite(x)].astype(np.float64)
    return [(finite > 0).mean(), np.log1p(np.abs(finite)).sum(), scipy.stats.skew(finite) / 6]


def values() -> Tensor:
    x = torch.randn(50, 7, generator=torch.Generator().manual_seed(0))
    x[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return x


@pytest.mark.spread(1)
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("on_device", [False, True])
def test_registered_statistics_are_recorded_with_a_remark(
    on_device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_device:
        use_device_statistics(monkeypatch)
    hooks = {"h": {**RECORD, "stats": ["mean", *NAMES]}, "other": {**RECORD, "stats": ["mean"]}}
    model = nn.Identity()
    run_steps(model, hooks, lambda: model(values()), 2, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    rows = run.stats[run.stats.hook == "h"]
    for name, wanted in zip(NAMES, reference(values().numpy()), strict=True):
        assert rows[name].to_list() == pytest.approx([wanted] * 2, rel=1e-5)
        assert run.stats[run.stats.hook == "other"][name].isna().all()
    (message,) = run.events[run.events.rule == "statistics"].message
    assert message.startswith("PyTorch operations compute positive_fraction, log_norm, sixth_of_skewness in addition")


@pytest.mark.usefixtures("registered")
def test_registered_statistics_are_recorded_without_rules(tmp_path: Path) -> None:
    model = nn.Identity()
    run_steps(model, {"h": {**RECORD, "stats": [*NAMES]}}, lambda: model(values()), 1, out=tmp_path, rules=None)
    (row,) = instrument.load(tmp_path).stats[[*NAMES]].to_numpy()
    assert row == pytest.approx(reference(values().numpy()), rel=1e-5)


@pytest.mark.usefixtures("registered")
def test_registered_statistics_are_merged_from_parts() -> None:
    parts = [torch.from_numpy(measure(part, needs_of(NAMES)).row)[None] for part in values().split([20, 1, 29])]
    maxima = torch.stack([extremes(part) for part in parts]).amax(0)
    total = torch.stack([totals(part, maxima) for part in parts]).sum(0)
    found = [column.item() for column in statistics_of(merged(maxima, total), NAMES)]
    assert found == pytest.approx(reference(values().numpy()), rel=1e-9)


@pytest.mark.usefixtures("registered")
def test_registered_statistic_decides_conditions_and_rules() -> None:
    hooks = {
        "all": {**RECORD, "stats": ["positive_fraction"]},
        "some": {**RECORD, "when": {"stat": "positive_fraction", "above": 0.5}},
    }
    rules = {"mostly": {"watch": "all", "stat": "positive_fraction", "above": 0.9}}
    with instrument.attach(nn.Identity(), hooks, rules=rules) as probe:
        for sign in (1.0, -1.0):
            probe.plan.layers.model(sign * torch.ones(4))
            probe.end_step()
    assert [row["hook"] for row in probe.sink.records("stats")] == ["all", "some", "all"]
    (event,) = [row for row in probe.sink.records("events") if row["rule"] == "mostly"]
    assert event["step"] == 0


def fails(given: Any) -> Any:
    raise ZeroDivisionError("no")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "needs", "formula", "message"),
    [
        *(
            (name, (), lambda given: given.n, f"the tables already have a column {name!r}")
            for name in ("l2", "layer", "loss", "LR", "seed")
        ),
        ("positive_fraction", (), lambda given: given.n, r"registered already.* \S+test_registered_statistics.py:\d+"),
        ("new", ["cubez"], lambda given: given.n, "there is no such sum.*magnitudes, .*cubes, fourths"),
        ("new", (), lambda given: given.cubez, "AttributeError: there is no sum 'cubez'; the sums are numel, n, nan"),
        ("new", (), fails, "the formula of 'new' fails: ZeroDivisionError: no"),
        ("new", (), lambda given: given.n + 0j * given.n, "must return one real number for each row, but returns complex128"),
        ("new", (), lambda given: given.n.sum(), "must return one real number for each row"),
        ("new", [instrument.Sum("positives", abs)], lambda given: given.n, "sum 'positives' has another definition"),
        ("new", [instrument.Sum("mean", abs)], lambda given: given.n, "sum 'mean' has another definition"),
        ("new", [instrument.Sum("fifths")], lambda given: given.n, "sum 'fifths' requires a term"),
    ],
)  # fmt: skip
def test_invalid_statistic_is_refused_with_its_place(name: str, needs: Any, formula: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.compile(message, re.DOTALL)) as error:
        instrument.statistic(name, needs=needs)(formula)
    assert "test_registered_statistics.py:" in str(error.value)
    assert name not in REGISTERED or name == "positive_fraction"


def adversarial_sums(rows: int) -> np.ndarray:
    """Return rows of sums with zeros of both signs, NaN, infinities, and numbers whose powers overflow and underflow."""
    generator = np.random.default_rng(0)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e300, -1e-300, 5.0])
    matrix = generator.normal(size=(rows, len(sums.COLUMNS))) * 10.0 ** generator.integers(-9, 9, (rows, 1))
    is_special = generator.random(matrix.shape) < 0.3
    return np.where(is_special, generator.choice(special, matrix.shape), matrix)


@pytest.mark.skipif(sums.evaluate is None, reason="installed without a C compiler")
def test_kernel_computes_the_bits_of_numpy() -> None:
    """The formulas are applied to columns of NumPy, one by one."""
    matrix, names = adversarial_sums(3001), tuple(STATISTICS)
    given = sums.Sums(matrix)
    with np.errstate(all="ignore"):
        for name, column in zip(names, statistics_of(matrix, names), strict=True):
            value = STATISTICS[name].formula(given)
            wanted = value if name in WITHOUT_VALUES else np.where(given.n > 0, value, np.nan)
            assert np.array_equal(column, wanted, equal_nan=True), name
            numbers = ~np.isnan(wanted)
            assert np.array_equal(np.signbit(column)[numbers], np.signbit(wanted)[numbers]), name
    assert not {*DEFAULT} & {*sums.program_of(names)[1]}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    "formula",
    [
        lambda given: 1 - (2 / given.n + 0.5 * given.mean - -given.low),
        lambda given: abs(given.mean) * (given.high > given.low) + (given.n > 2) + (given.n - -0.0),
        lambda given: np.abs(given.mean) * np.float64(3) if isinstance(given.n, np.ndarray) else abs(given.mean) * 3,
        lambda given: (given.zeros == 0) * 1.0 + (given.n >= 3) + (given.nan != 0) + (given.n <= 1),
        lambda given: 2**given.n + given.variance**1.5 + given.n // 2 + given.n % 2,
        lambda given: (given.n.log() if isinstance(given.n, Tensor) else np.log(given.n)) + 0 * given.mean,
        lambda given: given.n.clip(2, 3) + given.mean.round(),
        lambda given: given.n - np.mean(given.n.tolist()),
    ],
)
def test_formulas_of_users_are_computed_as_written(formula: Any) -> None:
    instrument.statistic("of_user")(formula)
    matrix = adversarial_sums(200)
    matrix[:, INDEX["n"]] = np.arange(200) % 5
    given = sums.Sums(matrix)
    with np.errstate(all="ignore"):
        wanted = np.where(given.n > 0, formula(given), np.nan)
        (column,) = statistics_of(matrix, ("of_user",))
    assert np.array_equal(column, wanted, equal_nan=True)


@pytest.mark.skipif(sums.evaluate is None, reason="installed without a C compiler")
@pytest.mark.parametrize(
    "operation",
    [(13, 0, 0, 0), (-1, 0, 0, 0), (0, 5, 0, 0), (0, -1, 0, 0), (3, 0, 0, 0), (2, 0, 0, 0), (np.nan, 0, 0, 0)],
)
def test_invalid_programs_are_refused(operation: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="not a program for rows of 5 numbers"):
        sums.evaluate(np.array([operation], np.float64).tobytes(), np.ones((2, 5)), 5, np.ones((1, 2)))


@pytest.mark.usefixtures("registered")
def test_unknown_statistic_lists_registered_ones() -> None:
    assert "positive_fraction" in refused(nn.Identity(), {"h": {**RECORD, "stats": ["positive_fractoin"]}})


def test_distribution_of_a_tensor_equals_scipy() -> None:
    x = np.random.default_rng(0).gamma(2.0, 3.0, 4000)
    stats = ["skewness", "kurtosis", "negative_fraction", "l0"]
    _, probe = run_step(nn.Identity(), {"h": {**RECORD, "stats": stats}}, torch.from_numpy(x))
    (row,) = probe.sink.records("stats")
    assert row["skewness"] == pytest.approx(scipy.stats.skew(x))
    assert row["kurtosis"] == pytest.approx(scipy.stats.kurtosis(x))
    assert (row["negative_fraction"], row["l0"]) == (0.0, 4000)
