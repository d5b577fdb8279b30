"""From a spec to the action that does it."""

from __future__ import annotations

from ..spec.hooks import ClipSpec, HookSpec, ModifySpec, RecordSpec, ScaleSpec
from .base import Action, Rows
from .clip import Clip
from .intervention import Intervention
from .modify import Modify
from .record import Record
from .scale import Scale


def make_action(spec: HookSpec, rows: Rows) -> Action:
    """The action of a spec; its rows go to `rows`.

    Raises:
        ConfigError: A function of the user's own is not there or does not take a tensor and a context.
    """
    match spec:
        case RecordSpec():
            return Record(spec, rows)
        case ClipSpec():
            return Intervention(Clip(spec), rows)
        case ScaleSpec():
            return Intervention(Scale(spec), rows)
        case ModifySpec():
            return Intervention(Modify(spec), rows)
