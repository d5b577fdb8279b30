"""Errors: their messages, suggestions, exit codes and locations in user code."""

from __future__ import annotations

import ast
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from conftest import load_module
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
    Problem,
    similar_names,
    user_code_location,
)
from instrument.storage.remote_folder import UploadError


@pytest.mark.parametrize(
    ("problem", "lines"),
    [
        (
            Problem("a", "b", given="evry: 2", allowed=["every", "start"], similar=["every"], fix="rename it"),
            [
                "a: b",
                "    given    evry: 2",
                "    allowed  every, start",
                "    similar  every",
                "    fix      rename it",
            ],
        ),
        (Problem("", "nothing works"), ["nothing works"]),
        (Problem("seed", "is missing"), ["seed: is missing"]),
        (Problem("a", "b", given=0), ["a: b", "    given    0"]),
        (Problem("a", "b", given=False), ["a: b", "    given    False"]),
        (
            Problem("a", "b", given=["x"], allowed="one of yours"),
            ["a: b", "    given    ['x']", "    allowed  one of yours"],
        ),
        (Problem("a", "b", similar=("x", "y")), ["a: b", "    similar  x, y"]),
        (Problem("a", "b", fix="pass c="), ["a: b", "    fix      pass c="]),
    ],
)
def test_each_part_is_on_a_line_and_missing_parts_are_omitted(problem: Problem, lines: list[str]) -> None:
    assert str(problem).splitlines() == lines


def test_long_given_value_is_truncated() -> None:
    line = str(Problem("a", "b", given=list(range(1000)))).splitlines()[1]
    assert len(line) < 220
    assert line.endswith("...")


@pytest.mark.parametrize(
    ("word", "options", "expected"),
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
def test_nearest_options_are_sorted_by_similarity(word: str, options: list[str], expected: list[str]) -> None:
    assert similar_names(word, options)[: len(expected)] == expected
    assert bool(similar_names(word, options)) == bool(expected)


@given(st.lists(st.text("abcAB_", max_size=5), max_size=8), st.text("abcAB_", max_size=5), st.integers(1, 4))
def test_nearest_options_are_unique_with_exact_match_first(options: list[str], word: str, limit: int) -> None:
    found = similar_names(word, options, limit=limit)
    assert set(found) <= set(options)
    assert len(found) == len(set(found)) <= limit
    if word in options:
        assert word.lower() == found[0].lower()


def test_config_error_lists_all_problems_and_can_be_pickled() -> None:
    error = ConfigError(Problem("a", "first", given=[1]), Problem("b", "second", similar=["c"]))
    assert str(error) == "a: first\n    given    [1]\nb: second\n    similar  c"
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.problems, str(again)) == (ConfigError, error.problems, str(error))


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
def test_error_has_its_base_class_and_exit_code(error: type[InstrumentError], base: type[Exception], code: int) -> None:
    assert error.__bases__ == (base,)
    assert error.exit_code == code
    assert getattr(instrument, error.__name__) is error


def class_tree(kind: type[InstrumentError], depth: int = 0) -> list[tuple[int, str]]:
    own = [child for child in kind.__subclasses__() if child.__module__.startswith("instrument.")]
    return [(depth, kind.__name__), *(entry for child in own for entry in class_tree(child, depth + 1))]


def test_error_tree_in_the_docstring_is_current() -> None:
    assert instrument.NoRunError.__base__ is UploadError.__base__ is InstrumentError  # defined in other modules
    written = re.findall(r"^([│├└─ ]*)(\w+Error)\b", errors.__doc__ or "", re.MULTILINE)
    assert sorted((len(lead) // 4, name) for lead, name in written) == sorted(class_tree(InstrumentError))


def test_all_of_the_module_lists_every_public_name() -> None:
    tree = ast.parse(Path(errors.__file__).read_text())
    public = {
        node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) if node.name[0] != "_"
    }
    assert set(errors.__all__) == public


MODULE = """
def outer():
    return inner()

def inner():
    import json
    return json.loads("{")
"""


def own_module(file: Path) -> ModuleType:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(MODULE)
    return load_module("own_module", file)


@pytest.mark.parametrize("folder", ["project", "instrument", "instrument/conf", "lib/python"])
def test_error_location_is_the_last_line_of_user_code(tmp_path: Path, folder: str) -> None:
    file = tmp_path / folder / "mine.py"
    with pytest.raises(ValueError, match="Expecting") as caught:
        own_module(file).outer()
    caught.value.__traceback__ = caught.value.__traceback__.tb_next if caught.value.__traceback__ else None
    assert user_code_location(caught.value) == f" (in {file}:7, inner)"


@pytest.mark.slow
def test_error_outside_user_code_has_no_location() -> None:
    code = "import instrument.config.parse as p\nfrom instrument.errors import user_code_location\n" + (
        "try:\n    p.parse_hooks(3)\nexcept Exception as error:\n    print(repr(user_code_location(error)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "''"
