"""`keep`: the tensors of the last steps, written when a rule fires or the run fails."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import Answer
from torch import Tensor, nn

import instrument
from instrument.actions.base import Context, StepContext
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_rules
from instrument.integrations.attached_probe import AttachedProbe
from instrument.probe.flight_recorder import FlightRecorder

Cli = Callable[..., Answer]
EVIDENCE = {"layers": "*", "kind": "forward", "action": "record", "tensors": True, "keep": 2}


class Fragile(nn.Module):
    """Computes the logarithm at one step."""

    step = 0

    def forward(self, x: Tensor) -> Tensor:
        return torch.log(x) if self.step == 5 else x * 1


def train(
    hooks: dict[str, Any], *, out: Path | None = None, fails_at: int | None = None, **options: Any
) -> AttachedProbe:
    """Train a network in which one layer gives NaN at step 5."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Fragile(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    with warnings.catch_warnings(), instrument.attach(model, hooks, optimizer=optimizer, out=out, **options) as probe:
        warnings.simplefilter("ignore", instrument.InstrumentWarning)
        for step in range(8):
            model[1].step = step
            probe.batch(ids=list(range(4 * step, 4 * step + 4)), targets=[3] * 4)
            loss = model(torch.randn(4, 4, generator=generator)).square().mean()
            if step == fails_at:
                raise ZeroDivisionError("the loop failed")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


def stored(probe: AttachedProbe) -> dict[tuple[int, str], Tensor]:
    rows = probe.sink.records("tensors")
    found = {(row["step"], row["layer"]): torch.as_tensor(row["values"]).view(row["shape"]) for row in rows}
    assert len(found) == len(rows), "tensors are written once"
    return found


def messages(probe: AttachedProbe) -> list[str]:
    return [row["message"] for row in probe.sink.records("events") if row["rule"] == "flight_recorder"]


def test_tensors_and_samples_of_the_last_two_steps_are_written() -> None:
    """They equal those of a hook that writes all steps."""
    everything = {key: value for key, value in EVIDENCE.items() if key != "keep"}
    probe, complete = train({"evidence": EVIDENCE}), train({"evidence": everything})
    found, expected = stored(probe), stored(complete)
    assert [step for step, layer in found if layer == "1"][:2] == [4, 5]
    assert len(expected) == 24
    assert all(torch.equal(found[key].nan_to_num(7), expected[key].nan_to_num(7)) for key in found)
    assert found[5, "1"].isnan().any()
    assert not found[5, "0"].isnan().any()
    ids: dict[int, list[int]] = {}
    for row in probe.sink.records("samples"):
        ids.setdefault(row["step"], []).append(row["sample"])
    assert (min(ids), ids[4], ids[5]) == (4, [16, 17, 18, 19], [20, 21, 22, 23])
    assert messages(probe)[0] == "hook 'evidence' wrote 6 tensors of the steps 4 to 5: rule non_finite fired"
    assert [row["step"] for row in probe.sink.records("stats")] == [
        row["step"] for row in complete.sink.records("stats")
    ]


class Read(instrument.Rule):
    """Notes the steps that it reads, and with how many targets."""

    read: ClassVar[list[tuple[int, int]]] = []

    def update(self, rows: instrument.StepRows) -> Iterator[instrument.Firing]:
        self.read.append((rows.step, len(rows.targets)))
        yield from ()


@pytest.mark.parametrize("others", [{}, {"tensors": {**EVIDENCE, "keep": None, "steps": [4]}}])
def test_rules_read_each_step_once(others: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not read the samples of a step again when its tensors are written, neither in the run nor afterwards."""
    monkeypatch.setattr(Read, "read", [])
    rules = {"read": {"_target_": Read}, "classes": {"rule": "class_imbalance", "after": 4}}
    train({"evidence": EVIDENCE} | others, rules=rules, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    assert set(run.samples["step"]) >= {4, 5}
    assert Read.read == [(step, 4 if others and step == 4 else 0) for step in range(8)]
    fired = rule_events(run, parse_rules({"classes": rules["classes"]}))
    assert [event.step for event in fired] == list(run.events.query("rule == 'classes'")["step"])
    assert len(fired) == len(others)


def test_samples_are_written_with_their_tensors() -> None:
    """A checkpoint at the end of the step, or a kill in the next one, does not lose them."""
    model, hooks = Fragile(), {"evidence": {**EVIDENCE, "layers": "."}}
    with warnings.catch_warnings(), instrument.attach(model, hooks) as probe:
        warnings.simplefilter("ignore", instrument.InstrumentWarning)
        for model.step in range(6):
            probe.batch(ids=[model.step])
            model(torch.zeros(1))
            probe.end_step()
        assert [row["sample"] for row in probe.sink.records("samples")] == [4, 5]
        assert len(stored(probe)) == 2


def test_only_the_rule_of_when_writes() -> None:
    rules = {"large": {"watch": "evidence", "stat": "abs_max", "above": 1e6}, "bad": {"rule": "non_finite"}}
    silent = train({"evidence": {**EVIDENCE, "when": "large"}}, rules=rules)
    assert not stored(silent)
    assert messages(silent) == [
        "hook 'evidence' kept tensors in memory, and they were not written: rule large did not fire"
    ]
    assert stored(train({"evidence": {**EVIDENCE, "when": "bad"}}, rules=rules))


def test_failed_run_writes_the_last_steps(tmp_path: Path) -> None:
    """The step that failed is there as far as it ran."""
    with pytest.raises(ZeroDivisionError):
        train({"evidence": {**EVIDENCE, "keep": 3}}, out=tmp_path / "run", fails_at=3)
    run = instrument.load(tmp_path / "run")
    assert sorted(run.tensors(hook="evidence")["step"].unique()) == [1, 2, 3]
    assert run.events.query("rule == 'flight_recorder'")["message"].tolist() == [
        "hook 'evidence' wrote 9 tensors of the steps 1 to 3: the run failed with ZeroDivisionError"
    ]
    assert sorted(run.read("samples", ["step"])["step"].unique()) == [1, 2, 3]


def test_interrupted_run_writes_nothing() -> None:
    model, hooks = nn.Linear(2, 2), {"evidence": {**EVIDENCE, "layers": "."}}
    with pytest.raises(KeyboardInterrupt), instrument.attach(model, hooks) as probe:  # noqa: PT012
        model(torch.ones(1, 2))
        raise KeyboardInterrupt
    assert not stored(probe)


def test_hook_with_a_schedule_keeps_its_recorded_steps() -> None:
    found = stored(train({"evidence": {**EVIDENCE, "every": 5}}))
    assert sorted({step for step, _ in found}) == [0, 5]


def context_of(step: int) -> Context:
    return Context("h", "forward", "output", "", nn.Identity(), "", StepContext(step, 0, 0, "train"))


def test_memory_is_bounded_and_reused() -> None:
    """Steps with the same shapes use the memory of the oldest step."""
    recorder = FlightRecorder({"h": 3})
    for step in range(20):
        for size in (4, 4, 2):
            recorder.add(context_of(step), (size,), torch.full((size,), float(step)), None, has_pending_step=False)
    assert recorder.bytes == {"h": 3 * (4 + 4 + 2) * 4}
    taken = recorder.take("h")
    addresses = {one.copy.memory.data_ptr() for one in taken}
    assert len(addresses) == 9
    assert [int(one.copy.wait()[0]) for one in taken] == [17] * 3 + [18] * 3 + [19] * 3
    assert recorder.bytes == {"h": 0}


def test_tensors_in_memory_keep_no_graph() -> None:
    """The context of a call with a selection has the complete tensor."""
    model, found = nn.Linear(2, 2), []
    model.register_forward_hook(lambda module, args, output: found.append(weakref.ref(output)))
    hook = {"layers": ".", "kind": "forward", "action": "record", "tensors": True, "keep": 2, "units": [0]}
    with instrument.attach(model, {"evidence": hook}) as probe:
        model(torch.ones(1, 2))
        assert found[0]() is None
        assert probe.recorder.flight_recorder.bytes == {"evidence": 4}


def test_one_more_step_is_kept_while_the_rules_wait_for_a_gpu() -> None:
    """When they read step 18, the tensors of step 19 are in memory already."""
    recorder = FlightRecorder({"h": 2})
    for step in range(20):
        recorder.add(context_of(step), (1,), torch.ones(1), torch.float64, has_pending_step=step > 0)
    assert [one.context.step for one in recorder.take("h")] == [17, 18, 19]


def test_plan_states_the_memory(cli: Cli) -> None:
    """Three steps of a tensor [64, 10] of float32."""
    hook = "{layers: layers.2, kind: forward, action: record, tensors: true, keep: 3}"
    answer = cli("model=mlp", "data=digits", "train.steps=4", "plan=true", f"+hooks.evidence={hook}")
    assert answer.code == 0, answer.err
    text = re.sub(r"\s+", " ", answer.out)
    assert (
        "evidence: tensors of the last 3 recorded steps in memory, 7.68 kB; written if a rule non_finite fires" in text
    )
