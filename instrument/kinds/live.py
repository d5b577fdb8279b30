"""A site while it is attached: its action, whether it is due, and the count of its firings."""

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
from ..plan.shapes import refuse_misfit
from ..plan.sites import Site
from ..sharded import is_sharded, own_part, sharded_like, whole
from ..spec.functions import FunctionSpec, PenaltySpec
from ..spec.globs import matches
from ..spec.record import RecordSpec
from ..stats.vector import unreadable
from .causes import FROZEN, INFERENCE, NO_GRAD, NO_GRADIENT, NO_GRAPH, RAISED, REMOVED, absent
from .meter import Meter
from .scope import Parallel, scope_of

if TYPE_CHECKING:
    from .calls import Calls


@dataclass
class Clock:
    """What time it is; one clock is shared by all sites of a probe.

    `turn` counts the micro-steps of the whole run, in all phases: what belongs to one of them starts anew when it
    has moved on. `amp_scale` gives what a gradient scaler has multiplied the loss by; None where there is no scaler.
    `meter` measures what hooks cost; None where nobody asks. `parallel` says how several processes train together, and
    `rank` which of them this is; None for a single one. `phases` are those that there have been. `in_checkpoint` is true
    while the runner makes its own checkpoint, which interventions leave as it is.
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
        """The moment of what happens around the optimizer's step: in the last micro-step, though that is over."""
        return self.moment._replace(micro_step=max(0, self.moment.micro_step - 1))


class Firing(NamedTuple):
    """Which of several firings at one place this is; the fields are those of `Context`."""

    call: int = 0
    backward: int = 0
    recompute: bool = False


ONLY = Firing()


class LiveSite:
    """A site, its action, and its ledger: how often it should have fired, how often it did, and why not."""

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
        self.tried: set[str] | None = None if tried else set()  # paths whose shapes fit; None: a trial has seen to it
        self.action = action
        self.clock = clock
        self.records = isinstance(site.spec, RecordSpec)
        self.rhythm = site.spec.definition.rhythm
        self.scope = scope_of(site.spec.definition, site.spec.tensor_role, clock.parallel)
        self.absent = absent(site.spec.definition)
        self.due = False
        self.ever_due = False
        self.away = False  # whether a record looks away from training steps, to see what they take without it
        self.thin = 1  # once in how many times that its schedule is due it is looked at, where there is a budget
        self.dues = 0  # steps at which its schedule was due
        self._due_at: tuple[int, str] | None = None
        self.expected = 0
        self.fired = 0
        self.causes: Counter[str] = Counter()  # of firings that were expected
        self.excuses: Counter[str] = Counter()  # of opportunities that were not counted
        self.elsewhere: set[str] = set()  # phases in which there was an opportunity while the hook was not due
        self.copied = False  # whether its module was copied with its hooks
        self.module_calls: Calls | None = None  # of its module, where it has a forward hook
        self.trained = True  # whether its parameter required a gradient when the step began
        self._calls = self._fired = 0  # in the turn that is running
        self._misses: list[str] = []
        self._excuses: list[str] = []

    def turn(self, due: bool) -> bool:
        """The clock has moved on, and the schedule is due or not; whether that makes a difference."""
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
        """The site had an opportunity: its module was called, its optimizer made a step."""
        self._calls += 1

    @property
    def call(self) -> int:
        """Which of the opportunities in this turn the latest is, from 0: an optimizer may make several steps in one."""
        return self._calls - 1

    def hit(self) -> None:
        """It fired at one of them."""
        self._fired += 1

    def meet(self, tensor: Tensor) -> bool:
        """It had an opportunity at a tensor: count that, and give whether it fires, which takes values to read."""
        self.called()
        cause = unreadable(tensor)
        self.hit() if cause is None else self.miss(cause)
        return cause is None

    def miss(self, cause: str) -> None:
        """It could not fire at one of them."""
        self._misses.append(cause)

    def excuse(self, cause: str) -> None:
        """It had an opportunity at which it is not expected to fire, such as a parameter that is frozen."""
        self._excuses.append(cause)

    def not_due(self) -> None:
        """It had an opportunity while it was not due."""
        self.elsewhere.add(self.clock.moment.phase)

    def settle(self, absent: str | None = None) -> None:
        """A turn in which the site was due is over: enter into the ledger what was expected and what was seen.

        Args:
            absent: The cause where there was no opportunity; the usual one of its kind without it.
        """
        if not self.busy and self.rhythm == "micro_step" and self.is_frozen:
            self.excuse(FROZEN)
        calls, fired, excuses = self._calls, self._fired, self._excuses
        self.expected += calls if calls or excuses else 1
        self.fired += fired
        self.excuses.update(excuses)
        if not calls and not fired and not excuses:
            self.causes[self._unknown(absent or self.absent)] += 1
        elif fired < calls:  # what checkpointing repeats may fire where the first pass could not
            misses = self._misses[: calls - fired]
            self.causes.update(misses)
            if more := calls - fired - len(misses):
                self.causes[self._unknown(NO_GRADIENT)] += more
        self._calls = self._fired = 0
        self._misses.clear()
        self._excuses.clear()

    def _unknown(self, cause: str) -> str:
        """The cause where nothing was noted: the usual one, unless the parameter is gone or the module's forward pass was seen
        to break off."""
        if self.site.parameter is not None and self.current_parameter() is None:
            return REMOVED
        return RAISED if self.module_calls is not None and self.module_calls.broke_off else cause

    @property
    def is_frozen(self) -> bool:
        """Whether its parameter needs no gradient, or needed none when the step began."""
        parameter = None if self.site.parameter is None else self.current_parameter()
        return parameter is not None and not (self.trained and parameter.requires_grad)

    @property
    def busy(self) -> bool:
        """Whether anything happened to it in the turn that is running."""
        return bool(self._calls or self._fired or self._excuses)

    def state_dict(self) -> dict[str, Any]:
        """The ledger, between two turns."""
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
        """Go on from a ledger."""
        self.expected, self.fired = state["expected"], state["fired"]
        self.causes, self.excuses = Counter(state["causes"]), Counter(state["excuses"])
        self.elsewhere, self.copied = set(state["elsewhere"]), state["copied"]
        self.ever_due, self.absent = state["ever_due"], state["absent"]
        self.thin, self.dues = state["thin"], state["dues"]

    def wants(self, path: str) -> bool:
        """Whether the spec means the tensor at this path."""
        pattern = self.site.spec.path
        return pattern is None or matches(pattern, path)

    def takes(self, tensor: Tensor, path: str) -> bool:
        """Whether the site acts on this tensor: a record takes any, an intervention floating-point ones."""
        return self.wants(path) and (self.records or tensor.is_floating_point())

    @property
    def has_statistics(self) -> bool:
        """Whether each firing writes a row of statistics."""
        return isinstance(self.site.spec, RecordSpec) and bool(self.site.spec.statistics)

    @property
    def needs_value(self) -> bool:
        """Whether the action needs, beside a gradient, what it is the gradient of."""
        return isinstance(self.site.spec, PenaltySpec | FunctionSpec)

    @property
    def is_scaled(self) -> bool:
        """Whether what it sees is a gradient on its way, multiplied by a gradient scaler where there is one."""
        definition = self.site.spec.definition
        return definition.gradient and definition.rhythm == "micro_step"

    def current_parameter(self) -> Parameter | None:
        """The parameter that stands at the site now; None where the module's was set to None."""
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
        """Act on one tensor; gives what is to take its place, itself where nothing is changed.

        Of a tensor of which each process has a shard a record sees the shard. An intervention is made on the whole: a norm
        is that of all shards, and each process draws the same numbers.

        Raises:
            HookError: The action failed, or gave what does not fit; it names hook, kind, layer and step.
            ConfigError: The spec does not fit the shape of the first tensor that the site sees.
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
        """A gradient of a loss that a gradient scaler multiplied: it is seen and changed in its true scale.

        Elements that the action leaves as they are keep all of their bits, whatever the scale.
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
        except (InstrumentError, _StopRecomputationError):  # the latter is how checkpointing ends what it repeats
            raise
        except Exception as error:
            message = f"{describe(context)} failed: {type(error).__name__}: {error}{own_frame(error)}"
            raise HookError(message) from error
        return tensor if new is None else new


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """A gradient without the factor of a gradient scaler: in float32, where the gradient is not in a wider type."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) / scale.to(gradient.device)


class Uncopied:
    """A family that hangs on a module, and is copied or pickled along with it: what comes of it does nothing.

    A copied model has our hooks in its dictionaries, and must neither write rows nor drag the probe along. Every hook
    of such a family asks first whether the clock is closed.
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
    """The sites of one family at one place, attached to PyTorch."""

    def refresh(self) -> None:
        """Some of the sites became due, or ceased to be."""

    def detach(self) -> None:
        """Remove every hook that this family put anywhere."""


def fire_all(
    lives: Iterable[LiveSite],
    tensor: Tensor,
    path: str,
    firing: Firing = ONLY,
    value: Tensor | Parameter | None = None,
) -> Tensor:
    """Several sites at one tensor, in the order in which they are written; each sees what the one before gave."""
    for live in lives:
        tensor = live.fire(tensor, path, firing, value=value)
    return tensor


def no_graph() -> str:
    """Why a tensor that needs no gradient needs none, as far as that is known here."""
    if torch.is_inference_mode_enabled():
        return INFERENCE
    return NO_GRAPH if torch.is_grad_enabled() else NO_GRAD
