"""Attribution: how much each layer, position, head or unit contributes to a number that is computed from a model's output.

Attribution patching approximates the heat map of `instrument.plot.patching`, and has the same rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

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
    grid_of,
    labels_of,
    parts_of,
)
from .recorded_layers import recorded_indices, recorded_specs

if TYPE_CHECKING:
    from torch import Tensor, nn

Columns = Literal["positions", "heads", "units"]
Method = Literal["gradient_x_input", "integrated_gradients", "attribution_patching"]
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
    method: Method | None = None,
    baseline: Any = None,
    steps: int = 50,
    columns: Columns = "positions",
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
        method: Default: `gradient_x_input`; for a run with `from_sample` or `baseline`, `attribution_patching`.
        baseline: The inputs to compare with, such as a corrupted prompt. Default for integrated gradients: zeros. For a
            run: the run of the corrupted inputs, in the same batches, with the gradients.
        steps: Number of points of the integral.
        columns: The columns of the grid: `positions` of tensors [N, positions, features], otherwise one column; `heads`,
            which are side by side in the last dimension; or `units`.
        heads: Number of heads, with `columns="heads"`.
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
    choices = (("columns", columns, ("positions", "heads", "units")), ("role", role, ("output", "input")))
    for name, word, options in (*choices, ("method", method or GRADIENT, METHODS)):
        check_choice(word, options, name, "unknown value")
    if (columns == "heads") != (heads is not None):
        raise InstrumentError(Problem("heads", "columns='heads' requires the number of heads, and only this", heads))
    parts = partial(parts_of, columns, heads)
    is_run = isinstance(source, RunTables)
    of_model, of_runs = {"inputs": inputs, "of": of, "exact": exact or None}, {"phase": phase, "step": step}
    of_other = of_model if is_run else {**of_runs, "from_sample": from_sample}
    for name, value in of_other.items():
        if value is not None:
            message = f"does not apply to a {'run' if is_run else 'model'}"
            raise InstrumentError(Problem(name, message, str(value)[:40], fix="leave it out"))
    if isinstance(source, RunTables):
        where = {name: value for name, value in {**of_runs, "path": path}.items() if value is not None}
        return _of_run(source, baseline, from_sample, method, layers, role, where, parts)
    kind = "forward" if layers and role == "output" else "forward_pre"
    hook = {"layers": layers or ".", "kind": kind, "path": path, "action": "modify"}
    from .model_attribution import attribution_of_model

    return attribution_of_model(source, inputs, baseline, of, method or GRADIENT, hook, steps, parts, exact=exact)


def _of_run(  # noqa: PLR0917
    run: Run,
    baseline: Any,
    from_sample: int | None,
    method: str | None,
    layers: str | Sequence[str] | None,
    role: str,
    where: Mapping[str, Any],
    parts: Parts,
) -> Attribution:
    forward = (run.info.get("config") or {}).get("forward") or {}
    if from_sample is None and baseline is None and method != GRADIENT:
        from_sample = forward.get("from_sample")
    has_clean = (from_sample is not None) + (baseline is not None)
    method = method or (PATCHING if has_clean else GRADIENT)
    if method == INTEGRATED or has_clean != (method == PATCHING):
        needed = {
            INTEGRATED: "a model",
            GRADIENT: "neither baseline nor from_sample",
            PATCHING: "baseline or from_sample",
        }
        raise InstrumentError(Problem("method", f"for a run, it requires {needed[method]}", method))
    if len(run.folders) > 1 or not isinstance(baseline, RunTables | None):
        raise InstrumentError(Problem("run" if baseline is None else "baseline", "must be one run", fix="load one run"))
    corrupted = run if baseline is None else baseline
    roles = [role, f"grad_{role}"]
    order = list(dict.fromkeys(run.read("layers", ["layer"])["layer"]))
    found: dict[Location, list[Array]] = {}
    cells: dict[Location, dict[str, float]] = {}
    for layer in _layers(order, layers, (run, _FORWARD, roles), (corrupted, _BACKWARD, roles)):
        rows = _calls(run, layer, _FORWARD, roles, where)
        for name, kinds in (("_baseline", _FORWARD), ("_gradient", _BACKWARD)):
            further = _calls(corrupted, layer, kinds, roles, where)[[*_KEYS, "values"]]
            rows = rows.merge(further, on=_KEYS, suffixes=("", name))
        if rows["phase"].nunique() != 1:
            message = (
                "the tensors are of several phases" if len(rows) else "the values and gradients are of other steps"
            )
            raise InstrumentError(Problem("phase", message, layer or ".", fix="pass phase= or step="))
        batches = len(rows[["step", "micro_step"]].drop_duplicates())
        for _, row in rows.iterrows():
            value, at = _attributed(row, method, from_sample), Location(layer, row["path"], row["call"])
            found.setdefault(at, []).append(value)
            taken = recorded_indices(recorded_specs(run).get(row["hook"]), row["shape"], row["source_shape"])
            of_location = cells.setdefault(at, {})
            for name, part in parts(value.shape, taken).items():
                of_location[name] = of_location.get(name, 0.0) + float(value[part].sum()) / batches
    labels = labels_of(found, order)
    if several := [labels[at] for at, each in found.items() if len({value.shape[1:] for value in each}) > 1]:
        message = "the tensors of this layer differ in shape between batches"
        raise InstrumentError(Problem("layers", message, several[0], fix="pass step="))
    values = {label: np.concatenate(found[at]) for at, label in labels.items()}
    return Attribution(method, forward.get("of") or "loss", values, grid_of(cells, labels, parts.args[0]))


def _layers(
    order: Sequence[str], layers: str | Sequence[str] | None, *sources: tuple[RunTables, list[str], list[str]]
) -> list[str]:
    """Return the selected layers whose values and gradients were recorded."""
    known = []
    for run, kinds, roles in sources:
        rows = run.read("tensors", ["layer", "kind", "role"])
        known.append(set(rows[rows["kind"].isin(kinds) & rows["role"].isin(roles)]["layer"]))
    both = sorted(set.intersection(*known), key=rank_in(order))
    patterns = [layers] if isinstance(layers, str) else layers or ["**"]
    for pattern in patterns:
        if not any(matches(pattern, name) for name in both):
            names, message = [name or "." for name in both], "no such layer has recorded values and gradients"
            near = similar_names(pattern, names)
            raise InstrumentError(Problem("layers", message, pattern, shorten(names) or "none", near, _RECORD))
    return [name for name in both if any(matches(pattern, name) for pattern in patterns)]


def _calls(run: RunTables, layer: str, kinds: list[str], roles: list[str], where: Mapping[str, Any]) -> pd.DataFrame:
    """Return the recorded tensors of a layer: one row for each tensor and call, from the first hook that recorded it."""
    rows = run.tensors(layer=layer, kind=kinds, role=roles, recompute=False, backward=0, **where)
    return rows.drop_duplicates(_KEYS)


def _attributed(row: Any, method: str, from_sample: int | None) -> Array:
    """Return the attributions of the samples of a recorded tensor, float64."""
    names = ("values", "values_baseline", "values_gradient")
    value, baseline, gradient = (np.asarray(row[name], np.float64) for name in names)
    if value.shape != baseline.shape or value.shape != gradient.shape:
        message = "the values, those of the baseline and the gradients differ in shape"
        given = ", ".join(str([*each.shape]) for each in (value, baseline, gradient))
        raise InstrumentError(Problem("layers", message, f"{row['layer'] or '.'}: {given}"))
    if from_sample is None:
        return np.asarray((value if method == GRADIENT else value - baseline) * gradient)
    size = len(value) if value.ndim else 0
    if not 0 <= from_sample < size or size < 2:
        message = "a batch has no such clean sample with corrupted ones"
        raise InstrumentError(Problem("from_sample", message, from_sample, f"a batch has {size} samples"))
    corrupted = np.delete(np.arange(size), from_sample)
    return np.asarray((value[from_sample] - value[corrupted]) * gradient[corrupted])
