"""Checks of rules against the hooks of a run, before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from ..config.hook_specs import HookSpec, RecordSpec
from ..config.rules import RULES, CustomRule, DisableAction, EnableAction, PersistentRule, RuleBase, WatchRule
from ..config.schedule import STEP_PHASES
from ..errors import Problem, raise_problems, similar_names
from ..formatting import shorten
from ..tables.schemas import TABLES, joined_table
from ..tables.statistics import STATISTICS
from .loss_spike import LossSpikeRule
from .non_finite import NonFinite
from .reference import ReferenceRule
from .reference_ranges import METRICS
from .rule import CatalogueRule, LocatedRule
from .rule_set import make_rule
from .step_rows import Location


def check_rules(
    rules: Mapping[str, RuleBase],
    hooks: Mapping[str, HookSpec],
    *,
    has_targets: bool = True,
    evaluations: int | None = None,
    steps: int | None = None,
) -> None:
    """Check that the hooks record what the rules read, and that the rules can fire.

    A rule that is optional may be inactive.

    Args:
        has_targets: Whether the table `samples` has rows.
        evaluations: The number of evaluations; None if it is unknown.
        steps: The number of steps; None if it is unknown.

    Raises:
        ConfigError: A rule names a hook that does not exist, or any hook although it reads none, watches a statistic that no hook
            records, watches only hooks that it turns on itself, or requires more steps or evaluations than the run has.
    """
    problems = [problem for name, rule in rules.items() for problem in _name_problems(f"rules.{name}", rule, hooks)]
    problems += [
        Problem(f"hooks.{name}.when", "no rule has this name", spec.when, tuple(rules), similar_names(spec.when, rules))
        for name, spec in hooks.items()
        if isinstance(spec.when, str) and spec.when not in rules
    ]
    raise_problems(problems)
    followed = {spec.when for spec in hooks.values()}
    required = {name: rule for name, rule in rules.items() if not rule.is_optional or name in followed}
    read = {name: hooks_read(rule, hooks) for name, rule in required.items()}
    for name, rule in required.items():
        problems += _count_problems(
            f"rules.{name}", rule, has_targets=has_targets, evaluations=evaluations, steps=steps
        )
        problems += _record_problems(f"rules.{name}", rule, hooks, read[name], steps)
    problems += _cycle_problems(required, hooks, {name: names for name, names in read.items() if names})
    raise_problems(problems)


def check_references(
    rules: Mapping[str, RuleBase], hooks: Mapping[str, HookSpec], layers: Iterable[tuple[str, str]]
) -> None:
    """Check that references concern what the hooks of a model record, given the hook and the layer of each site.

    Raises:
        ConfigError: A reference has no layer of the hooks, or none of its hooks records a statistic that its rule names.
    """
    problems: list[Problem] = []
    sites = {*layers}
    for name, rule in rules.items():
        if not isinstance(rule, ReferenceRule) or rule.is_optional:
            continue
        known = {(hook, layer) for hook, layer, *_ in rule.reference.locations}
        common = {hook for hook, _ in known & sites if not rule.hook or hook in rule.hook}
        if known and not common:
            problems.append(_foreign_reference(f"rules.{name}.from", rule, known))
            continue
        read = [spec for hook in common if isinstance(spec := hooks[hook], RecordSpec)]
        recorded = {
            each for spec in read for each in (*spec.statistics, *(own.column for own in spec.custom_statistics))
        }
        for statistic in rule.stats or rule.reference.statistics if known else ():
            if statistic not in recorded.union(METRICS) and (
                rule.stats or recorded.isdisjoint(rule.reference.statistics)
            ):
                message = f"the hooks of the reference do not record it: {', '.join(sorted(common))}"
                fix = f"add {statistic} to hooks.{min(common)}.stats"
                problems.append(Problem(f"rules.{name}.stats", message, statistic, sorted(recorded), fix=fix))
    raise_problems(problems)


def _foreign_reference(where: str, rule: ReferenceRule, known: Collection[tuple[str, str]]) -> Problem:
    message = "the hooks record no layer of the reference"
    fix = f"record with its hooks ({', '.join(sorted({hook for hook, _ in known}))}), or make a reference of runs of this model"
    allowed = shorten(sorted(f"{layer or '.'} ({hook})" for hook, layer in known))
    return Problem(where, message, list(rule.from_), f"recorded are {allowed}", fix=fix)


def turned_on_by_rules(rules: Mapping[str, RuleBase], hooks: Mapping[str, HookSpec]) -> frozenset[str]:
    """Return the hooks that are off until one of these rules turns them on."""
    actions = (action for rule in rules.values() for action in rule.actions)
    enabled = {action.enable for action in actions if isinstance(action, EnableAction)}
    return frozenset(enabled | {name for name, spec in hooks.items() if spec.follows in rules})


def writes_kept_tensors(rule: str, rules: Mapping[str, RuleBase], spec: HookSpec) -> bool:
    """Return whether a rule makes a hook with `keep` write its tensors."""
    if not isinstance(spec, RecordSpec) or spec.keep is None:
        return False
    return spec.when == rule if spec.when is not None else isinstance(rules[rule], NonFinite.fields)


def _name_problems(where: str, rule: RuleBase, hooks: Mapping[str, HookSpec]) -> Iterator[Problem]:
    named = [("hook", name) for name in rule.hook]
    if isinstance(rule, WatchRule) and not rule.is_of_metrics:
        named += [("watch", name) for name in rule.watch]
    for action in rule.actions:
        if isinstance(action, EnableAction | DisableAction):
            named.append(("then", action.enable if isinstance(action, EnableAction) else action.disable))
    kind = RULES[str(rule.rule)] if hasattr(rule, "rule") else None
    if rule.hook and (isinstance(rule, CustomRule) or (kind is not None and not issubclass(kind, LocatedRule))):
        message = "a custom rule gets the rows of all hooks" if kind is None else "the rule reads no rows of hooks"
        fix = "select rows in its method update" if kind is None else "remove 'hook'"
        yield Problem(f"{where}.hook", message, [*rule.hook], fix=fix)
        return
    for field, name in named:
        if name not in hooks:
            allowed = [*hooks, *(["metrics"] if field == "watch" else [])]
            yield Problem(f"{where}.{field}", "no hook has this name", name, allowed, similar_names(name, allowed))


def hooks_read(rule: RuleBase, hooks: Mapping[str, HookSpec]) -> list[str] | None:
    """Return the hooks whose rows a rule reads; None if it does not read statistics of tensors."""
    if isinstance(rule, CustomRule | ReferenceRule):  # see `check_references`
        return None
    made = make_rule(rule)
    if not isinstance(made, LocatedRule) and not (
        isinstance(made, CatalogueRule) and made.relation and made.statistics
    ):
        return None
    return [name for name, spec in _candidates(made, hooks).items() if {*made.statistics} <= spec.readable]


def _candidates(rule: CatalogueRule[RuleBase], hooks: Mapping[str, HookSpec]) -> dict[str, RecordSpec]:
    """Return the record hooks at the tensors that a rule reads, also those without its statistics."""
    return {
        name: spec
        for name, spec in hooks.items()
        if isinstance(spec, RecordSpec)
        and any(
            rule.reads(at := Location(name, "", module_type, spec.kind, spec.tensor_role, "weight", spec.phase))
            and rule.selects(at)
            for module_type in ("Linear", "Softmax")
        )
    }


def _count_problems(
    where: str, rule: RuleBase, *, has_targets: bool, evaluations: int | None, steps: int | None
) -> Iterator[Problem]:
    source = RULES[str(rule.rule)].source if hasattr(rule, "rule") else "steps"
    if source == "targets" and not has_targets:
        fix = "set data.ids=all, or 'tensors: true' in a record hook"
        yield Problem(where, "no targets of samples are recorded, which the rule reads", fix=fix)
    count = evaluations if source == "evaluations" else None
    if isinstance(rule, PersistentRule) and count is not None and count < rule.for_:
        message = f"cannot be reached: the run has {evaluations} evaluations"
        yield Problem(f"{where}.for", message, rule.for_, fix="set train.eval_every to a smaller number")
    if isinstance(rule, LossSpikeRule) and steps is not None and steps <= rule.after:
        message = f"cannot be reached: the run has {steps} steps"
        yield Problem(f"{where}.after", message, rule.after, fix="reduce 'after'")


def _record_problems(
    where: str, rule: RuleBase, hooks: Mapping[str, HookSpec], read: list[str] | None, steps: int | None
) -> Iterator[Problem]:
    if read is None:
        return
    if not read:
        yield _unrecorded(where, rule, hooks)
    elif isinstance(rule, PersistentRule) and steps is not None:
        schedules = {name: hooks[name].schedule for name in read}
        counted = all(schedule.phase in STEP_PHASES for schedule in schedules.values())
        most = max(len(schedule.steps_in(range(steps))) for schedule in schedules.values())
        if counted and most < rule.for_:
            message = f"cannot be reached: {', '.join(map(repr, read))} record at {most} of the {steps} steps"
            yield Problem(f"{where}.for", message, rule.for_, fix="reduce 'for', or 'every' of the hook")


def _unrecorded(where: str, rule: RuleBase, hooks: Mapping[str, HookSpec]) -> Problem:
    """Return the problem that no hook records what a rule reads, with the hook and the field to add."""
    made = make_rule(rule)
    assert isinstance(made, CatalogueRule), "only these rules read statistics of tensors"
    statistics = ", ".join(made.statistics)
    message = f"no hook records what the rule reads: {statistics}"
    candidates = _candidates(made, hooks)
    if candidates:
        name, spec = next(iter(candidates.items()))
        missing = [each for each in made.statistics if each not in spec.readable]
        if (table := joined_table(missing[0])) is not None:
            field = next(iter(TABLES[table].fields))
            return Problem(
                where, message, fix=f"set {field} in hooks.{name}, next to a statistic, such as stats: [rms]"
            )
        fix = f"add {', '.join(missing)} to hooks.{name}.stats, such as stats: [default, {', '.join(missing)}]"
        if isinstance(rule, WatchRule):
            recorded = sorted({each for spec in candidates.values() for each in spec.readable})
            similar = similar_names(rule.stat, recorded)
            is_misspelled = bool(similar) and rule.stat not in STATISTICS
            return Problem(f"{where}.stat", message, rule.stat, recorded, similar, fix="" if is_misspelled else fix)
    elif isinstance(rule, WatchRule):
        fix = f"set action: record and stats: [{statistics}] in hooks.{rule.watch[0]}"
    else:
        fix = f"add a hook that records {made.requires}"
    return Problem(where, message, fix=fix)


def _cycle_problems(
    rules: Mapping[str, RuleBase], hooks: Mapping[str, HookSpec], read: Mapping[str, list[str]]
) -> Iterator[Problem]:
    """Yield a problem for each rule that reads only hooks that are off until it, or a rule like it, fires."""
    waiting = {name: names for name, names in read.items() if {*names} <= turned_on_by_rules(rules, hooks)}
    while waiting:
        others = {name: rule for name, rule in rules.items() if name not in waiting}
        ready = [name for name, names in waiting.items() if {*names} & turned_on_by_rules(others, hooks)]
        if not ready:
            break
        for name in ready:
            del waiting[name]
    for name, names in waiting.items():
        message = "can never fire: it reads only hooks that are off until it fires"
        yield Problem(
            f"rules.{name}", message, names, fix="read another hook, or remove 'enable' or 'when' of these hooks"
        )
