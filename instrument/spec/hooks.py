"""The union of all hook specs: one model per action, and one per built-in function of modify."""

from __future__ import annotations

from .base import HookBase
from .clip_and_scale import ClipSpec, ScaleSpec
from .modify import (
    DropoutSpec,
    FunctionSpec,
    MeanSpec,
    ModifySpec,
    NanSpec,
    NoiseSpec,
    PenaltySpec,
    QuantizeSpec,
    RecordedSpec,
    ResampleSpec,
    ShuffleSpec,
    SignSpec,
    ZeroSpec,
)
from .record import RecordSpec

HookSpec = (
    RecordSpec
    | ClipSpec
    | ScaleSpec
    | ZeroSpec
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

ACTIONS: dict[str, type[HookBase]] = {"record": RecordSpec, "clip": ClipSpec, "scale": ScaleSpec, "modify": ModifySpec}
