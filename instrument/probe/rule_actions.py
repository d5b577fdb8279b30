"""What follows when a rule fires: a stop, a checkpoint, hooks that are turned on or off, and calls of functions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any

from ..config.hook_specs import HookSpec
from ..config.rules import CallAction, DisableAction, EnableAction, RuleBase
from ..errors import HookError, user_code_location
from ..fields.targets import build_callable
from ..rules.requirements import turned_on_by_rules, writes_kept_tensors
from ..rules.rule_set import RuleEvent, RuleSet
from .collectives import Ranks


class RuleActions:
    """Carries out the actions of the rules that fired, in all processes alike.

    Args:
        write_kept: Writes the tensors that a hook keeps: called with the hook and the reason.

    Attributes:
        fired: The rules that fired in the last step or evaluation, by name: in this process, and those with actions in any process.
        stop_reason: Why the loop should stop; None if it should continue.
        is_pruned: Whether the reason is a rule with `then: prune`.
        should_checkpoint: Whether the loop should save a checkpoint after this step.

    Raises:
        ConfigError: A function to call cannot be imported.
    """

    def __init__(
        self, rules: RuleSet, hooks: Mapping[str, HookSpec], ranks: Ranks | None, write_kept: Callable[[str, str], None]
    ) -> None:
        self.rules = rules
        self.ranks = ranks
        self.fired: frozenset[str] = frozenset()
        self.stop_reason: str | None = None
        self.is_pruned = False
        self.should_checkpoint = False
        self._write_kept = write_kept
        self._followers: defaultdict[str, list[str]] = defaultdict(list)  # hooks by rule
        self._keeping: defaultdict[str, list[str]] = defaultdict(list)
        for rule, (hook, spec) in product(rules.specs, hooks.items()):
            if spec.follows == rule:
                self._followers[rule].append(hook)
            if writes_kept_tensors(rule, rules.specs, spec):
                self._keeping[rule].append(hook)
        acting = {name for name, spec in rules.specs.items() if spec.actions}
        self._names = sorted(acting | self._followers.keys() | self._keeping.keys())
        self._functions = _functions(rules.specs)
        self._off = turned_on_by_rules(rules.specs, hooks)
        self._has_stopped: set[str] = set()  # rules that stopped the run before it was resumed
        self._switches: dict[str, tuple[bool, int | None]] = {}  # by hook: on, and the step after the last one

    def is_on(self, hook: str, step: int) -> bool:
        """Return whether a hook is turned on at a step."""
        on, stop = self._switches.get(hook, (None, None))
        return hook not in self._off if on is None or (stop is not None and step >= stop) else on

    @property
    def never_turned_on(self) -> frozenset[str]:
        """The hooks that are off until a rule fires, and were never turned on."""
        return self._off - self._switches.keys()

    def act(self, step: int) -> None:
        """Carry out the actions of the rules that fired since the last call, before a step. Call it in all processes at once.

        Raises:
            HookError: A function of `call` failed.
        """
        self.should_checkpoint = False
        events = {event.rule: event for event in self.rules.take_fired()}
        flags = [name in events for name in self._names]
        if self.ranks is not None and flags:
            flags = self.ranks.any_rank(flags)
        to_act = [name for name, any_fired in zip(self._names, flags, strict=True) if any_fired]
        self.fired = frozenset([*events, *to_act])
        for name in to_act:
            self._carry_out(name, events.get(name), step)

    def _carry_out(self, name: str, event: RuleEvent | None, step: int) -> None:
        """Carry out the actions of one rule. `event` is None if it fired in another process only."""
        for hook in self._keeping.get(name, ()):
            self._write_kept(hook, f"rule {name} fired")
        for hook in self._followers.get(name, ()):
            self._turn_on(hook, step + 1)
        for action in self.rules.actions_of(name):
            if action in ("stop", "prune") and self.stop_reason is None and name not in self._has_stopped:
                self._has_stopped.add(name)
                self.is_pruned = action == "prune"
                self.stop_reason = f"rule {name}: {'it fired in another process' if event is None else event.message}"
            elif action == "checkpoint":
                self.should_checkpoint = True
            elif isinstance(action, EnableAction):
                self._turn_on(action.enable, None if action.steps is None else step + action.steps)
            elif isinstance(action, DisableAction):
                self._switches[action.disable] = (False, None if action.steps is None else step + action.steps)
            elif isinstance(action, CallAction) and event is not None:
                self._call(name, event)

    def _turn_on(self, hook: str, stop: int | None) -> None:
        """Turn a hook on until a step, or longer if it is on for longer already."""
        is_on, known = self._switches.get(hook, (False, 0))
        if is_on and stop is not None:
            stop = None if known is None else max(stop, known)
        self._switches[hook] = (True, stop)

    def _call(self, name: str, event: RuleEvent) -> None:
        for function in self._functions[name]:
            try:
                function(event)
            except Exception as error:
                at = f"at step {event.step}{user_code_location(error)}"
                reason = f"{type(error).__name__}: {error}"
                raise HookError(f"rules.{name}.then: the function failed {at}: {reason}") from error

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        switches = {hook: list(switch) for hook, switch in self._switches.items()}
        return {"switches": switches, "has_stopped": sorted(self._has_stopped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. A rule that has stopped the run does not stop it again."""
        self._switches = {hook: (on, stop) for hook, (on, stop) in state["switches"].items()}
        self._has_stopped = set(state["has_stopped"])


def _functions(specs: Mapping[str, RuleBase]) -> dict[str, list[Callable[[RuleEvent], object]]]:
    """Import the functions to call, by rule."""
    return {
        name: [
            action.call.function or build_callable(action.call, f"rules.{name}.then.call")
            for action in spec.actions
            if isinstance(action, CallAction)
        ]
        for name, spec in specs.items()
    }
