"""`python -m instrument.control`: changes to a run in progress, their record, and their repetition after a resume."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Answer, Call
from run_folders import write_run
from torch import nn
from training_runs import resume_here, train_here
from waiting import wait_until

import instrument
from instrument import ConfigError, HookError
from instrument.actions.base import Context
from instrument.commands import control
from instrument.config.run_changes import RunChange, Settings, parse_changes
from instrument.storage import control_folder
from instrument.storage.control_folder import ControlFolder, MessageError, send
from instrument.storage.lock import FolderLock

STEPS = 10
FIRST = ["hooks.acts.every=1", "hooks.tame.norm=0.001", "lr_scale=0.5"]
MESSAGES = {
    1: [FIRST],
    4: [["disable=acts"], ["hooks.nothing.every=2"]],
    6: [["enable=acts", "hooks.quiet.factor=0.25"]],
}
RUN = (
    *("model=mlp", "model.sizes=[64,8,10]", "data=digits", f"train.steps={STEPS}", "train.batch_size=16", "quiet=true"),
    *("optimizer=sgd", "optimizer.lr=0.1", "hydra.run.dir=out", "train.checkpoint.every=4"),
    "+hooks.acts={layers: '**', kind: forward, action: record, every: 5}",
    "+hooks.tame={layers: '**', kind: parameter_grad, action: clip, norm: 1.0}",
    "+hooks.quiet={layers: layers.0, kind: forward, action: scale, factor: 0.5}",
    "+hooks.sender={layers: layers.0, kind: forward, action: call, fn: {_target_: test_control.send_messages}}",
)


def send_messages(tensor: object, context: Context) -> None:
    """Send the messages of a step, once. At step 7, fail if the file `broken` exists."""
    for i, changes in enumerate(MESSAGES.get(context.step, ())):
        sent = Path(f"sent-{context.step}-{i}")
        if not sent.exists():
            send(Path("out"), changes)
            sent.touch()
    if context.step == 7 and Path("broken").exists():
        Path("broken").unlink()
        raise ValueError("broken")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that is changed while it trains, and one that fails after the changes and is resumed."""
    whole, resumed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("resumed")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(Path(__file__).parent))
        patched.setitem(sys.modules, "test_control", sys.modules[__name__])
        train_here(whole / "out", *RUN)
        (resumed / "broken").touch()
        with pytest.raises(HookError, match="broken"):
            train_here(resumed / "out", *RUN)
        resume_here(resumed / "out")
    return whole / "out", resumed / "out"


@pytest.mark.slow
def test_changes_take_effect_at_the_next_step(folders: tuple[Path, Path]) -> None:
    run = instrument.load(folders[0])
    stats = run.stats[run.stats["hook"] == "acts"]
    assert sorted(stats["step"].unique()) == [0, 2, 3, 4, 7, 8, 9]
    tamed = run.effects[run.effects["hook"] == "tame"].groupby("step")["norm_after"].apply(np.linalg.norm)
    assert (tamed.loc[2:] <= 0.001 * 1.00001).all()
    assert (tamed.loc[:1] > 0.01).all()
    factors = run.effects[run.effects["hook"] == "quiet"].set_index("step")["factor"]
    assert factors.tolist() == [0.5] * 7 + [0.25] * 3
    training = run.metrics[run.metrics["phase"] == "train"]
    assert training["lr"].tolist() == [0.1] * 2 + [0.05] * 8
    coverage = run.coverage.set_index("hook")
    assert (coverage["expected"] == coverage["fired"]).all()


@pytest.mark.slow
def test_changes_are_events_with_the_values_before_and_after(folders: tuple[Path, Path]) -> None:
    events = instrument.load(folders[0]).events
    found = events[events["rule"] == "control"]
    assert list(zip(found["step"], found["message"].str.partition("\n")[0], strict=True)) == [
        (2, "hooks.acts.every: 5 -> 1"),
        (2, "hooks.tame.norm: 1.0 -> 0.001"),
        (2, "lr_scale: 1.0 -> 0.5"),
        (5, "a message was refused: hooks: the run has no such hook"),
        (5, "hooks.acts: enabled -> disabled"),
        (7, "hooks.acts: disabled -> enabled"),
        (7, "hooks.quiet.factor: 0.5 -> 0.25"),
    ]
    assert found["severity"].tolist() == ["info"] * 3 + ["warning"] + ["info"] * 3
    answers = [json.loads(file.read_text()) for file in sorted((folders[0] / "control").glob("*.done"))]
    assert [answer["step"] for answer in answers] == [2, 5, 5, 7]
    assert [answer["problem"] is None for answer in answers] == [True, True, False, True]


@pytest.mark.slow
def test_resumed_run_repeats_the_changes(folders: tuple[Path, Path]) -> None:
    whole, resumed = (instrument.load(folder) for folder in folders)
    assert resumed.metrics["loss"].tolist() == whole.metrics["loss"].tolist()
    assert resumed.metrics["lr"].equals(whole.metrics["lr"])
    columns = ["step", "hook", "layer", "l2"]
    assert resumed.read("stats", columns).equals(whole.read("stats", columns))
    mine, others = (run.events[run.events["rule"] == "control"] for run in (resumed, whole))
    changes = [each[each["severity"] == "info"][["step", "message"]].to_numpy().tolist() for each in (mine, others)]
    assert changes[0] == changes[1]


@pytest.mark.slow
def test_stop_saves_a_checkpoint_and_ends_the_run(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_control", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "MESSAGES", {2: [["lr_scale=0.1", "checkpoint"]], 5: [["stop"]]})
    assert cli(*RUN).code == 3
    run = instrument.load("out")
    assert run.info["status"] == "stopped"
    assert run.info["error"] == "python -m instrument.control stopped the run after 6 steps"
    assert [file.name for file in Path("out/checkpoints").iterdir()] == ["step-00000006.pt"]
    assert resume_here(Path("out").resolve()).metrics["lr"].dropna().tolist() == pytest.approx([0.1] * 3 + [0.01] * 7)


codes: list[int] = []


def control_from_thread(tensor: object, context: Context) -> None:
    """At step 2, run the command in a thread, and wait until its message is written."""
    if context.step == 2:
        Thread(target=lambda: codes.append(control.main(["out", "lr_scale=0"]))).start()
        wait_until(lambda: codes or list(Path("out/control").glob("*.json")))


def test_command_waits_for_the_answer(cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "test_control", sys.modules[__name__])
    answer = cli(*RUN[:-1], RUN[-1].replace("send_messages", "control_from_thread")).expect(0)
    wait_until(lambda: codes)
    assert codes == [0]
    assert "after 3 steps  lr_scale: 1.0 -> 0.0" in answer.out
    assert [file.name for file in Path("out/control").iterdir()] == ["changes.jsonl"]


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Path]:
    hooks = {"acts": {"layers": "*", "kind": "forward", "action": "record", "every": 5}}
    folder = write_run(tmp_path / "run", config={"hooks": hooks, "train": {}}, status="running")
    lock = FolderLock(folder)
    assert lock.acquire()
    yield folder
    lock.release()


def test_invalid_changes_are_not_sent(running: Path, call: Call) -> None:
    error = call(control.main, running, "hooks.acts.every=0", "hooks.act.every=1").expect(2).err
    assert "hooks: the run has no such hook" in error
    assert "similar  acts" in error
    assert "hooks.acts.every" in call(control.main, running, "hooks.acts.every=0").expect(2).err
    assert not (running / "control").exists()


def test_only_a_run_in_progress_is_changed(tmp_path: Path, running: Path, call: Call) -> None:
    done = write_run(tmp_path / "done", config={"train": {}})
    assert "is not in progress: its status is done" in call(control.main, done, "stop").expect(1).err
    assert "RUN: the folder does not exist" in call(control.main, tmp_path / "none", "stop").expect(2).err
    assert f"such as {tmp_path}/" in call(control.main, tmp_path, "stop").expect(2).err
    record = json.loads((running / "run.json").read_text())
    (running / "run.json").write_text(json.dumps({**record, "config": {"hooks": {}}, "ranks": 2}))
    assert "a custom training loop with several processes" in call(control.main, running, "stop").expect(2).err


def test_message_is_withdrawn_if_the_run_ends(running: Path, monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    monkeypatch.setattr(control_folder, "is_locked", lambda folder: False)
    assert "the run ended before it read the message" in call(control.main, running, "stop").expect(1).err
    assert list((running / "control").iterdir()) == []


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"{", "it is not JSON"),
        (b"[" * 60_000, "it is not JSON"),
        (b'{"a": 1}', "it is not a list of strings"),
        (b"[1]", "it is not a list of strings"),
        (b'["' + b"x" * control_folder.MAX_BYTES + b'"]', "more than 65,536 bytes"),
    ],
)
def test_malformed_messages_are_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    (tmp_path / "control").mkdir()
    (tmp_path / "control" / "1.json").write_bytes(content)
    folder = ControlFolder(tmp_path)
    (tmp_path / "control").chmod(0o700)
    (message,) = folder.messages()
    with pytest.raises(MessageError, match=problem):
        folder.read(message)


def test_messages_of_other_users_and_links_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ControlFolder(tmp_path)
    message = send(tmp_path, ["stop"])
    assert folder.read(message) == ["stop"]
    link = message.with_name("link.json")
    link.symlink_to(message)
    with pytest.raises(MessageError, match="cannot be opened"):
        folder.read(link)
    pipe = message.with_name("pipe.json")
    os.mkfifo(pipe)
    with pytest.raises(MessageError, match="it is not a regular file"):
        folder.read(pipe)
    monkeypatch.setattr(os, "geteuid", lambda: -1)
    with pytest.raises(MessageError, match="another user"):
        folder.read(message)


def test_folder_that_others_can_write_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ControlFolder(tmp_path)
    message = send(tmp_path, ["stop"])
    for mode in (0o720, 0o702):
        folder.folder.chmod(mode)
        with pytest.raises(MessageError, match="only the user of the run can write"):
            folder.messages()
    folder.folder.chmod(0o700)
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: -1)
        with pytest.raises(MessageError, match="only the user of the run can write"):
            folder.messages()
    assert folder.messages() == [message]
    folder.folder.rename(tmp_path / "other")
    folder.folder.symlink_to(tmp_path / "other")
    with pytest.raises(MessageError, match="only the user of the run can write"):
        folder.messages()


RECORD = {"layers": "**", "kind": "forward", "action": "record"}


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[instrument.AttachedProbe]:
    with instrument.attach(nn.Linear(2, 2), {"acts": {**RECORD, "every": 5}}, out=tmp_path / "run") as probe:
        yield probe


@pytest.mark.filterwarnings("ignore::instrument.InstrumentWarning")
def test_problems_with_messages_do_not_end_the_run(
    probe: instrument.AttachedProbe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    (run / "control").mkdir()
    (run / "control").chmod(0o777)
    for _ in range(3):
        probe.end_step()
    (run / "control").chmod(0o700)
    withdrawn = send(run, ["stop"])
    with monkeypatch.context() as patched:
        patched.setattr(ControlFolder, "messages", lambda folder: [withdrawn])
        withdrawn.unlink()
        probe.end_step()
    for refused in (["lr_scale=0.5"], ["checkpoint"], ["hooks.acts.every=x"]):
        send(run, refused)
    probe.end_step()
    (run / "control" / control_folder.LOG).mkdir()
    unlogged = send(run, ["disable=acts"])
    probe.end_step()
    problem = json.loads(unlogged.with_suffix(".done").read_text())["problem"]
    assert "Is a directory" in problem
    with monkeypatch.context() as patched:
        patched.setattr(ControlFolder, "answer", lambda *arguments: Path("/proc/none/file").read_bytes())
        send(run, ["stop"])
        probe.end_step()
    probe.end_step()
    events = probe.events[probe.events["rule"] == "control"]
    assert [
        (step, message.partition(":")[0]) for step, message in zip(events["step"], events["message"], strict=True)
    ] == [
        (1, "messages are not read"),
        *[(5, "a message was refused")] * 3,
        (6, "a message was refused"),
        (7, "no more messages are read, since one cannot be answered"),
        (7, "stop"),
    ]
    assert "the training loop sets them" in events["message"].iloc[1]
    assert "the training loop saves them" in events["message"].iloc[2]
    assert probe.stop_reason == "python -m instrument.control stopped the run after 7 steps"


def test_log_of_an_earlier_run_is_removed(tmp_path: Path) -> None:
    log = tmp_path / "run" / "control" / control_folder.LOG
    log.parent.mkdir(parents=True)
    log.write_text('{"step": 1, "changes": ["disable=acts"]}\n')
    model = nn.Linear(2, 2)
    with instrument.attach(model, {"acts": RECORD}, out=tmp_path / "run") as probe:
        for _ in range(3):
            probe.end_step(loss=model(torch.ones(1, 2)).sum())
        assert not log.exists()
        assert len(probe.stats) == 3


def test_custom_loop_is_changed(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    hooks = {
        "acts": {**RECORD, "every": 5},
        "tame": {"layers": "**", "kind": "forward", "action": "clip", "value": 9.0},
    }
    with instrument.attach(model, hooks, out=tmp_path / "run") as probe:
        for step in range(10):
            if step == 3:
                send(tmp_path / "run", ["hooks.acts.every=1", "hooks.tame.value=0.001"])
            if step == 6:
                send(tmp_path / "run", ["stop"])
            output = model(torch.ones(1, 2))
            assert (output.abs().max() < 0.0011) == (step > 3)
            probe.end_step(loss=output.sum())
            if probe.should_stop:
                break
    run = instrument.load(tmp_path / "run")
    assert sorted(run.stats["step"].unique()) == [0, 4, 5, 6]
    assert run.info["status"] == "stopped"
    assert probe.coverage()[0]["fired"] == 4


def test_message_after_a_listing_is_found(tmp_path: Path) -> None:
    folder = ControlFolder(tmp_path)
    assert list(folder.messages()) == []
    messages = [send(tmp_path, ["stop"])]
    assert list(folder.messages()) == messages
    messages.append(send(tmp_path, ["stop"]))
    assert list(folder.messages()) == messages


SETTINGS = Settings.of(
    {
        "train": {},
        "hooks": {
            "acts": {"layers": "*", "kind": "forward", "action": "record", "every": 5},
            "tame": {"layers": "*", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
            "each": {"layers": "*", "kind": "forward", "action": "scale", "factor": [0.5, 2.0]},
            "one": {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.5},
            "bound": {"layers": "*", "kind": "forward", "action": "clip", "min": 0.0},
            "removed": None,
        },
    }
)


def test_changes_of_one_message_are_validated_together() -> None:
    request = parse_changes(["hooks.acts.every=null", "hooks.acts.steps=[1, 2]", "hooks.bound.max=1", "stop"], SETTINGS)
    assert request.settings.hooks["acts"] == {"layers": "*", "kind": "forward", "action": "record", "steps": [1, 2]}
    assert [str(change) for change in request.changes] == [
        "hooks.acts.every: 5 -> not set", "hooks.acts.steps: not set -> [1, 2]", "hooks.bound.max: not set -> 1",
    ]  # fmt: skip
    assert request.hooks == ["acts", "bound"]
    assert request.commands == ["stop"]
    assert parse_changes(["lr_scale=0.1"], SETTINGS).changes == [RunChange("lr_scale", 1.0, 0.1)]


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("hooks.acts.steps=[1]", "steps"),
        ("hooks.acts.every=x", "hooks.acts.every"),
        ("hooks.acts.stats=all", "hooks.acts.stats: this field cannot change"),
        ("hooks.tame.value=1", "hooks.tame.value: this field cannot change"),
        ("hooks.tame.norm=-1", "hooks.tame.norm"),
        ("hooks.bound.max=-1", r"min \(0.0\) is above max"),
        ("hooks.each.factor=[1, 2, 3]", "must have as many factors as before"),
        ("hooks.each.factor=1", "must have as many factors as before"),
        ("hooks.one.factor=[1, 2]", "cannot become a list"),
        ("hooks.one.factor=null", "hooks.one"),
        ("hooks.removed.every=1", "the run has no such hook"),
        ("hooks.acts", "unknown change"),
        ("enable=tme", "similar  tame"),
        ("lr_scale=-1", "must be a number that is at least 0"),
        ("lr_scale=true", "must be a number"),
        ("lr_scale=1" + "0" * 400, "must be a number"),
        ("lr_scale=[", "not valid YAML"),
        ("lr_scale=2024-99-99", "not valid YAML"),
        ("hooks.acts.every=!!bool x", "not valid YAML"),
        ("hooks.acts.every=!!timestamp x", "not valid YAML"),
        ("disable=" + "[" * 900, "not valid YAML"),
        ("lr_scal=1", "similar  lr_scale"),
        ("halt", "unknown change"),
    ],
)
def test_invalid_changes_are_reported(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse_changes([text], SETTINGS)


def test_settings_of_a_list_of_hooks_have_names() -> None:
    assert list(Settings.of({"hooks": [{"name": "a"}, {"kind": "forward"}, None]}).hooks) == ["a", "hooks_1"]


def test_incomplete_line_of_the_log_is_ignored(tmp_path: Path) -> None:
    folder = ControlFolder(tmp_path)
    folder.folder.mkdir()
    folder.record(4, ["lr_scale=0.5"])
    folder.record(2, ["stop"])
    with (folder.folder / control_folder.LOG).open("a") as log:
        log.write('{"step": 5, "cha')
    recorded: list[Any] = folder.recorded()
    assert recorded == [(2, ["stop"]), (4, ["lr_scale=0.5"])]
    folder.record(6, ["lr_scale=1"])  # by the resumed run
    assert folder.recorded() == [*recorded, (6, ["lr_scale=1"])]
    with (folder.folder / control_folder.LOG).open("a") as log:
        log.write('{"step": null, "changes": []}\n{"step": 1}\n[]\n')
    assert len(folder.recorded()) == 3
