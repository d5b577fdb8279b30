"""What the rules of a run found, grouped by cause: the first problem leads, and its consequences follow.

The order of causes follows published tools: DeepLocalize (Wardat et al. 2021, https://arxiv.org/abs/2103.03376) reports the first
layer whose values are wrong, forward or backward; UMLAUT (Schoop et al. 2021, https://doi.org/10.1145/3411764.3445538) separates checks of
the program and its data from those of the behavior of the model; AutoTrainer (Zhang et al., ICSE 2021) distinguishes vanishing and
exploding gradients, dead units, and losses that oscillate or hardly decrease.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

from ..config.rules import RULES
from ..rules.loss_spike import LATER
from ..rules.non_finite import LOSS_NOT_FINITE
from ..rules.reference import NEW_PARAMETER, OF_GRADIENTS, OTHER_COUNTS, OTHER_SETTING
from ..rules.reference_ranges import MEAN_LOSS, METRICS
from ..rules.rule import CAUSES, CatalogueRule, Part, Stage
from ..rules.rule_set import RuleEvent
from ..rules.step_rows import hook_and_role, is_gradient
from ..rules.watch import ADVICE as WATCH_ADVICE
from ..tables.statistics import ALL
from .config_comparison import hooks_of
from .plot_data import in_forward_order, rank_in

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
FAR = 1000
"""The number of steps without a problem after which the next one has another cause: the time constant of the second moment of Adam,
1 / (1 - 0.999)."""
PARTS: tuple[Part, ...] = get_args(Part)
FORWARD, LOSS, BACKWARD, UPDATE = range(len(PARTS))
IS_TARGET = re.compile(r"\.\[(.*[._])?(label|target)s?(\..*)?\] input ")
"""The label of a location that is an argument of the model with the targets, as the models of transformers and torchvision have one."""
IS_LOSS = re.compile(r".*( loss |\[loss\] output )")
"""The label of a location that is a loss, also one that a model returns."""
INDICES = "EmbeddingBackward0.indices"
PARTS_OF_METRICS = {"grad_norm": BACKWARD, "lr": UPDATE, INDICES: FORWARD}
LATE: Mapping[Stage | None, int] = {"non_finite": 2, "learning": 3}
"""The order of the stages that come last. Their problems cause no problem of an earlier stage."""
TRAINING = "training"
"""Where a problem is that concerns the run as a whole."""
MAX_NAMED = 4  # consequences in a sentence


@dataclass(frozen=True)
class Finding:
    """One observation about a run.

    Attributes:
        step: The step; None if the observation is about the run as a whole.
        severity: `info`, `warning`, or `error` if the training is unusable.
        number: The value as a number, if it is numeric.
        advice: What to do next, in one sentence; empty for an observation that is not a problem.
        rule: The name of the rule; empty for an observation without a rule.
        cause: The name of the rule of which this is a consequence; empty for a problem without a known cause.
        statistic: The statistic or the metric that the rule reads; empty if a single one does not show the problem.
        threshold: The threshold of `statistic`; None if the rule has none.
        layer: The name of the module; None for the run as a whole and for several modules.
        hook: The name of the hook; empty for the run as a whole and for a module as a whole.
        role: The role of the tensor, such as `output`; empty without a tensor.
    """

    what: str
    where: str
    step: int | None
    value: str
    severity: Severity = "info"
    number: float | None = None
    advice: str = ""
    rule: str = ""
    cause: str = ""
    statistic: str = ""
    threshold: float | None = None
    layer: str | None = None
    hook: str = ""
    role: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """A problem without a known cause, and its consequences in the order in which they began.

    Its text is one sentence, such as `Input not normalized in linear0 input (inputs) at step 0: std 96, above 10; 2 consequences:
    loss spike at step 4, dead units at step 50.`
    """

    lead: Finding
    consequences: tuple[Finding, ...]

    def __str__(self) -> str:
        return f"{self.title}: {self.lead.value}{self.summary and f'; {self.summary}'}."

    @property
    def title(self) -> str:
        """What is wrong, where and when."""
        where = "" if self.lead.where == TRAINING else f" in {self.lead.where}"
        return f"{self.lead.what[0].upper()}{self.lead.what[1:]}{where} at step {self.lead.step:,}"

    @property
    def summary(self) -> str:
        """The consequences in words; empty if there are none."""
        count = len(self.consequences)
        named = ", ".join(f"{each.what} at step {each.step:,}" for each in self.consequences[:MAX_NAMED])
        more = f" and {count - MAX_NAMED} more" if count > MAX_NAMED else ""
        return f"{count} consequence{'s' * (count > 1)}: {named}{more}" if count else ""

    @property
    def severity(self) -> Severity:
        """The severity of the most severe of its findings."""
        return min((each.severity for each in (self.lead, *self.consequences)), key=SEVERITIES.index)


def diagnoses(findings: Iterable[Finding]) -> list[Diagnosis]:
    """Return the findings of rules as diagnoses, in their order: the first one is the most important."""
    groups: list[list[Finding]] = []
    for finding in findings:
        if finding.rule and not finding.cause:
            groups.append([finding])
        elif finding.rule:
            groups[-1].append(finding)
    return [Diagnosis(group[0], tuple(group[1:])) for group in groups]


def findings_of(
    events: Sequence[RuleEvent], rules: Mapping[str, Any], info: Mapping[str, Any], layers: Sequence[str]
) -> list[Finding]:
    """Return one finding for each rule that fired and each cause: its first event, and how many more there are.

    A problem with consequences is followed by them. Causes with an error come first, then those that began first.

    Args:
        events: Events of rules. Notes, which have no value, do not count.
        rules: The entries of the rules in the configuration.
        info: The content of run.json.
        layers: The names of the modules in the order of the table `layers`.
    """
    facts = _facts(rules, info)
    timeline = _Timeline(facts, info, layers)
    found: dict[_Key, dict[_Key, list[RuleEvent]]] = {}  # events of each finding by the leading finding
    for episode in timeline.episodes(events):
        for key, lead in timeline.leads(episode).items():
            found.setdefault(lead, {}).setdefault(key, []).extend(episode[key])
    warns = {(event.rule, event.location is None) for event in events if event.severity == "warning"}
    groups = []
    for lead, members in found.items():
        made = [
            _finding(events, facts.get(key[0], NO_FACTS), key in warns, timeline.part(events))
            for key, events in members.items()
        ]
        first, *others = (events[0] for events in members.values())
        if any(each.step < first.step for each in others):
            began = timeline.began(members[lead])
            made[0] = replace(made[0], value=f"{made[0].value}; it can have begun at step {began:,}")
        groups.append(Diagnosis(made[0], tuple(replace(each, cause=lead[0]) for each in made[1:])))
    groups.sort(key=lambda group: SEVERITIES.index(group.severity))
    return [finding for group in groups for finding in (group.lead, *group.consequences)]


def _finding(events: Sequence[RuleEvent], facts: RuleFacts, warns: bool, part: Part) -> Finding:
    event = events[0]
    what, _, value = event.message.split(": ", 2)
    first = _first_word(event)  # a rule of several statistics names the one that shows the problem first
    first = "" if what.startswith(OTHER_SETTING) else "loss" if first == MEAN_LOSS else first
    count = len(events) - 1
    more = f" ({count} more event{'s' * (count > 1)})" if count else ""
    hook, role = hook_and_role(event.location) if event.location else ("", "")
    statistic = facts.statistic if event.location or facts.is_of_metric else "loss"
    known = ALL if event.location else METRICS
    return Finding(
        what,
        event.location or event.layer or TRAINING,
        event.step,
        f"{value}{more}",
        severity_of(what, warns),
        event.value,
        facts.advice_in.get(part, facts.advice),
        event.rule,
        statistic=statistic or (first if facts.has_threshold and first in known else ""),
        threshold=event.threshold if facts.has_threshold else None,
        layer=event.layer,
        hook=hook,
        role=role,
    )


def _earliest(events: Sequence[RuleEvent]) -> RuleEvent:
    return min(events, key=lambda event: event.step)


def _first_word(event: RuleEvent) -> str:
    return event.message.split(": ", 2)[-1].partition(" ")[0]


def _is_of_mean_loss(event: RuleEvent) -> bool:
    return event.location is None and event.layer is None and _first_word(event) == MEAN_LOSS


def _is_of_program(event: RuleEvent) -> bool:
    """Return whether an event is about a setting or the learning rate, which nothing in its step changes: it precedes the others."""
    is_of_rate = event.location is None and event.layer is None and _first_word(event) == "lr"
    return is_of_rate or event.message.startswith(OTHER_SETTING)


def _is_of_root_parameter(event: RuleEvent) -> bool:
    """Return whether an event is about the gradient of a parameter of the model itself, which any of its layers can use."""
    return event.layer == "" and hook_and_role(event.location or "")[1] == "param_grad"


def severity_of(what: str, warns: bool) -> Severity:
    """Return the severity of a problem. `warns`: whether the rule that found it warns."""
    return "error" if what == LOSS_NOT_FINITE else "warning" if warns else "info"


class RuleFacts(NamedTuple):
    """What is known about a rule without its events."""

    advice: str = ""
    stage: Stage | None = None
    times: int = 1  # how often in succession its condition has to hold
    statistic: str = ""
    is_of_metric: bool = True  # whether `statistic` is a metric
    has_threshold: bool = False  # whether the threshold of an event is one of `statistic`
    advice_in: Mapping[Part, str] = {}


NO_FACTS = RuleFacts()


def _facts(rules: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, RuleFacts]:
    facts = {name: RuleFacts(advice) for name, advice in (info.get("advice") or {}).items()}  # of custom rules
    for name, entry in rules.items():
        if not isinstance(entry, Mapping):
            continue
        if "watch" in entry:
            is_of_metric = entry["watch"] in ("metrics", ["metrics"])
            facts[name] = RuleFacts(WATCH_ADVICE, None, entry.get("for", 1), str(entry.get("stat")), is_of_metric, True)
        elif "_target_" not in entry and (kind := str(entry.get("rule", name))) in RULES:
            rule: type[CatalogueRule[Any]] = RULES[kind]
            field = rule.fields.model_fields.get("for_")
            times = entry.get("for", 1 if field is None else field.default)
            statistics = getattr(rule, "statistics", ())
            statistic = rule.evidence or next(iter(statistics), "")
            has_threshold = rule.evidence not in statistics
            facts[name] = RuleFacts(
                rule.advice, rule.stage, times, statistic, not statistics, has_threshold, rule.advice_in
            )
    return facts


_Key = tuple[str, bool]  # the name of a rule, and whether its events are about the run as a whole
_Events = dict[_Key, list[RuleEvent]]  # the first one leads


class _Timeline:
    """The causal order of events: by time, then by the order of a training step.

    A step calls the layers forward, computes the loss, calls the layers backward, and updates the parameters. What comes first can
    cause what follows, if `CAUSES` allows it.
    """

    def __init__(self, facts: Mapping[str, RuleFacts], info: Mapping[str, Any], layers: Sequence[str]) -> None:
        self._facts = facts
        self._hooks = hooks_of(info) or {}
        self._every = {name: spec.every for name, spec in self._hooks.items() if spec.steps is None}
        self._interval = min(self._every.values(), default=1)
        self._rank = rank_in(in_forward_order(layers, []))
        self._last = layers[-1] if layers else ""

    def onset(self, event: RuleEvent) -> int:
        """Return the step at which a problem began: the first of several in succession, or one after the last recorded step."""
        return max(0, event.step - self._delay(event))

    def began(self, events: Sequence[RuleEvent]) -> int:
        """Return the step at which the problem of a rule began. Its first event can be another than the leading one."""
        return self.onset(_earliest(events))

    def _delay(self, event: RuleEvent) -> int:
        """Return how many steps before its event a problem of a rule, or one that is recorded with it, can have begun."""
        facts = self._facts.get(event.rule, NO_FACTS)
        if event.location is None and LATER in event.message:
            return facts.times - 1
        if event.message.startswith(OTHER_SETTING) or (event.location is None and facts.stage != "reference"):
            return 0
        # A metric outside of the reference was compared in the steps in which statistics were, the learning rate in each.
        of_metric = 1 if _is_of_program(event) else self._interval
        interval = self._every.get(hook_and_role(event.location)[0], 1) if event.location else of_metric
        return interval - 1 if facts.times == 1 else (facts.times - 1) * interval

    def position(self, event: RuleEvent) -> tuple[int, int]:
        """Return the position in the order of a training step: its part, and the one within this part."""
        if event.message.startswith(OTHER_SETTING):
            name, is_of_root = _first_word(event), event.layer is None
            if name.endswith(".optimizer") or (is_of_root and name.startswith("optimizer")):
                return UPDATE, 0
            if event.message.startswith(OF_GRADIENTS):
                return BACKWARD, 0
            return (LOSS, 0) if is_of_root and name.startswith("loss.") else (FORWARD, self._rank(event.layer or ""))
        if event.location is None:
            return PARTS_OF_METRICS.get(_first_word(event), LOSS), 0
        hook, role = hook_and_role(event.location)
        if IS_LOSS.match(event.location):
            return LOSS, 0
        rank = self._rank(event.layer or "")
        if event.message.startswith(NEW_PARAMETER):
            return FORWARD, rank
        if role in ("param", "update") or role.startswith("state."):  # the forward pass changes buffers
            return UPDATE, rank
        kind = self._hooks[hook].kind if hook in self._hooks else ""
        if not is_gradient(kind, role):
            return FORWARD, rank
        return BACKWARD, 1 if _is_of_root_parameter(event) else -rank

    def episodes(self, events: Iterable[RuleEvent]) -> list[_Events]:
        """Return events by rule, those after a long time without any apart. The leading event of a rule is its first."""
        episodes: list[_Events] = []
        last = 0
        for event in sorted((each for each in events if each.value is not None), key=lambda each: each.step):
            if not episodes or self.onset(event) - last > FAR:
                episodes.append({})
            last = event.step
            episodes[-1].setdefault((event.rule, event.location is None), []).append(event)
        for group in (group for episode in episodes for group in episode.values()):
            lead = min(group, key=self._order_in_rule)
            group.remove(lead)
            group.insert(0, lead)
        return episodes

    def part(self, events: Sequence[RuleEvent]) -> Part:
        """Return the part of a training step in which to look for the cause of the events of a rule, the leading one first.

        An optimizer whose settings, learning rate and first update are within the reference computes other updates from other gradients.
        A model computes its loss from an argument such as `labels`. The loss decides which outputs of the last layer have a gradient, and
        the forward pass, such as a mask, which elements of other layers have one. If only losses of evaluations are outside, their data
        and the mode of layers differ from those of the training, whose loss is usual.
        """
        event, (part, _) = events[0], self.position(events[0])
        if IS_TARGET.match(event.location or ""):
            return "loss"
        is_last = f"{self._last}.".startswith(f"{event.layer}.") if event.layer else not _is_of_root_parameter(event)
        is_of_mask = part == BACKWARD and _first_word(event) == "zero_fraction" and not is_last
        if is_of_mask or all(each.location is None and _first_word(each) == "eval" for each in events):
            return "forward"
        is_later = self.onset(event) > 0 and not _is_of_program(event)
        return PARTS[BACKWARD if part == UPDATE and is_later else part]

    def _order_in_rule(self, event: RuleEvent) -> tuple[bool, int, bool, int, int]:
        """Return the sort key of an event among those of its rule.

        They are in the order of their rows except for gradients: rows of the gradients of parameters are in the order of the parameters,
        not of the backward pass. Settings stay in their order, from the modules to the root. Counts of values are added up, and so show
        late what enters the training, on which the loss depends.
        """
        part, rank = self.position(event)
        is_setting = event.message.startswith(OTHER_SETTING)
        is_result = not (is_setting or event.message.startswith(OTHER_COUNTS))
        part, rank = 0 if is_setting else part, rank if part == BACKWARD else 0
        return is_result, event.step, not _is_of_program(event), part, rank

    def leads(self, episode: _Events) -> dict[_Key, _Key]:
        """Return the leading problem of each problem, in the causal order; of one without a known cause, the problem itself."""
        leads: dict[_Key, _Key] = {}
        for key in sorted(episode, key=lambda key: self._order(episode[key])):
            first, stage = _earliest(episode[key]), self._facts.get(key[0], NO_FACTS).stage
            step = self._latest(first, first.step)
            causes = CAUSES[stage] if stage else ()
            known = (each for each in leads if self._facts.get(each[0], NO_FACTS).stage in causes)
            cause = next((each for each in known if self.began(episode[each]) <= step), None)
            leads[key] = key if cause is None else leads[cause]
        return leads

    def _order(self, events: Sequence[RuleEvent]) -> tuple[int, int, bool, tuple[int, int]]:
        """Return the sort key of the events of a rule, the leading one first.

        Indices of embeddings do not depend on what is learned, so they precede all that is outside after the first step.
        """
        event = events[0]
        stage = self._facts.get(event.rule, NO_FACTS).stage
        first = 0 if stage and not CAUSES[stage] else LATE.get(stage, 1)
        of_indices = _first_word(event) == INDICES
        step = min([1] * of_indices + [self._latest(_earliest(events), self.began(events))])
        return first, step, not _is_of_program(event), self.position(event)

    def _latest(self, event: RuleEvent, step: int) -> int:
        """Return a step of an event, or that of a mean loss: the last one before hooks record again.

        The phase of training of a mean loss ends between recorded steps, so what the next ones show can have begun in this phase.
        """
        return event.step + self._interval - 1 if _is_of_mean_loss(event) else step
