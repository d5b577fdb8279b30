"""Attribution: how much each layer, position, head or unit contributes to a number that is computed from a model's output.

Attribution patching approximates the heat map of `instrument.plot.patching`, and has the same rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..analysis.features import Array
from ..analysis.load import Run
from ..analysis.plot_data import check_choice, rank_in
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError, Problem, similar_names
from ..fields.globs import matches
from ..formatting import shorten
from .attribution_result import (
    GRADIENT,
    INTEGRATED,
    METHODS,
    PATCHING,
    Attribution,
    Location,
    Parts,
    make_attribution,
    parts_of,
)
from .recorded_layers import recorded_indices, recorded_specs

if TYPE_CHECKING:
    from torch import Tensor, nn

_KEYS = ["phase", "step", "micro_step", "rank", "path", "call"]
_FORWARD, _BACKWARD = ["forward", "forward_pre"], ["full_backward_pre", "full_backward", "tensor"]  # kinds
_RECORD = (
    "record both: {kind: forward, action: record, tensors: true} and {kind: full_backward_pre, action: record, tensors: true}, "
    "with mode=forward forward.grad=true"
)


def attribute(
    source: Run | nn.Module,
    inputs: Any = None,
    *,
    of: str | Callable[[Any], Tensor] | None = None,
    layers: str | Sequence[str] | None = None,
    method: Literal["gradient_x_input", "integrated_gradients", "attribution_patching"] | None = None,
    baseline: Any = None,
    steps: int = 50,
    columns: Literal["positions", "units"] = "positions",
    heads: int | None = None,
    exact: bool = False,
    role: Literal["output", "input"] = "output",
    path: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    from_sample: int | None = None,
) -> Attribution:
    """Compute how much each element of the tensors of some layers contributes to a number.

        attribute(model, clean, baseline=corrupted, of="[:, -1, 5]", layers="blocks.*", method="attribution_patching")

    The methods, for the tensor x of a layer, the tensor b of the baseline and the number m:

    - `gradient_x_input`: x * dm/dx (Shrikumar et al. 2016, https://arxiv.org/abs/1605.01713)
    - `integrated_gradients`: (x - b) * the mean of dm/dx on the line from b to x, for each layer alone (Sundararajan et al.
      2017, https://arxiv.org/abs/1703.01365), by Gauss-Legendre quadrature
    - `attribution_patching`: (x - b) * dm/dx at b, which approximates the change of m if x replaces b; for all layers from
      two forward passes and one backward pass (Syed et al. 2023, https://arxiv.org/abs/2310.10348)

    A model runs in eval mode. Its mode, buffers and gradients and the random states are unchanged afterwards.

    Args:
        source: A model. Or a run that recorded the tensors and their gradients, as with `forward.grad=true`.
        inputs: The inputs of the model: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        of: The number: a part of the model's output, as in `forward.of`; or a function of the output. It is summed over
            its elements. For a run, it is `forward.of` or the loss.
        layers: Patterns of names. Default: the inputs of the model; for a run, all recorded layers.
        method: Default: `gradient_x_input`. For a run with `from_sample`, `attribution_patching`; for one with
            `forward.integrate`, the `integrated_gradients` of the inputs.
        baseline: The inputs to compare with, such as a corrupted prompt. Default for integrated gradients: zeros.
        steps: Number of points of the integral.
        columns: The columns of the grid: the `positions` of tensors [N, positions, features], otherwise one column; or `units`.
        heads: Number of heads, which are side by side in the last dimension and are the columns instead.
        exact: Whether to compute `exact` too, with one forward pass per cell: the change of the number if x replaces b in the
            cell for attribution patching; otherwise, what the number loses if b, or zero, replaces x.
        role: `output`, or `input` for the inputs of the layers.
        path: The path of the tensor in a nested value. Default: all floating-point tensors.
        phase, step: For a run: the phase and the step of the tensors. Default: all.
        from_sample: For a run: the index of the clean sample of each batch; the others are corrupted. Default:
            `forward.from_sample` of the run.

    Raises:
        InstrumentError: A pattern matches no layer, an argument does not fit to the others, or the run has no such tensors.
    """
    choices = (("columns", columns, ("positions", "units")), ("role", role, ("output", "input")))
    for name, word, options in (*choices, ("method", method or GRADIENT, METHODS)):
        check_choice(word, options, name, "unknown value")
    is_run = isinstance(source, RunTables)
    of_model = {"inputs": inputs, "of": of, "baseline": baseline, "exact": exact or None}
    of_runs = {"phase": phase, "step": step, "from_sample": from_sample}
    for name, value in (of_model if is_run else of_runs).items():
        if value is not None:
            message = f"does not apply to a {'run' if is_run else 'model'}"
            raise InstrumentError(Problem(name, message, type(value).__name__, fix="leave it out"))
    parts = partial(parts_of, columns if heads is None else "heads", heads)
    if isinstance(source, RunTables):
        where = {"role": [role, f"grad_{role}"], "phase": phase, "step": step, "path": path}
        given = {name: value for name, value in where.items() if value is not None}
        return _of_run(source, from_sample, method, layers, given, parts)
    from .model_attribution import attribution_of_model

    kind = "forward" if layers and role == "output" else "forward_pre"
    hook = {"layers": layers or ".", "kind": kind, "path": path, "action": "modify"}
    return attribution_of_model(source, inputs, baseline, of, method or GRADIENT, hook, steps, parts, exact=exact)


def _of_run(
    run: Run,
    from_sample: int | None,
    method: str | None,
    layers: str | Sequence[str] | None,
    where: Mapping[str, Any],
    parts: Parts,
) -> Attribution:
    if len(run.folders) > 1:
        raise InstrumentError(Problem("run", f"the folder contains {len(run.folders)} runs", fix="load one of them"))
    forward = (run.info.get("config") or {}).get("forward") or {}
    if from_sample is None and method != GRADIENT:
        from_sample = forward.get("from_sample")
    passes = forward["passes"] if forward.get("integrate") else 0
    method = method or (INTEGRATED if passes else GRADIENT if from_sample is None else PATCHING)
    if bool(passes) != (method == INTEGRATED) or (from_sample is None) != (method != PATCHING):
        needed = {INTEGRATED: "forward.integrate=true", GRADIENT: "neither", PATCHING: "from_sample"}[method]
        message = f"of from_sample and forward.integrate, it requires {needed} in this run"
        raise InstrumentError(Problem("method", message, method))
    points, weights = np.polynomial.legendre.leggauss(max(passes, 1))  # on [-1, 1]
    if passes:
        if layers not in (None, "."):
            message = "the inputs of the model are on the line from zero, and not those of its layers"
            raise InstrumentError(Problem("layers", message, layers, "."))
        layers, where = ".", {**where, "role": ["input", "grad_input"]}
    order = list(dict.fromkeys(run.read("layers", ["layer"])["layer"]))
    found: dict[Location, list[Array]] = {}
    taken = {}
    steps: set[tuple[int, int]] = set()
    for layer in _layers(run, order, layers, where["role"]):
        values, gradients = (
            run.tensors(layer=layer, kind=kinds, recompute=False, backward=0, **where).drop_duplicates(_KEYS)
            for kinds in (_FORWARD, _BACKWARD)
        )
        rows = values.merge(gradients[[*_KEYS, "values"]], on=_KEYS, suffixes=("", "_gradient")).sort_values("step")
        if rows["phase"].nunique() != 1:
            message = "several phases have tensors" if len(rows) else "the values and the gradients are of other steps"
            raise InstrumentError(Problem("phase", message, layer or ".", fix="pass phase= or step="))
        steps.update(zip(rows["step"], rows["micro_step"], strict=True))
        for _, row in rows.iterrows():
            at, value = Location(layer, row["path"], row["call"]), _attributed(row, from_sample)
            if passes:  # the recorded input is that of the run times a point
                value *= weights[row["epoch"]] / (points[row["epoch"]] + 1)
            found.setdefault(at, []).append(value)
            spec = recorded_specs(run).get(row["hook"])
            taken[at] = recorded_indices(spec, tuple(row["shape"]), tuple(row["source_shape"]))
    if passes and len(steps) % passes:
        message = f"{len(steps)} batches were recorded, not the same number in each of {passes} passes"
        raise InstrumentError(Problem("run", message, fix="record all batches, without step="))
    batches = len(steps) // max(passes, 1)
    if passes:
        found = {at: [np.sum(each[i::batches], 0) for i in range(batches)] for at, each in found.items()}
    return make_attribution(method, forward.get("of") or "loss", found, order, parts, batches=batches, taken=taken)


def _layers(run: Run, order: Sequence[str], layers: str | Sequence[str] | None, roles: list[str]) -> list[str]:
    """Return the selected layers whose values and gradients were recorded."""
    rows = run.read("tensors", ["layer", "kind", "role"])
    rows = rows[rows["role"].isin(roles)]
    known = [set(rows[rows["kind"].isin(kinds)]["layer"]) for kinds in (_FORWARD, _BACKWARD)]
    both = sorted(set.intersection(*known), key=rank_in(order))
    patterns = [layers] if isinstance(layers, str) else layers or ["**"]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in both):
            names, message = [name or "." for name in both], "no such layer has recorded values and gradients"
            near = similar_names(pattern, names)
            raise InstrumentError(Problem("layers", message, pattern, shorten(names) or "none", near, _RECORD))
    return [name for name in both if any(matches(pattern, name) for pattern in patterns)]


def _attributed(row: Any, from_sample: int | None) -> Array:
    """Return the attributions of the samples of a recorded tensor, float64."""
    value, gradient = (np.asarray(row[name], np.float64) for name in ("values", "values_gradient"))
    if value.shape != gradient.shape:
        given, message = (
            f"{[*gradient.shape]}, not {[*value.shape]}",
            "the gradients have another shape than the values",
        )
        raise InstrumentError(Problem("layers", message, given, fix="use the same selection in both hooks"))
    if from_sample is None:
        return np.asarray(value * gradient)
    size = len(value) if value.ndim else 0
    if not 0 <= from_sample < size or size < 2:
        message = "a batch has no such clean sample with corrupted ones"
        raise InstrumentError(Problem("from_sample", message, from_sample, f"a batch has {size} samples"))
    corrupted = np.delete(np.arange(size), from_sample)
    return np.asarray((value[from_sample] - value[corrupted]) * gradient[corrupted])
