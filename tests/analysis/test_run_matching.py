"""Pairing of the runs of a sweep, and the reasons of unpaired runs."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from run_folders import CLIP, RECORD, write_run

import instrument
from instrument.analysis.config_comparison import match_runs


def clip_config(norm: Any, **more: Any) -> dict[str, Any]:
    return {"hooks": {"tame": {**CLIP, "norm": norm}}, **more}


def sweep(folder: Path, *configs: tuple[int, dict[str, Any]], **more: Any) -> instrument.Run:
    """Load a sweep with a job for each seed and configuration."""
    for i, (seed, config) in enumerate(configs):
        write_run(folder / str(i), config=config, seed=seed, **more)
    return instrument.load(folder)


def match_indices(run: instrument.Run, key: str, baseline: Any = None) -> list[tuple[Any, int, int]]:
    return [(found.value, found.index, found.baseline) for found in match_runs(run, key, baseline).matches]


def test_runs_are_matched_by_seed_and_all_other_keys(tmp_path: Path) -> None:
    rates = [(rate, norm, seed) for rate, norm, seed in product((0.1, 0.2), (10, 0.1, 1.0), (1, 2))]
    run = sweep(tmp_path, *[(seed, clip_config(norm, optimizer={"lr": rate})) for rate, norm, seed in rates])
    found = match_runs(run, "hooks.tame.norm")
    assert (found.baseline, found.left_out) == (0.1, {})
    assert [one.value for one in found.matches] == [1.0] * 4 + [10] * 4  # in numeric order
    for one in found.matches:
        (rate, norm, seed), (its_rate, its_norm, its_seed) = rates[one.index], rates[one.baseline]
        assert (rate, seed, norm, its_norm) == (its_rate, its_seed, one.value, 0.1)
    assert len(match_runs(run, "optimizer.lr").matches) == 6


@pytest.mark.parametrize(
    ("values", "asked", "baseline"),
    [
        ([1.0, 0.1, 10], None, 0.1),
        ([1.0, None, 0.1], None, None),
        ([True, False], None, False),
        (["sgd", "adam"], None, "sgd"),
        ([0.1, "auto", 0.01], None, 0.01),
        ([1.0, 0.1, 10], 1, 1.0),
        (["sgd", "adam"], "adam", "adam"),
        ([None, 0.1], 0.1, 0.1),
        ([[1, 2], [3]], [3], "[3]"),
        ([[1, 2], [3]], "[3]", "[3]"),
        ([{"a": 1}, None], None, None),
    ],
)
def test_baseline_is_the_default_or_given_value(tmp_path: Path, values: list[Any], asked: Any, baseline: Any) -> None:
    run = sweep(tmp_path, *[(0, {"some": {"key": value}}) for value in values])
    found = match_runs(run, "some.key", asked)
    assert (found.baseline, type(found.baseline)) == (baseline, type(baseline))
    assert len(found.matches) == len(values) - 1


def test_key_missing_in_some_runs_is_null_there(tmp_path: Path) -> None:
    run = sweep(tmp_path, (0, {"optimizer": {"lr": 0.1}}), (0, {"optimizer": {"lr": 0.1, "nesterov": True}}))
    assert match_indices(run, "optimizer.nesterov") == [(True, 1, 0)]
    assert match_runs(run, "optimizer.nesterov").baseline is None


def test_hook_and_hook_field_match_runs_without_the_hook(tmp_path: Path) -> None:
    seen = {"hooks": {"seen": RECORD}}
    without = {"hooks": {"tame": None}}
    run = sweep(tmp_path, (1, clip_config(0.1)), (1, clip_config(1)), (1, without), (2, clip_config(1)), (2, seen))
    assert match_indices(run, "hooks.tame.norm") == [(0.1, 0, 2), (1.0, 1, 2), (1.0, 3, 4)]
    assert match_indices(run, "hooks.tame.norm", 1) == [(0.1, 0, 1), (None, 2, 1), (None, 4, 3)]
    low, high = (f"{{layers: [a], kind: parameter_grad, action: clip, norm: {norm}}}" for norm in (0.1, 1.0))
    assert match_indices(run, "hooks.tame") == [(low, 0, 2), (high, 1, 2), (high, 3, 4)]


OBSERVING = {
    "record": RECORD,
    "print": {**RECORD, "action": "print"},
    "call": {**RECORD, "action": "call", "fn": {"_target_": "mymodule.look"}},
}


@pytest.mark.parametrize("spec", OBSERVING.values(), ids=OBSERVING)
def test_observing_hooks_may_differ(tmp_path: Path, spec: dict[str, Any]) -> None:
    config = clip_config(1.0)
    run = sweep(
        tmp_path, (1, clip_config(0.1)), (1, {"hooks": {**config["hooks"], "seen": spec}, "sink": {"wandb": True}})
    )
    assert match_indices(run, "hooks.tame.norm") == [(1.0, 1, 0)]


def test_key_of_a_recording_hook_can_be_compared(tmp_path: Path) -> None:
    run = sweep(tmp_path, *[(1, {"hooks": {"seen": {**RECORD, "every": every}}}) for every in (5, 1)])
    assert match_indices(run, "hooks.seen.every") == [(5, 0, 1)]


def test_config_group_options_are_compared_by_name(tmp_path: Path) -> None:
    models = {"mlp": {"_target_": "MLP", "sizes": [64, 10]}, "cnn": {"_target_": "CNN"}}
    for i, (seed, name) in enumerate(product((1, 2), models)):
        write_run(tmp_path / str(i), config={"model": models[name]}, seed=seed, overrides={"model": name, "seed": seed})
    run = instrument.load(tmp_path)
    assert match_indices(run, "model") == [("cnn", 1, 0), ("cnn", 3, 2)]
    assert match_runs(run, "model", "cnn").baseline == "cnn"
    other = {"_target_": "MLP", "sizes": [64, 32, 10]}
    for seed in (1, 2):
        overrides = {"model": "mlp", "model.sizes": [64, 32, 10], "seed": seed}
        write_run(tmp_path / f"deep{seed}", config={"model": other}, seed=seed, overrides=overrides)
    values = {value for value, *_ in match_indices(instrument.load(tmp_path), "model", "cnn")}
    assert values == {"{_target_: MLP, sizes: [64, 10]}", "{_target_: MLP, sizes: [64, 32, 10]}"}


CONFIGS = {
    "exp": {"some": {"optimizer": {"lr": 0.1}, "train": {"steps": 5}}, "other": {"optimizer": {"lr": 0.2}, "model": {"width": 2}}},
    "vars.rate": {0.1: {"vars": {"rate": 0.1}, "optimizer": {"lr": 0.1}}, 0.2: {"vars": {"rate": 0.2}, "optimizer": {"lr": 0.2}}},
}  # fmt: skip


@pytest.mark.parametrize("key", CONFIGS)
def test_overrides_that_set_several_keys_are_compared(tmp_path: Path, key: str) -> None:
    values = CONFIGS[key]
    for i, (seed, batch, value) in enumerate(product((1, 2), (8, 16), values)):
        config = {**values[value], "data": {"batch": batch}}
        overrides = {key: value, "data.batch": batch, "seed": seed, "sink.wandb": i}
        write_run(tmp_path / str(i), config=config, seed=seed, overrides=overrides)
    run = instrument.load(tmp_path)
    first, second = values
    assert match_indices(run, key) == [(second, 1, 0), (second, 3, 2), (second, 5, 4), (second, 7, 6)]
    assert match_indices(run, key, second) == [(first, 0, 1), (first, 2, 3), (first, 4, 5), (first, 6, 7)]
    assert [one.by for one in match_runs(run, key, by=["data.batch"]).matches] == [(8,), (16,), (8,), (16,)]
    assert [one.by for one in match_runs(run, "data.batch", by=[key]).matches] == [(first,), (second,)] * 2


def test_overrides_of_different_sweeps_are_not_compared(tmp_path: Path) -> None:
    for i, (value, config) in enumerate(CONFIGS["exp"].items()):
        write_run(tmp_path / f"sweep{i}" / "0", config=config, overrides={"exp": value})
    with pytest.raises(instrument.InstrumentError, match=r"it also differs .* in the folder of the sweep"):
        match_runs(instrument.load(tmp_path), "exp")


def test_last_of_repeated_runs_counts(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clip_config(0.1)), (1, clip_config(1)), (1, clip_config(1)), (1, clip_config(0.1)))
    assert match_indices(run, "hooks.tame.norm") == [(1.0, 2, 3)]
    assert match_runs(run, "hooks.tame.norm").left_out == {0: "it was repeated as 3", 1: "it was repeated as 2"}


def test_unpaired_runs_have_a_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "failed", config=clip_config(1), seed=1, status="failed")
    write_run(tmp_path / "lonely", config=clip_config(1), seed=7)
    write_run(tmp_path / "more", config=clip_config(1, optimizer={"lr": 0.5}, train={"steps": 9}), seed=1)
    write_run(tmp_path / "ok", config=clip_config(1, optimizer={"lr": 0.1}, train={"steps": 9}), seed=1)
    write_run(tmp_path / "base", config=clip_config(0.1, optimizer={"lr": 0.1}, train={"steps": 9}), seed=1)
    write_run(tmp_path / "unused", config=clip_config(0.1), seed=8)
    run = instrument.load(tmp_path)
    found = match_runs(run, "hooks.tame.norm")
    names = [folder.name for folder in run.folders]
    assert [(names[one.index], names[one.baseline]) for one in found.matches] == [("ok", "base")]
    assert {names[index]: why for index, why in found.left_out.items()} == {
        "failed": "its status is failed",
        "lonely": "no run with hooks.tame.norm=0.1 has seed 7",
        "more": "it also differs from the runs with hooks.tame.norm=0.1 in optimizer.lr",
        "unused": "no run with another value has the same seed and the same other settings",
    }


NO_KEY = "no run has this key"


def test_hook_order_is_part_of_the_training(tmp_path: Path) -> None:
    quiet = {"layers": "b", "kind": "full_backward", "action": "scale", "factor": 0.5}
    tame = {**CLIP, "norm": 1.0}
    calm = {**CLIP, "norm": 0.5}
    first = {"tame": tame, "calm": calm, "quiet": quiet}
    orders: list[dict[str, Any]] = [first, {"quiet": quiet, "calm": calm, "tame": CLIP}, first]
    run = sweep(tmp_path, *[(1, {"hooks": hooks, "lr": lr}) for lr, hooks in enumerate(orders, start=1)])
    assert match_indices(run, "lr") == [(3, 2, 0)]
    assert match_runs(run, "lr").left_out == {1: "it also differs from the runs with lr=1 in the order of hooks"}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("hooks.tame.nrom", [NO_KEY, "allowed  hooks.tame.norm, train.steps", "similar  hooks.tame.norm"]),
        ("train.step", [NO_KEY, "similar  train.steps"]),
        ("seed", ["paired by their seed"]),
        ("optimizer.seed", [NO_KEY]),
        ("name", ["this key does not affect training"]),
    ],
)
def test_key_without_differences_is_reported(tmp_path: Path, key: str, words: list[str]) -> None:
    for i, (norm, steps) in enumerate([(0.1, 9), (1, 9), (1, 8)]):
        config = clip_config(norm, train={"steps": steps}, optimizer={"lr": 0.1}, name=f"n{i}")
        overrides = {"exp": "some", "hooks.tame.norm": norm, "train.steps": steps, "optimizer.lr": 0.1, "seed": 0}
        write_run(tmp_path / str(i), config=config, overrides=overrides)
    with pytest.raises(instrument.InstrumentError) as error:
        match_runs(instrument.load(tmp_path), key)
    assert str(error.value).startswith(f"effects_of: {words[0]}" if key != "seed" else "effects_of: runs are paired")
    assert all(word in str(error.value) for word in words)
    assert f"given    {key}" in str(error.value)


def test_key_whose_other_values_failed_is_reported(tmp_path: Path) -> None:
    for i, (fail, norm) in enumerate(product((False, True), (0.1, 1))):
        overrides = {"model.fail": fail, "hooks.tame.norm": norm}
        status = "failed" if fail else "done"
        write_run(tmp_path / str(i), config=clip_config(norm, model={"fail": fail}), overrides=overrides, status=status)
    with pytest.raises(instrument.InstrumentError) as error:
        match_runs(instrument.load(tmp_path), "model.fail")
    assert str(error.value).splitlines() == [
        "effects_of: all 2 finished runs have the value false",
        "    given    model.fail",
        "    allowed  hooks.tame.norm",
    ]


PAIR = [(1, clip_config(0.1)), (1, clip_config(1))]
VARYING = [(1, clip_config(0.1, optimizer={"lr": 1})), (1, clip_config(1.0, optimizer={"lr": 2}))]


@pytest.mark.parametrize(
    ("configs", "status", "key", "message"),
    [
        (
            [(1, clip_config(norm, model={"width": 16})) for norm in (0.1, 1)],
            "done",
            ("model.width",),
            "^effects_of: all 2 finished runs have the value 16\n    given    model.width\n    allowed  hooks.tame.norm",
        ),
        (VARYING, "done", ("no.such.key",), "allowed  optimizer.lr, hooks.tame.norm"),
        (PAIR[:1], "done", ("hooks.tame.norm",), "allowed  none: the runs differ only in their seed"),
        (PAIR, "failed", ("hooks.tame.norm",), "none of the 2 runs is finished"),
        (
            PAIR,
            "done",
            ("hooks.tame.norm", 0.2),
            "^baseline: no run has this value of hooks.tame.norm\n    given    0.2\n    allowed  0.1, 1.0\n    similar  0.1$",
        ),
    ],
    ids=["constant", "unknown", "one run", "failed", "baseline"],
)
def test_key_that_cannot_be_compared_is_reported(
    tmp_path: Path, configs: list[tuple[int, dict[str, Any]]], status: str, key: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(instrument.InstrumentError, match=message.replace(".", r"\.")):
        match_runs(sweep(tmp_path, *configs, status=status), *key)


def test_unmatched_sweep_lists_reasons_by_run(tmp_path: Path) -> None:
    run = sweep(tmp_path, *[(seed, clip_config(norm)) for seed, norm in enumerate([0.1, 1, 10] * 6)])
    with pytest.raises(instrument.InstrumentError) as error:
        match_runs(run, "hooks.tame.norm")
    lines = str(error.value).splitlines()
    assert lines[0] == "hooks.tame.norm: no two runs can be compared"
    assert lines[2] == "    1: no run with hooks.tame.norm=0.1 has seed 1"
    assert (len(lines), lines[-1]) == (14, "    ... (18 in all)")
