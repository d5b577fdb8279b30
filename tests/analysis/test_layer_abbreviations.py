"""Short names of layers are short where possible, and always distinct."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instrument.analysis.plot_data import short_names

VIT = [
    f"encoder.layers.encoder_layer_{i}.{part}"
    for i in range(12)
    for part in ("self_attention.in_proj_weight", "mlp.0", "ln_1")
]


@pytest.mark.parametrize(("most", "longest"), [(18, 25), (44, 44)])
def test_transformer_blocks_keep_their_numbers(most: int, longest: int) -> None:
    short = short_names(VIT, most)
    assert len(set(short.values())) == len(VIT)
    assert max(map(len, short.values())) <= longest
    for i in range(12):
        assert f"_{i}." in short[f"encoder.layers.encoder_layer_{i}.self_attention.in_proj_weight"]


def test_short_name_is_unchanged() -> None:
    assert short_names(["encoder.0", "encoder.1", "."], 18) == {name: name for name in ("encoder.0", "encoder.1", ".")}


@given(st.sets(st.text("ab._1", min_size=1, max_size=30), max_size=12), st.integers(6, 20))
def test_different_names_have_different_short_names(names: set[str], most: int) -> None:
    short = short_names(sorted(names), most)
    assert set(short) == names
    assert len(set(short.values())) == len(names)
    assert all(short[name] == name for name in names if len(name) <= most)
