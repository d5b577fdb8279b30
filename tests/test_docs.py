"""The generated parts of the documentation are current, its examples are valid, and its links lead to files."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import REPOSITORY, load_module

from instrument import errors
from instrument.commands import findings, job, verbs, verify
from instrument.config.apply import ACTIONS
from instrument.config.base import ACTIONS as HOOK_ACTIONS
from instrument.config.experiment import RunConfig
from instrument.config.hook_specs import FUNCTIONS
from instrument.config.parse import parse_rules
from instrument.config.rules import RULES, RuleBase
from instrument.tables.kinds import KINDS
from instrument.tables.statistics import STATISTICS


def load(name: str) -> ModuleType:
    return load_module(f"docs_{name}", REPOSITORY / "docs" / f"{name}.py")


MAKE = load("make")
rendered = functools.cache(MAKE.rendered)


@pytest.mark.parametrize("name", [*MAKE.PAGES, *MAKE.PARTS])
def test_generated_pages_are_current(name: str) -> None:
    assert (REPOSITORY / name).read_text() == rendered(name), "run `make docs`"


def test_controls_and_parts_of_the_screenshots_are_in_the_pages() -> None:
    pages = "".join(page.read_text() for page in (REPOSITORY / "instrument" / "report" / "template").glob("*.html"))
    shots = re.search(r"\nSHOTS = \(\n.*?\n\)\n", (REPOSITORY / "docs" / "screenshots.py").read_text(), re.S)
    assert shots is not None
    names = {*re.findall(r"\(\(\"([\w-]+)\"", shots[0]), *re.findall(r"\"#([\w-]+)", shots[0])}
    assert {"layer-location", "training-scale", "maps"} <= names
    assert names - {*re.findall(r"(?:id=|choice\(|scale\()\"([\w-]+)", pages)} == set()


def test_reference_has_every_kind_action_statistic_and_field() -> None:
    text = "".join(rendered(name) for name in (*MAKE.PAGES, *MAKE.PARTS))
    specs = [*HOOK_ACTIONS.values(), *FUNCTIONS.values(), *ACTIONS.values()]
    fields = {field.alias or name for spec in specs for name, field in spec.model_fields.items()}
    for name in (*KINDS, *STATISTICS, *FUNCTIONS, *fields - {"action", "fn"}):
        assert re.search(rf"`[^`]*\b{name}\b[^`]*`", text), name


@pytest.mark.slow
def test_reference_has_every_rule_and_its_fields() -> None:
    text = MAKE.rules_page()
    for name, model in ((name, rule.fields) for name, rule in RULES.items()):
        section = text.partition(f"\n## `{name}`")[2].partition("\n## ")[0]
        for field, own in model.model_fields.items():
            assert field in {*RuleBase.model_fields, "rule"} or f"| `{own.alias or field}` |" in section, (name, field)
    for _, example in MAKE.CUSTOM_RULES.values():
        assert parse_rules({"mine": example})


def test_reference_has_every_task_and_dataset_with_its_arguments() -> None:
    text = MAKE.tasks_page()
    for group in ("task", "data"):
        for file in (REPOSITORY / "conf" / group).glob("*.yaml"):
            assert f"`{group}={file.stem}`" in text
    assert "| `smoothing` | `0.0` | Label smoothing of the distributions, from 0 to 1: the probability" in text
    assert "| `root` | required | The folder of the torchvision datasets" in text
    assert "| `split` |" not in text


def test_exit_codes_are_those_of_the_table() -> None:
    documented = {verb: MAKE.documented_exit_codes(verb) for verb in verbs.ALL}
    assert {code for codes in documented.values() for code in codes} == {*MAKE.EXIT_CODES}
    assert all({0, errors.ConfigError.exit_code} <= codes.keys() for codes in documented.values())
    raised = {error.exit_code for error in vars(errors).values() if hasattr(error, "exit_code")}
    assert raised <= {*MAKE.EXIT_CODES}
    for verb, code, words in (
        ("run", job.STOPPED_CODE, "stopped"),
        ("run", errors.FingerprintError.exit_code, "fingerprint"),
        ("verify", verify.NOT_REPEATABLE, "two trainings without hooks differ"),
        ("findings", findings.FIRED, "a rule fires"),
        ("reference", findings.FIRED, "the run leaves the reference"),
    ):
        assert words in documented[verb][code]


@pytest.mark.parametrize(("name", "given"), [*zip(MAKE.SECTIONS, MAKE.CONFIGS, strict=False)])
def test_example_of_a_section_is_valid(name: str, given: dict[str, Any]) -> None:
    model = MAKE.SECTIONS[name]
    for key in re.findall(r"\w+", name.split(" and ", maxsplit=1)[0]) if name.startswith("`") else ():
        given = given[key]
    if model is RunConfig:
        assert set(given) <= set(RunConfig.model_fields)
    else:
        model.model_validate(given)


@pytest.mark.spread(48)
@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "CONTRIBUTING.md", "examples/README.md", "benchmarks/README.md"),
        *(str(page.relative_to(REPOSITORY)) for page in sorted((REPOSITORY / "docs").rglob("*.md"))),
    ],
)
def test_links_lead_to_files(name: str) -> None:
    page = REPOSITORY / name
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", without_code(page)):
        assert (page.parent / link).exists(), link


@pytest.mark.spread(48)
@pytest.mark.parametrize("page", sorted((REPOSITORY / "docs").rglob("*.md")), ids=lambda page: page.stem)
def test_links_lead_to_headings(page: Path) -> None:
    for link, heading in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text()):
        target = (page.parent / link).resolve() if link else page
        assert target.suffix != ".md" or heading in headings(target), f"{link}#{heading}"


def without_code(page: Path) -> str:
    return re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@functools.cache
def headings(page: Path) -> set[str]:
    """Return the anchors of the headings of a page, as the extension `toc` of Python-Markdown makes them."""
    titles = re.findall(r"^#+ (.*)$", without_code(page), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    words = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in plain)
    return {re.sub(r"[-\s]+", "-", title) for title in words}


def test_architecture_page_has_every_package_folder() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    folders = [folder.name for folder in (REPOSITORY / "instrument").iterdir() if (folder / "__init__.py").exists()]
    assert len(folders) >= 9
    assert [name for name in folders if f"{name}/" not in text] == []


HOOKS_PAGE = (REPOSITORY / "docs" / "hooks.md").read_text()


def test_hooks_page_has_a_section_for_every_kind() -> None:
    sections = re.findall(r"^## `(\w+)`$", HOOKS_PAGE, re.M)
    assert sorted(sections) == sorted([*KINDS, "backward"])


def test_comparison_has_the_tools_jobs_and_workloads_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = REPOSITORY / "benchmarks" / "peers"
    monkeypatch.syspath_prepend(str(folder.parent))
    compare = load_module("benchmarks_compare", folder / "compare.py")
    jobs = {tool: (folder / f"with_{tool.replace('-', '_')}.py").read_text() for tool in compare.PEERS}
    page = compare.PAGE.read_text()
    features, header, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in page.splitlines()
        if line.startswith(("| | ", "| tool |", *(f"| {name or tool} |" for tool, name in compare.PEERS.items())))
    )
    assert {*features[1:]} - {*compare.PEERS} == {"msprobe"}
    assert tuple(header) == compare.HEADER
    assert {row[0] for row in rows} == {name or tool for tool, name in compare.PEERS.items()}
    for row in rows:
        assert f'"{row[1].removesuffix(", and their statistics in a list")}"' in jobs[row[0].partition("==")[0]], row
    part = page.partition(compare.BEGIN)[2].partition(compare.END)[0]
    assert len(rows) == part.count("\n") - 4  # no row of another tool or version


def test_bench_peers_replaces_the_rows_of_the_measured_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    compare = load_module("benchmarks_compare", REPOSITORY / "benchmarks" / "peers" / "compare.py")
    page = compare.PAGE.read_text()
    assert compare.updated(page, {}) == page
    row = f"| {compare.PEERS['captum']} | outputs | 2.50 | 1.50 | 1.25 |"
    found = compare.updated(page, {"captum": [row]}).splitlines()
    removed = [line for line in page.splitlines() if line.startswith("| captum")]
    assert removed
    assert [line for line in found if line != row] == [line for line in page.splitlines() if line not in removed]
    assert found[found.index(row) - 1].startswith("| torchlens")
    assert compare.machine() in compare.updated(page, {tool: ["| row |"] for tool in compare.PEERS})


@pytest.mark.parametrize("name", ["benchmarks/README.md", "docs/performance.md"])
def test_each_measured_table_names_its_command(name: str) -> None:
    sections = re.split(r"^## ", (REPOSITORY / name).read_text(), flags=re.M)
    with_tables = [section for section in sections if "|---|" in section]
    assert with_tables
    for section in with_tables:
        scripts = re.findall(r"python (benchmarks/[\w/]+\.py)", section)
        assert scripts, section.partition("\n")[0]
        assert all((REPOSITORY / script).exists() for script in scripts)


def test_every_trap_names_a_test() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", HOOKS_PAGE)
    assert len(named) > 50
    missing = [(path, name) for path, name in named if f"def {name}(" not in (REPOSITORY / path).read_text()]
    assert not missing


def test_words_check_finds_the_words_in_prose_only(tmp_path: Path) -> None:
    words = load("words")
    page, module = tmp_path / "page.md", tmp_path / "module.py"
    page.write_text("The rows are foretold.\n\n```python\nanew = 1\n```\nThe column `anew`.\n")
    module.write_text('"""Nobody waits."""\n\nanew = "made anew"  # made anew\n')
    found = [(number, words.PATTERN.findall(line)) for file in (page, module) for number, line in words.prose(file)]
    assert [(number, *matches) for number, matches in found if matches] == [
        (1, "foretold"),
        (1, "Nobody"),
        (3, "anew"),
        (3, "anew"),
    ]
