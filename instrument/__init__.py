"""Record and change what happens inside a PyTorch network: hooks declared in YAML, recorded data in Parquet.

with instrument.attach(model, "hooks.yaml", optimizer=optimizer, out="runs/mine") as probe: ...
run = instrument.load("runs/mine")
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import interpret, plot, report
    from .actions.base import Context
    from .analysis.features import Features
    from .analysis.load import Run, load
    from .analysis.reference import make_reference
    from .comparison.diff import diff
    from .errors import (
        AlreadyAttachedError,
        ConfigError,
        HookError,
        HookResultError,
        InstrumentError,
        InstrumentWarning,
    )
    from .integrations.attach import attach
    from .integrations.attached_probe import AttachedProbe
    from .integrations.dump import Dump, dump
    from .integrations.observe import observe
    from .probe.probe import Probe
    from .rules.rule import Firing, Rule
    from .rules.rule_set import RuleEvent
    from .rules.step_rows import StepRows
    from .stats.sums import statistic
    from .storage.memory import MemorySink
    from .storage.run_search import NoRunError
    from .tables.sink_interface import Sink
    from .tables.statistics import Sum
    from .tasks import CountsTerms, Outcome, SelectsTargets, Task

# `python -m instrument.export` runs commands/export.py. The modules there import others by their full names for this reason.
__path__.append(f"{__path__[0]}/commands")


class _MovedModules:
    """Finds the modules of the last version that have moved."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG004
        if name.startswith(("instrument.cli", "instrument.spec")):
            from .runtime.moved_names import find_spec

            return find_spec(name)
        return None


sys.meta_path.append(_MovedModules)

# `python -m instrument.report` imports this package before the module of the command; its name follows `-m`.
if sys.argv[:1] == ["-m"] and f"{sys.orig_argv[-len(sys.argv)]}.".startswith(f"{__name__}."):
    from .commands.interrupts import handle_interrupts

    handle_interrupts()

__all__ = [
    "AlreadyAttachedError",
    "AttachedProbe",
    "ConfigError",
    "Context",
    "CountsTerms",
    "Dump",
    "Features",
    "Firing",
    "HookError",
    "HookResultError",
    "InstrumentError",
    "InstrumentWarning",
    "MemorySink",
    "NoRunError",
    "Outcome",
    "Probe",
    "Rule",
    "RuleEvent",
    "Run",
    "SelectsTargets",
    "Sink",
    "StepRows",
    "Sum",
    "Task",
    "attach",
    "diff",
    "dump",
    "interpret",
    "load",
    "make_reference",
    "observe",
    "plot",
    "report",
    "statistic",
]

# Modules are imported on first access: reading a run does not need torch.
_NAMES = {
    ".actions.base": "Context",
    ".analysis.features": "Features",
    ".analysis.load": "Run load",
    ".analysis.reference": "make_reference",
    ".comparison.diff": "diff",
    ".errors": "AlreadyAttachedError ConfigError HookError HookResultError InstrumentError InstrumentWarning",
    ".integrations.attach": "attach",
    ".integrations.attached_probe": "AttachedProbe",
    ".integrations.dump": "Dump dump",
    ".integrations.observe": "observe",
    ".probe.probe": "Probe",
    ".rules.rule": "Firing Rule",
    ".rules.rule_set": "RuleEvent",
    ".rules.step_rows": "StepRows",
    ".stats.sums": "statistic",
    ".storage.memory": "MemorySink",
    ".storage.run_search": "NoRunError",
    ".tables.sink_interface": "Sink",
    ".tables.statistics": "Sum",
    ".tasks": "CountsTerms Outcome SelectsTargets Task",
}
_LAZY = {name: module for module, names in _NAMES.items() for name in names.split()}
# Available as attributes, as in instrument.plot.heatmap(run).
_PACKAGES = ("analysis", "errors", "interpret", "plot", "report", "tasks")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name], __name__), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
