"""`python -m instrument.findings RUN`: pass the rows of a run to its rules, and print what they find.

The decisions are those of the run. A run without rules is checked with the default rules. The rows are read again; only the
events of custom rules are taken from the run, since their code is not run.

Exit codes: 0, no rule fires; 1, the run, or a file of it, cannot be read, and no rule fires; 2, the arguments are invalid; 4, a rule
fires, or the optimizer does not hold the model or a new module and nothing else changes it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from instrument.analysis.config_comparison import rules_of
from instrument.analysis.diagnosis import Finding, diagnoses, findings_of
from instrument.analysis.findings import layers_of, not_fired, not_trained, recorded_events
from instrument.analysis.load import Run, load
from instrument.analysis.rule_events import rule_events
from instrument.commands.verbs import add_json, parser_of, print_json, with_arguments
from instrument.config.parse import parse_rules
from instrument.config.rules import default_rules
from instrument.rules.rule_set import reference_file

FIRED = 4


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("findings")
    parser.add_argument("run", metavar="RUN", help="the folder or the remote address of a run")
    add_json(parser)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    run = load(args.run)
    return print_findings(check(run), run, as_json=args.json)


def print_findings(fired: Sequence[Finding], run: Run, *, as_json: bool, otherwise: str = "no rule fired") -> int:
    """Print the findings of the rules, what is not trained, and the hooks that did not fire. Return the exit code."""
    untrained = list(not_trained(run))
    others = [*untrained, *not_fired(run)]
    code = FIRED if fired or untrained else int(bool(run.problems))
    if as_json:
        print_json([*fired, *others])
        return code
    for diagnosis in diagnoses(fired):
        _print(diagnosis.lead)
        for finding in diagnosis.consequences:
            print(f"{finding.severity:<8} consequence: {_line(finding)}")
    for finding in others:
        _print(finding)
    found = f"{len(fired)} finding{'s' * (len(fired) > 1)} of rules" if fired else otherwise
    unread, partly = ", of which some files cannot be read", "; not all of the model is trained"
    status = "" if run.info["status"] == "done" else f"; the status of the run is {run.info['status']}"
    print(f"{found} in {run.path}{unread * bool(run.problems)}{partly * bool(untrained)}{status}")
    return code


def _print(finding: Finding) -> None:
    print(f"{finding.severity:<8} {_line(finding)}")
    if finding.advice:
        print(f"{'':<8} {finding.advice}")


def _line(finding: Finding) -> str:
    step = "" if finding.step is None else f"step {finding.step}: "
    return f"{finding.what}: {step}{finding.where}: {finding.value}"


def check(run: Run, rules: Mapping[str, Any] | None = None) -> list[Finding]:
    """Pass the rows of a single run to rules, by default its own, and return what they find."""
    run.check_single("RUN")
    rules = rules or rules_of(run.info) or default_rules()
    custom = {name for name, entry in rules.items() if isinstance(entry, Mapping) and "_target_" in entry}
    again = parse_rules({name: _again(run, name, entry) for name, entry in rules.items() if name not in custom})
    events = [*rule_events(run, again), *recorded_events(run, custom)]
    return findings_of(events, rules, run.info, layers_of(run))


def _again(run: Run, name: str, entry: Any) -> Any:
    """Return a rule of the same severity without its calls, which are not repeated, with the reference that it read live."""
    if not isinstance(entry, Mapping):
        return entry
    then = entry.get("then", "warn")
    actions = [then] if isinstance(then, str | Mapping) else then
    again = {**entry, "then": [each for each in actions if isinstance(each, str)] or "checkpoint"}
    if "from" in again and (copy := run.path / reference_file(name)).is_file():
        again["from"] = str(copy)
    return again


if __name__ == "__main__":
    sys.exit(main())
