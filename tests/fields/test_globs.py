"""Globs, compared with a second matcher that implements the definition by recursion over segments."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from instrument.fields.globs import ROOT, compile_glob, matches

LETTERS = "ab0+$^("


@dataclass(frozen=True)
class Set:
    """A character set, `[...]` or `[!...]`."""

    members: tuple[str, ...]
    negated: bool

    def __str__(self) -> str:
        return f"[{'!' if self.negated else ''}{''.join(self.members)}]"


Token = str | Set  # "*", "?", a letter, or a set
Segment = tuple[Token, ...]


def expected_match(segments: list[Segment], name: str) -> bool:
    """Return whether the pattern made of these segments matches a name."""
    return _segments(segments, name.split(".") if name else [])


def _segments(wanted: list[Segment], present: list[str]) -> bool:
    if not wanted:
        return not present
    if wanted[0] == ("**",):
        return any(_segments(wanted[1:], present[i:]) for i in range(len(present) + 1))
    return bool(present) and _characters(wanted[0], present[0]) and _segments(wanted[1:], present[1:])


def _characters(wanted: Segment, text: str) -> bool:
    if not wanted:
        return not text
    first, rest = wanted[0], wanted[1:]
    if first == "*":
        return any(_characters(rest, text[i:]) for i in range(len(text) + 1))
    if not text:
        return False
    fits = (text[0] in first.members) != first.negated if isinstance(first, Set) else first in ("?", text[0])
    return fits and _characters(rest, text[1:])


sets = st.builds(
    Set, st.lists(st.sampled_from("ab0$^\\["), min_size=1, max_size=3, unique=True).map(tuple), st.booleans()
)
parts = st.one_of(st.sampled_from([*LETTERS, "*", "?"]), sets)
plain = st.lists(parts, min_size=1, max_size=4).map(tuple).filter(lambda s: ("*", "*") not in itertools.pairwise(s))
patterns = st.lists(st.one_of(plain, st.just(("**",))), min_size=1, max_size=4)
names = st.lists(st.text(LETTERS, min_size=1, max_size=3), max_size=4).map(".".join)


def pattern_of(segments: list[Segment]) -> str:
    return ".".join("".join(map(str, segment)) for segment in segments)


@given(patterns, names)
@example([("**",)], "")
@example([("**",), ("a",), ("**",)], "a")
@example([("a",), ("**",)], "a")
def test_glob_matches_by_its_definition(segments: list[Segment], name: str) -> None:
    assert matches(pattern_of(segments), name) == expected_match(segments, name)


@given(names, names)
def test_name_without_wildcards_matches_only_itself(pattern: str, name: str) -> None:
    assert matches("**", name)
    assert matches(name or ROOT, name)
    assert matches(pattern or ROOT, name) == (pattern == name)


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (".", [""], ["a", "a.b"]),
        ("*", ["a", "0"], ["", "a.b"]),
        ("**", ["", "a", "a.b.c"], []),
        ("encoder.*", ["encoder.0", "encoder.bn"], ["encoder", "encoder.0.bn", "encoders.0"]),
        ("encoder.**", ["encoder", "encoder.0", "encoder.0.bn"], ["encoder0", "my.encoder", ""]),
        ("**.bn", ["bn", "a.bn", "a.b.bn"], ["abn", "a.bn.c"]),
        ("a.**.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "z", "az"]),
        ("layer?", ["layer1"], ["layer", "layer12", "layer."]),
        ("conv*", ["conv", "conv1", "conv_in"], ["my_conv", "conv.0"]),
        ("*_*", ["a_b", "_"], ["ab"]),
        ("layer[1-3]", ["layer1", "layer3"], ["layer4", "layer-"]),
        ("layer[!1-3]", ["layer4", "layerx"], ["layer1", "layer", "layer1.x"]),
        ("[]]x", ["]x"], ["x"]),
        ("[!]]x", ["ax"], ["]x"]),
        ("a+", ["a+"], ["aa"]),
        ("a[!b]c", ["axc"], ["a.c", "abc"]),
        ("re:", [""], ["a"]),
        ("re:a|ab", ["a", "ab"], ["abc", "b"]),
        (r"re:encoder\.\d+", ["encoder.0", "encoder.12"], ["encoder.x", "my.encoder.0", "encoder.0.bn"]),
        ("re:(?i)CONV.*", ["conv1", "Conv2.x"], ["my_conv"]),
    ],
)
def test_documented_globs_match(pattern: str, matching: list[str], others: list[str]) -> None:
    assert [name for name in [*matching, *others] if matches(pattern, name)] == matching


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("", "empty"),
        ("a..b", "empty segment"),
        (".a", "empty segment"),
        ("a.", "empty segment"),
        ("a**", "complete segment"),
        ("**a.b", "complete segment"),
        ("***", "complete segment"),
        ("a[bc", "not closed"),
        ("a[", "not closed"),
        ("a[!", "not closed"),
        ("a[]", "not closed"),
        ("a[!]", "not closed"),
        ("[z-a]", "range"),
        ("re:(", "regular expression"),
        ("re:[", "regular expression"),
        ("re:*", "regular expression"),
    ],
)
def test_malformed_pattern_is_refused_with_a_reason(pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compile_glob(pattern)
