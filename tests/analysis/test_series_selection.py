"""Selection of a series by the arguments, with errors that list the available ones."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.analysis.plot_data import (
    RecordedSeries,
    check_choice,
    evenly_spaced,
    location_names,
    rows_at,
    select_location,
    select_series,
    series_where,
)
from instrument.errors import InstrumentError

ACTS = RecordedSeries("acts", "forward", "output", "train")
EVAL = RecordedSeries("acts", "forward", "output", "eval")
GRADS = RecordedSeries("grads", "parameter_grad", "param_grad", "train")


def rows(*cells: tuple[str, str, RecordedSeries]) -> pd.DataFrame:
    lines = [(layer, path, one.hook, one.kind, one.role, one.phase, False, 1.0) for layer, path, one in cells]
    return pd.DataFrame(lines, columns=["layer", "path", "hook", "kind", "role", "phase", "recompute", "l2"])


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"hook": "grads"}, GRADS),
        ({"kind": "parameter_grad"}, GRADS),
        ({"role": "output", "phase": "train"}, ACTS),
        ({"phase": "eval"}, EVAL),
    ],
)
def test_matching_series_is_chosen(wanted: dict[str, str], found: RecordedSeries) -> None:
    assert select_series([ACTS, EVAL, GRADS], **wanted) == found


def test_several_matches_are_listed_as_arguments() -> None:
    with pytest.raises(InstrumentError) as error:
        select_series([ACTS, EVAL, GRADS], phase="train")
    assert str(error.value).splitlines() == [
        "several series match phase='train'; select one of",
        "    hook='acts', kind='forward', role='output', phase='train'",
        "    hook='grads', kind='parameter_grad', role='param_grad', phase='train'",
    ]


def test_several_series_without_arguments_are_listed() -> None:
    with pytest.raises(InstrumentError, match=r"^several series match; select one of\n"):
        select_series([ACTS, GRADS])


def test_arguments_that_match_nothing_together_are_reported() -> None:
    with pytest.raises(InstrumentError, match="no series matches all of hook='grads', phase='eval'"):
        select_series([ACTS, EVAL, GRADS], hook="grads", phase="eval")


def test_unknown_argument_is_reported_with_the_nearest() -> None:
    with pytest.raises(InstrumentError, match=r"(?s)hook: .*given    'grad'.*allowed  acts, grads.*similar  grads"):
        select_series([ACTS, GRADS], hook="grad")
    with pytest.raises(InstrumentError, match=r"l0, .*l11, \.\.\. \(20 in all\)"):
        check_choice("m", [f"l{i}" for i in range(20)], "layer", "unknown")


def test_series_are_filtered_by_their_rows() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS))
    frame.loc[1, "l2"] = float("nan")
    assert series_where(frame, lambda own: bool(own["l2"].notna().any())) == [ACTS]


def test_location_selects_a_tensor_and_a_layer_all_its_tensors() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS), ("a", "bias", GRADS), ("", "0", ACTS))
    assert list(location_names(frame).values()) == ["a", "a.weight", "a.bias", ".[0]"]
    assert rows_at(frame, "a.bias").index.tolist() == [2]
    assert rows_at(frame, "a").index.tolist() == [0]
    assert rows_at(frame.iloc[1:], "a").index.tolist() == [1, 2]
    assert rows_at(frame, ".").index.tolist() == [3]
    assert rows_at(frame, "b").empty


def test_location_is_chosen_together_with_its_series() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS), ("a", "bias", GRADS))
    series, location, found = select_location(frame, "a.bias")
    assert (series, location, found.index.tolist()) == (GRADS, "a.bias", [2])
    with pytest.raises(InstrumentError, match="several series match"):
        select_location(frame, "a")
    with pytest.raises(InstrumentError, match=r"a has several tensors; select one of a\.weight, a\.bias"):
        select_location(frame, "a", hook="grads")
    with pytest.raises(InstrumentError, match=r"(?s)layer: .*'a\.wight'.*similar  a\.weight"):
        select_location(frame, "a.wight")


@given(st.integers(1, 500), st.integers(2, 50))
def test_locations_are_spread_evenly(count: int, most: int) -> None:
    found = evenly_spaced(count, most)
    assert len(found) == min(count, most)
    assert (found[0], found[-1]) == (0, count - 1)
    gaps = [two - one for one, two in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1
