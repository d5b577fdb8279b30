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
_LAZY = {
    "AlreadyAttachedError": ".errors",
    "AttachedProbe": ".integrations.attached_probe",
    "ConfigError": ".errors",
    "Context": ".actions.base",
    "CountsTerms": ".tasks",
    "Dump": ".integrations.dump",
    "Features": ".analysis.features",
    "Firing": ".rules.rule",
    "HookError": ".errors",
    "HookResultError": ".errors",
    "InstrumentError": ".errors",
    "InstrumentWarning": ".errors",
    "MemorySink": ".storage.memory",
    "NoRunError": ".storage.run_search",
    "Outcome": ".tasks",
    "Probe": ".probe.probe",
    "Rule": ".rules.rule",
    "RuleEvent": ".rules.rule_set",
    "Run": ".analysis.load",
    "SelectsTargets": ".tasks",
    "Sink": ".tables.sink_interface",
    "StepRows": ".rules.step_rows",
    "Sum": ".tables.statistics",
    "Task": ".tasks",
    "attach": ".integrations.attach",
    "diff": ".comparison.diff",
    "dump": ".integrations.dump",
    "load": ".analysis.load",
    "make_reference": ".analysis.reference",
    "observe": ".integrations.observe",
    "statistic": ".stats.sums",
}
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
