"""`instrument.attach` on a custom training loop."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hook_runs import Calls, counts, record, refused, run_step, scale
from torch import nn

import instrument
from instrument import ConfigError, InstrumentWarning
from instrument.config.parse import parse_hooks

SPECS: dict[str, Any] = {
    "seen": {"layers": "**", "kind": "forward", "action": "record"},
    "tame": {"layers": "1", "kind": "parameter_grad", "action": "clip", "norm": 0.01},
}
TEXT = """
seen: {layers: "**", kind: forward, action: record}
tame: {layers: "1", kind: parameter_grad, action: clip, norm: 0.01}
"""


class Loop:
    """A model, an optimizer and a custom training loop."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = torch.randn(3, 5, 4)

    def run(self, probe: instrument.Probe) -> None:
        for batch in self.data:
            self.optimizer.zero_grad()
            loss = self.model(batch).square().mean()
            loss.backward()
            self.optimizer.step()
            probe.end_step(loss=loss)


@pytest.fixture
def loop() -> Loop:
    return Loop()


def hook_count(model: nn.Module) -> int:
    return sum(
        len(hooks) for module in model.modules() for name, hooks in vars(module).items() if name.endswith("_hooks")
    )


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "form", ["mapping", "list", "section", "yaml", "yaml section", "yaml list", "objects", "object list"]
)
def test_specs_are_accepted_in_every_form(loop: Loop, form: str, tmp_path: Path) -> None:
    file = tmp_path / "hooks.yaml"
    listed = [{"name": name, **spec} for name, spec in SPECS.items()]
    texts = {"yaml": TEXT, "yaml section": "hooks:" + TEXT.replace("\n", "\n  "), "yaml list": json.dumps(listed)}
    forms: dict[str, Any] = {
        "mapping": SPECS,
        "list": listed,
        "section": {"hooks": SPECS},
        "objects": parse_hooks(SPECS),
        "object list": list(parse_hooks(SPECS).values()),
    }
    file.write_text(texts.get(form, ""))
    specs = forms.get(form, str(file) if form == "yaml" else file)
    with instrument.attach(loop.model, specs, optimizer=loop.optimizer) as probe:
        loop.run(probe)
    stats, effects = probe.sink.frame("stats"), probe.sink.frame("effects")
    assert set(stats.hook) == {"seen"}
    assert sorted(set(stats.layer)) == ["", "0", "1"]
    assert set(effects.hook) == {"tame"}
    assert effects.groupby("step").norm_after.agg(lambda norms: (norms**2).sum() ** 0.5).max() < 0.01 * (1 + 1e-5)


def test_attach_without_out_writes_no_files(loop: Loop, workdir: Path) -> None:
    with instrument.attach(loop.model, SPECS, optimizer=loop.optimizer) as probe:
        loop.run(probe)
    assert list(probe.sink.frame("metrics").step) == [0, 1, 2]
    assert list(workdir.iterdir()) == []


def test_attach_with_out_writes_a_loadable_run(loop: Loop, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "mine"
    with instrument.attach(loop.model, SPECS, optimizer=loop.optimizer, out=out, seed=4) as probe:
        assert json.loads((out / "run.json").read_text())["status"] == "running"
        loop.run(probe)
    run = instrument.load(out)
    assert (run.info["status"], run.info["name"], run.info["seed"], run.info["device"]) == ("done", "mine", 4, "cpu")
    assert run.info["config"]["hooks"]["tame"]["norm"] == 0.01
    assert len(run.stats) == 9
    assert list(run.metrics.lr) == [0.1] * 3
    assert (run.coverage.fired == run.coverage.expected).all()
    assert len(run.layers) == 3


def test_resumed_loop_continues_steps_and_epochs(loop: Loop) -> None:
    hooks = {"seen": {**SPECS["seen"], "start": 6}, "first": {**SPECS["seen"], "steps": [0]}}
    with instrument.attach(loop.model, hooks, optimizer=loop.optimizer, step=5, epoch=2) as probe:
        loop.run(probe)
    assert probe.metrics[["step", "epoch"]].values.tolist() == [[5, 2], [6, 2], [7, 2]]
    assert sorted(probe.stats.step.unique()) == [6, 7]
    coverage = {row["hook"]: (row["expected"], row["fired"]) for row in probe.coverage()}
    assert coverage == {"seen": (2, 2), "first": (0, 0)}


def test_attach_writes_to_its_folder_after_a_change_of_directory(loop: Loop, workdir: Path) -> None:
    elsewhere = workdir / "elsewhere"
    elsewhere.mkdir()
    with (
        contextlib.chdir(workdir),
        instrument.attach(loop.model, SPECS, optimizer=loop.optimizer, out="mine") as probe,
    ):
        os.chdir(elsewhere)
        loop.run(probe)
        assert list(probe.metrics.step) == [0, 1, 2]
    run = instrument.load(workdir / "mine")
    assert (run.info["status"], run.info["name"], run.problems) == ("done", "mine", [])
    assert len(run.stats) == 9
    assert not list(elsewhere.iterdir())


def test_second_run_does_not_overwrite_the_first(loop: Loop, tmp_path: Path) -> None:
    with instrument.attach(loop.model, SPECS, optimizer=loop.optimizer, out=tmp_path) as probe:
        loop.run(probe)
    message = refused(loop.model, SPECS, optimizer=loop.optimizer, out=tmp_path)
    assert "out: the folder already contains a run\n" in message
    assert len(instrument.load(tmp_path).metrics) == 3
    assert hook_count(loop.model) == 0


def test_process_of_torchrun_without_a_group_is_refused(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    message = refused(loop.model, SPECS, optimizer=loop.optimizer, out=tmp_path)
    assert "out: torchrun started this process with rank 1, but it has no process group\n" in message


@pytest.mark.spread(1)
@pytest.mark.parametrize(("raised", "status"), [(ZeroDivisionError, "failed"), (KeyboardInterrupt, "interrupted")])
def test_error_in_the_loop_is_raised_and_rows_are_kept(
    loop: Loop, tmp_path: Path, raised: type[BaseException], status: str
) -> None:
    options = {"optimizer": loop.optimizer, "out": tmp_path / "run"}
    with pytest.raises(raised), instrument.attach(loop.model, SPECS, **options) as probe:  # noqa: PT012
        loop.run(probe)
        raise raised
    assert hook_count(loop.model) == 0
    run = instrument.load(tmp_path / "run")
    assert run.info["status"] == status
    assert list(run.metrics.step) == [0, 1, 2]
    for table in ("stats", "tensors", "effects", "metrics", "coverage", "layers", "events"):
        pd.read_parquet(tmp_path / "run" / table)


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ("no_such.yaml", "specs: neither a file that can be read nor a hook set: No such file"),
        ("bad.yaml", "specs: the file is not YAML"),
        ("star.yaml", r"specs: the file is not YAML[\s\S]*fix +put quotes around a value that starts with '\*'"),
        ("words.yaml", "hooks: must be a mapping"),
        ({"a": {"layers": "nope", "kind": "forward", "action": "record"}}, r"hooks\.a\.layers: .* matches no module"),
        ({"a": {"layers": "0", "kind": "forwrd", "action": "record"}}, r"hooks\.a\.kind"),
        ({"a": 3}, r"hooks\.a: must be a mapping\n    given    3\Z"),
        (SPECS["seen"], r"fix      give the spec a name: hooks: \{NAME: \{layers: "),
        (3, "hooks: must be a mapping"),
        ([{**SPECS["seen"], "stats": 5}], r"hooks\[0\]\.stats: must be a string, not 5 \(int\)\n"),
        ([{**SPECS["seen"], "layers": "nope"}], r"hooks\[0\]\.layers: .* matches no module"),
        (
            {"a": {**SPECS["seen"], "kind": "function", "functions": ["sofmax", "my_own_operator", "softmax"]}},
            r"\Ahooks\.a\.functions: no torch function has this name\n    given    sofmax\n    similar  softmax[^\n]*\Z",
        ),
    ],
)
def test_invalid_specs_leave_no_hooks_and_no_folder(loop: Loop, workdir: Path, specs: Any, message: str) -> None:
    Path("bad.yaml").write_text("a: {")
    Path("star.yaml").write_text("a: {layers: **}")
    Path("words.yaml").write_text("words")
    assert re.search(message, refused(loop.model, specs, optimizer=loop.optimizer, out="run"))
    assert hook_count(loop.model) == 0
    assert not Path("run").exists()


def test_attach_without_a_block_says_what_to_write(loop: Loop) -> None:
    block = instrument.attach(loop.model, {})
    message = r"use the object after `with \.\.\. as`, or keep this block and use what its __enter__ returns"
    with pytest.raises(AttributeError, match=f"end_step is not available here: {message}"):
        block.end_step()  # type: ignore[attr-defined]
    probe = block.__enter__()
    probe.end_step()
    block.__exit__(None, None, None)
    assert probe.step == 1


def test_second_block_of_a_call_is_refused_and_leaves_the_first_one(loop: Loop) -> None:
    block = instrument.attach(loop.model, {"h": record("forward", "**")})
    with block as probe:
        with pytest.raises(RuntimeError, match="has begun already; call the function again"), block:
            pass
        loop.model(torch.randn(2, 4))
        probe.end_step()
    assert not probe.stats.empty
    with pytest.raises(RuntimeError, match="has begun already"), block:
        pass


def test_step_after_the_block_is_refused_and_not_recorded(loop: Loop, tmp_path: Path) -> None:
    with instrument.attach(loop.model, {}, out=tmp_path / "run") as probe:
        probe.end_step(loss=1.0)
    with pytest.raises(instrument.InstrumentError, match="call end_step inside the block"):
        probe.end_step(loss=2.0)
    assert probe.metrics["loss"].tolist() == instrument.load(tmp_path / "run").metrics["loss"].tolist() == [1.0]


def test_missing_module_of_a_function_is_reported_once(loop: Loop, capfd: pytest.CaptureFixture[str]) -> None:
    spec = {"layers": "**", "kind": "forward", "action": "modify", "fn": {"_target_": "missing_module.function"}}
    assert "missing_module" in refused(loop.model, {"zero": spec})
    assert capfd.readouterr().err == ""


def test_missing_optimizer_is_reported_and_leaves_no_folder(loop: Loop, workdir: Path) -> None:
    assert re.search(r"hooks\.tame\.kind: [\s\S]*optimizer=", refused(loop.model, SPECS, out="run"))
    assert not Path("run").exists()


def test_hooks_that_did_not_fire_are_warned_about_at_exit() -> None:
    layers = {name: nn.Linear(2, 2) for name in ("used", "unused")}
    model = Calls(lambda used, unused, hidden, x: used(x), **layers, hidden=[nn.Linear(2, 2)])
    with pytest.warns(InstrumentWarning) as caught:
        run_step(model, {"seen": record("forward", "*")}, torch.zeros(1, 2))
    messages = [str(warning.message) for warning in caught]
    assert any(
        "hook 'seen' (forward) fired 0 of 1 times on unused: the module was not called" in text for text in messages
    )
    assert any(text.startswith("hidden[0] (Linear) is in a plain Python list") for text in messages)
    assert len(messages) == 2


def test_full_coverage_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, probe = run_step(nn.Linear(2, 2), {"seen": record("forward")}, torch.zeros(1, 2))
    assert counts(probe) == [(1, 1)]


def test_loss_that_is_not_finite_is_reported_without_hooks(tmp_path: Path) -> None:
    with (
        pytest.warns(instrument.InstrumentWarning, match="loss not finite: at step 1: nan, 1 before"),
        pytest.warns(instrument.InstrumentWarning, match="specs contains no hook"),
        instrument.attach(nn.Linear(2, 2), {}, out=tmp_path / "run") as probe,
    ):
        for loss in (1.0, math.nan, math.nan):
            probe.end_step(loss=loss)
    assert instrument.load(tmp_path / "run").runs["warnings"].tolist() == [1]


def test_overwrite_replaces_the_run_in_out(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    spec = {"seen": record("forward")}
    for value in (1.0, 2.0):
        model = nn.Linear(2, 2)
        with instrument.attach(model, spec, out=tmp_path, overwrite=True) as probe:
            model(torch.zeros(1, 2))
            probe.end_step(loss=value)
            assert probe.metrics.loss.tolist() == [value]
    run = instrument.load(tmp_path)
    assert (run.metrics.loss.tolist(), len(run.stats), run.problems) == ([2.0], 1, [])
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_overwrite_keeps_the_run_if_the_next_one_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"seen": record("forward")}, out=tmp_path) as probe:
        model(torch.zeros(1, 2))
        probe.end_step(loss=1.0)
    wide = {"seen": scale("forward", [1.0, 2.0, 3.0])}
    with pytest.raises(ConfigError), instrument.attach(model, wide, out=tmp_path, overwrite=True):
        model(torch.zeros(1, 2))
    run = instrument.load(tmp_path)
    assert (run.info["status"], run.metrics.loss.tolist(), len(run.stats), run.problems) == ("done", [1.0], 1, [])


@pytest.mark.parametrize("specs", [{}, [], {"hooks": {}}])
def test_specs_without_hooks_cause_a_warning(specs: Any) -> None:
    with (
        pytest.warns(InstrumentWarning, match="no statistics are recorded, and rules that read") as caught,
        instrument.attach(nn.Linear(2, 2), specs) as probe,
    ):
        probe.end_step(loss=1.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert probe.metrics.loss.tolist() == [1.0]


@pytest.mark.parametrize(("key", "similar"), [("rule", "rules"), ("hook", "hooks")])
def test_unknown_key_next_to_hooks_is_refused(key: str, similar: str, tmp_path: Path) -> None:
    (tmp_path / "hooks.yaml").write_text(
        "hooks: {seen: {layers: '**', kind: forward, action: record}}\n" + key + ": {}\n"
    )
    message = refused(nn.Linear(2, 2), tmp_path / "hooks.yaml")
    assert message.startswith(f"{key}: unknown key next to 'hooks'")
    assert similar in message.partition("similar")[2]


@pytest.mark.parametrize("section", [{"hook": {"seen": record("forward")}}, {"rules": {"non_finite": {}}}])
def test_missing_section_of_hooks_is_named(section: dict[str, Any]) -> None:
    message = refused(nn.Linear(2, 2), section)
    assert message.startswith(f"{next(iter(section))}: is a section, but the section 'hooks' is missing")
    assert "unknown field" not in message


def test_unknown_argument_is_reported_with_the_parameters() -> None:
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'hooks'; the parameters are model, specs, optimizer,"
    ):
        instrument.attach(nn.Linear(2, 2), hooks=[])  # type: ignore[call-arg]


def test_error_is_not_preceded_by_the_warning_about_missing_hooks(recwarn: pytest.WarningsRecorder) -> None:
    rule = {"watch": "outputs", "stat": "l2", "above": 1.0}
    with pytest.raises(ConfigError, match=r"rules\.large\.watch: no hook has this name"):
        instrument.attach(nn.Linear(2, 2), {}, rules={"large": rule}).__enter__()
    assert not [each for each in recwarn if issubclass(each.category, InstrumentWarning)]


@pytest.mark.parametrize("model", ["m", None])
def test_attach_to_something_else_than_a_module_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"model: must be a torch.nn.Module[\s\S]*given +" + type(model).__name__):
        instrument.attach(model, {}).__enter__()


@pytest.mark.parametrize(("name", "allowed"), [("scaler", r"torch\.amp\.GradScaler"), ("out", "path")])
def test_attach_with_an_argument_of_another_type_is_refused(name: str, allowed: str) -> None:
    arguments: Any = {name: 3}
    with pytest.raises(ConfigError, match=rf"{name}: must be a {allowed}\n +given +int"):
        instrument.attach(nn.Linear(2, 2), {}, **arguments).__enter__()


@pytest.mark.parametrize("value", ["5%", 5, [1]])
def test_attach_with_a_budget_that_is_no_mapping_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"budget: must be a mapping\n +given +"):
        instrument.attach(nn.Linear(2, 2), {}, budget=value).__enter__()


@pytest.mark.parametrize("name", ["seed", "step", "epoch"])
@pytest.mark.parametrize("value", ["x", -1, 1.5, 2**63])
def test_attach_with_a_number_that_is_not_an_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}: must be an integer[\s\S]*given +{value}"):
        instrument.attach(nn.Linear(2, 2), {}, **{name: value}).__enter__()
