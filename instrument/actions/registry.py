"""From a spec to the action that does it."""

from __future__ import annotations

from ..spec.functions import ModifySpec
from ..spec.hooks import HookSpec
from ..spec.interventions import ClipSpec, ScaleSpec
from ..spec.record import RecordSpec
from .base import Action, Archive, Rows
from .clip import Clip
from .intervention import Intervention
from .modify import Modify
from .record import Record
from .scale import Scale


def make_action(spec: HookSpec, rows: Rows, archive: Archive) -> Action:
    """The action of a spec; its rows go to `rows`, and tensors of other runs come from `archive`.

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
            return Intervention(Modify(spec, archive), rows)
