"""The house: which package may import which, what is imported late, what is packed, how files are called."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "instrument"

# Left to right, the data's way: a room imports from itself and from rooms to its left. What is in one row does not know
# of each other.
ORDER: tuple[tuple[str, ...], ...] = (
    ("errors", "extras", "spec", "nested", "formatting", "compiler"),
    ("sharded",),
    ("targets", "plan", "stats"),
    ("actions",),
    ("kinds",),
    ("capture",),
    ("sinks",),
    ("analysis",),
    ("plot",),
    ("report",),
    ("folders", "tasks"),
    ("configuration", "distributed"),
    ("sweeps", "training"),
    ("dry_run", "verification"),
    ("cli",),
    ("__main__", "compact", "export", "integrations", "recover", "sweep", "upload", "verify"),
)
# The only looks to the side: a mistake is an error.
WITHIN_A_ROW = {("nested", "errors"), ("spec", "errors")}
PLACE = {room: place for place, row in enumerate(ORDER) for room in row}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(file: Path) -> str:
    """The package or the single module that a file belongs to; empty for the package's own front."""
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def read(file: Path) -> tuple[str | None, list[tuple[int, str]]]:
    """The docstring of a file, and its imports: each is parsed once."""
    tree = ast.parse(file.read_text())
    return ast.get_docstring(tree), list(imported_rooms(file, tree))


def imported_rooms(file: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and rooms of all imports of this package's own, those inside functions and for type checkers included."""
    package = ("instrument", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join([*base, *([node.module] if node.module else [])])
            names = [start] if start.count(".") else [f"{start}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "instrument":
                yield node.lineno, parts[1] if len(parts) > 1 else ""


def test_every_room_has_its_place() -> None:
    assert {room_of(file) for file in files()} - {""} == set(PLACE)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_go_leftwards(file: Path) -> None:
    room = room_of(file)
    if not room:
        return  # the front imports nothing but errors when it is imported: the subprocess below says so
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{line} imports {other or 'the front'}"
        for line, other in read(file)[1]
        if other != room and (room, other) not in WITHIN_A_ROW and not (other and PLACE[other] < PLACE[room])
    ]
    assert wrong == []


def test_every_look_within_a_row_is_still_needed() -> None:
    looks = {(room_of(file), other) for file in files() for _, other in read(file)[1]}
    assert looks >= WITHIN_A_ROW


def test_the_check_sees_every_way_to_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "spec").mkdir()
    file = tmp_path / "spec" / "some.py"
    file.write_text(
        "import instrument.training.loop\nfrom instrument import kinds\nfrom instrument.plan import sites\n"
        "from .. import stats\nfrom ..actions.base import Context\nfrom . import globs\nfrom .fields import Spec\n"
        "def late():\n    from ..capture import probe\nimport torch\nfrom torch import nn\nimport instrument\n"
    )
    _, found = read(file)
    assert found == [
        (1, "training"), (2, "kinds"), (3, "plan"), (4, "stats"), (5, "actions"), (6, "spec"), (7, "spec"), (12, ""), (9, "capture"),
    ]  # fmt: skip


# One process goes through these stages; `seen` keeps what is imported after each.
STAGES = """
import json, sys
seen = {}
import instrument
seen["front"] = list(sys.modules)
import instrument.spec.parse, instrument.spec.schema, instrument.recover, instrument.upload
seen["folders"] = list(sys.modules)
import instrument.compact, instrument.export, instrument.sweep, instrument.report.__main__, instrument.verify
from instrument.__main__ import main
seen["commands"] = list(sys.modules)
try:
    main()
finally:
    seen["run"] = list(sys.modules)
    print(json.dumps(seen))
"""
COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
OF_SOME_RUNS = {
    "sklearn",
    "scipy",
    "torchvision",
    "PIL",
    "matplotlib",
    "plotly",
    "jinja2",
    "duckdb",
    "polars",
    "fsspec",
    "optuna",
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The modules that are imported after each stage, of which the last is a plain run on digits."""
    folder = tmp_path_factory.mktemp("plain")
    model = ["model=mlp", "model.sizes=[64,8,10]"]
    overrides = [
        *model,
        "data=digits",
        "hooks=gradients",
        "train.steps=2",
        "optimizer=adam",
        "train.checkpoint.every=1",
    ]
    command = [sys.executable, "-c", STAGES, *overrides, "hydra.run.dir=out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {stage: set(names) for stage, names in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize(
    ("stage", "heavy"),
    [
        ("front", {"torch", "pandas", "pydantic", "pyarrow", "hydra", "numpy"}),
        ("folders", {"torch", "pandas", "hydra"}),
        ("commands", {"torch"}),
        ("run", COMPILER),
    ],
)
def test_what_is_not_needed_is_not_imported(imported: dict[str, set[str]], stage: str, heavy: set[str]) -> None:
    assert imported[stage] & (heavy | OF_SOME_RUNS) == set()


def test_every_public_name_can_be_had_and_is_listed() -> None:
    import instrument

    assert dir(instrument) == sorted(instrument.__all__)
    assert all(getattr(instrument, name).__name__.rpartition(".")[2] == name for name in instrument.__all__)
    with pytest.raises(AttributeError, match="no attribute 'probe_it'"):
        instrument.probe_it  # noqa: B018


def test_every_package_is_packed() -> None:
    packed = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(file.parent.relative_to(REPOSITORY).parts) for file in PACKAGE.rglob("__init__.py")}
    assert sorted(packed) == sorted({*there, "instrument.conf"})
    assert {file.parent for file in files()} == {file.parent for file in PACKAGE.rglob("__init__.py")}


def test_every_file_is_named_for_what_it_does() -> None:
    nameless = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem in nameless] == []


def test_no_two_test_files_have_the_same_name() -> None:
    names = [file.name for file in (REPOSITORY / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_every_file_says_what_it_is_for(file: Path) -> None:
    assert read(file)[0]
