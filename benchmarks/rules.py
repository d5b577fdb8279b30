"""The quality of the default rules: how many seeded faults they find, and how often they warn in healthy trainings.

python benchmarks/rules.py                  # the reported seeds
python benchmarks/rules.py --development    # the seeds with which thresholds were chosen
python benchmarks/rules.py --only GAN --seeds 0

The trainings are in `faults.py`. Each runs for 300 steps with the ready-made hook sets of the guide "Debug a network that does not
learn" and the default rules. A fault counts as found if a warning names the right layer or cause. Only warnings count: the first
event of a rule, which the terminal and the findings show. Warnings of other kinds, such as those of hooks that did not fire, do not count.
`leads` counts the trainings in which the leading finding names it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from faults import FAULTS, HEALTHY, STEPS, Case
from measure import machine
from torch import nn
from trainings import Training

import instrument
from instrument.config.spec_file import default_rules
from instrument.integrations.attached_probe import AttachedProbe

RULES = default_rules()
HOOK_SETS = ("inputs", "activations", "gradients", "parameters", "dead_relu")
EVALUATE_EVERY = 20
DEVELOPMENT_SEEDS, REPORTED_SEEDS = range(3), range(100, 103)


@dataclass(frozen=True)
class Finding:
    """A warning of a training.

    Attributes:
        rule: The rule.
        layer: The layer; None for the training as a whole.
        step: The step.
        message: The complete message.
    """

    rule: str
    layer: str | None
    step: int
    message: str

    def __str__(self) -> str:
        return self.rule if self.layer is None else f"{self.rule} @ {self.layer}"


@dataclass(frozen=True)
class Result:
    """A finished training.

    Attributes:
        seed: The seed.
        findings: Its warnings, in the order in which they appeared.
        found: The indices in `findings` of those that name the fault.
        leads: Whether the leading finding, which `run.findings` lists first, names the fault.
        losses: The first and the last training loss.
    """

    seed: int
    findings: Sequence[Finding]
    found: Sequence[int]
    leads: bool
    losses: tuple[float, float]


def hooks(model: nn.Module) -> dict[str, Any]:
    """Return the hook specs of the ready-made sets, without those of which the model has no layers."""
    folder = Path(__file__).parents[1] / "conf" / "hooks"
    specs = [yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in HOOK_SETS]
    types = {type(module).__name__ for module in model.modules()}
    return {
        name: spec for each in specs for name, spec in each.items() if not {*types}.isdisjoint(spec.get("types", types))
    }


def run(case: Case, seed: int, steps: int = STEPS) -> Result:
    """Run a training with the default rules.

    Args:
        case: The training.
        seed: Its seed.
        steps: The number of steps.
    """
    torch.manual_seed(seed)
    made = case.make(Random(f"{case.architecture} {case.name} {seed}"))
    training, layer = made if isinstance(made, tuple) else (made, "")
    probe, losses = train(training, steps, ids="all")
    events = probe.run.events.query("severity == 'warning' and rule in @RULES")
    findings = [
        Finding(event.rule, event.layer if isinstance(event.layer, str) else None, int(event.step), event.message)
        for event in events.itertuples()
    ]
    found = [index for index, finding in enumerate(findings) if _accepts(case, layer, finding)]
    lead = next(probe.run.findings.query("rule in @RULES").itertuples(), None)
    leads = lead is not None and any(
        _accepts(case, layer, Finding(event.rule, event.layer if isinstance(event.layer, str) else None, lead.step, ""))
        for event in probe.run.events.query("rule == @lead.rule and step == @lead.step").itertuples()
        if lead.where == next((each for each in (event.location, event.layer) if isinstance(each, str)), "training")
    )
    return Result(seed, findings, found, leads, (losses[0], losses[-1]))


def train(training: Training, steps: int, **options: Any) -> tuple[AttachedProbe, list[float]]:
    """Run a training, and return its probe and its losses.

    Args:
        training: The training.
        steps: The number of steps.
        options: Further arguments of `instrument.attach`.
    """
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with instrument.attach(training.model, hooks(training.model), optimizer=training.start(), **options) as probe:
            for step in range(steps):
                total = torch.zeros(())
                for micro_step in range(training.micro_batches):
                    indices = training.indices(step * training.micro_batches + micro_step)
                    targets = training.targets[indices]
                    probe.batch(ids=torch.arange(len(indices)), targets=targets if targets.dim() == 1 else None)
                    total += training.backward(indices) / training.micro_batches
                    if micro_step < training.micro_batches - 1:
                        probe.end_micro_step()
                training.update()
                losses.append(total.item())
                probe.end_step(loss=total)
                if (step + 1) % EVALUATE_EVERY == 0:
                    with probe.evaluating():
                        loss = training.evaluate()
                        if loss is not None:
                            probe.write_metrics(loss=loss, seconds=0.0)
    return probe, losses


def _accepts(case: Case, layer: str, finding: Finding) -> bool:
    """Return whether a finding names the fault of a case."""
    if finding.step < case.since:
        return False
    for accepted in case.accepts:
        rule, _, pattern = accepted.replace("{layer}", layer).partition("@")
        if rule == finding.rule and (fnmatchcase(finding.layer, pattern) if finding.layer is not None else not pattern):
            return True
    return False


def _prepare_process() -> None:
    torch.set_num_threads(1)


def run_all(cases: Sequence[Case], seeds: Sequence[int], processes: int) -> Iterator[tuple[Case, list[Result]]]:
    """Yield each case with the results of all seeds.

    Args:
        cases: The trainings.
        seeds: Their seeds.
        processes: The number of processes.
    """
    with ProcessPoolExecutor(processes, get_context("spawn"), _prepare_process) as pool:
        index = {id(case): number for number, case in enumerate(FAULTS + HEALTHY)}
        jobs = [(index[id(case)], seed) for case, seed in product(cases, seeds)]
        results = zip(jobs, pool.map(_run_job, jobs), strict=True)
        for number, group in groupby(results, lambda item: item[0][0]):
            yield (FAULTS + HEALTHY)[number], [result for _, result in group]


def _run_job(job: tuple[int, int]) -> Result:
    number, seed = job
    return run((FAULTS + HEALTHY)[number], seed)


def _unique(names: Sequence[str]) -> str:
    """Return names with the number of their occurrences, the most frequent one first."""
    counts = {name: names.count(name) for name in names}
    ordered = sorted(counts, key=lambda name: -counts[name])
    return ", ".join(name if counts[name] == 1 else f"{name} ({counts[name]})" for name in ordered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--development", action="store_true", help="the seeds with which thresholds were chosen")
    parser.add_argument("--seeds", type=int, nargs="+", help="other seeds")
    parser.add_argument("--only", default="", help="only trainings whose architecture or name contains this text")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--messages", action="store_true", help="print each warning in full")
    arguments = parser.parse_args()
    seeds = arguments.seeds or (DEVELOPMENT_SEEDS if arguments.development else REPORTED_SEEDS)

    def chosen(cases: Sequence[Case]) -> list[Case]:
        return [case for case in cases if arguments.only in f"{case.architecture} {case.name}"]

    print(f"{machine()}\nseeds {', '.join(map(str, seeds))}; {STEPS} steps\n")
    print("| architecture | fault | found | leads | by | other warnings |\n|---|---|---|---|---|---|")
    found = runs = leading = first = 0
    for case, results in run_all(chosen(FAULTS), seeds, arguments.processes):
        hits = [str(result.findings[index]) for result in results for index in result.found]
        others = [str(f) for result in results for i, f in enumerate(result.findings) if i not in result.found]
        count, leads = sum(bool(result.found) for result in results), sum(result.leads for result in results)
        found, runs, leading = found + count, runs + len(results), leading + leads
        first += sum(0 in result.found for result in results)
        numbers = f"{count} of {len(results)} | {leads}"
        print(
            f"| {case.architecture} | {case.name} | {numbers} | {_unique(hits)} | {_unique(others)} |",
            flush=True,
        )
        _print_messages(results, arguments.messages)
    print(f"\nRecall: {found} of {runs} ({found / max(runs, 1):.3f})")
    print(f"The leading finding names the fault: {leading} of {runs}; the first warning: {first} of {runs}\n")
    print("| architecture | healthy training | warnings |\n|---|---|---|")
    alarms = runs = 0
    for case, results in run_all(chosen(HEALTHY), seeds, arguments.processes):
        warned = [str(finding) for result in results for finding in result.findings]
        alarms, runs = alarms + sum(bool(result.findings) for result in results), runs + len(results)
        print(f"| {case.architecture} | {case.name} | {_unique(warned)} |", flush=True)
        _print_messages(results, arguments.messages)
    print(f"\nHealthy trainings with a warning: {alarms} of {runs}")


def _print_messages(results: Sequence[Result], verbose: bool) -> None:
    for result in results if verbose else ():
        print(f"    seed {result.seed}: loss {result.losses[0]:.4g} to {result.losses[1]:.4g}")
        for index, finding in enumerate(result.findings):
            mark = "*" if index in result.found else " "
            print(f"      {mark} {finding}, step {finding.step}: {finding.message[:150]}")


if __name__ == "__main__":
    main()
