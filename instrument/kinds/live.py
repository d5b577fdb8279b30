"""A site while it is attached: its action, whether it is due, and the count of its firings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn.parameter import Parameter
from torch.utils.checkpoint import _StopRecomputationError

from ..actions.base import Action, Context, Moment
from ..actions.intervention import describe
from ..errors import HookError, InstrumentError, own_frame
from ..plan.sites import Site
from ..sharded import is_sharded, own_part, sharded_like, whole
from ..spec.functions import FunctionSpec, PenaltySpec
from ..spec.globs import matches
from ..spec.record import RecordSpec
from .causes import NO_GRADIENT, absent
from .meter import Meter
from .scope import Parallel, scope_of


@dataclass
class Clock:
    """What time it is; one clock is shared by all sites of a probe.

    `turn` counts the micro-steps of the whole run, in all phases: what belongs to one of them starts anew when it
    has moved on. `amp_scale` gives what a gradient scaler has multiplied the loss by; None where there is no scaler.
    `meter` measures what hooks cost; None where nobody asks. `parallel` says how several processes train together, and
    `rank` which of them this is; None for a single one.
    """

    moment: Moment
    seed: int = 0
    turn: int = 0
    closed: bool = False
    amp_scale: Callable[[], Tensor] | None = None
    meter: Meter | None = None
    parallel: Parallel | None = None
    rank: int = 0

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
        "_excused",
        "_fired",
        "_missed",
        "absent",
        "action",
        "away",
        "causes",
        "clock",
        "due",
        "dues",
        "ever_due",
        "expected",
        "fired",
        "optimized",
        "records",
        "rhythm",
        "scope",
        "site",
        "thin",
    )

    def __init__(self, site: Site, action: Action, clock: Clock) -> None:
        self.site = site
        self.action = action
        self.clock = clock
        self.records = isinstance(site.spec, RecordSpec)
        self.rhythm = site.spec.definition.rhythm
        self.scope = scope_of(site.spec.definition, site.spec.tensor_role, clock.parallel)
        self.absent = absent(site.spec.definition)
        self.optimized = True
        self.due = False
        self.ever_due = False
        self.away = False  # whether a record looks away from training steps, to see what they take without it
        self.thin = 1  # once in how many times that its schedule is due it is looked at, where there is a budget
        self.dues = 0  # steps at which its schedule was due
        self._due_at: tuple[int, str] | None = None
        self.expected = 0
        self.fired = 0
        self.causes: Counter[str] = Counter()
        self._calls = self._fired = self._missed = self._excused = 0  # in the turn that is running

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

    def hit(self) -> None:
        """It fired at one of them."""
        self._fired += 1

    def miss(self, cause: str) -> None:
        """It could not fire at one of them."""
        self._missed += 1
        self.causes[cause] += 1

    def excuse(self, cause: str) -> None:
        """It had an opportunity at which a record has nothing to see by nature: noted, and not held against it."""
        self._excused += 1
        self.causes[cause] += 1

    def settle(self, absent: str | None = None) -> None:
        """A turn in which the site was due is over: enter into the ledger what was expected and what was seen.

        Args:
            absent: The cause where there was no opportunity; the usual one of its kind without it.
        """
        calls, fired, missed, excused = self._calls, self._fired, self._missed, self._excused
        self._calls = self._fired = self._missed = self._excused = 0
        self.expected += calls if calls or excused else 1
        self.fired += fired
        if not calls and not fired and not excused:
            self.causes[self.site.note or absent or self.absent] += 1
        elif fired + missed < calls:
            self.causes[NO_GRADIENT] += calls - fired - missed

    @property
    def busy(self) -> bool:
        """Whether anything happened to it in the turn that is running."""
        return bool(self._calls or self._fired or self._excused)

    @property
    def cause(self) -> str:
        """Why it fired less often than expected, or was not expected to fire; empty where all is well."""
        silent = self.fired < self.expected or not self.expected
        return self.causes.most_common(1)[0][0] if silent and self.causes else ""

    def state_dict(self) -> dict[str, Any]:
        """The ledger, between two turns."""
        return {
            "expected": self.expected,
            "fired": self.fired,
            "causes": dict(self.causes),
            "ever_due": self.ever_due,
            "absent": self.absent,
            "thin": self.thin,
            "dues": self.dues,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a ledger."""
        self.expected, self.fired = state["expected"], state["fired"]
        self.causes = Counter(state["causes"])
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

    def current_parameter(self) -> Parameter:
        """The parameter that stands at the site now."""
        parameter = self.site.layer.module._parameters[self.site.own_name]
        assert parameter is not None, "a site at a parameter was resolved from one"
        return parameter

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
        """
        spec, layer = self.site.spec, self.site.layer
        shard = is_sharded(tensor)
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
        """A gradient of a loss that a gradient scaler multiplied: it is seen and changed in its true scale, in float32."""
        true = tensor.float() / scale.to(tensor.device)
        new = self._act(true, context)
        return tensor if new is true else (new * scale.to(tensor.device)).to(tensor.dtype)

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


class Uncopied:
    """A family that hangs on a module, and is copied or pickled along with it: what comes of it does nothing.

    A copied model has our hooks in its dictionaries, and must neither write rows nor drag the probe along. Every hook
    of such a family asks first whether the clock is closed.
    """

    clock: Clock

    def __deepcopy__(self, memo: dict[int, object]) -> Uncopied:
        return _lifeless(type(self))

    def __reduce__(self) -> tuple[Callable[[type[Uncopied]], Uncopied], tuple[type[Uncopied]]]:
        return _lifeless, (type(self),)


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
