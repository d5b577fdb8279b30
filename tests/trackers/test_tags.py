"""Tag, step and value of a row."""

from __future__ import annotations

import math
import re
import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tracker_files import key, metrics, row

from instrument.tables.schemas import TABLES
from instrument.tables.statistics import ALL
from instrument.trackers.tags import scalars, tag_prefix


@pytest.mark.parametrize(
    ("cells", "tag"),
    [
        ({}, "seen/a.0"),
        ({"layer": ""}, "seen/_root_"),
        ({"path": "logits"}, "seen/a.0/logits"),
        ({"kind": "parameter_grad", "role": "param_grad", "path": "weight"}, "seen/a.0/weight"),
        ({"kind": "step_post", "role": "state.exp_avg", "path": "weight"}, "seen/a.0/weight/state.exp_avg"),
        ({"role": "input"}, "seen/a.0/input"),
        ({"call": 2}, "seen/a.0/call2"),
        ({"call": -1}, "seen/a.0/call-1"),
        ({"backward": 1, "kind": "tensor"}, "seen/a.0/backward1"),
        ({"phase": "eval"}, "seen.eval/a.0"),
        ({"rank": 3}, "seen.rank3/a.0"),
        ({"micro_step": 4, "epoch": 2, "recompute": True, "module_type": "X"}, "seen/a.0"),
        ({"path": "a b/[c]"}, "seen/a.0/a_b__c_"),
    ],
)
def test_tag_contains_hook_layer_and_path(cells: dict[str, Any], tag: str) -> None:
    assert tag_prefix(key(**cells)) == tag


def test_metrics_are_tagged_by_phase_without_nulls() -> None:
    custom = {"episode_return": 2.0, "late": None}
    found = list(scalars("metrics", metrics(3, loss=0.5, lr=math.nan, skipped=True, custom=custom)))
    assert {step for _, step, _, _ in found} == {3}
    assert [tag for tag, *_ in found] == ["train/loss", "train/lr", "train/skipped", "train/episode_return"]
    np.testing.assert_array_equal([each.value for each in found], [0.5, math.nan, 1.0, 2.0])
    assert [tag for tag, *_ in scalars("metrics", metrics(3, "eval", accuracy=1.0))] == ["eval/accuracy"]


def test_every_statistic_but_the_fingerprint_is_a_scalar() -> None:
    cells: dict[str, Any] = {name: number for number, name in enumerate(ALL)}
    found = {tag: value for tag, _, value, _ in scalars("stats", row("stats", *key(7), **cells))}
    assert found == {f"seen/a.0/{name}": number for number, name in enumerate(ALL) if name != "fingerprint"}


def test_effects_and_quantiles_are_scalars() -> None:
    effect = row("effects", *key(7), numel=4, changed=2, changed_fraction=0.5, norm_before=2.0, norm_after=1.0)
    assert {tag: value for tag, _, value, _ in scalars("effects", effect)} == {
        "seen/a.0/numel": 4, "seen/a.0/changed": 2, "seen/a.0/changed_fraction": 0.5,
        "seen/a.0/norm_before": 2.0, "seen/a.0/norm_after": 1.0,
    }  # fmt: skip
    seen = row("distributions", *key(7), sampled=9, levels=[0.05, 0.5], quantiles=[-1.0, 2.0])
    assert [(tag, step, value) for tag, step, value, _ in scalars("distributions", seen)] == [
        ("seen/a.0/quantile_0.05", 7, -1.0), ("seen/a.0/quantile_0.5", 7, 2.0),
    ]  # fmt: skip
    nothing = row("distributions", *key(7), sampled=0, levels=[0.5], low=None, counts=[0, 0])
    assert list(scalars("distributions", nothing)) == []


SOME = string.printable + "\0\x7fä\u07c0\u0301\u2028雪\U0001f600"


@pytest.mark.parametrize("alphabet", [SOME, pytest.param(st.characters(), marks=pytest.mark.slow)], ids=["some", "all"])
def test_any_name_gives_a_tag_valid_in_all_trackers(alphabet: Any) -> None:
    names = st.text(alphabet, max_size=12)

    @given(layer=names, path=names, role=names, call=st.integers(-1, 5))
    def check(layer: str, path: str, role: str, call: int) -> None:
        tag = tag_prefix(key(layer=layer, path=path, role=role, call=call))
        assert re.fullmatch(r"[/\w.\- :]+", tag), "allowed by MLflow"
        assert all(tag.split("/"))

    check()


def test_tables_share_their_identity_columns() -> None:
    for table in ("stats", "effects", "distributions", "tensors"):
        assert TABLES[table].names[: len(key())] == TABLES["stats"].names[: len(key())]
