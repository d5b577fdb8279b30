"""Checks of a configuration against its mode: phases that do not occur, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import Problem
from .config import RunConfig
from .kinds import KINDS


def mode_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the hooks and settings that the mode of a run does not support.

    Args:
        config: A valid configuration.
    """
    yield from _hook_problems(config)
    if config.mode == "train":
        if config.forward.grad:
            yield Problem("forward.grad", "requires mode: forward", given=True, fix="set mode=forward")
        if config.data.probe_batch is not None and all(spec.phase != "probe" for spec in config.hooks.values()):
            message = "the probe batch is never used: no hook has phase: probe"
            fix = "set phase: probe in a hook, or data.probe_batch=null"
            yield Problem("data.probe_batch", message, fix=fix)
        return
    if config.train.accumulate > 1:
        message = "mode: forward accumulates no gradients: each batch is one step"
        yield Problem("train.accumulate", message, given=config.train.accumulate, allowed="1")
    if config.data.probe_batch is not None:
        message = "the probe batch runs between training steps, but mode: forward does not train"
        yield Problem("data.probe_batch", message, fix="set data.probe_batch=null")


def _hook_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the hooks that would never run."""
    phases = ["forward"] if config.mode == "forward" else ["train", "eval", "probe"]
    for name, spec in config.hooks.items():
        if spec.phase not in phases:
            message = f"mode: {config.mode} has no such phase"
            yield Problem(f"hooks.{name}.phase", message, given=spec.phase, allowed=phases)
        elif spec.phase == "probe" and config.data.probe_batch is None:
            fix = "set data.probe_batch=N for the first N evaluation samples"
            yield Problem(f"hooks.{name}.phase", "phase probe requires a probe batch", given="probe", fix=fix)
        elif spec.phase == "forward" and spec.definition.gradient and not config.forward.grad:
            message = "requires gradients, which mode: forward computes only with forward.grad=true"
            yield Problem(f"hooks.{name}.kind", message, given=spec.kind, fix="set forward.grad=true")
        if spec.definition.of_functions and config.train.compile:
            message = (
                "torch.compile replaces the functions of a module by compiled code, in which no function is called"
            )
            allowed = [other for other, kind in KINDS.items() if not kind.of_functions]
            fix = "set train.compile=false, or hook the modules instead"
            yield Problem(f"hooks.{name}.kind", message, given=spec.kind, allowed=allowed, fix=fix)
