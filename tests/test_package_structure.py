"""Structure of the package: allowed imports, lazy imports, packaged folders and file names."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

import instrument
from instrument.fields.pip_extras import DISTRIBUTION, installed_version, pip_command
from instrument.plot import PLOTS
from instrument.report.panels import RUN_PANELS, SWEEP_PANELS
from instrument.runtime import moved_names

REPOSITORY = Path(__file__).parents[1]
PACKAGE = REPOSITORY / "instrument"

# Layers in import order: a subpackage imports only from itself and from earlier layers. Subpackages of the same layer do
# not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "formatting", "runtime"),
    ("fields", "values"),
    ("tables",),
    ("config", "stats"),
    ("actions", "importers", "plan", "rules", "trackers"),
    ("hooks", "storage"),
    ("relations",),
    ("analysis", "probe"),
    ("comparison", "tasks"),
    ("plot", "training"),
    ("integrations", "report"),
    ("commands", "interpret"),
    ("__main__",),
)
LAYER_INDEX = {subpackage: index for index, layer in enumerate(LAYERS) for subpackage in layer}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def subpackage_of(file: Path) -> str:
    """Return the subpackage or top-level module of a file; empty for `instrument/__init__.py`."""
    if file.name == "__main__.py":  # also that of `python -m instrument.report`
        return "__main__"
    first = file.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "" if first == "__init__" else first


@cache
def parsed(file: Path) -> tuple[str | None, list[ast.Import | ast.ImportFrom]]:
    """Return the docstring of a file, and its imports, also in functions and for type checkers."""
    tree = ast.parse(file.read_text())
    return ast.get_docstring(tree), list(imports_in(tree.body))


def imports_in(statements: Iterable[ast.AST]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of statements and of the statements inside them. An expression contains none."""
    for node in statements:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif not isinstance(node, ast.expr):
            yield from imports_in(ast.iter_child_nodes(node))


def imported_names(file: Path) -> Iterator[tuple[int, str, list[str]]]:
    """Yield line and module of each import, and the names imported from the module."""
    package = ("instrument", *file.relative_to(PACKAGE).parts[:-1])
    for node in parsed(file)[1]:
        names = [alias.name for alias in node.names]
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name, []) for name in names)
        else:
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield node.lineno, ".".join([*base, *([node.module] if node.module else [])]), names


@cache
def imported_subpackages(file: Path) -> list[tuple[int, str]]:
    """Return line and subpackage of each import from this package."""
    modules = [
        (line, module if module.count(".") or not names else f"{module}.{name}")
        for line, module, names in imported_names(file)
        for name in names or [""]
    ]
    parts = dict.fromkeys((line, *f"{module}.".split(".")[:2]) for line, module in modules)
    return [(line, second) for line, first, second in parts if first == "instrument"]


def test_every_subpackage_has_a_layer() -> None:
    assert {subpackage_of(file) for file in files()} - {""} == set(LAYER_INDEX)


def test_imports_respect_the_layers() -> None:
    wrong = [
        f"{file.relative_to(REPOSITORY)}:{line} imports {other or 'instrument'}"
        for file in files()
        if (subpackage := subpackage_of(file))  # test_heavy_modules_are_imported_lazily checks `__init__.py`
        for line, other in imported_subpackages(file)
        if other != subpackage and not (other and LAYER_INDEX[other] < LAYER_INDEX[subpackage])
    ]
    assert wrong == []


def test_import_check_finds_every_form_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "config").mkdir()
    file = tmp_path / "config" / "some.py"
    file.write_text(
        "import instrument.training.loop\nfrom instrument import hooks\nfrom instrument.plan import sites\n"
        "from .. import stats\nfrom ..actions.base import Context\nfrom . import globs\nfrom .fields import Spec\n"
        "def late():\n    from ..probe import probe\nimport torch\nfrom torch import nn\nimport instrument\n"
    )
    assert imported_subpackages(file) == [
        (1, "training"), (2, "hooks"), (3, "plan"), (4, "stats"), (5, "actions"), (6, "config"), (7, "config"), (9, "probe"), (12, ""),
    ]  # fmt: skip


def imported_modules(file: Path) -> Iterator[str]:
    """Yield the modules of this package that a file imports anywhere, also only for type checkers."""
    for _, module, names in imported_names(file):
        for name in names or [""]:
            is_module = (PACKAGE.parent / Path(*module.split("."), f"{name}.py")).exists()
            yield f"{module}.{name}" if is_module else module


def test_only_registries_name_the_interpretation_of_networks() -> None:
    others = [file for file in files() if subpackage_of(file) not in {"", "interpret"}]
    wrong = [file.name for file in others if any(other == "interpret" for _, other in imported_subpackages(file))]
    assert wrong == []
    entries = {**PLOTS.builtin, **RUN_PANELS.builtin, **SWEEP_PANELS.builtin}
    assert sorted(entries) == [
        *("attention", "attribution", "by_location", "class_activation_map", "importance", "layer_similarity"),
        *("logit_lens", "patching"),
    ]
    assert all(entry.startswith("instrument.interpret.") for entry in entries.values())


def test_tasks_are_an_attribute_before_their_first_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(instrument, "tasks", raising=False)
    assert instrument.tasks.Supervised.__name__ == "Supervised"


@pytest.mark.parametrize(("old", "new"), {**moved_names.MODULES, **moved_names.ATTRIBUTES}.items())
def test_moved_names_work_with_a_warning(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, old, raising=False)
    module, _, name = old.rpartition(".")
    message = rf"{re.escape(f'{old} is now {new}')}.*; version 0\.4\.0 removes"
    with pytest.warns(DeprecationWarning, match=message) as warnings:
        if old in moved_names.MODULES:
            found, expected = vars(import_module(old)), vars(import_module(new))
            assert {key for key in expected if not key.startswith("__")} <= found.keys()
            assert all(found[key] is expected[key] for key in found if not key.startswith("__"))
        else:
            assert getattr(import_module(module), name) is getattr(import_module(new), name)
            assert {warning.filename for warning in warnings} == {__file__}  # otherwise, Python shows no warning


def test_compatibility_page_lists_the_deprecated_names_with_dates() -> None:
    page = (REPOSITORY / "docs" / "compatibility.md").read_text()
    rows = [line for line in page.splitlines() if re.search(r"\| 0\.3\.0, \d{4}-\d\d-\d\d \| 0\.4\.0, ", line)]
    for old in moved_names.MODULES:
        assert any(f"`{old}`" in row for row in rows), old
    for old in moved_names.ATTRIBUTES:
        assert re.search(rf"`[\w.]*{old.rpartition('.')[2]}`", "".join(rows)), old


def test_other_names_of_moved_packages_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'instrument\.spec\.nothing'"):
        import_module("instrument.spec.nothing")
    with pytest.raises(AttributeError, match=r"module 'instrument\.analysis' has no attribute 'nothing'"):
        import_module("instrument.analysis").nothing  # noqa: B018


def find_cycle(imports: dict[str, set[str]]) -> list[str]:
    """Return the modules that import each other, directly or indirectly; an empty list if there are none."""
    left = {name: set(others) for name, others in imports.items()}
    while removable := [name for name, others in left.items() if not others & left.keys()]:
        for name in removable:
            del left[name]
    return sorted(left)


@pytest.mark.slow
def test_no_import_cycle_even_for_type_checkers() -> None:
    names = {
        ".".join(file.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): file for file in files()
    }
    # The front imports lazily, and every module is inside it.
    imports = {
        name: {*imported_modules(file)} & names.keys() - {name} for name, file in names.items() if name != "instrument"
    }
    assert find_cycle(imports) == []


def test_find_cycle_names_the_modules_of_a_cycle_and_their_users() -> None:
    imports = {"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}
    assert find_cycle(imports) == ["a", "b", "c"]


# One process runs these stages; `seen` stores the imported modules after each stage.
STAGES = """
import json, sys
seen = {}
import instrument
seen["package"] = list(sys.modules)
import instrument.config.parse, instrument.config.schema
from instrument.commands import recover, upload
seen["folders"] = list(sys.modules)
from instrument.commands import compact, completion, control, convert, diff, export, replay, report, sweep, verify, watch
from instrument.__main__ import main
seen["commands"] = list(sys.modules)
try:
    main()
finally:
    seen["run"] = list(sys.modules)
    print(json.dumps(seen))
"""
COMPILER = {"torch._dynamo", "torch._inductor", "sympy"}
OPTIONAL = {
    *("sklearn", "scipy", "torchvision", "PIL", "matplotlib", "plotly", "jinja2"),
    *("duckdb", "polars", "fsspec", "optuna"),
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Imported modules by stage. The last stage is a plain run on digits."""
    folder = tmp_path_factory.mktemp("plain")
    overrides = [
        *("model=mlp", "model.sizes=[64,8,10]", "data=digits", "hooks=gradients", "optimizer=adam"),
        *("train.steps=2", "train.checkpoint.every=1"),
    ]
    command = [sys.executable, "-c", STAGES, *overrides, "hydra.run.dir=out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stderr
    return {stage: set(names) for stage, names in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.parametrize(
    ("stage", "heavy"),
    [
        ("package", {"torch", "pandas", "pydantic", "pyarrow", "hydra", "numpy"}),
        ("folders", {"torch", "pandas", "hydra"}),
        ("commands", {"torch"}),
        ("run", COMPILER),
    ],
)
def test_heavy_modules_are_imported_lazily(imported: dict[str, set[str]], stage: str, heavy: set[str]) -> None:
    assert imported[stage] & (heavy | OPTIONAL) == set()


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(sys.argv.pop(1).split(","))  # importing them fails
import torch
import instrument
from instrument.__main__ import main
model = torch.nn.Linear(3, 2)
with instrument.attach(model, "activations", out="out", rules="default") as probe:
    model(torch.ones(4, 3)).sum().backward()
    probe.end_step()
run = instrument.load("out")
print(*run.coverage.hook, run.info["status"], run.info["versions"]["instrument"])
try:
    with instrument.attach(model, {"mine": {"layers": "**", "kind": "forward", "action": "call", "fn": {"_target_": "os.getcwd"}}}):
        pass
except instrument.InstrumentError as error:
    print(error)
main()
"""


@pytest.mark.slow
def test_attach_and_reading_require_no_extra(tmp_path: Path) -> None:
    missing = ",".join({*OPTIONAL, "hydra", "omegaconf", "rich"} - {"jinja2", "fsspec"})  # torch requires these two
    command = [sys.executable, "-c", WITHOUT_EXTRAS, missing, "watch", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.splitlines() == [
        f"activations done {installed_version(DISTRIBUTION)}",
        f"hooks.mine.fn requires hydra: {pip_command('run')}",
    ]
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"this command requires rich: {pip_command('run')}"


def test_every_public_name_is_available_and_listed() -> None:
    import instrument

    assert dir(instrument) == sorted(instrument.__all__)
    assert all(getattr(instrument, name).__name__.rpartition(".")[2] == name for name in instrument.__all__)
    with pytest.raises(AttributeError, match="no attribute 'probe_it'"):
        instrument.probe_it  # noqa: B018


def test_every_package_is_in_the_wheel_configuration() -> None:
    packaged = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    existing = {".".join(file.parent.relative_to(REPOSITORY).parts) for file in PACKAGE.rglob("__init__.py")}
    assert sorted(packaged) == sorted({*existing, "instrument.conf"})
    assert {file.parent for file in files()} == {file.parent for file in PACKAGE.rglob("__init__.py")}


def test_no_file_has_a_generic_name() -> None:
    forbidden = {"utils", "util", "common", "helpers", "helper", "misc"}
    assert [str(path) for path in PACKAGE.rglob("*") if path.stem in forbidden] == []


def test_names_of_test_files_are_unique() -> None:
    names = [file.name for file in (REPOSITORY / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_file_has_a_docstring() -> None:
    assert [str(file) for file in files() if not parsed(file)[0]] == []


def test_probe_has_at_most_20_methods() -> None:
    methods = [name for name, value in vars(instrument.Probe).items() if inspect.isfunction(value) and name[0] != "_"]
    assert len(methods) <= 20
