"""The errors: what they say, and what the process ends with."""

from __future__ import annotations

import ast
import importlib.util
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import instrument
from instrument import errors
from instrument.errors import (
    AlreadyAttachedError,
    ConfigError,
    HookError,
    HookResultError,
    InstrumentError,
    Mistake,
    nearest,
    own_frame,
)
from instrument.sinks.remote import UploadError


def test_all_four_parts_stand_on_lines_of_their_own() -> None:
    mistake = Mistake(
        "hooks.a", "unknown field 'evry'", written="evry: 2", allowed=["every", "start"], nearest=["every"]
    )
    assert str(mistake).splitlines() == [
        "hooks.a: unknown field 'evry'",
        "    written  evry: 2",
        "    allowed  every, start",
        "    nearest  every",
    ]


@pytest.mark.parametrize(
    ("mistake", "lines"),
    [
        (Mistake("", "nothing works"), ["nothing works"]),
        (Mistake("seed", "is missing"), ["seed: is missing"]),
        (Mistake("a", "b", written=0), ["a: b", "    written  0"]),
        (Mistake("a", "b", written=False), ["a: b", "    written  False"]),
        (
            Mistake("a", "b", written=["x"], allowed="one of yours"),
            ["a: b", "    written  ['x']", "    allowed  one of yours"],
        ),
        (Mistake("a", "b", nearest=("x", "y")), ["a: b", "    nearest  x, y"]),
    ],
)
def test_parts_that_are_not_there_are_left_out(mistake: Mistake, lines: list[str]) -> None:
    assert str(mistake).splitlines() == lines


def test_what_was_written_is_cut_where_it_would_fill_the_screen() -> None:
    line = str(Mistake("a", "b", written=list(range(1000)))).splitlines()[1]
    assert len(line) < 220
    assert line.endswith("...")


@pytest.mark.parametrize(
    ("word", "options", "found"),
    [
        ("evry", ["start", "every", "stop"], ["every"]),
        ("RELU", ["ReLU6", "ReLU", "Linear"], ["ReLU"]),
        ("relu", ["ReLU6", "ReLU", "ELU"], ["ReLU"]),
        ("xyz", ["every"], []),
        ("a", [], []),
        ("aaaa", ["aaab", "aaac", "aaad", "aaae"], ["aaae", "aaad", "aaac"]),
        ("every", ["every", "every"], ["every"]),
    ],
)
def test_the_nearest_options_come_best_first(word: str, options: list[str], found: list[str]) -> None:
    assert nearest(word, options)[: len(found)] == found
    assert bool(nearest(word, options)) == bool(found)


@given(st.lists(st.text("abcAB_", max_size=5), max_size=8), st.text("abcAB_", max_size=5), st.integers(1, 4))
def test_the_nearest_are_options_once_each_and_an_exact_one_is_first(options: list[str], word: str, most: int) -> None:
    found = nearest(word, options, most=most)
    assert set(found) <= set(options)
    assert len(found) == len(set(found)) <= most
    if word in options:
        assert word.lower() == found[0].lower()


def test_a_config_error_says_every_mistake_and_survives_a_trip_to_another_process() -> None:
    error = ConfigError(Mistake("a", "first", written=[1]), Mistake("b", "second", nearest=["c"]))
    assert str(error) == "a: first\n    written  [1]\nb: second\n    nearest  c"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.mistakes, str(again)) == (ConfigError, error.mistakes, str(error))


@pytest.mark.parametrize(
    ("error", "base", "code"),
    [
        (InstrumentError, Exception, 1),
        (ConfigError, InstrumentError, 2),
        (HookError, InstrumentError, 1),
        (HookResultError, HookError, 1),
        (AlreadyAttachedError, InstrumentError, 1),
    ],
)
def test_each_error_has_its_place_in_the_tree_and_its_exit_code(
    error: type[InstrumentError], base: type[Exception], code: int
) -> None:
    assert error.__bases__ == (base,)
    assert error.exit_code == code
    assert getattr(instrument, error.__name__) is error


def below(kind: type[InstrumentError], depth: int = 0) -> list[tuple[int, str]]:
    own = [child for child in kind.__subclasses__() if child.__module__.startswith("instrument.")]
    return [(depth, kind.__name__), *(found for child in own for found in below(child, depth + 1))]


def test_the_tree_in_the_docstring_is_the_tree_there_is() -> None:
    assert instrument.NoRunError.__base__ is UploadError.__base__ is InstrumentError  # both in modules of their own
    written = re.findall(r"^([│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted((len(lead) // 4, name) for lead, name in written) == sorted(below(InstrumentError))


def test_what_the_module_gives_away_is_what_it_has() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    public = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) if node.name[0] != "_"
    }
    assert set(errors.__all__) == public


# ------------------------------------------------------------------------------------------------ the user's own frame

OWN = """
def outer():
    return inner()

def inner():
    import json
    return json.loads("{")
"""


def own_module(file: Path) -> ModuleType:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OWN)
    spec = importlib.util.spec_from_file_location("own_module", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("folder", ["project", "instrument", "instrument/conf", "lib/python"])
def test_an_error_is_placed_at_the_last_line_of_the_users_own_code(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "mine.py"
    with pytest.raises(ValueError, match="Expecting") as caught:
        own_module(file).outer()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    assert own_frame(caught.value) == f" (in {file}:7, inner)"


def test_an_error_in_nobodys_own_code_has_no_place() -> None:
    code = "import instrument.spec.parse as p\nfrom instrument.errors import own_frame\n" + (
        "try:\n    p.parse_hooks(3)\nexcept Exception as error:\n    print(repr(own_frame(error)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"
