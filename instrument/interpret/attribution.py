"""Attribution: how much each layer, position or head contributes to a number that is computed from a model's output.

Attribution patching approximates the heat map of `instrument.plot.patching`, and has the same rows and columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..analysis.features import Array
from ..analysis.load import Run
from ..analysis.plot_data import check_choice, rank_in
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError, Problem, similar_names
from ..fields.globs import matches
from ..formatting import shorten
from .attribution_result import GRADIENT, INTEGRATED, METHODS, PATCHING, Attribution, TensorLocation, make_attribution
from .recorded_layers import recorded_indices, recorded_specs

if TYPE_CHECKING:
    from torch import Tensor, nn

_BATCH = ["step", "micro_step", "rank"]
_KEYS = ["phase", *_BATCH, "path", "call"]
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
    heads: int | None = None,
    exact: bool = False,
    role: Literal["output", "input"] = "output",
    path: str | None = None,
    phase: str | None = None,
    step: int | None = None,
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
        method: Default: `gradient_x_input`. For a run, the method for which it was made: `attribution_patching` with
            `forward.from_sample`, `integrated_gradients` of the inputs with `forward.integrate`.
        baseline: The inputs to compare with, such as a corrupted prompt. Default for integrated gradients: zeros.
        steps: Number of points of the integral.
        heads: Number of heads, which are side by side in the last dimension and are the columns of the grid. Default:
            the columns are the positions of tensors [N, positions, features]; other tensors have one column.
        exact: Whether to compute `exact` too, with one forward pass per cell: the change of the number if x replaces b in the
            cell for attribution patching; otherwise, what the number loses if b, or zero, replaces x.
        role: `output`, or `input` for the inputs of the layers.
        path: The path of the tensor in a nested value. Default: all floating-point tensors.
        phase, step: For a run: the phase and the step of the tensors. Default: all.

    Raises:
        InstrumentError: A pattern matches no layer, an argument does not fit to the others, or the run has no such tensors.
    """
    check_choice(role, ("output", "input"), "role", "unknown value")
    check_choice(method or GRADIENT, METHODS, "method", "unknown value")
    of_model = {"inputs": inputs, "of": of, "baseline": baseline, "exact": exact or None}
    is_run = isinstance(source, RunTables)
    for name, value in (of_model if is_run else {"phase": phase, "step": step}).items():
        if value is not None:
            message = f"does not apply to a {'run' if is_run else 'model'}"
            raise InstrumentError(Problem(name, message, type(value).__name__, fix="leave it out"))
    if isinstance(source, RunTables):
        where = {"role": [role, f"grad_{role}"], "phase": phase, "step": step, "path": path}
        return _of_run(source, method, layers, {key: value for key, value in where.items() if value is not None}, heads)
    from .model_attribution import attribution_of_model

    kind = "forward" if layers and role == "output" else "forward_pre"
    hook = {"layers": layers or ".", "kind": kind, "path": path, "action": "modify"}
    return attribution_of_model(source, inputs, baseline, of, method or GRADIENT, hook, steps, heads, exact=exact)


def _of_run(
    run: Run, method: str | None, layers: str | Sequence[str] | None, where: Mapping[str, Any], heads: int | None
) -> Attribution:
    run.check_single()
    forward = (run.info.get("config") or {}).get("forward") or {}
    passes, clean = forward["passes"] if forward.get("integrate") else 0, forward.get("from_sample")
    own = INTEGRATED if passes else GRADIENT if clean is None else PATCHING
    if method not in (None, own):
        fix = "set forward.integrate or forward.from_sample of the run"
        raise InstrumentError(Problem("method", "the run was made for another method", method, own, fix=fix))
    points, weights = np.polynomial.legendre.leggauss(max(passes, 1))  # on [-1, 1]
    batches_of_pass = None
    if passes:
        if layers not in (None, "."):
            message = "the inputs of the model are on the line from zero, and not those of its layers"
            raise InstrumentError(Problem("layers", message, layers, "."))
        layers, where = ".", {**where, "role": ["input", "grad_input"]}
        batches_of_pass = run.read("metrics", ["epoch", "step"]).query("epoch == 0")["step"].nunique()
    order, specs = list(dict.fromkeys(run.read("layers", ["layer"])["layer"])), recorded_specs(run)
    found: dict[TensorLocation, dict[tuple[int, ...], list[Array]]] = {}
    taken = {}
    for layer in _layers(run, order, layers, where["role"]):
        values, gradients = (
            run.tensors(layer=layer, kind=kinds, recompute=False, backward=0, **where).drop_duplicates(_KEYS)
            for kinds in (_FORWARD, _BACKWARD)
        )
        of_gradients = gradients[[*_KEYS, "values", "hook"]]
        rows = values.merge(of_gradients, on=_KEYS, suffixes=("", "_gradient")).sort_values("step")
        if rows["phase"].nunique() != 1:
            message = "several phases have tensors" if len(rows) else "the values and the gradients are of other steps"
            raise InstrumentError(Problem("phase", message, layer or ".", fix="pass phase= or step="))
        for _, row in rows.iterrows():
            at, batch = TensorLocation(layer, row["path"], row["call"]), [*row[_BATCH]]
            shapes = tuple(row["shape"]), tuple(row["source_shape"])
            taken[at], of_gradient = (
                recorded_indices(specs.get(row[key]), *shapes) for key in ("hook", "hook_gradient")
            )
            value = _attributed(row, clean, taken[at], is_same_part=taken[at] == of_gradient)
            if batches_of_pass is not None:
                batch[0] %= batches_of_pass
                value *= weights[row["epoch"]] / (points[row["epoch"]] + 1)  # the input is multiplied by the point
            found.setdefault(at, {}).setdefault(tuple(batch), []).append(value)
    for each in found.values():
        for key, of_passes in each.items():
            if passes and len(of_passes) != passes:
                message = f"batch {key[0]} was recorded in {len(of_passes)} of {passes} passes"
                raise InstrumentError(Problem("run", message, fix="record all batches of all passes, without step="))
    sums = {at: [np.sum(of_passes, 0) for of_passes in each.values()] for at, each in found.items()}
    steps = len({key[:2] for each in found.values() for key in each})
    return make_attribution(own, forward.get("of") or "loss", sums, order, heads, batches=steps, taken=taken)


def _layers(run: Run, order: Sequence[str], layers: str | Sequence[str] | None, roles: list[str]) -> list[str]:
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


def _attributed(row: Any, clean: int | None, taken: Sequence[Sequence[int]] | None, *, is_same_part: bool) -> Array:
    """Return the attributions of the samples of a recorded tensor, float64."""
    value, gradient = (np.asarray(row[name], np.float64) for name in ("values", "values_gradient"))
    if value.shape != gradient.shape or not is_same_part:
        fix, shapes = "use the same selection in both hooks", (str([*gradient.shape]), str([*value.shape]))
        raise InstrumentError(Problem("layers", "the gradients have another shape or selection", *shapes, fix=fix))
    if clean is None:
        return np.asarray(value * gradient)
    samples = [*(range(len(value)) if taken is None else taken[0])] if value.ndim else []
    if clean not in samples or len(samples) < 2:
        message = "a batch has no recorded clean sample with corrupted ones"
        raise InstrumentError(Problem("forward.from_sample", message, clean, f"recorded samples: {samples}"))
    corrupted = np.array(samples) != clean
    return np.asarray((value[~corrupted] - value[corrupted]) * gradient[corrupted])
