"""What the docs take from the code is what the code says now."""

from __future__ import annotations

import importlib.util
import re
from types import ModuleType

import pytest
from conftest import REPOSITORY

from instrument.spec.kinds import KINDS


def load_make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_make", REPOSITORY / "docs" / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKE = load_make()


@pytest.mark.parametrize("name", MAKE.GENERATED)
def test_generated_tables_are_current(name: str) -> None:
    assert (REPOSITORY / name).read_text() == MAKE.rendered(name), "run `make docs`"


def test_generated_tables_have_every_kind_action_and_statistic() -> None:
    text = (REPOSITORY / "README.md").read_text()
    for name in ("full_backward_pre", "record", "clip", "scale", "fn: noise", "zero_fraction", "inf_count"):
        assert f"`{name}" in text or f"{name}`" in text, name


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"),
        *(
            f"docs/{name}.md"
            for name in (
                "architecture",
                "export",
                "hooks",
                "performance",
                "ranks",
                "remote",
                "report",
                "scale",
                "security",
                "sweeps",
                "tables",
            )
        ),
    ],
)
def test_links_lead_to_files(name: str) -> None:
    page = REPOSITORY / name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_the_house_in_the_docs_has_every_folder_of_the_package() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    folders = [folder.name for folder in (REPOSITORY / "instrument").iterdir() if (folder / "__init__.py").exists()]
    assert len(folders) >= 9
    assert [name for name in folders if f"{name}/" not in text] == []


HOOKS_PAGE = (REPOSITORY / "docs" / "hooks.md").read_text()


def test_the_page_of_hooks_has_a_section_for_every_kind() -> None:
    sections = re.findall(r"^## `(\w+)`$", HOOKS_PAGE, re.M)
    assert sorted(sections) == sorted([*KINDS, "backward"])


def test_every_trap_names_a_test_that_is_there() -> None:
    named = re.findall(r"\[(\w+)\]\(\.\./(tests/[\w/]+\.py)\)", HOOKS_PAGE)
    assert len(named) > 50
    missing = [(path, name) for name, path in named if f"def test_{name}(" not in (REPOSITORY / path).read_text()]
    assert not missing
