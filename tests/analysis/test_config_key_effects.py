"""`effects_of`: paired differences and confidence intervals, compared with SciPy's, and unpaired runs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pandas as pd
import pytest
import scipy
from hypothesis import example, given, settings
from hypothesis import strategies as st
from run_folders import CLIP, write_run

import instrument

NUMBER = st.floats(-1e6, 1e6)


def clip_config(norm: float | None) -> dict[str, Any]:
    return {"hooks": {"tame": None if norm is None else {**CLIP, "norm": norm}}}


def losses(folder: Path, by_value: dict[float, Sequence[float | None]]) -> instrument.Run:
    """Load a sweep of one-step runs, with one seed per loss."""
    for norm, numbers in by_value.items():
        for seed, loss in enumerate(numbers):
            rows = {"metrics": [{"loss": loss}]}
            write_run(folder / f"{norm}-{seed}", config=clip_config(norm), seed=seed, rows=rows)
    return instrument.load(folder)


def only(frame: pd.DataFrame) -> pd.Series:
    assert len(frame) == 1
    return frame.iloc[0]


@pytest.mark.slow
@settings(max_examples=30)
@given(pairs=st.lists(st.tuples(NUMBER, NUMBER), min_size=2, max_size=12), confidence=st.sampled_from([0.5, 0.9, 0.99]))
def test_interval_equals_that_of_scipy(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[float, float]], confidence: float
) -> None:
    before, after = np.array(pairs).T
    run = losses(tmp_path_factory.mktemp("t"), {0.1: before.tolist(), 1.0: after.tolist()})
    found = only(run.effects_of("hooks.tame.norm", confidence=confidence))
    near = {"rel": 1e-9, "abs": 1e-7}
    assert (found["n"], found["confidence"], found["baseline"], found["value"]) == (len(pairs), confidence, 0.1, 1.0)
    assert found["mean_baseline"] == pytest.approx(before.mean(), **near)
    assert found["mean_value"] == pytest.approx(after.mean(), **near)
    assert found["difference"] == pytest.approx((after - before).mean(), **near)
    if len(set((after - before).tolist())) == 1:  # SciPy divides by zero
        assert found["ci_low"] == found["difference"] == found["ci_high"]
    else:
        test = scipy.stats.ttest_rel(after, before)
        interval = test.confidence_interval(confidence)
        assert [found["ci_low"], found["ci_high"]] == pytest.approx([interval.low, interval.high], **near)
        assert found["p_value"] == found["p_adjusted"] == pytest.approx(test.pvalue, **near)
    assert found["survives"] == (found["p_value"] < 1 - confidence)


@pytest.mark.slow
def test_p_values_are_adjusted_for_the_number_of_intervals(tmp_path: Path) -> None:
    """The loss has an effect only if it is the only interval."""
    loss, accuracy = [0.3, 1.6, 0.4, 1.9, 1.2, -0.1], [0.3, -0.3, 0.3, -0.3, 0.3, -0.1]
    for seed, after in enumerate(zip(loss, accuracy, strict=True)):
        for norm, (one, two) in ((0.1, (0.0, 0.0)), (1.0, after)):
            rows = {"metrics": [{"loss": one, "accuracy": two}]}
            write_run(tmp_path / f"{norm}-{seed}", config=clip_config(norm), seed=seed, rows=rows)
    run = instrument.load(tmp_path)
    frame = run.effects_of("hooks.tame.norm").set_index("statistic")
    assert frame["p_adjusted"].tolist() == pytest.approx(scipy.stats.false_discovery_control(frame["p_value"]).tolist())
    assert frame.attrs["intervals"] == 2
    assert frame["p_value"]["loss"] < 0.05 < frame["p_adjusted"]["loss"]
    assert frame["survives"].tolist() == [False, False]


def test_interval_is_accurate_far_from_zero(tmp_path: Path) -> None:
    before, after = 1e9 + np.array([0.0, 1.0, 2.0]), 1e9 + np.array([0.5, 1.25, 3.0])
    found = only(losses(tmp_path, {0.1: before.tolist(), 1.0: after.tolist()}).effects_of("hooks.tame.norm"))
    interval = scipy.stats.ttest_rel(after, before).confidence_interval()
    assert [found["ci_low"], found["ci_high"]] == pytest.approx([interval.low, interval.high], rel=1e-12)


NAN = math.nan
NUMBERS = ["mean_baseline", "mean_value", "difference", "ci_low", "ci_high"]


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("before", "after", "counts", "expected"),
    [
        ([2.0], [1.5], (1, 0), [2.0, 1.5, -0.5, NAN, NAN]),
        ([1.0, NAN], [math.inf, 1.0], (0, 2), [NAN] * 5),
        ([1.5, 7.25, 3.0], [1.5, 7.25, 3.0], (3, 0), [11.75 / 3, 11.75 / 3, 0.0, 0.0, 0.0]),
        ([1.5, 7.25, 3.0], [1.75, 7.5, 3.25], (3, 0), [11.75 / 3, 12.5 / 3, 0.25, 0.25, 0.25]),
    ],
    ids=["one pair", "no finite pair", "equal numbers", "equal differences"],
)
def test_few_or_equal_differences(
    tmp_path: Path, before: list[float], after: list[float], counts: tuple[int, int], expected: list[float]
) -> None:
    found = only(losses(tmp_path, {0.1: before, 1.0: after}).effects_of("hooks.tame.norm"))
    assert (found["n"], found["not_finite"]) == counts
    assert found[NUMBERS[:2]].tolist() == pytest.approx(expected[:2], nan_ok=True)
    np.testing.assert_array_equal(found[NUMBERS[2:]].to_numpy(float), expected[2:])


@pytest.mark.slow
def test_non_finite_and_one_sided_pairs_are_counted(tmp_path: Path) -> None:
    inf = math.inf
    before = [1.0, 2.0, NAN, 1.0, -inf, None, 1.0, None]
    after = [2.0, 4.0, 1.0, inf, inf, 1.0, None, None]
    found = only(losses(tmp_path, {0.1: before, 1.0: after}).effects_of("hooks.tame.norm"))
    assert (found["n"], found["not_finite"], found["one_sided"]) == (2, 3, 2)
    assert (found["mean_baseline"], found["mean_value"], found["difference"]) == (1.5, 3.0, 1.5)
    interval = scipy.stats.ttest_rel([2.0, 4.0], [1.0, 2.0]).confidence_interval()
    assert [found["ci_low"], found["ci_high"]] == pytest.approx([interval.low, interval.high])


@pytest.mark.slow
@settings(max_examples=30)
@example(numbers=[0.0, 1.1984620899082105e308, 0.0, 0.0, 0.0, 1.1984620899082105e308])
@example(numbers=[1.7e308, -1.7e308, 1.7e308, -1.7e308, 1.7e308, -1.7e308, 0.0, 0.0])
@given(numbers=st.lists(st.floats(allow_nan=True, allow_infinity=True), min_size=2, max_size=12))
def test_bounds_are_never_infinite(tmp_path_factory: pytest.TempPathFactory, numbers: list[float]) -> None:
    half = len(numbers) // 2
    run = losses(tmp_path_factory.mktemp("t"), {0.1: numbers[:half], 1.0: numbers[half : 2 * half]})
    found = only(run.effects_of("hooks.tame.norm"))
    assert not np.isinf(found[NUMBERS].to_numpy(float)).any()
    assert found["n"] + found["not_finite"] == half


@pytest.mark.slow
def test_each_value_is_compared_by_layer_and_statistic(tmp_path: Path) -> None:
    """Compared with a pandas implementation over all rows."""
    random = np.random.default_rng(0)
    for rate, norm, seed in product((0.1, 0.2), (0.1, 1.0, 10.0), (1, 2, 3)):
        layers = ("a", "b", "only in one" if norm == 0.1 else "c")
        rows = {
            "stats": [
                {"step": step, "layer": layer, "l2": random.normal(), "std": random.normal()}
                for step in range(4)
                for layer in layers
            ],
            "effects": [{"step": step, "hook": "tame", "norm_before": random.normal()} for step in range(4)],
            "metrics": [{"step": step, "loss": random.normal()} for step in range(4)]
            + [{"step": step, "phase": "eval", "loss": random.normal()} for step in (2, 4)],
        }
        config = {**clip_config(norm), "optimizer": {"lr": rate}}
        overrides = {"optimizer.lr": rate, "hooks.tame.norm": norm, "seed": seed}
        write_run(tmp_path / f"{rate}-{norm}-{seed}", config=config, seed=seed, overrides=overrides, rows=rows)
    sweep = instrument.load(tmp_path)
    found = sweep.effects_of("hooks.tame.norm", confidence=0.9)
    assert list(found.columns) == [
        "value", "baseline", "table", "phase", "hook", "layer", "kind", "role", "path",
        *(["scope"] if "scope" in found else []), "statistic", "n", "mean_baseline", "mean_value", "difference", "ci_low",
        "ci_high", "confidence", "p_value", "p_adjusted", "survives", "pairs", "not_finite", "one_sided",
    ]  # fmt: skip
    assert (len(found), set(found["value"])) == (2 * (2 * 2 + 1 + 2), {1.0, 10.0})
    assert (set(found["n"]), set(found["pairs"])) == ({3}, {6})

    last = sweep.metrics[(sweep.metrics["phase"] == "train") | (sweep.metrics["step"] == 4)]
    tables = {"stats": sweep.stats, "effects": sweep.effects, "metrics": last}
    for one in found.to_dict("records"):
        rows = tables[one["table"]]
        for name in ("phase", "hook", "layer"):
            rows = rows[rows[name] == one[name]] if name in rows else rows
        by_run = rows.groupby(["hooks.tame.norm", "seed", "optimizer.lr"])[one["statistic"]].mean()
        mean = by_run.groupby(level=["hooks.tame.norm", "seed"]).mean()
        before, after = mean[0.1], mean[one["value"]]
        interval = scipy.stats.ttest_rel(after, before).confidence_interval(0.9)
        assert one["difference"] == pytest.approx((after - before).mean())
        assert [one["ci_low"], one["ci_high"]] == pytest.approx([interval.low, interval.high])
    assert list(found["table"].drop_duplicates()) == ["metrics", "stats", "effects"]
    assert found.attrs["left_out"] == {}
    assert len(found.attrs["pairs"]) == 12
    assert found.attrs["pairs"][0] == (1.0, "0.1-1.0-1", "0.1-0.1-1")


@pytest.mark.slow
def test_by_splits_comparisons_by_another_key(tmp_path: Path) -> None:
    for rate, norm, seed in product((0.2, 0.1), (0.1, 1.0), (1, 2)):
        config = {
            **clip_config(norm),
            "optimizer": {"lr": rate},
            "model": {"_target_": "MLP", "sizes": [seed // 9, 10]},
        }
        rows = {"metrics": [{"loss": rate * norm + seed}]}
        write_run(tmp_path / f"{rate}-{norm}-{seed}", config=config, seed=seed, rows=rows)
    sweep = instrument.load(tmp_path)
    frame = sweep.effects_of("hooks.tame.norm", by="optimizer.lr")
    assert list(frame.columns[:4]) == ["value", "baseline", "optimizer.lr", "table"]
    assert list(zip(frame["optimizer.lr"], frame["n"], frame["pairs"], strict=True)) == [(0.1, 2, 2), (0.2, 2, 2)]
    assert frame["difference"].tolist() == pytest.approx([0.09, 0.18])
    assert sweep.effects_of("hooks.tame.norm", by=["optimizer.lr"]).equals(frame)
    with pytest.raises(instrument.InstrumentError, match=r"by: all \d+ finished runs have the value \{_target_: MLP"):
        sweep.effects_of("hooks.tame.norm", by="model")


@pytest.mark.slow
def test_runs_without_the_hook_are_compared_with_all_others(tmp_path: Path) -> None:
    """With either side as the baseline, the differences are equal up to their sign."""
    for seed in (1, 2, 3):
        tames = {f"{norm}-{by}": (norm, by) for norm, by in product((0.1, 1.0), ("tensor", "all"))}
        for name, tame in {"none": None, **tames}.items():
            spec = None if tame is None else {**CLIP, "norm": tame[0], "scope": tame[1]}
            loss = seed if tame is None else seed**2 * (1 + tame[0]) * (3 if tame[1] == "all" else 1)
            rows = {"metrics": [{"loss": float(loss)}]}
            write_run(tmp_path / f"{seed}-{name}", config={"hooks": {"tame": spec}}, seed=seed, rows=rows)
    sweep = instrument.load(tmp_path)
    for by in ([], ["hooks.tame.scope"]):
        forth = sweep.effects_of("hooks.tame.norm", by=by)
        back = sweep.effects_of("hooks.tame.norm", by=by, baseline=0.1)
        forth, back = forth[forth["value"] == 0.1], back[back["value"].isna()]
        names = ["n", "pairs", *by]
        assert forth[names].to_numpy().tolist() == back[names].to_numpy().tolist()
        assert forth["difference"].tolist() == pytest.approx((-back["difference"]).tolist())
        assert forth["ci_low"].tolist() == pytest.approx((-back["ci_high"]).tolist())
        assert (forth["pairs"].sum(), forth["n"].unique().tolist()) == (6, [3])


@pytest.mark.slow
def test_runs_of_one_seed_count_as_one(tmp_path: Path) -> None:
    """An override that changes nothing leaves the interval unchanged."""
    for copies, folder in ((1, tmp_path / "once"), (2, tmp_path / "again")):
        for copy, seed, (norm, off) in product(range(copies), (1, 2, 3), ((0.1, 0.0), (1.0, 0.5))):
            rows = {"metrics": [{"loss": seed**2 * (1 + off)}]}
            config = {**clip_config(norm), "data": {"root": str(copy)}}
            write_run(folder / f"{copy}-{norm}-{seed}", config=config, seed=seed, rows=rows)
    once, again = (only(instrument.load(tmp_path / name).effects_of("hooks.tame.norm")) for name in ("once", "again"))
    assert (once["n"], once["pairs"], again["n"], again["pairs"]) == (3, 3, 3, 6)
    for name in ("mean_baseline", "mean_value", "difference", "ci_low", "ci_high"):
        assert again[name] == pytest.approx(once[name])


@pytest.mark.slow
def test_steps_argument_limits_the_rows(tmp_path: Path) -> None:
    for norm, seed in product((0.1, 1.0), (1, 2)):
        rows = {"metrics": [{"step": step, "loss": norm * step} for step in range(6)]}
        write_run(tmp_path / f"{norm}-{seed}", config=clip_config(norm), seed=seed, rows=rows)
    sweep = instrument.load(tmp_path)
    assert only(sweep.effects_of("hooks.tame.norm", steps=(2, 4)))["mean_value"] == 2.5
    assert only(sweep.effects_of("hooks.tame.norm", steps=(np.int64(4), None)))["mean_value"] == 4.5
    assert sweep.effects_of("hooks.tame.norm", steps=(9, None)).empty


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"steps": steps}, r"steps: the range contains no steps\n    given ")
            for steps in (5, (5, 3), (3, 3), (0, None, 1), ("a", None), (-1, None))
        ),
        *(
            ({"confidence": confidence}, f"confidence: must be between 0 and 1\n    given    {confidence}")
            for confidence in (0.0, 1.0, 95)
        ),
    ],
)
def test_invalid_option_is_reported(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    run = losses(tmp_path, {0.1: [1.0], 1.0: [1.0]})
    with pytest.raises(instrument.InstrumentError, match=message):
        run.effects_of("hooks.tame.norm", **options)


def test_unpaired_runs_are_warned_of_and_listed(tmp_path: Path) -> None:
    losses(tmp_path, {0.1: [1.0, 2.0], 1.0: [1.0, 2.0, 3.0]})
    write_run(tmp_path / "failed", config=clip_config(1.0), status="failed")
    with pytest.warns(instrument.InstrumentWarning) as caught:
        frame = instrument.load(tmp_path).effects_of("hooks.tame.norm")
    assert [str(warning.message) for warning in caught] == [
        "2 of 6 runs are not in any pair: no run with hooks.tame.norm=0.1 has seed 2 (1); its status is failed (1). "
        "attrs['left_out'] lists all of them"
    ]
    assert caught[0].filename == __file__
    assert frame.attrs["left_out"] == {
        "1.0-2": "no run with hooks.tame.norm=0.1 has seed 2",
        "failed": "its status is failed",
    }


@pytest.mark.slow
def test_values_keep_their_types(tmp_path: Path) -> None:
    run = losses(tmp_path, {0.1: [1.0], 1.0: [1.0]})
    write_run(tmp_path / "none", config=clip_config(None), rows={"metrics": [{"loss": 2.0}]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all runs are in pairs
        frame = run.effects_of("hooks.tame.norm")
    assert pd.api.types.is_float_dtype(frame["value"])
    frame = instrument.load(tmp_path).effects_of("hooks.tame.norm")
    assert (list(frame["value"]), list(frame["baseline"])) == ([0.1, 1.0], [None, None])
    frame = instrument.load(tmp_path).effects_of("hooks.tame.norm", baseline=0.1)
    assert (list(frame["value"]), list(frame["baseline"])) == ([1.0, None], [0.1, 0.1])


@pytest.mark.slow
def test_remote_sweep_gives_the_same_effects(tmp_path: Path) -> None:
    local = losses(tmp_path, {0.1: [1.0, 2.0], 1.0: [1.5, 3.0]}).effects_of("hooks.tame.norm")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path), "/effects/sweep", recursive=True)
    try:
        remote = instrument.load("memory://effects/sweep").effects_of("hooks.tame.norm")
    finally:
        memory.rm("/effects", recursive=True)
    assert remote.equals(local)
    assert remote.attrs == local.attrs
