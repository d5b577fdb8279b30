"""The default rules on programs after published ones: which errors they find, and in which healthy programs they warn.

python benchmarks/strangers/run.py --collection build --seeds 1
python benchmarks/strangers/run.py --collection build --seeds 3 --only gpt2
python benchmarks/strangers/run.py --collection "held out" --no-rules    # whether each program runs to its end
python benchmarks/strangers/run.py --collection "held out" --reference 5    # also with the rule `reference`

Each program runs in a new process with one thread. A fault counts as found if a rule that names its cause warns within 20 recorded
steps of the start of its effect, and its healthy twin has no such warning. Other warnings that the twin does not have are wrong causes.
A fault that does not change the final loss is no miss: it is counted separately. The loss is changed if the losses of all seeds of the
fault are above, or all below, those of its twin, by more than 5 percent of the twin's loss.

Do not change a rule because of a program of the collection `held out`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import signal
import sys
import traceback
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from registry import COLLECTIONS, EVERY, GROUPS, PARTS, PROGRAMS, RECORDING, WITHIN, Fault, Program, seed_of

from instrument import ConfigError, make_reference
from instrument.config.rules import RULES

MODULES = [module for modules in COLLECTIONS.values() for module in modules]
LIMIT = 60  # seconds; a program takes at most 10 on a machine without other work
REFERENCE_SEED = 100  # the first seed of the healthy trainings in a reference
LAST_LOSSES = 20  # the final loss is the mean of so many training losses, unless the program returns one

for module in MODULES:
    importlib.import_module(module)


@dataclass(frozen=True)
class Result:
    """A finished program.

    Attributes:
        name: The name of the program, or of the fault.
        seed: The seed.
        loss: The final loss; NaN if the program failed.
        losses: The training loss of each step.
        seconds: The processor time, with that of its processes.
        events: The warnings of the rules.
        error: The exception or the reason why it did not end; None if it ended.
        findings: The findings of rules.
    """

    name: str
    seed: int
    loss: float
    losses: Sequence[float]
    seconds: float
    events: Sequence[Mapping[str, Any]]
    error: str | None = None
    findings: Sequence[Mapping[str, Any]] = ()


def train(program: Program, fault: str, seed: int) -> Result:
    """Run a program in this process.

    Args:
        program: The program.
        fault: The name of its fault; empty for the healthy program.
        seed: The seed.
    """
    error = None
    loss = math.nan
    started = sum(os.times()[:4])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            seed_of(program.name, seed)
            final = program.train(fault)
        last = RECORDING.losses[-LAST_LOSSES:]
        loss = float(sum(last) / len(last) if final is None else final)
    except Exception:
        error = traceback.format_exc()
    seconds = sum(os.times()[:4]) - started
    name, events, findings = fault or program.name, RECORDING.events, RECORDING.findings
    return Result(name, seed, loss, RECORDING.losses, seconds, events, error, findings)


def _run(name: str, fault: str, seed: int, settings: Mapping[str, Any], writer: Any) -> None:
    os.setpgid(0, 0)  # so that a program with several processes can be ended as a whole
    torch.set_num_threads(1)
    vars(RECORDING).update(settings)
    writer.send(asdict(train(PROGRAMS[name], fault, seed)))


def run(job: tuple[Program, str, int], **settings: Any) -> Result:
    """Run a program in a new process.

    Args:
        job: The program, the name of its fault or an empty string, and the seed.
        settings: Attributes of `RECORDING`.
    """
    program, fault, seed = job
    context = get_context("forkserver")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(program.name, fault, seed, settings, writer))
    process.start()
    writer.close()
    failed = partial(Result, fault or program.name, seed, math.nan, (), 0.0, ())
    try:
        return Result(**reader.recv()) if reader.poll(LIMIT) else failed(f"not finished after {LIMIT} s")
    except EOFError:
        process.join()
        return failed(f"exit code {process.exitcode}")
    finally:
        if process.pid is not None and process.is_alive():
            process.join(2)
            with suppress(ProcessLookupError):  # it ended in the meantime
                os.killpg(process.pid, signal.SIGKILL)
            process.join()


def jobs_of(programs: Sequence[Program], only: Sequence[str], seeds: int) -> Iterator[tuple[Program, str, int]]:
    """Yield the runs of some programs: the healthy one and those of its faults.

    Args:
        programs: The programs.
        only: Parts of the names of the programs or faults to run; a fault runs with its twin.
        seeds: The number of seeds.
    """

    def chosen(name: str) -> bool:
        return any(part in name for part in only)

    for program in programs:
        faults = [fault.name for fault in program.faults if chosen(fault.name) or chosen(program.name)]
        if faults or chosen(program.name):
            yield from product([program], ["", *faults], range(seeds))


def references_of(names: Iterable[str], count: int, folder: Path, pool: ThreadPoolExecutor) -> dict[str, Path]:
    """Return a file for the rule `reference` of each program, if its healthy trainings make one."""
    jobs = [(PROGRAMS[name], "", REFERENCE_SEED + at) for name in names for at in range(count)]
    results = pool.map(lambda job: run(job, rules="default", out=folder / job[0].name / str(job[2])), jobs)
    errors = {result.name: result.error for result in results if result.error is not None}
    files = {name: folder / f"{name}.parquet" for name in names if name not in errors}
    for name in list(files):
        try:
            make_reference(folder / name, out=files[name])
        except ConfigError as error:
            del files[name]
            errors[name] = error.problems[0].message
    for name, error in errors.items():
        print(f"{name} is not judged with a reference: {error.strip().splitlines()[-1]}")
    return files


def names_cause(fault: Fault, event: Mapping[str, Any]) -> bool:
    """Return whether a warning is a correct diagnosis of a fault."""
    for cause in fault.causes:
        rule, _, pattern = cause.partition("@")
        if rule in ("", event["rule"]) and (not pattern or fnmatchcase(event["layer"] or "", pattern)):
            return True
    return False


def default_events(result: Result) -> list[Mapping[str, Any]]:
    """Return the warnings of the default rules."""
    return [event for event in result.events if event["rule"] != "reference"]


def outside(result: Result) -> Mapping[str, Any] | None:
    """Return the warning of the rule `reference`; None if the run stays within its reference."""
    return next((event for event in result.events if event["rule"] == "reference"), None)


def in_time(fault: Fault, event: Mapping[str, Any]) -> bool:
    """Return whether a warning is within 20 recorded steps of the start of the effect of a fault."""
    return bool(fault.since <= event["step"] <= fault.since + WITHIN * EVERY)


def judge(fault: Fault, result: Result, twin: Result) -> tuple[list[str], list[str]]:
    """Return the warnings that name the cause of a fault in time, and the rules that warn of something else.

    Warnings of the same rule at the same layer as in the twin count as neither.
    """
    same = {(event["rule"], event["layer"]) for event in twin.events}
    new = [event for event in default_events(result) if (event["rule"], event["layer"]) not in same]
    right = [
        f"{event['rule']} @ {event['layer'] or 'run'}"
        for event in new
        if names_cause(fault, event) and in_time(fault, event)
    ]
    return right, list(dict.fromkeys(event["rule"] for event in new if not names_cause(fault, event)))


def changes_loss(faulty: Sequence[Result], healthy: Sequence[Result]) -> bool:
    """Return whether a fault changes the final loss, over all seeds."""
    losses, base = [result.loss for result in faulty], [result.loss for result in healthy]
    if not all(map(math.isfinite, losses)):
        return True
    margin = 0.05 * abs(sum(base) / len(base))
    return min(losses) > max(base) + margin or max(losses) < min(base) - margin


Runs = Mapping[tuple[str, str], Sequence[Result]]  # the results of all seeds, by program and fault


def pairs_of(runs: Runs) -> Iterator[tuple[Program, Fault, list[tuple[Result, Result]]]]:
    """Yield each fault with its program, and for each seed its result and that of its twin, if both ended."""
    for (name, fault_name), results in runs.items():
        pairs = [(r, t) for r, t in zip(results, runs[name, ""], strict=True) if r.error is None and t.error is None]
        if fault_name and pairs:
            (fault,) = (fault for fault in PROGRAMS[name].faults if fault.name == fault_name)
            yield PROGRAMS[name], fault, pairs


def report_faults(runs: Runs) -> None:
    """Print which faults were found, and the sums of each group."""
    print("\n| group | fault | found | by | wrong causes | loss | loss of the twin |\n|---|---|---|---|---|---|---|")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong_rules: Counter[str] = Counter()
    for program, fault, pairs in pairs_of(runs):
        verdicts = [judge(fault, result, twin) for result, twin in pairs]
        found = sum(bool(right) for right, _ in verdicts)
        changed = changes_loss([result for result, _ in pairs], [twin for _, twin in pairs])
        wrong = Counter(rule for _, rules in verdicts for rule in rules)
        wrong_rules += wrong
        for key in (program.group, "all"):
            counts[key].update(runs=len(pairs), found=found, wrong=sum(bool(rules) for _, rules in verdicts))
            counts[key].update(changed=changed * len(pairs), found_of_changed=changed * found)
        by = ", ".join(dict.fromkeys(right[0] for right, _ in verdicts if right))
        losses = [sum(pair[side].loss for pair in pairs) / len(pairs) for side in (0, 1)]
        print(
            f"| {program.group} | {fault.name} ({program.name}) | {found} of {len(pairs)} | {by} | {', '.join(wrong)} "
            f"| {losses[0]:.4g}{'' if changed else ' (not changed)'} | {losses[1]:.4g} |"
        )
    print("\n| group | faults found | of those that change the loss | with a wrong cause |\n|---|---|---|---|")
    for key in [group for group in (*GROUPS, "all") if group in counts]:
        count = counts[key]
        print(
            f"| {key} | {count['found']} of {count['runs']} | {count['found_of_changed']} of {count['changed']} "
            f"| {count['wrong']} of {count['runs']} |"
        )
    print("\nWrong causes:", _numbers(wrong_rules))


def part_of(finding: Mapping[str, Any]) -> str:
    """Return the part of a training step that left the reference first, according to the advice of its finding; empty if it names none."""
    parts = (part for part, text in RULES["reference"].advice_in.items() if text == finding["advice"])
    return next(parts, "")


def names_place(fault: Fault, finding: Mapping[str, Any], event: Mapping[str, Any]) -> bool:
    """Return whether a finding of the rule `reference` has the layer of a fault, or the part of a training step that it affects first.

    Operators that follow the last layers with parameters are of the forward pass or of the loss.
    """
    patterns = [pattern for cause in fault.causes if (pattern := cause.partition("@")[2])]
    is_there = any(fnmatchcase(finding["layer"] or "", pattern) for pattern in patterns)
    parts = {part_of(finding)} | ({"forward"} if ": loss." in event["message"] else set())
    return is_there or not parts.isdisjoint(PARTS.get(fault.category, ("forward",)))


def report_reference(runs: Runs) -> None:
    """Print which faults that change the loss, and which healthy programs, leave the reference, and in which part of a step first."""
    print("\n| group | fault that changes the loss | in time | of the twin | part | right place | rule `reference` |")
    print("|---|---|---|---|---|---|---|")
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for program, fault, pairs in pairs_of(runs):
        for result, twin in pairs if changes_loss(*zip(*pairs, strict=True)) else ():
            event, of_twin = outside(result), outside(twin)
            is_timely = event is not None and in_time(fault, event)
            found = bool(judge(fault, result, twin)[0])
            finding = next((each for each in result.findings if each["rule"] == "reference"), None)
            is_right = event is not None and is_timely and finding is not None and names_place(fault, finding, event)
            for key in (program.group, "all"):
                counts[key].update(faults=1, found=found, timely=is_timely, right=is_right, either=found or is_right)
            what = "" if event is None else event["message"]
            print(
                f"| {program.group} | {fault.name} ({program.name}) | {is_timely} | {of_twin is not None} "
                f"| {part_of(finding) if finding else ''} | {is_right} | {what} |"
            )
    names = ("faults", "found", "timely", "right", "either")
    print(
        "\n| group | faults that change the loss | default rules | outside in time | at the right place | either is right |"
    )
    print("|---|---|---|---|---|---|")
    for key in [group for group in (*GROUPS, "all") if group in counts]:
        print(f"| {key} | {' | '.join(str(counts[key][name]) for name in names)} |")
    healthy = [each for (_, fault), results in runs.items() if not fault for each in results if each.error is None]
    events = [(each.name, event["message"]) for each in healthy if (event := outside(each)) is not None]
    print(f"\nHealthy programs outside of the reference: {len(events)} of {len(healthy)}")
    for name, message in events:
        print(f"    {name}: {message}")


def report_healthy(runs: Runs) -> None:
    """Print which rules warn in healthy programs."""
    results = [(name, result) for (name, fault), group in runs.items() if not fault for result in group]
    healthy = [(name, result) for name, result in results if result.error is None]
    warned = [(name, rules) for name, each in healthy if (rules := Counter(e["rule"] for e in default_events(each)))]
    print(f"\nHealthy programs with a warning: {len(warned)} of {len(healthy)}")
    print("Of these, by rule:", _numbers(Counter(rule for _, rules in warned for rule in rules)))
    print("\n| group | healthy program | warnings |\n|---|---|---|")
    for name, rules in warned:
        print(f"| {PROGRAMS[name].group} | {name} | {_numbers(rules)} |")


def _numbers(rules: Counter[str]) -> str:
    return ", ".join(f"{rule} ({number})" for rule, number in rules.most_common()) or "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collection", choices=tuple(COLLECTIONS), default="build")
    parser.add_argument("--seeds", type=int, default=1, help="the number of seeds")
    parser.add_argument(
        "--only", nargs="+", default=[""], help="only programs and faults whose name contains one of these"
    )
    judged = parser.add_mutually_exclusive_group()
    judged.add_argument("--no-rules", action="store_true", help="only losses, without rules")
    judged.add_argument("--reference", type=int, default=0, metavar="N", help="also the rule reference, of N trainings")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=1, help="programs that run at the same time")
    parser.add_argument("--out", type=Path, default="outputs/strangers.json", help="a JSON file for the results")
    arguments = parser.parse_args()
    programs = [program for program in PROGRAMS.values() if program.collection == arguments.collection]
    jobs = list(jobs_of(programs, arguments.only, arguments.seeds))
    # The server from which the programs are forked imports the modules of this folder, with PyTorch.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path[1:]])
    get_context("forkserver").set_forkserver_preload(MODULES)
    results = []
    names = list(dict.fromkeys(program.name for program, *_ in jobs)) if arguments.reference else []
    with TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.processes) as pool:
        references = references_of(names, arguments.reference, Path(folder), pool)
        rules = {name: {"reference": {"rule": "reference", "from": str(file)}} for name, file in references.items()}
        default = None if arguments.no_rules else "default"
        for result in pool.map(lambda job: run(job, rules=rules.get(job[0].name, default)), jobs):
            results.append(result)
            state = "failed" if result.error else f"loss {result.loss:.4g}, {len(result.losses)} steps"
            print(f"{result.name}, seed {result.seed}: {state}, {result.seconds:.1f} s", file=sys.stderr, flush=True)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps([asdict(result) for result in results], indent=1))
    runs = defaultdict(list)
    for (program, fault, _), result in zip(jobs, results, strict=True):
        runs[program.name, fault].append(result)
    if not arguments.no_rules:
        report_faults(runs)
        report_healthy(runs)
    if references:
        report_reference({key: results for key, results in runs.items() if key[0] in references})
    failed = [result for result in results if result.error is not None]
    print(f"\nPrograms that failed: {len(failed)} of {len(results)}")
    for result in failed:
        print(f"    {result.name}, seed {result.seed}: {(result.error or '').strip().splitlines()[-1]}")
    print(f"Processor time: {sum(result.seconds for result in results):.0f} s")


if __name__ == "__main__":
    main()
