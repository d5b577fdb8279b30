"""Checks of a configuration against its mode: phases that do not occur, and settings that have no effect."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..errors import Problem
from .base import HookBase
from .experiment import RunConfig


def mode_problems(config: RunConfig) -> Iterator[Problem]:
    yield from _hook_problems(config)
    if config.mode == "train":
        if config.forward.grad:
            yield Problem("forward.grad", "requires mode: forward", given=True, fix="set mode=forward")
        if config.data.probe_batch is not None and all(spec.phase != "probe" for spec in config.hooks.values()):
            message = "the probe batch is never used: no hook has phase: probe"
            fix = "set phase: probe in a hook, or data.probe_batch=null"
            yield Problem("data.probe_batch", message, fix=fix)
        return
    clean, size = config.forward.from_sample, config.train.batch_size
    if clean is not None and (clean >= size or size < 2):
        message = "each batch needs this clean sample and another, corrupted one"
        yield Problem("forward.from_sample", message, given=clean, allowed=f"train.batch_size is {size}")
    if config.train.accumulate > 1:
        message = "mode: forward accumulates no gradients: each batch is one step"
        yield Problem("train.accumulate", message, given=config.train.accumulate, allowed="1")
    if config.data.probe_batch is not None:
        message = "the probe batch runs between training steps, but mode: forward does not train"
        yield Problem("data.probe_batch", message, fix="set data.probe_batch=null")


def _hook_problems(config: RunConfig) -> Iterator[Problem]:
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
        if config.train.compile is not None and (not config.train.compile.graph_breaks or spec.definition.of_functions):
            yield from graph_problems(name, spec, "set train.compile={graph_breaks: true}")


class Obstacle(NamedTuple):
    """Why a hook cannot be part of a graph of `torch.compile`: the field of its spec, the reason, and the alternative."""

    key: str
    reason: str
    fix: str


def graph_obstacle(spec: HookBase) -> Obstacle | None:
    """Return why a hook breaks the graphs of `torch.compile`; None if it does not."""
    if spec.definition.family != "module":
        return None
    if spec.definition.of_functions:
        return Obstacle("kind", "compiled code calls no functions", "hook the modules instead")
    if (spec.kind, spec.tensor_role) == ("tensor", "input"):
        fix = "use 'kind: full_backward' with 'role: grad_input', the contribution of the module"
        return Obstacle("role", "the gradient of an input is complete only outside of the module", fix)
    if spec.tensor_role == "change":
        return Obstacle("role", "a graph does not keep the input of the module", "record the output")
    if spec.keep_as is not None and not spec.definition.gradient:
        return Obstacle(
            "keep_as", "a kept tensor keeps its autograd graph, and compiled code has none", "remove 'keep_as'"
        )
    return None


def graph_problems(name: str, spec: HookBase, fix: str) -> Iterator[Problem]:
    """Yield the problem of a hook that breaks graphs, where they must not break. `fix` allows that; hooks on functions never run there."""
    if (obstacle := graph_obstacle(spec)) is not None:
        given = spec.kind if obstacle.key == "kind" else getattr(spec, obstacle.key)
        fixes = obstacle.fix if spec.definition.of_functions else f"{obstacle.fix}, or {fix}"
        message = f"breaks the graphs of torch.compile: {obstacle.reason}"
        yield Problem(f"hooks.{name}.{obstacle.key}", message, given=given, fix=fixes)
