"""The logit lens: what the output layer of a language model predicts from the residual stream of each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..analysis.features import Array, Features
from ..analysis.load import Run
from ..errors import InstrumentError, Problem
from .recorded_layers import TOKENS, Recorded, linear_layer, positions_of, saved_weights, weight_named

if TYPE_CHECKING:
    from torch import Tensor, nn

LOGITS_BYTES = 2**26  # size of the logits of a block of positions in float64
Projection = Callable[[Any], Any]


def logit_lens(
    run: Run,
    unembed: Tensor | Array | nn.Module | str,
    *,
    norm: nn.Module | Callable[[Tensor], Tensor] | str | None = None,
    layers: Sequence[str] | None = None,
    tokens: Tensor | Array | None = None,
    targets: Tensor | Array | None = None,
    top: int = 5,
    hook: str | None = None,
    role: str = "output",
    phase: str | None = None,
    step: int | None = None,
    path: str | None = None,
    call: int | None = None,
) -> pd.DataFrame:
    """Apply the output layer of a model to the residual stream of each layer: the logit lens (nostalgebraist 2020).

        instrument.interpret.logit_lens(run, "head.weight", norm="norm")

    The logits are `unembed(norm(residual))`. Record the residual stream as the output of each block:
    `{layers: "blocks.*", kind: forward, action: record, stats: none, tensors: true}`.

    Args:
        run: A run with recorded tensors of shape [N, positions, features] or [N, features]; for a probe, `probe.run`.
        unembed: The output layer: a module; an array [vocabulary, features] as the weight of `nn.Linear`; or the name of a
            layer or its weight in the weights that the run saved (`train.save=true`). A layer in saved weights includes its bias.
        norm: The final normalization, applied first: a module or function of tensors; or the name of an `nn.LayerNorm` in the
            saved weights, with the default eps of 1e-5. Default: none.
        layers: The layers. Default: all recorded layers with as many features as `unembed` has, in forward order.
        tokens: The token ids of the samples, in ascending order of the ids of the samples: [N, length], also if only some
            positions were recorded. The target of a position is the next token. Default: the recorded integer inputs of the
            model or of its embedding.
        targets: The targets instead: [N, positions], or [N] for one target per sample. Negative ones are ignored. Default: the next
            tokens; without them, the targets of the samples.
        top: Number of most probable tokens.
        hook, role, phase, step, path, call: Select the recorded residual streams; see `layer_similarity`.

    Returns:
        One row per layer, sample and position, in this order:

        - `layer`, `sample`, `position`: the layer, the id of the sample, the position in the model, from 0
        - `top_tokens`, `top_log_probs`: lists of the `top` most probable tokens and of their log-probabilities, descending
        - `target`: the target; null without one
        - `target_log_prob`: its log-probability, in nats
        - `target_rank`: the number of tokens that are more probable than the target; null if a logit is NaN

    Raises:
        InstrumentError: A layer was not recorded, the selection is ambiguous, the sizes do not fit, or the run has no such weights.
    """
    if top < 1:
        raise InstrumentError(Problem("top", "must be positive", top))
    recorded = Recorded(hook=hook, role=role, phase=phase, step=step, path=path, call=call).preferring_outputs(run)
    normalize = _normalization(run, norm)
    project, features = _projection(run, unembed)
    frames = []
    for layer in recorded.layers(run, layers, features):
        streams = recorded.read(run, layer)
        residual = streams.X if streams.X.ndim == 3 else streams.X[:, None]
        if residual.ndim != 3 or (features is not None and residual.shape[2] != features):
            message = f"the residual stream must have shape [N, positions, {features}] or [N, {features}]"
            raise InstrumentError(Problem("layers", message, f"{layer} {list(streams.X.shape)}"))
        count = residual.shape[1]
        positions, length = recorded.positions(run, layer, count)
        inputs = tokens
        if tokens is None and targets is None:
            inputs = _recorded_tokens(run, recorded, layer, streams, (len(streams.ids), length))
        wanted = _targets(streams, positions, length, tokens=inputs, targets=targets)
        rows = residual.reshape(-1, residual.shape[2])
        numbers = _numbers(rows, lambda hidden: project(normalize(hidden)), wanted, top)
        where = {"layer": layer, "sample": np.repeat(streams.ids, count), "position": np.tile(positions, len(residual))}
        frames.append(pd.DataFrame({**where, **numbers}))
    return pd.concat(frames, ignore_index=True)


def _numbers(residual: Array, logits_of: Projection, targets: Array, top: int) -> dict[str, Any]:
    """Return the columns with the predictions from a residual stream [rows, features] and targets [rows], block by block."""
    import torch

    tokens, log_probs, target_log_probs, ranks = [], [], [], []
    start, step = 0, 1
    while start < len(residual):
        with torch.no_grad():
            hidden = torch.from_numpy(np.ascontiguousarray(residual[start : start + step], dtype=np.float32))
            logits = logits_of(hidden).double().log_softmax(-1)
        best = logits.topk(min(top, logits.shape[-1]))
        tokens += best.indices.tolist()
        log_probs += best.values.tolist()
        wanted = torch.from_numpy(targets[start : start + step])[:, None]
        if int(wanted.max()) >= logits.shape[-1]:
            message = f"a target is not one of the {logits.shape[-1]} tokens of the output layer"
            raise InstrumentError(Problem("targets", message, int(wanted.max())))
        of_target = logits.gather(1, wanted.clamp(min=0))
        target_log_probs += of_target.masked_fill(wanted < 0, torch.nan)[:, 0].tolist()
        ranks += (logits > of_target).sum(1).tolist()
        start, step = start + len(hidden), max(1, LOGITS_BYTES // (8 * logits.shape[-1]))
    return {
        "top_tokens": tokens,
        "top_log_probs": log_probs,
        "target": pd.arrays.IntegerArray(targets, targets < 0),
        "target_log_prob": target_log_probs,
        "target_rank": pd.arrays.IntegerArray(np.array(ranks, np.int64), np.isnan(target_log_probs)),
    }


def _targets(streams: Features, positions: Sequence[int], length: int, *, tokens: Any, targets: Any) -> Array:
    """Return the target of each recorded position, int64 [samples * positions], negative for none."""
    shape, complete = (len(streams.ids), len(positions)), (len(streams.ids), length)
    if targets is not None:
        wanted = np.asarray(targets)
        if wanted.shape == shape[:1]:
            wanted = np.repeat(wanted[:, None], shape[1], 1)
        return _checked("targets", wanted, shape).ravel()
    if tokens is not None:
        ids = _checked("tokens", np.asarray(tokens), complete)
        following = np.pad(ids[:, 1:], ((0, 0), (0, 1)), constant_values=-1)  # the last position has none
        return following[:, [*positions]].ravel()
    if streams.y is not None and np.issubdtype(streams.y.dtype, np.integer):
        return np.repeat(streams.y.astype(np.int64), shape[1])
    return np.full(shape[0] * shape[1], -1)


def _checked(where: str, given: Array, shape: tuple[int, ...]) -> Array:
    if given.shape != shape or not np.issubdtype(given.dtype, np.integer):
        allowed = f"integers of shape {list(shape)}: [samples, positions]"
        raise InstrumentError(Problem(where, "wrong shape or dtype", f"{given.dtype} {list(given.shape)}", allowed))
    return given.astype(np.int64)


def _recorded_tokens(run: Run, recorded: Recorded, of: str, streams: Features, shape: tuple[int, ...]) -> Array | None:
    """Return the recorded token ids of the samples; None if they were not recorded for all of them."""
    inputs = run.read("tensors", ["layer", "hook", "path", "role", "dtype", "source_shape"])
    is_integer = inputs["dtype"].str.startswith(("int", "uint")) & (inputs["role"] == "input")
    places = inputs[is_integer][["layer", "hook", "path"]].drop_duplicates().itertuples(index=False, name=None)
    # Those of the innermost module around the layer `of` first: a decoder has other tokens than its model.
    ordered = sorted(places, key=lambda at: at[2] != TOKENS or -len(at[0]) * f"{of}.".startswith(f"{at[0]}."))
    tried = product(ordered, dict.fromkeys((None, recorded.call)))
    for (layer, hook, path), call in tried:
        try:
            features = replace(recorded, hook=hook, role="input", path=path, call=call).read(run, layer or ".")
        except InstrumentError:  # for example several calls
            continue
        at = positions_of(features.ids, streams.ids)
        if features.X.shape[1:] == shape[1:] and (at >= 0).all():
            return features.X[at].astype(np.int64)
    return None


def _projection(run: Run, unembed: Any) -> tuple[Projection, int | None]:
    """Return the output layer as a function of tensors, and its number of input features if it is known."""
    from torch import nn
    from torch.nn import functional as F

    if isinstance(unembed, nn.Module):
        return _in_own_dtype(unembed), getattr(unembed, "in_features", None)
    weight, bias = linear_layer(run, unembed, "unembed")
    if weight.dim() != 2:
        allowed = "a matrix [vocabulary, features]"
        raise InstrumentError(Problem("unembed", "wrong shape", f"{list(weight.shape)}", allowed))
    matrix, offset = weight.float(), None if bias is None else bias.float()
    return lambda hidden: F.linear(hidden, matrix, offset), matrix.shape[1]


def _normalization(run: Run, norm: Any) -> Projection:
    from torch import nn
    from torch.nn import functional as F

    if norm is None:
        return lambda hidden: hidden
    if isinstance(norm, nn.Module):
        return _in_own_dtype(norm)
    if not isinstance(norm, str):
        return norm  # type: ignore[no-any-return]
    weights, name = saved_weights(run), norm.removesuffix(".weight")
    weight, bias = (weight_named(weights, f"{name}.{part}", "norm").float() for part in ("weight", "bias"))
    if weight.dim() != 1 or f"{name}.running_mean" in weights:
        message = "the saved weights of this layer are not those of an nn.LayerNorm"
        raise InstrumentError(Problem("norm", message, norm, fix="pass the module or a function"))
    return lambda hidden: F.layer_norm(hidden, weight.shape, weight, bias)


def _in_own_dtype(module: Any) -> Projection:
    """Return a function that applies a module to float32 tensors in the dtype and on the device of its parameters."""

    def apply(hidden: Tensor) -> Tensor:
        like = next((each for each in module.parameters() if each.is_floating_point()), hidden)
        output: Tensor = module(hidden.to(like.device, like.dtype))
        return output.cpu().float()

    return apply
