"""What is to be shown is chosen by what the user says of it, and errors name what there is."""

from __future__ import annotations

from itertools import pairwise

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.analysis.series import Series
from instrument.analysis.series_selection import (
    at_place,
    choose,
    choose_place,
    places_of,
    refuse_unless,
    seen_in,
    spread,
)
from instrument.errors import InstrumentError

ACTS = Series("acts", "forward", "output", "train")
EVAL = Series("acts", "forward", "output", "eval")
GRADS = Series("grads", "parameter_grad", "param_grad", "train")


def rows(*cells: tuple[str, str, Series]) -> pd.DataFrame:
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
def test_the_one_that_fits_is_chosen(wanted: dict[str, str], found: Series) -> None:
    assert choose([ACTS, EVAL, GRADS], **wanted) == found


def test_several_that_fit_are_named_as_the_arguments_that_tell_them_apart() -> None:
    with pytest.raises(InstrumentError) as told:
        choose([ACTS, EVAL, GRADS], phase="train")
    assert str(told.value).splitlines() == [
        "several series fit phase='train': choose one of",
        "    hook='acts', kind='forward', role='output', phase='train'",
        "    hook='grads', kind='parameter_grad', role='param_grad', phase='train'",
    ]


def test_several_without_a_wish_are_named() -> None:
    with pytest.raises(InstrumentError, match=r"^several series fit: choose one of\n"):
        choose([ACTS, GRADS])


def test_what_there_is_not_together_is_said() -> None:
    with pytest.raises(InstrumentError, match="no series fits hook='grads', phase='eval' together"):
        choose([ACTS, EVAL, GRADS], hook="grads", phase="eval")


def test_what_there_is_not_at_all_is_told_with_the_nearest() -> None:
    with pytest.raises(InstrumentError, match=r"(?s)hook: .*written  'grad'.*allowed  acts, grads.*nearest  grads"):
        choose([ACTS, GRADS], hook="grad")
    with pytest.raises(InstrumentError, match=r"l0, .*l11, \.\.\. \(20 in all\)"):
        refuse_unless("m", [f"l{i}" for i in range(20)], "layer", "unknown")


def test_series_are_those_whose_rows_are_as_wanted() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS))
    frame.loc[1, "l2"] = float("nan")
    assert seen_in(frame, lambda own: bool(own["l2"].notna().any())) == [ACTS]


def test_a_place_is_a_tensor_and_a_layer_all_of_its_own() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS), ("a", "bias", GRADS), ("", "0", ACTS))
    assert list(places_of(frame).values()) == ["a", "a.weight", "a.bias", ".[0]"]
    assert at_place(frame, "a.bias").index.tolist() == [2]
    assert at_place(frame, "a").index.tolist() == [0]
    assert at_place(frame.iloc[1:], "a").index.tolist() == [1, 2]
    assert at_place(frame, ".").index.tolist() == [3]
    assert at_place(frame, "b").empty


def test_a_place_is_chosen_together_with_who_saw_it() -> None:
    frame = rows(("a", "", ACTS), ("a", "weight", GRADS), ("a", "bias", GRADS))
    series, place, found = choose_place(frame, "a.bias")
    assert (series, place, found.index.tolist()) == (GRADS, "a.bias", [2])
    with pytest.raises(InstrumentError, match="several series fit"):
        choose_place(frame, "a")
    with pytest.raises(InstrumentError, match=r"a has several tensors here: choose one of a\.weight, a\.bias"):
        choose_place(frame, "a", hook="grads")
    with pytest.raises(InstrumentError, match=r"(?s)layer: .*'a\.wight'.*nearest  a\.weight"):
        choose_place(frame, "a.wight")


@given(st.integers(1, 500), st.integers(2, 50))
def test_places_are_spread_evenly_from_the_first_to_the_last(count: int, most: int) -> None:
    found = spread(count, most)
    assert len(found) == min(count, most)
    assert (found[0], found[-1]) == (0, count - 1)
    gaps = [two - one for one, two in pairwise(found)]
    assert not gaps or max(gaps) - min(gaps) <= 1
