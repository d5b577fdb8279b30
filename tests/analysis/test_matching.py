"""Which runs of a sweep are compared with which, and why the others are not."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from swept import CLIP, SEEN, job

import instrument
from instrument.analysis.matching import match


def clipped(norm: Any, **more: Any) -> dict[str, Any]:
    return {"hooks": {"tame": {**CLIP, "norm": norm}}, **more}


def sweep(folder: Path, *configs: tuple[int, dict[str, Any]], **more: Any) -> instrument.Run:
    """A job for each seed and configuration."""
    for i, (seed, config) in enumerate(configs):
        job(folder / str(i), config=config, seed=seed, **more)
    return instrument.load(folder)


def told(run: instrument.Run, key: str, baseline: Any = None) -> list[tuple[Any, int, int]]:
    return [(found.value, found.place, found.baseline) for found in match(run, key, baseline).matches]


def test_runs_are_matched_by_seed_and_by_everything_else(tmp_path: Path) -> None:
    rates = [(rate, norm, seed) for rate, norm, seed in product((0.1, 0.2), (10, 0.1, 1.0), (1, 2))]
    run = sweep(tmp_path, *[(seed, clipped(norm, optimizer={"lr": rate})) for rate, norm, seed in rates])
    found = match(run, "hooks.tame.norm")
    assert (found.baseline, found.left_out) == (0.1, {})
    assert [one.value for one in found.matches] == [1.0] * 4 + [10] * 4  # in the order of the numbers
    for one in found.matches:
        (rate, norm, seed), (its_rate, its_norm, its_seed) = rates[one.place], rates[one.baseline]
        assert (rate, seed, norm, its_norm) == (its_rate, its_seed, one.value, 0.1)
    assert len(match(run, "optimizer.lr").matches) == 6


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
def test_the_baseline(tmp_path: Path, values: list[Any], asked: Any, baseline: Any) -> None:
    run = sweep(tmp_path, *[(0, {"some": {"key": value}}) for value in values])
    found = match(run, "some.key", asked)
    assert (found.baseline, type(found.baseline)) == (baseline, type(baseline))
    assert len(found.matches) == len(values) - 1


def test_a_key_that_some_runs_do_not_have_is_null_there(tmp_path: Path) -> None:
    run = sweep(tmp_path, (0, {"optimizer": {"lr": 0.1}}), (0, {"optimizer": {"lr": 0.1, "nesterov": True}}))
    assert told(run, "optimizer.nesterov") == [(True, 1, 0)]
    assert match(run, "optimizer.nesterov").baseline is None


def test_a_whole_hook_and_one_field_of_it_are_matched_with_runs_without_the_hook(tmp_path: Path) -> None:
    seen = {"hooks": {"seen": SEEN}}
    run = sweep(
        tmp_path, (1, clipped(0.1)), (1, clipped(1)), (1, {"hooks": {"tame": None}}), (2, clipped(1)), (2, seen)
    )
    assert told(run, "hooks.tame.norm") == [(0.1, 0, 2), (1.0, 1, 2), (1.0, 3, 4)]
    assert told(run, "hooks.tame.norm", 1) == [(0.1, 0, 1), (None, 2, 1), (None, 4, 3)]
    text = "{{layers: [a], kind: parameter_grad, action: clip, norm: {}}}"
    assert told(run, "hooks.tame") == [(text.format(0.1), 0, 2), (text.format(1.0), 1, 2), (text.format(1.0), 3, 4)]


def test_hooks_that_record_need_not_be_the_same(tmp_path: Path) -> None:
    config = clipped(1.0)
    run = sweep(tmp_path, (1, clipped(0.1)), (1, {"hooks": {**config["hooks"], "seen": SEEN}, "sink": {"wandb": True}}))
    assert told(run, "hooks.tame.norm") == [(1.0, 1, 0)]


def test_what_a_hook_that_records_does_can_be_asked_too(tmp_path: Path) -> None:
    run = sweep(tmp_path, *[(1, {"hooks": {"seen": {**SEEN, "every": every}}}) for every in (5, 1)])
    assert told(run, "hooks.seen.every") == [(5, 0, 1)]


def test_options_of_a_group_have_their_names(tmp_path: Path) -> None:
    models = {"mlp": {"_target_": "MLP", "sizes": [64, 10]}, "cnn": {"_target_": "CNN"}}
    for i, (seed, name) in enumerate(product((1, 2), models)):
        job(tmp_path / str(i), config={"model": models[name]}, seed=seed, overrides={"model": name, "seed": seed})
    run = instrument.load(tmp_path)
    assert told(run, "model") == [("cnn", 1, 0), ("cnn", 3, 2)]
    assert match(run, "model", "cnn").baseline == "cnn"
    other = {"_target_": "MLP", "sizes": [64, 32, 10]}
    for seed in (1, 2):
        overrides = {"model": "mlp", "model.sizes": [64, 32, 10], "seed": seed}
        job(tmp_path / f"deep{seed}", config={"model": other}, seed=seed, overrides=overrides)
    values = {value for value, *_ in told(instrument.load(tmp_path), "model", "cnn")}
    assert values == {"{_target_: MLP, sizes: [64, 10]}", "{_target_: MLP, sizes: [64, 32, 10]}"}


def test_of_a_run_that_was_made_again_the_last_counts(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clipped(0.1)), (1, clipped(1)), (1, clipped(1)), (1, clipped(0.1)))
    assert told(run, "hooks.tame.norm") == [(1.0, 2, 3)]
    assert match(run, "hooks.tame.norm").left_out == {0: "it was run again, as 3", 1: "it was run again, as 2"}


def test_runs_in_no_pair_say_why(tmp_path: Path) -> None:
    job(tmp_path / "failed", config=clipped(1), seed=1, status="failed")
    job(tmp_path / "lonely", config=clipped(1), seed=7)
    job(tmp_path / "more", config=clipped(1, optimizer={"lr": 0.5}, train={"steps": 9}), seed=1)
    job(tmp_path / "ok", config=clipped(1, optimizer={"lr": 0.1}, train={"steps": 9}), seed=1)
    job(tmp_path / "base", config=clipped(0.1, optimizer={"lr": 0.1}, train={"steps": 9}), seed=1)
    job(tmp_path / "unused", config=clipped(0.1), seed=8)
    run = instrument.load(tmp_path)
    found = match(run, "hooks.tame.norm")
    names = [folder.name for folder in run.folders]
    assert [(names[one.place], names[one.baseline]) for one in found.matches] == [("ok", "base")]
    assert {names[place]: why for place, why in found.left_out.items()} == {
        "failed": "it is not done, but failed",
        "lonely": "no run with hooks.tame.norm=0.1 has seed 7",
        "more": "it differs from the runs with hooks.tame.norm=0.1 in optimizer.lr too",
        "unused": "no run with another value has its seed and the rest of its configuration",
    }


def test_hooks_in_another_order_are_another_training(tmp_path: Path) -> None:
    quiet = {"layers": "b", "kind": "full_backward", "action": "scale", "factor": 0.5}
    tame = {**CLIP, "norm": 1.0}
    calm = {**CLIP, "norm": 0.5}
    orders: list[dict[str, Any]] = [
        {"tame": tame, "calm": calm, "quiet": quiet},
        {"quiet": quiet, "calm": calm, "tame": CLIP},
    ]
    run = sweep(
        tmp_path,
        (1, {"hooks": orders[0], "lr": 1}),
        (1, {"hooks": orders[1], "lr": 2}),
        (1, {"hooks": orders[0], "lr": 3}),
    )
    assert told(run, "lr") == [(3, 2, 0)]
    assert match(run, "lr").left_out == {1: "it differs from the runs with lr=1 in the order of hooks too"}


@pytest.mark.parametrize(
    ("key", "words"),
    [
        (
            "hooks.tame.nrom",
            ["no run has this key", "allowed  hooks.tame.norm, train.steps", "nearest  hooks.tame.norm"],
        ),
        ("train.step", ["no run has this key", "nearest  train.steps"]),
        ("seed", ["matched by their seed"]),
        ("name", ["this changes no training"]),
    ],
)
def test_a_key_in_which_the_runs_do_not_differ_is_told(tmp_path: Path, key: str, words: list[str]) -> None:
    for i, (norm, steps) in enumerate([(0.1, 9), (1, 9), (1, 8)]):
        config = clipped(norm, train={"steps": steps}, optimizer={"lr": 0.1}, name=f"n{i}")
        overrides = {"exp": "some", "hooks.tame.norm": norm, "train.steps": steps, "optimizer.lr": 0.1}
        job(tmp_path / str(i), config=config, overrides=overrides)
    with pytest.raises(instrument.InstrumentError) as error:
        match(instrument.load(tmp_path), key)
    assert str(error.value).startswith(f"effects_of: {words[0]}" if key != "seed" else "effects_of: runs are matched")
    assert all(word in str(error.value) for word in words)
    assert f"written  {key}" in str(error.value)


def test_a_key_whose_other_values_failed_says_so(tmp_path: Path) -> None:
    for i, (fail, norm) in enumerate(product((False, True), (0.1, 1))):
        overrides = {"model.fail": fail, "hooks.tame.norm": norm}
        status = "failed" if fail else "done"
        job(tmp_path / str(i), config=clipped(norm, model={"fail": fail}), overrides=overrides, status=status)
    with pytest.raises(instrument.InstrumentError) as error:
        match(instrument.load(tmp_path), "model.fail")
    assert str(error.value).splitlines() == [
        "effects_of: all 2 runs that are done have model.fail=false",
        "    not done        2 failed, model.fail=true",
        "    they differ in  hooks.tame.norm",
    ]


def test_a_key_that_is_the_same_in_all_names_those_that_are_not(tmp_path: Path) -> None:
    run = sweep(tmp_path, *[(1, clipped(norm, model={"width": 16})) for norm in (0.1, 1)])
    with pytest.raises(instrument.InstrumentError) as error:
        match(run, "model.width")
    assert str(error.value).splitlines() == [
        "effects_of: all 2 runs that are done have model.width=16",
        "    they differ in  hooks.tame.norm",
    ]


def test_without_overrides_the_keys_that_differ_are_listed(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clipped(0.1, optimizer={"lr": 1})), (1, clipped(1.0, optimizer={"lr": 2})))
    with pytest.raises(instrument.InstrumentError, match=r"allowed  optimizer\.lr, hooks\.tame\.norm"):
        match(run, "no.such.key")


def test_one_run_has_nothing_to_be_compared_with(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clipped(0.1)))
    with pytest.raises(
        instrument.InstrumentError, match="they differ in  nothing: no two runs differ in more than their seed"
    ):
        match(run, "hooks.tame.norm")


def test_no_run_that_is_done(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clipped(0.1)), (1, clipped(1)), status="failed")
    with pytest.raises(instrument.InstrumentError, match="none of the 2 runs is done"):
        match(run, "hooks.tame.norm")


def test_a_baseline_that_no_run_has_is_told(tmp_path: Path) -> None:
    run = sweep(tmp_path, (1, clipped(0.1)), (1, clipped(1)))
    with pytest.raises(instrument.InstrumentError) as error:
        match(run, "hooks.tame.norm", 0.2)
    assert str(error.value).splitlines() == [
        "baseline: no run has this hooks.tame.norm",
        "    written  0.2",
        "    allowed  0.1, 1.0",
        "    nearest  0.1",
    ]


def test_where_nothing_can_be_compared_it_says_why_run_by_run(tmp_path: Path) -> None:
    run = sweep(tmp_path, *[(seed, clipped(norm)) for seed, norm in enumerate([0.1, 1, 10] * 6)])
    with pytest.raises(instrument.InstrumentError) as error:
        match(run, "hooks.tame.norm")
    lines = str(error.value).splitlines()
    assert lines[0] == "hooks.tame.norm: no two runs can be compared"
    assert lines[2] == "    1: no run with hooks.tame.norm=0.1 has seed 1"
    assert (len(lines), lines[-1]) == (14, "    ... (18 in all)")
