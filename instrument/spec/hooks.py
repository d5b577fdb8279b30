"""The union of all hook specs: one model per action, and one per built-in function of modify."""

from __future__ import annotations

from .base import HookBase
from .clip_and_scale import ClipSpec, ScaleSpec
from .modify import (
    AddSpec,
    DropoutSpec,
    FunctionSpec,
    MeanAblateSpec,
    MeanSpec,
    ModifySpec,
    NanSpec,
    NoiseSpec,
    PenaltySpec,
    ProjectSpec,
    QuantizeSpec,
    RecordedSpec,
    ResampleSpec,
    ShuffleSpec,
    SignSpec,
    SwapSpec,
    ZeroSpec,
)
from .print_and_call import CallSpec, PrintSpec
from .record import RecordSpec

HookSpec = (
    RecordSpec
    | PrintSpec
    | CallSpec
    | ClipSpec
    | ScaleSpec
    | ZeroSpec
    | AddSpec
    | ProjectSpec
    | MeanAblateSpec
    | SwapSpec
    | NoiseSpec
    | MeanSpec
    | ResampleSpec
    | ShuffleSpec
    | DropoutSpec
    | QuantizeSpec
    | SignSpec
    | NanSpec
    | PenaltySpec
    | RecordedSpec
    | FunctionSpec
)

ACTIONS: dict[str, type[HookBase]] = {
    "record": RecordSpec,
    "print": PrintSpec,
    "call": CallSpec,
    "clip": ClipSpec,
    "scale": ScaleSpec,
    "modify": ModifySpec,
}
