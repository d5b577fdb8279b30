"""The command `instrument VERB`."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from instrument.commands import findings, verbs
from instrument.report.run_page import _command

MODULES = [verb for verb in verbs.ALL if verb not in ("run", "plan")]


def run_verb(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[str]:
    """Run a command line, and return that of `python -m instrument`."""
    monkeypatch.setattr(sys, "argv", ["instrument", *arguments])
    verbs.run_verb()
    return sys.argv


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["run", "-m", "+exp=a", "seed=1,2"], ["-m", "+exp=a", "seed=1,2"]),
        (["plan", "+exp=a"], ["plan=true", "+exp=a"]),
        (["plan", "-m", "model=mlp", "seed=1,2"], ["-m", "plan=true", "model=mlp", "seed=1,2"]),
        (["plan", "--config-name", "mine", "~hooks", "-m"], ["--config-name", "mine", "plan=true", "~hooks", "-m"]),
        (["plan", "-m"], ["-m", "plan=true"]),
        (["+exp=a"], ["+exp=a"]),
        (["run", "--help"], ["--help"]),
        (["model=mlp", "data=digits"], ["model=mlp", "data=digits"]),
        (["-m", "seed=1,2"], ["-m", "seed=1,2"]),
    ],
    ids=" ".join,
)
def test_run_and_plan_are_the_main_command(
    monkeypatch: pytest.MonkeyPatch, given: list[str], expected: list[str]
) -> None:
    assert run_verb(monkeypatch, *given) == ["instrument", *expected]


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], []], ids=" ".join)
def test_help_lists_all_verbs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_verb(monkeypatch, *arguments)
    assert not stop.value.code
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    listed = [line.split()[0] for line in lines if line.startswith("  ") and not line.startswith("  instrument ")]
    assert listed == [*verbs.ALL]


@pytest.mark.parametrize("verb", MODULES)
def test_help_of_a_verb_names_how_it_was_called(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.setattr(verbs, "_verb", [])
    with pytest.raises(SystemExit) as stop:
        run_verb(monkeypatch, verb, "--help")
    assert not stop.value.code
    if verb == "verify":  # the other lines of its help are those of `instrument run`
        assert capsys.readouterr().out.startswith("`python -m instrument.verify +exp=...`: verify that")
        return
    assert capsys.readouterr().out.startswith(f"usage: instrument {verb} [-h]")
    module = import_module(f"instrument.commands.{verb}")
    assert sys.argv == [module.__file__, "--help"]  # as of `python -m`, for the command in run.json
    monkeypatch.setattr(verbs, "_verb", [])
    with pytest.raises(SystemExit):
        module.main()
    assert capsys.readouterr().out.startswith(f"usage: python -m instrument.{verb} [-h]")


def test_exit_code_of_a_verb_is_that_of_its_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(verbs, "_verb", [])
    for verb in ("findings", "report", "watch", "export", "upload", "control"):
        more = {"export": ["--to", "csv"], "upload": ["s3://a/b"], "control": ["stop"]}.get(verb, [])
        with pytest.raises(SystemExit) as stop:
            run_verb(monkeypatch, verb, str(tmp_path / "nowhere"), *more)
        assert stop.value.code == 2, verb
        assert "nowhere" in capsys.readouterr().err, verb
    monkeypatch.setattr(findings, "main", lambda: 4)
    with pytest.raises(SystemExit) as stop:
        run_verb(monkeypatch, "findings", "run")
    assert stop.value.code == 4


def test_unknown_verb_is_refused_with_similar_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_verb(monkeypatch, "reprot", "run")
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "there is no such verb" in error
    assert "similar  report" in error
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        run_verb(monkeypatch, "Reprot", "run")
    assert "there is no such verb" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "1")  # of torchrun, where the first process prints the error
    with pytest.raises(SystemExit):
        run_verb(monkeypatch, "Reprot", "run")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("arguments", "similar"),
    [
        (("reference", "chek"), "check"),
        (("convert", "--from", "nvdl", "FILE"), "nvdlfw"),
        (("completion", "zhs"), "zsh"),
        (("report", "--opne", "RUN"), "--open, --out, --help"),
        (("reference", "make", "RUN", "--out", "FILE", "--stts", "l2"), "--stats, --out, --json"),
    ],
)
def test_invalid_choice_or_option_is_refused_with_similar_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], similar: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        run_verb(monkeypatch, *arguments)
    assert stop.value.code == 2
    assert capsys.readouterr().err.endswith(f"; similar: {similar}\n")


@pytest.mark.parametrize("program", ["/usr/local/bin/instrument", "/site-packages/instrument/__main__.py"])
def test_report_shows_a_command_of_any_machine(program: str) -> None:
    assert _command([program, "+exp=a", "seed=1"]) == "python -m instrument +exp=a seed=1"
