"""One look at a model: shapes, dtypes and statistics of the tensors of one forward and backward pass."""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from ..errors import ConfigError, Problem
from ..hooks.clock import operator_name
from ..plan.shape_inference import without_side_effects
from ..probe.program_settings import reached
from ..values.nested import iter_tensors, structure
from .attach import attach

STATISTICS = ("mean", "std", "min", "max", "nan_count", "inf_count")
COLUMNS = ("layer", "module_type", "call", "role", "path", "shape", "dtype", *STATISTICS)


def observe(
    model: nn.Module,
    batch: Any,
    layers: str | Sequence[str] = "**",
    *,
    loss: Callable[[Any], Tensor] | None = None,
    backward: bool = True,
    functions: str | Sequence[str] = (),
) -> pd.DataFrame:
    """Run a model on one batch and describe the outputs of its layers and their gradients.

        instrument.observe(model, images, "encoder.**")
        instrument.observe(model, tokens, "blocks.*.attention", functions=["softmax", "add*"])

    The model is not changed: gradients of parameters, buffers, random states and training flags are the same afterwards.
    It runs in its current mode and on its current device. Hooks of the model run, as in any forward pass.

    Args:
        model: The model.
        batch: The input: a tuple contains positional arguments, a mapping contains keyword arguments, and any other
            value is the only argument.
        layers: The layers: a glob on their names, or a list of globs. Default: all layers.
        loss: Takes the output of the model and returns the scalar whose gradients are computed. Default: the sum of all
            outputs.
        backward: Whether to run the backward pass. Default: True.
        functions: Globs on names of torch functions that the layers call. Their results are described too; `path` has the
            name and the number of the call, such as `softmax.0`. Default: none.

    Returns:
        One row per tensor, in the order of execution: the outputs (`role` output) in the order in which the layers
        finish, then the gradients of the loss with respect to these outputs (`role` grad_output). The columns:

        - `layer`, `module_type`: name and class of the module
        - `call`: the index of the module's call, from 0
        - `role`, `path`: which tensor, and its path in a nested output
        - `shape`, `dtype`: as a tuple, and as the name that PyTorch uses
        - `mean`, `std`, `min`, `max`: over finite values
        - `nan_count`, `inf_count`: numbers of elements

    Raises:
        ConfigError: A glob on layers matches no module, or `loss` returns no scalar that requires a gradient.
        Exception: The model or `loss` raised it. An exception of the model has a note with the layer that raised it, and
            the structure and shapes of the batch.

    Warns:
        InstrumentWarning: A layer was not called, no layer called any of the functions, or an output has no gradient.
    """
    record = {"layers": layers, "action": "record", "stats": list(STATISTICS), "tensors": True, "max_elements": 1}
    hooks = {"outputs": {**record, "kind": "forward"}}
    if backward:
        hooks["gradients"] = {**record, "kind": "full_backward", "role": "grad_output"}
    if functions:
        inside = {**record, "functions": functions}
        hooks["functions"] = {**inside, "kind": "function"}
        if backward:
            hooks["function_gradients"] = {**inside, "kind": "function_grad"}
    with errors_of_arguments(), attach(model, hooks) as probe:
        with without_side_effects(model), torch.enable_grad():
            output = call_model(model, batch)
            if backward:
                _backward(model, batch, _scalar(output, loss))
        probe.end_step()
    rows: pd.DataFrame = probe.tensors()  # gradients of a reentrant segment come from the recomputed pass
    keys = ["hook", "layer", "path", "call", "backward"]
    described = rows.merge(probe.stats[[*keys, *STATISTICS]], on=keys, how="left")
    return described.assign(shape=described["source_shape"].map(tuple))[list(COLUMNS)]


@contextmanager
def errors_of_arguments() -> Iterator[None]:
    """Replace the keys of the hooks in configuration errors by the argument that the caller passed."""
    try:
        yield
    except ConfigError as error:
        problems = [replace(each, where=re.sub(r"^hooks\.\w+\.", "", each.where)) for each in error.problems]
        raise ConfigError(*{str(each): each for each in problems}.values()) from None


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model. An exception gets a note with the layer that raised it, and the structure of the batch."""
    try:
        if isinstance(batch, tuple):
            return model(*batch)
        return model(**batch) if isinstance(batch, Mapping) else model(batch)
    except Exception as error:
        callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = {id(module): name or "." for name, module in model.named_modules()}
        layer = next((each for each in reversed(callers) if id(each) in names), model)
        error.add_note(f"layer {names[id(layer)]} ({type(layer).__name__}), batch {structure(batch)}")
        raise


def _scalar(output: Any, loss: Callable[[Any], Tensor] | None) -> Tensor | None:
    """Return the scalar whose gradients are computed; None if no output requires a gradient."""
    if loss is None:
        parts = [tensor.sum() for _, tensor in iter_tensors(output) if tensor.requires_grad and not tensor.is_complex()]
        return sum(parts[1:], parts[0]) if parts else None
    scalar = loss(output)
    if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.requires_grad:
        given = f"shape {list(scalar.shape)}" if isinstance(scalar, Tensor) else type(scalar).__name__
        raise ConfigError(Problem("loss", "must return a scalar tensor that requires a gradient", given))
    return scalar


def _backward(model: nn.Module, batch: Any, scalar: Tensor | None) -> None:
    """Run a backward pass that stores no gradient in any parameter or input."""
    leaves = [*model.parameters(), *(tensor for _, tensor in iter_tensors(batch) if tensor.is_leaf)]
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if scalar is None or not leaves:
        return
    nodes = reached([] if scalar.grad_fn is None else [scalar.grad_fn], limit=math.inf)
    if not any(operator_name(node) == "CheckpointFunctionBackward" for node in nodes):
        torch.autograd.grad(scalar.reshape(()), leaves, allow_unused=True)
        return
    before = [leaf.grad for leaf in leaves]
    try:
        for leaf in leaves:
            leaf.grad = None
        scalar.reshape(()).backward()  # reentrant checkpointing does not support `torch.autograd.grad`
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
