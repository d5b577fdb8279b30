"""`python -m instrument.reference`: make, show and use a reference, which has the ranges of statistics in healthy runs.

`make RUNS... --out FILE` computes it from healthy runs. `show FILE` prints its ranges. `check RUN --reference FILE` passes the rows of
a run to the rule `reference`.

Exit codes: 0, done, or the run stays within the reference; 1, a file of the run cannot be read; 2, the arguments are invalid, or the
run has nothing in common with the reference; 4, the run leaves the reference, or the optimizer does not hold
the model or a new module and nothing else changes it.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from instrument.analysis.load import load
from instrument.analysis.reference import make_reference, ranges_of, read_reference
from instrument.commands.findings import check, print_findings
from instrument.commands.verbs import add_json, parser_of, print_json, with_arguments
from instrument.errors import ConfigError, InstrumentWarning, Problem, similar_names
from instrument.fields.globs import matches
from instrument.formatting import shorten
from instrument.rules.reference_ranges import KEY, RATIOS, STARTS, Reference, phase_of, steps_of
from instrument.rules.step_rows import location_label, location_name


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("reference")
    verbs = parser.add_subparsers(dest="command", required=True, metavar="make | show | check")
    make = verbs.add_parser("make", help="compute a reference from healthy runs")
    make.add_argument("runs", metavar="RUNS", nargs="+", help="runs, folders of runs such as a sweep, or patterns")
    make.add_argument("--out", metavar="FILE", type=Path, required=True, help="the file to write")
    text = "statistics, also custom ones, and metrics"
    make.add_argument("--stats", metavar="NAME", nargs="+", default=[], help=text)
    show = verbs.add_parser("show", help="print the ranges of a reference")
    show.add_argument("file", metavar="FILE", help="the reference")
    show.add_argument("--layer", metavar="GLOB", help="only these layers")
    checked = verbs.add_parser("check", help="check whether a run stays within a reference")
    checked.add_argument("run", metavar="RUN", help="the folder or the remote address of a run")
    checked.add_argument("--reference", metavar="FILE", required=True, help="the reference, or healthy runs")
    checked.add_argument("--margin", metavar="X", type=float, default=1.0, help="how many times the margin is used")
    add_json(show)
    add_json(checked)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if args.command == "make":
        reference = make_reference(args.runs, args.stats, out=args.out)
        print(f"{args.out}: {_summary(reference)} ({args.out.stat().st_size / 1e3:.0f} kB)")
        return 0
    if args.command == "show":
        show(read_reference([args.file], where="FILE"), args.layer, as_json=args.json)
        return 0
    return check_run(args.run, args.reference, args.margin, as_json=args.json)


def show(reference: Reference, layer: str | None, *, as_json: bool) -> None:
    """Print the ranges of a reference and their margins. The text has the first, middle and last phase of training, the JSON all.

    Without a pattern of layers, the text has the ranges of metrics, and the layers and statistics of each hook.
    In the JSON, `low` and `high` are the bounds of the rule: the smallest and the largest value of the healthy runs, with the margin.
    """
    rows = list(_ranges(reference, layer))
    if layer is not None and not rows:
        names = [*dict.fromkeys(name or "." for _, name, *_ in reference.locations)]
        message = "this pattern matches no layer of the reference"
        raise ConfigError(Problem("--layer", message, layer, shorten(names), similar_names(layer, names)))
    if as_json:
        print_json({**reference.about, "statistics": reference.statistics, "ranges": rows})
        return
    print(_summary(reference))
    for name, value in (("runs", reference.about["runs"]), ("versions", reference.about["versions"])):
        print(f"{name}: {shorten([f'{key} {value[key]}' for key in value] if isinstance(value, dict) else value)}")
    for row in rows:
        if layer is None and row["hook"]:
            continue
        phases = row["phases"]
        shown = dict.fromkeys((0, len(phases) // 2, len(phases) - 1))
        ranges = [_shown_range(row["statistic"], **phases[at]) for at in shown]
        name = location_name(row["layer"], row["path"], row["kind"])
        location = f"{name} {row['role']} ({row['hook']})" if row["hook"] else row["phase"]
        print(f"{location} {row['statistic']}: {', '.join(ranges)}")
    located = [row for row in rows if layer is None and row["hook"]]
    for tensor in dict.fromkeys((row["hook"], row["role"], row["phase"]) for row in located):
        own = [row for row in located if (row["hook"], row["role"], row["phase"]) == tensor]
        layers, statistics = (list(dict.fromkeys(row[name] or "." for row in own)) for name in ("layer", "statistic"))
        print(f"{location_label(shorten(layers), tensor[1], tensor[0], tensor[2])}: {', '.join(statistics)}")
    if located:
        print(f"{len(located)} ranges of layers: --layer GLOB prints those of some, --layer '**' all")


def _ranges(reference: Reference, layer: str | None) -> Iterator[dict[str, Any]]:
    """Yield the ranges of each location and statistic, one for each phase of training. A phase starts at its `step`."""
    bounds = dict(zip(("low", "high"), reference.limits(reference.statistics, 1.0), strict=True))
    bounds |= zip(("smallest", "largest"), reference.limits(reference.statistics, 0.0), strict=True)
    for key, at in reference.index.items():
        location = dict(zip(KEY, key, strict=True))
        if layer is not None and not matches(layer, location["layer"]):
            continue
        for number, statistic in enumerate(reference.statistics):
            own = {name: values[at, number] for name, values in bounds.items()}
            known = (own["high"] < float("inf")).nonzero()[0]
            phases = [{"step": int(STARTS[each]), **{name: own[name][each] for name in own}} for each in known]
            if phases:
                yield {**location, "statistic": statistic, "phases": phases}


def _shown_range(statistic: str, step: int, low: float, high: float, smallest: float, largest: float) -> str:  # noqa: ARG001
    is_factor = statistic in RATIOS and largest > 0
    margin = f"a factor of {high / largest:.3g}" if is_factor else f"{high - largest:.3g}"
    return f"step {step}: {smallest:.3g} to {largest:.3g} (margin {margin})"


def check_run(path: str, reference: str, margin: float, *, as_json: bool) -> int:
    """Print the locations at which a run leaves a reference, and return the exit code."""
    run = load(path)
    with warnings.catch_warnings(action="ignore", category=InstrumentWarning):  # the rule reads it again
        ranges = read_reference([reference], where="--reference")
    fired = check(run, {"reference": {"rule": "reference", "from": reference, "margin": margin}})
    of_run = ranges_of(run, ranges.statistics)
    recorded = {*zip(*(of_run[name].to_pylist() for name in KEY), strict=True)}
    known = ranges.locations or list(ranges.index)
    missing = [key for key in known if key not in recorded]
    located = ((key[0] or key[-1], location_name(key[1], key[4], key[2]) if key[0] else "metrics") for key in missing)
    names = shorten(list(dict.fromkeys(f"{name} ({of})" for of, name in located)))
    if len(missing) == len(known):
        message = "the run recorded no location of the reference"
        fix = "compare runs of the same model, recorded with hooks of the same names"
        raise ConfigError(Problem("--reference", message, reference, names, fix=fix))
    out, last = sys.stderr if as_json else sys.stdout, ranges.about["last_step"]
    if missing:
        print(f"{len(missing)} of {len(known)} locations of the reference were not recorded: {names}", file=out)
    if max(of_run["phase_of_training"].to_pylist()) > (phase := phase_of(last)):
        steps = steps_of(phase)
        reason = f"the reference ends at step {last}, in the phase of the steps {steps[0]} to {steps[-1]}"
        print(f"steps after {steps[-1]} were not compared: {reason}", file=out)
    return print_findings(fired, run, as_json=as_json, otherwise=f"nothing outside of {reference}")


def _summary(reference: Reference) -> str:
    runs, last = len(reference.about["runs"]), reference.about["last_step"]
    statistics = ", ".join(reference.statistics)
    settings = sum(map(len, reference.settings.values()))
    sizes = f"{len(reference.locations)} locations, {settings} settings"
    return f"{runs} run{'s' * (runs > 1)}, steps 0 to {last}, {sizes}, {statistics}"


if __name__ == "__main__":
    sys.exit(main())
