"""A signal or an error at any moment of attaching and detaching leaves no hook behind, and a signal is raised once."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from tiers import tiered
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.overrides import _get_current_function_mode_stack

import instrument
from instrument.integrations.trainer_callback import CLIPPING, TrainerCallbackBase
from instrument.storage import journal, table_writer
from instrument.storage.lock import is_locked

RECORD = {"layers": "*", "kind": "forward", "action": "record"}
HOOKS: dict[str, Any] = {
    "seen": {**RECORD, "every": 2},
    "scaled": {**RECORD, "action": "scale", "factor": 0.5},
    "flow": {**RECORD, "kind": "full_backward"},
    "micro": {**RECORD, "kind": "parameter_grad_micro"},
    "used": {**RECORD, "kind": "parameter_grad"},
    "step": {**RECORD, "kind": "step_post", "role": "update"},
    "saved": {**RECORD, "kind": "state_dict_post"},
    "loaded": {**RECORD, "kind": "load_state_dict_pre"},
    "functions": {**RECORD, "kind": "function", "layers": "1", "functions": "relu"},
}
RECORDED = {"seen": HOOKS["seen"]}
TRIALS = 8
NEVER = 10**9


@pytest.fixture(autouse=True)
def sigint() -> Iterator[None]:
    """Use the default handler, and restore the trace function that measures test coverage."""
    handler, trace = signal.signal(signal.SIGINT, signal.default_int_handler), sys.gettrace()
    yield
    sys.settrace(trace)
    signal.signal(signal.SIGINT, handler)


class InterruptAtLine:
    """Sends SIGINT before a certain line of this package or of `contextlib` runs, or a certain function of some files begins."""

    def __init__(self, line: int, files: tuple[str, ...] = ()) -> None:
        self.remaining = line
        self.event = "call" if files else "line"
        self.files = files
        self.location = ""

    def __call__(self, frame: FrameType, event: str, argument: object) -> InterruptAtLine | None:
        file = Path(frame.f_code.co_filename)
        is_expression = frame.f_code.co_name == "<genexpr>"  # Python ignores exceptions while it closes one
        if is_expression or (file.name != "contextlib.py" and "instrument" not in file.parts):
            return None
        if (
            file.name == "contextlib.py"
            and frame.f_back is not None
            and "torch" in Path(frame.f_back.f_code.co_filename).parts
        ):
            return (
                None  # a block of PyTorch that an interrupt leaves half-way: Python ends it when it frees the generator
            )
        if isinstance(sys.exc_info()[1], StopIteration):  # Python 3.11 would handle it forever after such an interrupt
            return self
        self.remaining -= event == self.event and (not self.files or file.name in self.files)
        if self.remaining <= 0 and not self.location:
            self.location = f"{file.name}:{frame.f_lineno}"
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)
        return self


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def hooks_left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the dictionaries of PyTorch that contain hooks."""
    owners = [*model.modules(), optimizer, *model.parameters()]
    names = [
        (owner, name) for owner in owners for name in dir(owner) if name.endswith(("_hooks", "_kwargs", "_called"))
    ]
    return [name for owner, name in names if isinstance(hooks := getattr(owner, name), dict) and hooks]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, probe: instrument.Probe) -> None:
    for _ in range(2):
        model(torch.ones(1, 3, requires_grad=True)).sum().backward()
        optimizer.step()
        probe.end_step()


def interrupt(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: str, trace: InterruptAtLine, out: Path | None = None
) -> None:
    try:
        sys.settrace(trace if part == "attach" else None)
        with instrument.attach(model, HOOKS, optimizer=optimizer, rules=None, out=out) as probe:
            sys.settrace(trace if part == "steps" else None)
            train(model, optimizer, probe)
            sys.settrace(trace if part in ("detach", "error") else None)
            if part == "error":
                raise ValueError("in the block")
    finally:
        sys.settrace(None)


@pytest.mark.spread(1)
@pytest.mark.parametrize("part", ["attach", "steps", "detach", "error"])
@pytest.mark.parametrize("offset", tiered(range(16), quick=[0]))
def test_interrupt_at_any_line_leaves_no_hook(part: str, offset: int) -> None:
    interrupt(*network(), "none", InterruptAtLine(NEVER))  # imports what attaching needs
    complete = InterruptAtLine(NEVER)
    with suppress(ValueError):
        interrupt(*network(), part, complete)
    lines = NEVER - complete.remaining
    assert lines > 16 * TRIALS
    # Before the first line, Python itself has called `__exit__`, and nothing can defer a signal.
    for line in range(2 + offset * lines // (16 * TRIALS), lines, lines // TRIALS):
        model, optimizer = network()
        trace = InterruptAtLine(line)
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupt(model, optimizer, part, trace)
        assert not hooks_left(model, optimizer), trace.location
        assert not _get_current_function_mode_stack(), trace.location
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, trace.location
        assert not isinstance(caught.value.__context__, KeyboardInterrupt), trace.location


@pytest.mark.slow
@pytest.mark.parametrize("part", ["attach", "detach"])
@pytest.mark.parametrize("first", tiered(range(1, 5), quick=[4]))
def test_interrupt_at_any_call_ends_the_run(tmp_path: Path, part: str, first: int) -> None:
    """Python handles signals when a function begins. The files are those that create the folder and end the run."""
    files = ("run_folder.py", "run_record.py", "lock.py", "attach.py")
    interrupt(*network(), "none", InterruptAtLine(NEVER), tmp_path / "none")
    complete, threads = InterruptAtLine(NEVER, files), threading.active_count()
    interrupt(*network(), part, complete, tmp_path / "complete")
    statuses = set()
    for call in range(first, NEVER - complete.remaining + 1, 4):
        model, optimizer = network()
        trace, folder = InterruptAtLine(call, files), tmp_path / str(call)
        with pytest.raises(KeyboardInterrupt):
            interrupt(model, optimizer, part, trace, folder)
        assert not hooks_left(model, optimizer), trace.location
        assert threading.active_count() == threads, trace.location
        if folder.exists():
            assert not is_locked(folder), trace.location
            assert not {".run.json.tmp", ".writable"} & {path.name for path in folder.iterdir()}, trace.location
            statuses.add(instrument.load(folder).info["status"])
    assert statuses <= ({"interrupted"} if part == "attach" else {"interrupted", "done"})


@pytest.mark.spread(1)
@pytest.mark.parametrize("part", ["attach", "detach"])
@pytest.mark.parametrize("offset", tiered([None, *range(16)], quick=[None]))
def test_interrupt_of_a_trainer_callback_at_any_line_leaves_no_hook(part: str, offset: int | None) -> None:
    def run(trace: InterruptAtLine) -> list[str]:
        """Return the hooks that are left while the interrupt is handled: its traceback refers to all local variables."""
        model, optimizer = network()
        callback = TrainerCallbackBase(RECORDED, rules=None)
        try:
            sys.settrace(trace if part == "attach" else None)
            callback._attach(model, clipped_by=None, around=CLIPPING.before(lambda _: None), optimizer=optimizer)
            sys.settrace(trace if part == "detach" else None)
            callback._detach()
            sys.settrace(None)
        except KeyboardInterrupt as error:
            if part == "detach":  # as at the end of the `with` block, or in `on_exception`
                callback._detach(error)
            return hooks_left(model, optimizer)
        return hooks_left(model, optimizer)

    run(InterruptAtLine(NEVER))  # imports what attaching needs
    complete = InterruptAtLine(NEVER)
    assert not run(complete)
    lines = NEVER - complete.remaining
    step = lines // TRIALS
    for line in (1, 2, lines - 1, lines) if offset is None else range(1 + offset * step // 16, lines, step):
        trace = InterruptAtLine(line)
        assert not run(trace), trace.location
        assert trace.location
        assert torch.nn.utils.clip_grad_norm_ is clip_grad_norm_, trace.location


@pytest.mark.spread(6)
@pytest.mark.parametrize("number", range(1, 9))
def test_failed_registration_leaves_no_hook(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    model, optimizer = network()
    expected = model(torch.ones(1, 3))
    remaining = number

    def failing(register: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if not remaining:
                raise RuntimeError("no hooks, please")
            return register(*args, **kwargs)

        return call

    for owner in (nn.Module, torch.optim.Optimizer, torch.Tensor):
        for name in [name for name in vars(owner) if name.startswith("register_") and name.endswith("_hook")]:
            monkeypatch.setattr(owner, name, failing(getattr(owner, name)))
    with pytest.raises(RuntimeError, match="no hooks, please"):
        instrument.attach(model, HOOKS, optimizer=optimizer, rules=None).__enter__()
    assert not remaining
    assert not hooks_left(model, optimizer)
    assert torch.equal(model(torch.ones(1, 3)), expected)


@pytest.mark.parametrize("times", [1, 2])
def test_interrupts_while_detaching_are_raised_after_all_rows(times: int) -> None:
    model, hooks = nn.Linear(2, 2), {"h": {**RECORD, "layers": "."}}
    with pytest.raises(KeyboardInterrupt) as caught, instrument.attach(model, hooks, rules=None) as probe:  # noqa: PT012
        model(torch.ones(1, 2))
        probe.end_step()
        for _ in range(times):
            probe._hooks._attached.callback(signal.raise_signal, signal.SIGINT)  # before the hooks are removed
    assert caught.value.__context__ is None
    assert not model._forward_hooks
    assert probe.sink.records("coverage")[0]["fired"] == 1


def test_interrupt_of_other_signals_is_deferred_too() -> None:
    model = nn.Linear(2, 2)
    received: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise TimeoutError

    previous = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(TimeoutError), instrument.attach(model, {"h": {**RECORD, "layers": "."}}) as probe:
            probe._hooks._attached.callback(signal.raise_signal, signal.SIGALRM)
        assert signal.getsignal(signal.SIGALRM) is stop
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert received == [signal.SIGALRM]
    assert not model._forward_hooks


def test_interrupt_while_the_folder_is_created_leaves_it_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, optimizer = network()
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("instrument.storage.run_folder.git_revision", lambda: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt), instrument.attach(model, HOOKS, optimizer=optimizer, out=folder):
            pass
    assert not is_locked(folder)
    assert not folder.exists()
    with instrument.attach(model, HOOKS, optimizer=optimizer, out=folder, rules=None) as probe:
        train(model, optimizer, probe)
    assert instrument.load(folder).info["status"] == "done"


def interrupt_after(patch: pytest.MonkeyPatch, owner: Any, name: str, signals: int = 1) -> None:
    """Make a function send SIGINT to this process at the end of each call."""
    original = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for _ in range(signals):
            signal.raise_signal(signal.SIGINT)
        return result

    patch.setattr(owner, name, call)


@pytest.mark.spread(1)
@pytest.mark.parametrize("call", range(3))
@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_interrupt_in_a_closure_ends_the_run_as_interrupted(tmp_path: Path, kind: str, call: int) -> None:
    model, _ = network()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls = iter(range(10))
    hooks = {**HOOKS, "user": {**RECORD, "layers": "1", "action": "call", "fn": lambda tensor, context: interrupt()}}
    hooks["user"]["kind"] = {"forward": "forward", "backward": "full_backward"}[kind]

    def interrupt() -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)

    def run() -> None:
        with instrument.attach(model, hooks, optimizer=optimizer, out=tmp_path / "run", rules=None) as probe:

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = model(torch.ones(1, 3, requires_grad=True)).square().sum()
                loss.backward()
                probe.end_micro_step()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        run()
    assert not hooks_left(model, optimizer)
    recorded = instrument.load(tmp_path / "run")
    assert (recorded.info["status"], recorded.problems) == ("interrupted", [])
    assert recorded.stats.micro_step.max() == call
    assert not (tmp_path / "run" / "journal").exists()


@pytest.mark.parametrize("part", ["evaluation", "run.json", "error"])
def test_interrupt_while_files_are_written_ends_the_run_as_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, part: str
) -> None:
    model, optimizer = network()
    tensors = {"t": {**RECORD, "tensors": True}, "e": {**RECORD, "phase": "eval"}}

    def run() -> None:
        with instrument.attach(model, tensors, optimizer=optimizer, out=tmp_path / "run", rules=None) as probe:
            train(model, optimizer, probe)
            if part == "evaluation":
                interrupt_after(monkeypatch, journal.os, "writev")
                with probe.in_phase("eval"):
                    model(torch.ones(1, 3))
            if part == "run.json":
                interrupt_after(monkeypatch, Path, "write_text", signals=2)
            elif part == "error":
                monkeypatch.setattr(table_writer, "convert_journal", raise_disk_full)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    recorded = instrument.load(tmp_path / "run")
    assert recorded.info["status"] == "interrupted"
    assert ("No space left on device" in recorded.info["error"]) == (part == "error")
    assert not recorded.problems
    assert list(recorded.stats.step) == [0, 0, 1, 1] + [2, 2] * (part == "evaluation")
    assert len(recorded.tensors()) == 4
    assert not (tmp_path / "run" / "journal").exists() or part == "error"


def raise_disk_full(*args: Any, **kwargs: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_interrupt_ends_the_wait_for_rank_0(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    has_processes = iter([False, True])  # not before it waits
    monkeypatch.setattr("instrument.integrations.attach.own_rank", lambda: 1)
    monkeypatch.setattr("instrument.integrations.attach.has_processes", lambda: next(has_processes))
    monkeypatch.setattr("instrument.storage.run_folder.RANK_0_TIMEOUT", 1.0)
    checked: list[list[str]] = []

    def interrupted_check(keys: list[str]) -> bool:
        checked.append(keys)
        signal.raise_signal(signal.SIGINT)
        return False

    store = SimpleNamespace(check=interrupted_check)
    monkeypatch.setattr("instrument.storage.run_folder.store_of_restart", lambda: store)
    with pytest.raises(KeyboardInterrupt), instrument.attach(network()[0], {}, out=tmp_path / "run"):
        pass
    assert len(checked) == 1


def test_attaching_in_another_thread_leaves_signal_handlers_alone() -> None:
    model, optimizer = network()
    left: list[list[str]] = []

    def run() -> None:
        with instrument.attach(model, HOOKS, optimizer=optimizer, rules=None) as probe:
            train(model, optimizer, probe)
        left.append(hooks_left(model, optimizer))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert left == [[]]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
