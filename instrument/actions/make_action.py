"""Creation of the action of a spec."""

from __future__ import annotations

from ..spec.clip_and_scale import ClipSpec, ScaleSpec
from ..spec.hooks import HookSpec
from ..spec.modify import FunctionSpec, ModifySpec
from ..spec.print_and_call import CallSpec, PrintSpec
from ..spec.record import RecordSpec
from .base import Action, Archive, Effects, Rows
from .call import Call
from .clip import Clip
from .intervention import Intervention
from .modify import Modify
from .print import Print
from .record import Record
from .scale import Scale
from .together import Together


def make_action(spec: HookSpec, rows: Rows, archive: Archive) -> Action:
    """Create the action of a spec.

    Args:
        spec: The spec.
        rows: Receives the rows of the action.
        archive: Provides the tensors of other runs.

    Returns:
        The action.

    Raises:
        ConfigError: A custom function cannot be imported or cannot be called with its arguments, or the
            tensors of another run cannot be found.
    """
    match spec:
        case RecordSpec():
            return Record(spec, rows)
        case PrintSpec():
            return Print(spec, rows)
        case CallSpec():
            return Call(spec)
        case ClipSpec():
            return Intervention(Clip(spec), rows)
        case ScaleSpec():
            return Intervention(Scale(spec), rows)
        case ModifySpec():
            return make_modification(spec, rows, archive)


def make_modification(spec: ModifySpec, rows: Effects, archive: Archive) -> Intervention | Together:
    """Create the action of a spec of `modify`; see `make_action`."""
    if isinstance(spec, FunctionSpec) and spec.together:
        return Together(spec, rows)
    return Intervention(Modify(spec, archive), rows)
