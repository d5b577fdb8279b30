"""Attached sites: the action of a site, its schedule state, and its coverage counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import _StopRecomputationError

from ..actions.base import Action, Context, Moment
from ..actions.functions import straight_through
from ..actions.intervention import describe
from ..errors import HookError, InstrumentError, own_frame
from ..plan.dimension_checks import refuse_misfit
from ..plan.sites import Site
from ..sharded import is_sharded, own_part, sharded_like, whole
from ..spec.functions import FunctionSpec, PenaltySpec
from ..spec.globs import matches
from ..spec.record import RecordSpec
from ..stats.vector import unreadable
from .hook_timer import Meter
from .reasons import FROZEN, INFERENCE, NO_GRAD, NO_GRADIENT, NO_GRAPH, RAISED, REMOVED, absent
from .scope import Parallel, scope_of

if TYPE_CHECKING:
    from .calls import Calls


@dataclass
class Clock:
    """The current time of a probe, shared by all of its sites.

    Attributes:
        moment: Step, micro-step, epoch and phase.
        seed: The seed of the run.
        turn: The number of micro-steps so far, over all phases. State of one micro-step is reset when it changes.
        closed: Whether the probe is detached.
        amp_scale: Returns the factor by which a gradient scaler multiplies the loss; None without a scaler.
        meter: Measures the time of hooks; None if it is not measured.
        parallel: How several processes train together; None for a single one.
        rank: The rank of this process, from 0.
        phases: The phases so far.
        in_checkpoint: Whether the run saves its own checkpoint, which interventions do not change.
    """

    moment: Moment
    seed: int = 0
    turn: int = 0
    closed: bool = False
    amp_scale: Callable[[], Tensor] | None = None
    meter: Meter | None = None
    parallel: Parallel | None = None
    rank: int = 0
    phases: set[str] = field(default_factory=set)
    in_checkpoint: bool = False

    @property
    def boundary(self) -> Moment:
        """The moment of hooks around the optimizer step.

        They belong to the last micro-step, which has ended already.
        """
        return self.moment._replace(micro_step=max(0, self.moment.micro_step - 1))


class Firing(NamedTuple):
    """Identifies one of several firings at a site. The fields are those of `Context`."""

    call: int = 0
    backward: int = 0
    recompute: bool = False


ONLY = Firing()


class LiveSite:
    """An attached site: its action, and its coverage: expected and actual firings, and reasons for missing ones."""

    __slots__ = (
        "_calls",
        "_due_at",
        "_excuses",
        "_fired",
        "_misses",
        "absent",
        "action",
        "away",
        "causes",
        "clock",
        "copied",
        "due",
        "dues",
        "elsewhere",
        "ever_due",
        "excuses",
        "expected",
        "fired",
        "module_calls",
        "records",
        "rhythm",
        "scope",
        "site",
        "thin",
        "trained",
        "tried",
    )

    def __init__(self, site: Site, action: Action, clock: Clock, *, tried: bool = False) -> None:
        self.site = site
        # Paths whose shapes were checked; None if shape inference has checked all.
        self.tried: set[str] | None = None if tried else set()
        self.action = action
        self.clock = clock
        self.records = isinstance(site.spec, RecordSpec)
        self.rhythm = site.spec.definition.rhythm
        self.scope = scope_of(site.spec.definition, site.spec.tensor_role, clock.parallel)
        self.absent = absent(site.spec.definition)
        self.due = False
        self.ever_due = False
        # Whether a record hook is paused in training steps, to measure them without it.
        self.away = False
        self.thin = 1  # with a budget, it runs at every n-th scheduled step
        self.dues = 0  # steps at which its schedule is active
        self._due_at: tuple[int, str] | None = None
        self.expected = 0
        self.fired = 0
        self.causes: Counter[str] = Counter()  # of expected firings
        self.excuses: Counter[str] = Counter()  # of opportunities that do not count as expected
        self.elsewhere: set[str] = set()  # phases in which it had an opportunity but was not scheduled
        self.copied = False  # whether its module was copied together with its hooks
        self.module_calls: Calls | None = None  # of its module, if that has a forward hook
        self.trained = True  # whether its parameter required a gradient at the start of the step
        self._calls = self._fired = 0  # in the current turn
        self._misses: list[str] = []
        self._excuses: list[str] = []

    def turn(self, due: bool) -> bool:
        """Update whether the hook runs at the new time of the clock. Return whether that changed."""
        moment = (self.clock.moment.step, self.clock.moment.phase)
        if due and moment != self._due_at:
            self._due_at = moment
            self.dues += 1
        due = due and (self.dues - 1) % self.thin == 0
        self.ever_due |= due
        if due and self.away and self.clock.moment.phase == "train":
            due = False
        changed = due != self.due
        self.due = due
        return changed

    def called(self) -> None:
        """Count an opportunity: its module was called, or its optimizer made a step."""
        self._calls += 1

    @property
    def call(self) -> int:
        """The index of the latest opportunity in this turn, from 0. An optimizer may make several steps in one turn."""
        return self._calls - 1

    def hit(self) -> None:
        """Count a firing."""
        self._fired += 1

    def meet(self, tensor: Tensor) -> bool:
        """Count an opportunity at a tensor. Return whether the hook fires, which requires a readable tensor."""
        self.called()
        cause = unreadable(tensor)
        self.hit() if cause is None else self.miss(cause)
        return cause is None

    def miss(self, cause: str) -> None:
        """Note why it could not fire at an opportunity."""
        self._misses.append(cause)

    def excuse(self, cause: str) -> None:
        """Note an opportunity at which it is not expected to fire, for example because its parameter is frozen."""
        self._excuses.append(cause)

    def not_due(self) -> None:
        """Note an opportunity while the hook is not scheduled."""
        self.elsewhere.add(self.clock.moment.phase)

    def settle(self, absent: str | None = None) -> None:
        """End a turn in which the hook was scheduled, and update its coverage.

        Args:
            absent: The reason if there was no opportunity; the default reason of the kind if None.
        """
        if not self.busy and self.rhythm == "micro_step" and self.is_frozen:
            self.excuse(FROZEN)
        calls, fired, excuses = self._calls, self._fired, self._excuses
        self.expected += calls if calls or excuses else 1
        self.fired += fired
        self.excuses.update(excuses)
        if not calls and not fired and not excuses:
            self.causes[self._unknown(absent or self.absent)] += 1
        # A recomputed forward pass may fire where the original one could not.
        elif fired < calls:
            misses = self._misses[: calls - fired]
            self.causes.update(misses)
            if more := calls - fired - len(misses):
                self.causes[self._unknown(NO_GRADIENT)] += more
        self._calls = self._fired = 0
        self._misses.clear()
        self._excuses.clear()

    def _unknown(self, cause: str) -> str:
        """Return the default reason, unless the parameter was removed or the module's forward pass raised an error."""
        if self.site.parameter is not None and self.current_parameter() is None:
            return REMOVED
        return RAISED if self.module_calls is not None and self.module_calls.broke_off else cause

    @property
    def is_frozen(self) -> bool:
        """Whether its parameter requires no gradient, or required none when the step began."""
        parameter = None if self.site.parameter is None else self.current_parameter()
        return parameter is not None and not (self.trained and parameter.requires_grad)

    @property
    def busy(self) -> bool:
        """Whether it had any opportunity in the current turn."""
        return bool(self._calls or self._fired or self._excuses)

    def state_dict(self) -> dict[str, Any]:
        """Return the coverage counts between two turns."""
        return {
            "expected": self.expected,
            "fired": self.fired,
            "causes": dict(self.causes),
            "excuses": dict(self.excuses),
            "elsewhere": sorted(self.elsewhere),
            "copied": self.copied,
            "ever_due": self.ever_due,
            "absent": self.absent,
            "thin": self.thin,
            "dues": self.dues,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore coverage counts."""
        self.expected, self.fired = state["expected"], state["fired"]
        self.causes, self.excuses = Counter(state["causes"]), Counter(state["excuses"])
        self.elsewhere, self.copied = set(state["elsewhere"]), state["copied"]
        self.ever_due, self.absent = state["ever_due"], state["absent"]
        self.thin, self.dues = state["thin"], state["dues"]

    def wants(self, path: str) -> bool:
        """Return whether the spec selects the tensor at this path."""
        pattern = self.site.spec.path
        return pattern is None or matches(pattern, path)

    def takes(self, tensor: Tensor, path: str) -> bool:
        """Return whether the hook acts on this tensor.

        Record hooks accept any dtype, interventions floating-point ones.
        """
        return self.wants(path) and (self.records or tensor.is_floating_point())

    @property
    def has_statistics(self) -> bool:
        """Whether each firing writes a row of statistics."""
        return isinstance(self.site.spec, RecordSpec) and bool(self.site.spec.statistics)

    @property
    def needs_value(self) -> bool:
        """Whether the action requires the tensor that a gradient belongs to."""
        return isinstance(self.site.spec, PenaltySpec | FunctionSpec)

    @property
    def is_scaled(self) -> bool:
        """Whether it sees gradients that a gradient scaler has multiplied, if there is one."""
        definition = self.site.spec.definition
        return definition.gradient and definition.rhythm == "micro_step"

    def current_parameter(self) -> Parameter | None:
        """Return the parameter that is at the site now; None if it was removed from the module."""
        return self.site.layer.module._parameters.get(self.site.own_name, self.site.parameter)

    def fire(
        self,
        tensor: Tensor,
        path: str,
        firing: Firing = ONLY,
        *,
        value: Tensor | Parameter | None = None,
        amp_scale: Tensor | None = None,
    ) -> Tensor:
        """Run the action on one tensor.

        For a sharded tensor, record hooks see the shard. Interventions act on the full tensor: a norm is that of all
        shards, and all processes draw the same random numbers.

        Args:
            tensor: The tensor.
            path: Its path in a nested value, or the name of the parameter.
            firing: Which of several firings this is.
            value: The tensor that a gradient belongs to.
            amp_scale: The factor of a gradient scaler in the tensor.

        Returns:
            The tensor that replaces it; the same object if it is unchanged.

        Raises:
            HookError: The action failed or returned an invalid result. The message contains hook, kind, layer and step.
            ConfigError: The spec does not fit the shape of the site's first tensor.
        """
        spec, layer = self.site.spec, self.site.layer
        shard = is_sharded(tensor)
        if self.tried is not None and path not in self.tried and not shard:
            self.tried.add(path)
            refuse_misfit(self.site, path, tensor)
        if shard and value is not None:
            value = (own_part if self.records else whole)(value)
        context = Context(
            hook=spec.name,
            kind=spec.kind,
            role=spec.tensor_role,
            layer=layer.name,
            module=layer.module,
            path=path,
            moment=self.clock.boundary if self.rhythm == "step" else self.clock.moment,
            call=firing.call,
            backward=firing.backward,
            recompute=firing.recompute,
            value=value,
            parameters=self.site.parameters,
            seed=self.clock.seed,
            scope=self.scope if not shard else "shard" if self.records else "averaged",
            rank=self.clock.rank,
        )
        if self.is_scaled and self.clock.amp_scale is not None:
            amp_scale = self.clock.amp_scale()
        part = tensor if not shard else own_part(tensor) if self.records else whole(tensor)
        new = self._act(part, context) if amp_scale is None else self._fire_scaled(part, context, amp_scale)
        if new is part:
            return tensor
        return sharded_like(new, tensor) if is_sharded(tensor) else new

    def _fire_scaled(self, tensor: Tensor, context: Context, scale: Tensor) -> Tensor:
        """Run the action on a gradient without the factor of a gradient scaler.

        Elements that the action does not change stay bit-identical for any factor.
        """
        true = unscaled(tensor, scale)
        new = self._act(true, context)
        if new is true:
            return tensor
        scaled = (new * scale.to(tensor.device)).to(tensor.dtype)
        if tensor.is_sparse:
            return scaled
        kept = (new == true) | (new.isnan() & true.isnan())
        return straight_through(scaled, torch.where(kept, tensor, scaled))

    def _act(self, tensor: Tensor, context: Context) -> Tensor:
        if (meter := self.clock.meter) is None:
            return self._do(tensor, context)
        with meter.acting(self):
            return self._do(tensor, context)

    def _do(self, tensor: Tensor, context: Context) -> Tensor:
        try:
            new = self.action(tensor, context)
        # Checkpointing ends a recomputed pass with `_StopRecomputationError`.
        except (InstrumentError, _StopRecomputationError):
            raise
        except Exception as error:
            message = f"{describe(context)} failed: {type(error).__name__}: {error}{own_frame(error)}"
            raise HookError(message) from error
        return tensor if new is None else new


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Divide a gradient by the factor of a gradient scaler, in float32 or the wider dtype of the gradient."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) / scale.to(gradient.device)


class Uncopied:
    """Base of hooks on a module. If the module is copied or pickled, the copied hooks become no-ops.

    A copied model contains our hooks in its dictionaries. They must neither write rows nor keep the probe alive. Every
    such hook first checks whether the clock is closed.
    """

    clock: Clock
    lives: Sequence[LiveSite] = ()

    def __deepcopy__(self, memo: dict[int, object]) -> Uncopied:
        self._note_copy()
        return _lifeless(type(self))

    def __reduce__(self) -> tuple[Callable[[type[Uncopied]], Uncopied], tuple[type[Uncopied]]]:
        self._note_copy()
        return _lifeless, (type(self),)

    def _note_copy(self) -> None:
        for live in self.lives:
            live.copied = True


def _lifeless(family: type[Uncopied]) -> Uncopied:
    new = object.__new__(family)
    new.clock = Clock(Moment(0, 0, 0, "train"), closed=True)
    return new


class Family(Protocol):
    """The attached hooks of one family at one location."""

    def refresh(self) -> None:
        """Update after the scheduled sites have changed."""

    def detach(self) -> None:
        """Remove all hooks of this family."""


def fire_all(
    lives: Iterable[LiveSite],
    tensor: Tensor,
    path: str,
    firing: Firing = ONLY,
    value: Tensor | Parameter | None = None,
) -> Tensor:
    """Run several hooks on one tensor in the order of the configuration. Each sees the result of the previous one."""
    for live in lives:
        tensor = live.fire(tensor, path, firing, value=value)
    return tensor


def no_graph() -> str:
    """Return why a tensor requires no gradient, as far as that is known here."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    return NO_GRAPH if torch.is_grad_enabled() else NO_GRAD
