"""What follows when a rule fires, in a custom loop and in a run; and the same decisions on the finished run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
import torch
import yaml
from conftest import Answer
from omegaconf import OmegaConf
from rule_rows import Step, feed
from torch import nn
from training_runs import train_here

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.commands.findings import main
from instrument.commands.sweep import main as list_jobs
from instrument.config.parse import parse_hooks, parse_rules
from instrument.config.rules import default_rules
from instrument.config.spec_file import read_rules
from instrument.integrations.attached_probe import AttachedProbe
from instrument.plan.hook_plan import make_plan
from instrument.probe.probe import Probe
from instrument.probe.rules import RuleActions
from instrument.rules.rule_set import RuleEvent, RuleSet
from instrument.rules.step_rows import StepRows
from instrument.training.sweep_objective import worst_score

Cli = Callable[..., Answer]
SEEN = {"layers": "*", "kind": "forward", "action": "record"}
LARGE = {"watch": "seen", "stat": "abs_max", "above": 50.0}
SCALES = (1.0, 1.0, 100.0, 100.0, 1.0, 1.0, 100.0)  # of the inputs: the rule LARGE fires at steps 2 and 6


def net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    nn.init.eye_(model[0].weight)
    return model


def run_steps(probe: Probe, model: nn.Module, scales: tuple[float, ...] = SCALES) -> list[tuple[bool, bool]]:
    """Run the steps. Return after each one whether to stop and whether to save a checkpoint."""
    flags = []
    for scale in scales:
        loss = model(torch.full((4, 2), scale)).mean()
        probe.end_step(loss=loss)
        flags.append((probe.should_stop, probe.should_checkpoint))
    return flags


def attached(hooks: dict[str, Any], rules: Any, **options: Any) -> tuple[AttachedProbe, list[tuple[bool, bool]]]:
    model = net()
    with instrument.attach(model, hooks, rules=rules, **options) as probe:
        return probe, run_steps(probe, model)


class Noted(instrument.Rule):
    """Notes the step, the phase and the largest value of each row, in the order in which the rule reads them."""

    def __init__(self) -> None:
        self.read: list[tuple[int, str, list[float]]] = []

    def update(self, rows: StepRows) -> list[instrument.Firing]:
        self.read.append((rows.step, rows.phase, rows.column("abs_max").tolist()))
        return []


def test_step_with_an_evaluation_inside_is_read_once(tmp_path: Path) -> None:
    hooks = {"seen": SEEN, "held_out": {**SEEN, "phase": "eval"}}
    model, ids = net(), [0, 1]
    with instrument.attach(model, hooks, rules={"noted": {"_target_": Noted}}, out=tmp_path / "run") as probe:
        for step in range(3):
            probe.batch(ids=ids, targets=[1, 2])
            model(torch.full((2, 2), 1.0 + step))
            with probe.evaluating():
                model(torch.full((2, 2), 10.0))
            model(torch.full((2, 2), 5.0 + step))
            probe.end_step()
        model(torch.ones(2, 2))
        with probe.evaluating():
            pass
    (live,) = [rule for rule in probe.rules.rules if isinstance(rule, Noted)]
    each = [[(step, "eval", [10.0]), (step, "train", [1.0 + step, 5.0 + step])] for step in range(3)]
    assert live.read == [*each[0], *each[1], *each[2], (3, "train", [1.0])]
    after: list[Any] = []

    class NotedAfter(Noted):
        def __init__(self) -> None:
            self.read = after

    rule_events(instrument.load(tmp_path / "run"), parse_rules({"noted": {"_target_": NotedAfter}}))
    assert after == live.read


def test_stop_and_checkpoint_are_requested(tmp_path: Path) -> None:
    probe, flags = attached({"seen": SEEN}, {"big": {**LARGE, "then": ["checkpoint", "stop"]}}, out=tmp_path / "run")
    assert [stop for stop, _ in flags] == [False, False, *[True] * 5]
    assert [step for step, (_, checkpoint) in enumerate(flags) if checkpoint] == [2, 6]
    message = "big: at step 2 in 0 output (seen): abs_max 100, above 50"
    assert probe.stop_reason == f"rule big: {message}"
    run = instrument.load(tmp_path / "run")
    assert (run.info["status"], run.info["error"]) == ("stopped", f"rule big: {message}")
    events = run.events.query("rule == 'big'")
    assert events["step"].tolist() == [2, 6]
    assert "python -m instrument.replay" in run.findings.query("what == 'big'")["advice"].item()
    assert events["severity"].tolist() == ["warning", "info"]
    (first, _) = events.to_dict("records")
    fields = [first[name] for name in ("layer", "location", "value", "threshold")]
    assert fields == ["0", "0 output (seen)", 100.0, 50.0]


def test_hooks_are_turned_on_and_off_for_some_steps() -> None:
    mean = {**SEEN, "stats": ["mean"]}
    hooks = {"seen": SEEN, "more": mean, "less": mean, "never": mean}
    then = [{"enable": "more", "steps": 2}, {"disable": "less", "steps": 1}]
    other = {"watch": "seen", "stat": "abs_max", "above": 1e9, "then": {"enable": "never"}}
    probe, _ = attached(hooks, {"big": {**LARGE, "then": then}, "other": other})
    steps = probe.stats.groupby("hook", observed=True)["step"].apply(list).to_dict()
    assert steps == {"seen": [*range(7)], "more": [3, 4], "less": [0, 1, 2, 4, 5, 6]}
    causes = {row["hook"]: row["cause"] for row in probe.coverage()}
    assert causes == {"seen": "", "more": "", "less": "", "never": "no rule turned it on"}
    assert [event for event in probe.warnings if "never" in event] == []
    assert probe.events.query("rule == 'big'")["severity"].tolist() == ["info", "info"]  # without `warn`


def test_call_gets_the_event_and_its_error_names_the_rule() -> None:
    events: list[RuleEvent] = []
    attached({"seen": SEEN}, {"big": {**LARGE, "then": {"call": events.append}}})
    assert [(event.rule, event.step, event.value) for event in events] == [("big", 2, 100.0), ("big", 6, 100.0)]

    def fail(event: RuleEvent) -> None:
        raise OSError("no network")

    message = r"rules.big.then: the function failed at step 2 .*OSError: no network"
    with pytest.raises(instrument.HookError, match=message):
        attached({"seen": SEEN}, {"big": {**LARGE, "then": {"call": fail}}})


class LossBelow(instrument.Rule):
    what = "low loss"

    def __init__(self, bound: float) -> None:
        self.bound = bound

    def update(self, rows: instrument.StepRows) -> Any:
        loss = rows.metric("loss")
        if loss is not None and loss < self.bound:
            yield instrument.Firing(f"{loss:g}", value=loss, threshold=self.bound)


def test_custom_rule_is_built_with_its_arguments() -> None:
    probe, flags = attached({"seen": SEEN}, {"low": {"_target_": LossBelow, "bound": 50.0, "then": "stop"}})
    assert flags[0] == (True, False)
    assert probe.stop_reason == "rule low: low loss: at step 0: 1"
    with pytest.raises(instrument.ConfigError, match=r"rules.low: a rule requires the method update\(rows\)"):
        attached({"seen": SEEN}, {"low": {"_target_": "fractions.Fraction"}})


class Broken(instrument.Rule):
    def update(self, rows: instrument.StepRows) -> Any:
        raise KeyError("missing")


def test_error_of_a_custom_rule_names_it() -> None:
    with pytest.raises(instrument.HookError, match=r"rules.own: it failed at step 0 \(in .*\): KeyError: 'missing'"):
        attached({"seen": SEEN}, {"own": {"_target_": Broken}})


def test_rules_of_a_file_and_of_the_argument_are_merged(tmp_path: Path) -> None:
    file = {"hooks": {"seen": SEEN}, "rules": {"big": LARGE, "low": {**LARGE, "above": 90.0}, "underflow": None}}
    assert read_rules(file).keys() == {*default_rules(), "big", "low"} - {"underflow"}
    assert read_rules(file, {"low": None}).keys() == {*default_rules(), "big"} - {"underflow"}
    assert read_rules(file, None) == {}
    own = read_rules(file, {"nan": {"rule": "non_finite", "then": "stop"}})
    assert "nan" in own
    assert "non_finite" not in own  # a rule replaces the default one of the same kind
    with pytest.raises(
        instrument.ConfigError, match=r"rules\.underflo: no rule has this name[\s\S]*similar  underflow"
    ):
        read_rules(file, {"underflo": None})
    similar = r"rules: must be a mapping, None or 'default'\n    given    defualt\n    similar  default"
    with pytest.raises(instrument.ConfigError, match=similar):
        attached({"seen": SEEN}, "defualt")
    with pytest.raises(instrument.ConfigError, match=r"fix      write \{NAME: \{...\}\} to add or change a rule"):
        attached({"seen": SEEN}, ["non_finite"])
    (tmp_path / "hooks.yaml").write_text(json.dumps(file))
    probe, _ = attached(tmp_path / "hooks.yaml", "default")  # type: ignore[arg-type]
    assert probe.run.info["config"]["rules"]["big"] == {**LARGE, "watch": ("seen",), "name": "big"}


def test_fired_rules_are_those_of_the_last_step() -> None:
    model, fired = net(), []
    with instrument.attach(model, {"seen": SEEN}, rules={"big": LARGE, "prune": {**LARGE, "then": "prune"}}) as probe:
        for scale in SCALES:
            probe.end_step(loss=model(torch.full((4, 2), scale)).mean())
            fired.append(probe.fired_rules & {"big", "prune"})
    assert [step for step, names in enumerate(fired) if names == {"big", "prune"}] == [2, 6]
    assert set().union(*fired[:2], *fired[3:6]) == set()
    assert (probe.is_pruned, probe.should_stop) == (True, True)


def test_firings_before_a_checkpoint_have_their_consequences_after_it() -> None:
    """The rows of a GPU can arrive when a checkpoint is saved, which is after the actions of the step."""
    rules = parse_rules({"big": {**LARGE, "then": "stop"}})
    before, after = (RuleSet(rules, [].append) for _ in range(2))
    about = {"hook": "seen", "layer": "0", "abs_max": 100.0}
    feed(before, [Step(rows=[about])])
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    actions = RuleActions(after, {}, None, lambda hook, reason: None)
    actions.act(1)
    assert actions.stop_reason == "rule big: big: at step 0 in 0 output (seen): abs_max 100, above 50"


def test_state_of_actions_is_resumed() -> None:
    rules = parse_rules({"big": {**LARGE, "then": {"enable": "more"}}})
    hooks = parse_hooks({"seen": SEEN, "more": {**SEEN, "stats": ["mean"]}})
    model = net()
    plan = make_plan(hooks, model)
    first = Probe(plan, instrument.MemorySink(), rules=rules)
    with first:
        run_steps(first, model, SCALES[:4])
        state = json.loads(json.dumps(first.state_dict()))
    sink = instrument.MemorySink()
    second = Probe(plan, sink, rules=rules)
    second.load_state_dict(state)
    with second:
        run_steps(second, model, SCALES[4:])
    assert [row["step"] for row in sink.records("stats") if row["hook"] == "more"] == [4, 5, 6]
    assert [row["step"] for row in sink.records("events") if row["rule"] == "big"] == [6]


def test_processes_act_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that fires in another process only stops this one too."""
    rules = parse_rules({"big": {**LARGE, "above": 1e9, "then": ["stop", {"call": print}]}, "other": LARGE})
    actions = RuleActions(RuleSet(rules, [].append), {}, None, lambda hook, reason: None)
    asked: list[list[bool]] = []

    class OtherFired:
        def any_rank(self, flags: list[bool]) -> list[bool]:
            asked.append(flags)
            return [True for _ in flags]

    monkeypatch.setattr(actions, "ranks", OtherFired())
    actions.act(3)
    assert asked == [[False]]  # a rule that only warns needs no agreement
    assert actions.stop_reason == "rule big: it fired in another process"
    assert actions.fired == {"big"}


@pytest.fixture(scope="module")
def exploded() -> AttachedProbe:
    """A network that is trained with far too large a learning rate, with an evaluation between the steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e3)
    updates = {"layers": "**", "kind": "step_post", "role": "update", "action": "record"}
    hooks = {
        "seen": {**SEEN, "stats": ["default", "dead_fraction", "saturated_fraction"]},
        "evaluated": {**SEEN, "phase": "eval"},
        "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record", "every": 2},
        "updates": {**updates, "stats": ["default", "update_ratio"]},
    }
    x, y = torch.randn(32, 8), torch.randint(0, 4, (32,))
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for step in range(20):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 4 == 3:
                with probe.evaluating(), torch.no_grad():
                    probe.write_metrics(loss=nn.functional.cross_entropy(model(x), y), seconds=0.1)
    return probe


def test_decisions_on_a_finished_run_are_those_of_the_run(exploded: AttachedProbe) -> None:
    live = [
        (row["rule"], row["step"], row["message"], row["severity"])
        for row in exploded.sink.records("events")
        if row["rule"] in default_rules()
    ]
    again = [
        (event.rule, event.step, event.message, event.severity)
        for event in rule_events(exploded.run, parse_rules(default_rules()))
    ]
    assert sorted(live) == sorted(again)
    assert {"exploding_gradient", "exploding_activation", "non_finite"} <= {rule for rule, *_ in live}


@pytest.mark.slow
def test_decisions_do_not_depend_on_the_batches_of_a_file(exploded: AttachedProbe) -> None:
    """Files are sorted by layer within a step, and a batch can end within a step that has rows of an evaluation."""

    class Split:
        def __getattr__(self, name: str) -> Any:
            return getattr(exploded.run, name)

        def scan(self, table: str, columns: list[str], condition: Any = None) -> Any:
            if table != "stats" or "layer" not in columns:
                yield from exploded.run.scan(table, columns, condition)
                return
            rows = pa.Table.from_batches(exploded.run.scan(table, columns, condition))
            by = pa.table({"step": rows["step"], "layer": rows["layer"].cast(pa.string())})
            rows = rows.take(pc.sort_indices(by, [("step", "ascending"), ("layer", "ascending")]))
            for begin in range(0, rows.num_rows, 7):
                batch = rows.slice(begin, 7)
                order = pc.sort_indices(batch, [("step", "ascending"), ("position", "ascending")])
                yield from batch.take(order).combine_chunks().to_batches()

    rules = parse_rules(default_rules())
    assert str(rule_events(Split(), rules)) == str(rule_events(exploded.run, rules))  # type: ignore[arg-type]  # NaN


def test_rules_do_not_change_the_training(exploded: AttachedProbe) -> None:
    assert not exploded.events.empty
    results = []
    for rules in ("default", None):
        torch.manual_seed(3)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with instrument.attach(model, {"seen": {**SEEN, "layers": "."}}, optimizer=optimizer, rules=rules) as probe:
            for _ in range(3):
                optimizer.zero_grad()
                loss = model(torch.randn(8, 4)).square().mean()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
        results.append((model.weight.clone(), torch.get_rng_state()))
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


TINY = (
    *("model=mlp", "model.sizes=[64,8,10]", "data=digits", "data.slice.stop=128", "data.eval_slice.stop=8"),
    *("hooks=activations", "hooks.activations.every=1"),
)
DRILL = "+hooks.drill={layers: layers.0, kind: forward, action: modify, fn: nan, start: 3}"
NAN = "+rules.nan={rule: non_finite, then: [checkpoint, stop]}"


@pytest.mark.slow
def test_stopped_run_has_its_status_and_can_be_resumed(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    answer = cli(*TINY, DRILL, NAN, "train.steps=9", "hydra.run.dir=out")
    assert answer.code == 3, answer.err
    assert "stopped     rule nan: loss not finite: at step 3: nan" in answer.out
    assert "Look at the first location" in answer.out
    run = instrument.load("out")
    assert run.info["status"] == "stopped"
    assert run.info["error"].startswith("rule nan: loss not finite: at step 3")
    assert run.metrics.query("phase == 'train'")["step"].tolist() == [0, 1, 2, 3]
    assert [path.name for path in Path("out/checkpoints").iterdir()] == ["step-00000004.pt"]
    capfd.readouterr()
    assert main(["out"]) == 4
    found = capfd.readouterr().out
    assert found.startswith("warning  first recorded non-finite value: step 3: layers")
    assert "error    consequence: loss not finite: step 3: training: nan" in found
    assert cli("resume=out", "quiet=true").code == 0  # the rule has fired already
    assert instrument.load("out").metrics.query("phase == 'train'")["step"].tolist() == [*range(9)]


@pytest.mark.slow
def test_sweep_lists_a_stopped_job_and_does_not_rerun_it(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = [*TINY, DRILL, NAN, "hooks.drill.start=1,99", "train.steps=3", "hydra.sweep.dir=out"]
    answer = cli("-m", *arguments)
    assert answer.code == 3, answer.err
    assert "2 jobs in out: 1 done, 1 stopped" in answer.err
    assert "out/0  stopped  hooks.drill.start=1  rule nan: loss not finite: at step 1: nan" in answer.err
    assert "--rerun" not in answer.err
    assert list_jobs(["out", "--rerun"]) == 1
    assert "no jobs to rerun" in capfd.readouterr().out


@pytest.mark.slow
def test_pruned_trial_is_the_worst_of_a_search(cli: Cli) -> None:
    prune = "+rules.large={watch: metrics, stat: loss, above: 1000, then: prune}"
    search = ("hydra/sweeper=search", "hydra/sweeper/sampler=grid", "hydra.sweep.dir=out", "train.steps=3")
    answer = cli("-m", *TINY, prune, *search, "optimizer.lr=choice(0.1,1e9)")
    assert answer.code == 0, answer.err
    results = yaml.safe_load(Path("out/optimization_results.yaml").read_text())
    assert results["best_params"] == {"optimizer.lr": 0.1}
    assert "2 jobs in out: 1 done, 1 stopped" in answer.out
    assert "rule large: large: at step 1" in answer.out
    assert "the objective has no value" not in answer.err
    hydra = OmegaConf.create({"sweeper": {"direction": ["maximize"]}})
    assert worst_score(hydra) == -math.inf


class Late(instrument.Rule):
    """Fires at step 2."""

    what = "late"
    advice = "Do nothing."

    def update(self, rows: instrument.StepRows) -> Iterator[instrument.Firing]:
        if rows.step == 2 and rows.is_training:
            yield instrument.Firing("hit", value=1.0)


def test_custom_rule_stops_and_its_advice_is_a_finding(cli: Cli, capfd: pytest.CaptureFixture[str]) -> None:
    rule = "+rules.late={_target_: test_rule_actions.Late, then: stop}"
    kept = "+hooks.kept={layers: layers.0, kind: forward, action: record, tensors: true, keep: 2, when: late}"
    answer = cli(*TINY, rule, kept, "train.steps=4", "train.checkpoint.every=2", "hydra.run.dir=out", "rules=none")
    assert answer.code == 3, answer.err
    assert "Late at step 2: hit.\nDo nothing.\n" in answer.out
    capfd.readouterr()
    assert main(["out"]) == 4
    found = "warning  late: step 2: training: hit\n         Do nothing.\n1 finding of rules in out; the status of the run is stopped\n"
    assert capfd.readouterr().out == found
    assert cli("resume=out", "quiet=true").code == 0
    messages = instrument.load("out").events.query("rule == 'flight_recorder'")["message"].tolist()
    assert messages == ["hook 'kept' wrote 2 tensors of the steps 1 to 2: rule late fired"]
    (live,) = instrument.load("out").findings.query("what == 'late'").to_dict("records")
    assert live["advice"] == "Do nothing."


@pytest.mark.slow
def test_findings_command_reports_a_healthy_run(workdir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_here(workdir / "out", *TINY, "train.steps=3", "rules=none")
    assert instrument.load("out").info["config"]["rules"] is None
    capfd.readouterr()
    assert main(["out"]) == 0
    assert capfd.readouterr().out == "no rule fired in out\n"
    assert main(["missing"]) == 2
