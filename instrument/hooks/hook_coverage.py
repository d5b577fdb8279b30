"""The coverage of an attached site: how often it should fire, how often it fired, and why it did not."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.nn.parameter import Parameter

from ..plan.hook_plan import Site
from ..runtime.lazy_compiler import has_compiled
from ..stats.flatten import unreadable
from ..tables.reasons import (
    FROZEN,
    NO_GRADIENT,
    NO_GRADIENT_OF_CALL,
    NO_TENSOR,
    RAISED,
    REMOVED,
    REPLACED,
    default_reason,
)
from .clock import Clock, take
from .module_calls import Calls
from .plain_calls import FiringCounts


class HookCoverage(FiringCounts):
    """Counts the opportunities of a site, which are calls of its module or steps of its optimizer, and its firings."""

    __slots__ = (
        "_exempt",
        "_is_repeated",
        "_misses",
        "clock",
        "copied",
        "default_reason",
        "exemptions",
        "frequency",
        "is_replaced",
        "module_calls",
        "other_phases",
        "reasons",
        "requires_grad_at_start",
        "site",
    )

    def __init__(self, site: Site, clock: Clock) -> None:
        self.site = site
        self.clock = clock
        self.frequency = site.spec.definition.frequency
        self.default_reason = default_reason(site.spec.definition)
        self.expected = self.fired = 0  # in all earlier micro-steps
        self.reasons: Counter[str] = Counter()  # of expected firings
        self.exemptions: Counter[str] = Counter()  # of opportunities that do not count as expected
        self.other_phases: set[str] = set()  # phases in which it had an opportunity but was not scheduled
        self.copied = False  # whether its module was copied together with its hooks
        self.is_replaced = False  # whether its module is not a part of the model any more
        self.module_calls: Calls | None = None  # of its module, if that has a forward hook
        self.requires_grad_at_start = True  # whether its parameter required a gradient at the start of the step
        self.opportunities = self.firings = 0  # in the current micro-step
        # Whether a miss, an exemption or a repeated gradient was noted in the current micro-step.
        self.has_notes = self._is_repeated = False
        self._misses: list[str] = []
        self._exempt: list[str] = []

    def count_gradient(self, *, is_repeated: bool) -> None:
        """Count a gradient of a call. A repeated one is not a firing, but a micro-step with only repeated ones is not missed."""
        self.firings += not is_repeated
        self._is_repeated |= is_repeated
        self.has_notes |= is_repeated

    def count_and_check_readable(self, tensor: Tensor) -> bool:
        """Count an opportunity at a tensor, and the firing or the miss. Return whether the tensor can be read, so that the hook fires."""
        self.opportunities += 1
        reason = unreadable(tensor)
        if reason is None:
            self.firings += 1
        else:
            self.count_miss(reason)
        return reason is None

    def count_missed_opportunity(self, reason: str) -> None:
        self.opportunities += 1
        self.count_miss(reason)

    def count_miss(self, reason: str) -> None:
        """Note why it could not fire at an opportunity."""
        self._misses.append(reason)
        self.has_notes = True

    def count_exempt(self, reason: str) -> None:
        """Note an opportunity at which it is not expected to fire, for example because its parameter is frozen."""
        self._exempt.append(reason)
        self.has_notes = True

    def count_unscheduled(self) -> None:
        """Note an opportunity while the hook is not scheduled."""
        self.other_phases.add(self.clock.moment.phase)

    def update_coverage(self, reason: str | None = None) -> None:
        """End a micro-step in which the hook was scheduled, and update its coverage.

        A gradient can arrive after the micro-step of its call, if several batches are in flight. It is expected only once.

        Args:
            reason: The reason if there was no opportunity; the default reason of the kind if None.
        """
        # Other threads may count at the same time: what they add in the meantime belongs to the next micro-step.
        self.has_notes = False
        is_repeated, self._is_repeated = self._is_repeated, False
        opportunities, fired = self.opportunities, self.firings
        self.opportunities -= opportunities
        self.firings -= fired
        if fired >= opportunities > 0 and not self._exempt:  # the usual case
            self.expected += opportunities
            self.fired += fired
            if self._misses:
                self._misses.clear()
            return
        self.fired += fired
        if not (opportunities or fired or self._exempt) and self.frequency == "micro_step" and self.is_frozen:
            self.count_exempt(FROZEN)
        exemptions, misses = take(self._exempt), take(self._misses)
        self.exemptions.update(exemptions)
        if not (opportunities or fired or exemptions or is_repeated):
            self.expected += 1
            self.reasons[self._refine_reason(reason or self.default_reason)] += 1
            return
        self.expected += opportunities
        if fired < opportunities:
            # A recomputed forward pass may fire where the original one could not.
            misses = misses[: opportunities - fired]
            self.reasons.update(misses)
            if more := opportunities - fired - len(misses):
                unknown = NO_TENSOR  # in graphs of torch.compile
                if self.site.spec.definition.gradient:
                    unknown = NO_GRADIENT_OF_CALL if fired and not has_compiled() else NO_GRADIENT
                self.reasons[self._refine_reason(unknown)] += more

    def _refine_reason(self, reason: str) -> str:
        """Return the reason, unless the parameter was removed or the module's forward pass raised an error."""
        if self.site.parameter is not None and self.current_parameter() is None:
            return self.removed_reason
        return RAISED if self.module_calls is not None and self.module_calls.has_unfinished else reason

    @property
    def is_frozen(self) -> bool:
        """Whether its parameter requires no gradient, or required none when the step began."""
        parameter = None if self.site.parameter is None else self.current_parameter()
        return parameter is not None and not (self.requires_grad_at_start and parameter.requires_grad)

    @property
    def has_opportunities(self) -> bool:
        """Whether it had any opportunity in the current micro-step."""
        return bool(self.opportunities or self.firings or self._exempt)

    @property
    def removed_reason(self) -> str:
        """Why its parameter is not a part of the model any more."""
        return REPLACED if self.is_replaced else REMOVED

    def current_parameter(self) -> Parameter | None:
        """Return the parameter that is at the site now; None if it, or its module, was removed from the model."""
        if self.is_replaced:
            return None
        module, name = self.site.registration
        # The parameters of a TorchScript module have no `get`.
        parameters = module._parameters
        return parameters[name] if name in parameters else self.site.parameter  # noqa: SIM401

    def state_dict(self) -> dict[str, Any]:
        """Return the coverage counts between two micro-steps."""
        return {
            "expected": self.expected,
            "fired": self.fired,
            "reasons": dict(self.reasons),
            "exemptions": dict(self.exemptions),
            "other_phases": sorted(self.other_phases),
            "copied": self.copied,
            "default_reason": self.default_reason,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.expected, self.fired = state["expected"], state["fired"]
        self.reasons, self.exemptions = Counter(state["reasons"]), Counter(state["exemptions"])
        self.other_phases, self.copied = set(state["other_phases"]), state["copied"]
        self.default_reason = state["default_reason"]
