"""Registries: entries of decorators and of installed packages, and the errors of invalid ones."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from instrument.errors import ConfigError
from instrument.fields.registry import Registry

Install = Callable[..., Path]
Shapes = Registry[Any]


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a package: its name, the text of its only module, and its entry points of the group `instrument.shapes`."""

    def install(package: str, module: str, **points: str) -> Path:
        (tmp_path / f"{package}.py").write_text(module)
        info = tmp_path / f"{package}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
        lines = [f"{name} = {value}" for name, value in points.items()]
        (info / "entry_points.txt").write_text("\n".join(["[instrument.shapes]", *lines]))
        return tmp_path / f"{package}.py"

    monkeypatch.syspath_prepend(tmp_path)
    return install


@pytest.fixture
def shapes() -> Shapes:
    """A registry with one entry."""
    registry: Registry[Any] = Registry(
        "shapes", "shape", check=lambda entry: None if callable(entry) else "is not a class"
    )

    @registry.register("circle")
    class Circle: ...

    return registry


def test_installed_entry_is_imported_at_first_use(installed: Install, shapes: Shapes) -> None:
    installed("squares", "class Square: ...", square="squares:Square")
    assert list(shapes) == ["circle", "square"]
    assert "square" in shapes
    assert "squares" not in sys.modules
    assert shapes["square"] is sys.modules["squares"].Square
    assert [entry.__name__ for entry in shapes.values()] == ["Circle", "Square"]


def test_builtin_entry_does_not_search_installed_packages(shapes: Shapes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", None)
    assert "circle" in shapes
    assert shapes.find("circle", "hooks.x.shape").__name__ == "Circle"


def test_installed_entry_may_use_the_decorator_too(
    installed: Install, shapes: Shapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "all_shapes", type(sys)("all_shapes"))
    sys.modules["all_shapes"].SHAPES = shapes  # type: ignore[attr-defined]
    module = "from all_shapes import SHAPES\n@SHAPES.register('cube')\nclass Cube: ..."
    file = installed("cubes", module, cube="cubes:Cube")
    assert shapes["cube"].__name__ == "Cube"
    assert shapes.places["cube"] == f"{file}:2"


def test_folder_is_imported_at_first_use() -> None:
    registry: Registry[Any] = Registry("shapes", "shape", folder="instrument.config")
    assert list(registry) == []
    assert "instrument.config.schema" in sys.modules


def test_unknown_name_lists_all_entries(installed: Install, shapes: Shapes) -> None:
    installed("squares_2", "class Square: ...", square="squares_2:Square")
    with pytest.raises(ConfigError) as caught:
        shapes.find("squar", "hooks.x.shape")
    (problem,) = caught.value.problems
    assert (problem.where, problem.message, problem.given) == ("hooks.x.shape", "unknown shape", "squar")
    assert (problem.allowed, problem.similar) == (["circle", "square"], ["square"])


def test_name_registered_twice_is_reported_with_both_places(shapes: Shapes) -> None:
    def again() -> None:
        shapes.register("circle")(dict)

    with pytest.raises(ConfigError) as caught:
        again()
    (problem,) = caught.value.problems
    line = again.__code__.co_firstlineno + 1
    assert problem.where == f"{__file__}:{line}"
    assert f"{shapes.places['circle']} has this one" in problem.fix
    assert shapes["circle"].__name__ == "Circle"


def test_same_code_may_register_its_entry_again(shapes: Shapes) -> None:
    for entry in (list, dict):
        shapes.register("cell")(entry)
    assert shapes["cell"] is dict


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("raise RuntimeError('no such GPU')", r"cannot be loaded: RuntimeError: no such GPU \(in .*broken.*py:1"),
        ("", "cannot be loaded: AttributeError: module 'broken.*' has no attribute 'Square'"),
        ("Square = 3", "shape 'square' is not a class"),
    ],
)
def test_broken_entry_point_names_package_and_entry_point(
    installed: Install, shapes: Shapes, module: str, message: str, request: pytest.FixtureRequest
) -> None:
    name = f"broken_{abs(hash(request.node.name))}"
    installed(name, module, square=f"{name}:Square")
    with pytest.raises(ConfigError, match=message) as caught:
        shapes.find("square", "hooks.x.shape")
    (problem,) = caught.value.problems
    assert problem.where == f"entry point square = {name}:Square (group instrument.shapes, package {name} 1.2)"


@pytest.mark.parametrize("second", ["circle", "square"])
def test_entry_points_with_the_same_name_are_reported(installed: Install, shapes: Shapes, second: str) -> None:
    installed("one", "", square="one:Square")
    installed("two", "", **{second: "two:Square"})
    with pytest.raises(ConfigError) as caught:
        list(shapes)
    text = str(caught.value)
    assert f"shape {second!r} is registered already" in text
    assert "package two 1.2" in text
    assert ("package one 1.2" if second == "square" else f"{__file__}:") in text


def test_registry_is_complete_for_a_second_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, resumed = threading.Event(), threading.Event()
    registry: Registry[Any] = Registry("shapes", "shape", folder="threaded_shapes")
    monkeypatch.setattr(sys, "registry_of_test", (registry, begun, resumed), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "threaded_shapes").mkdir()
    (tmp_path / "threaded_shapes" / "__init__.py").touch()
    module = "import sys\nregistry, begun, resumed = sys.registry_of_test\nbegun.set()\nresumed.wait(60)\nregistry.register('disc')(dict)\n"
    (tmp_path / "threaded_shapes" / "disc.py").write_text(module)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(list, registry)
        assert begun.wait(60)
        second = threads.submit(list, registry)
        wait([second], timeout=0.2)  # it must not end before the module is imported
        resumed.set()
        assert first.result(60) == second.result(60) == ["disc"]
