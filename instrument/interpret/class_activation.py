"""Class activation maps: the parts of an image that raise the score of a class, from recorded feature maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..analysis.features import Array, Features
from ..analysis.load import Run
from ..analysis.plot_data import forward_order, rank_in
from ..analysis.tensor_images import maps_in
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError, Problem
from .recorded_layers import Recorded, linear_layer, positions_of

if TYPE_CHECKING:
    from torch import Tensor, nn

SCORE_ARGUMENTS = "run mode=forward forward.grad=true 'forward.of=\"[:, 3]\"'"


class ClassActivation(NamedTuple):
    """Class activation maps of the samples of a run, in the order of their ids.

    Attributes:
        maps: One map per sample and class, float64 [samples, classes, H, W].
        classes: The class of each map, int64 [samples, classes]; None for Grad-CAM, whose score `forward.of` selects.
        y: The target of each sample, [samples]; None if no targets were recorded.
        ids: The id of each sample, [samples].
        layer: The layer of the feature maps.
    """

    maps: Array
    classes: Array | None
    y: Array | None
    ids: Array
    layer: str


def class_activation_map(
    run: Run,
    layer: str | None = None,
    *,
    classifier: Tensor | Array | nn.Linear | str | None = None,
    classes: int | Sequence[int] | None = None,
    hook: str | None = None,
    phase: str | None = None,
    step: int | None = None,
    path: str | None = None,
    call: int | None = None,
) -> ClassActivation:
    """Compute class activation maps (CAM) or gradient-weighted ones (Grad-CAM) from recorded feature maps.

    With `classifier`, the map of class c is `sum_k w[c, k] * f[k]`: the feature maps f, weighted by the classifier that reads
    their means (CAM, Zhou et al. 2016). Its mean is the score of the class without the bias, so it is exact for a model whose
    last feature maps are averaged and then classified by one linear layer.

    Without `classifier`, it is `relu(sum_k a[k] * f[k])`, where `a[k]` is the mean of the recorded gradient of a score with
    respect to `f[k]` (Grad-CAM, Selvaraju et al. 2017). It works for any convolutional layer of any model. Record the gradient
    of the layer's output with `kind: full_backward_pre`. `forward.of` selects the score.

    Args:
        run: A run with recorded feature maps [N, C, H, W]; for a probe, `probe.run`.
        layer: The layer of the feature maps. Default: the last one, in forward order.
        classifier: The linear layer; or its weights [classes, C]; or its name, if the run saved its weights
            (`train.save=true`) or loaded those of a run (`init_from`).
        classes: The class or the classes, with `classifier`. Default: the class with the highest score of each sample.
        hook, phase, step, path, call: Select the recorded feature maps; see `layer_similarity`.

    Returns:
        The maps with their classes, targets and ids.

    Raises:
        InstrumentError: The layer or its gradient was not recorded, the selection is ambiguous, the sizes do not fit, the
            weights are not those of the recorded step, or the gradient is that of a loss.
    """
    recorded = Recorded(hook=hook, phase=phase, step=step, path=path, call=call).preferring_outputs(run)
    name = _layer(run, recorded, layer)
    features = recorded.read(run, name)
    if features.X.ndim != 4:
        message = "class activation maps require feature maps [N, C, H, W]"
        raise InstrumentError(Problem("layer", message, f"{name} {list(features.X.shape)}"))
    if classifier is None:
        if classes is not None:
            message = "the recorded gradients are those of one score, which forward.of selects"
            raise InstrumentError(Problem("classes", message, classes, fix="pass classifier=, or leave classes out"))
        gradients = Recorded(role="grad_output", phase=phase, step=step, path=path, call=call)
        maps, chosen = _of_gradients(run, name, features, gradients), None
    else:
        maps, chosen = _of_weights(run, recorded, name, features, classifier, classes)
    return ClassActivation(maps, chosen, features.y, features.ids, name)


def _layer(run: Run, recorded: Recorded, layer: str | None) -> str:
    """Return the name of the layer, or of the last layer with recorded feature maps."""
    if layer is not None:
        return recorded.layers(run, [layer])[0]
    recorded.layers(run, None)  # raises an error if nothing was recorded
    names = {one.layer for one in maps_in(run) if one.what == "feature maps"}
    if not names:
        message = "no feature maps [N, C, H, W] were recorded"
        fix = "record the last convolutional layer with {kind: forward, action: record, tensors: true}"
        raise InstrumentError(Problem("layer", message, fix=fix))
    return max(names, key=rank_in(forward_order(run))) or "."


def _of_weights(
    run: Run, recorded: Recorded, layer: str, features: Features, classifier: Any, classes: int | Sequence[int] | None
) -> tuple[Array, Array]:
    """Return the maps [N, classes, H, W] and their classes [N, classes]."""
    if not isinstance(classifier, str) and not any(hasattr(classifier, name) for name in ("detach", "parameters")):
        classifier = np.array(classifier, np.float64)  # PyTorch would round a list, and refuse reversed arrays
    own, of_layer = linear_layer(run, classifier, "classifier")
    weight: Array = own.double().numpy()
    bias: Array | float = 0.0 if of_layer is None else of_layer.double().numpy()
    channels = features.X.shape[1]
    if weight.ndim != 2 or weight.shape[1] != channels:
        allowed = f"a matrix [classes, {channels}], because {layer} has {channels} channels"
        raise InstrumentError(Problem("classifier", "wrong shape", f"{list(weight.shape)}", allowed))
    if isinstance(classifier, str):
        # Only the final weights are saved, so the maps of a training must have been recorded after its last update.
        steps, rows = run.read("metrics", ["step", "phase"]), recorded.rows(run, ["step", "phase"], layer)
        last = steps[steps["phase"].isin(STEP_PHASES) & (steps["phase"] != "forward")]["step"].max() + 1
        early = rows[(rows["phase"] != "forward") & (rows["step"] < last)]
        if len(early):
            message = f"the saved weights are those after {last} steps, and the feature maps were recorded with earlier weights"
            fix = f"record with phase: probe at step {last}, or in a run with mode=forward init_from={run.path}"
            raise InstrumentError(Problem("step", message, int(early["step"].min()), fix=fix))
    maps = features.X.astype(np.float64)
    if classes is None:
        scores = maps.mean((2, 3)) @ weight.T + bias  # [N, classes]
        chosen = scores.argmax(1)[:, None]
    else:
        given = [classes] if isinstance(classes, int | np.integer) else list(classes)
        if bad := [each for each in given if not 0 <= each < len(weight)]:
            raise InstrumentError(Problem("classes", "no such class", bad[0], f"0 to {len(weight) - 1}"))
        chosen = np.tile(np.array(given, np.int64), (len(maps), 1))
    return np.einsum("nkhw,nck->nchw", maps, weight[chosen]), chosen


def _of_gradients(run: Run, layer: str, features: Features, recorded: Recorded) -> Array:
    config = run.info.get("config") or {}
    if "mode" in config and not (config.get("forward") or {}).get("of"):
        message = "the gradients of this run are those of its loss, and Grad-CAM requires those of a score"
        raise InstrumentError(Problem("run", message, str(run.path), fix=f"{SCORE_ARGUMENTS}, or pass classifier="))
    rows = run.read("tensors", ["layer", "role"])
    if not ((rows["layer"] == ("" if layer == "." else layer)) & (rows["role"] == "grad_output")).any():
        fix = "record it with {kind: full_backward_pre, action: record, tensors: true}, or pass classifier="
        raise InstrumentError(Problem("layer", "the gradient of its output was not recorded", layer, fix=fix))
    gradients = recorded.read(run, layer)
    at = positions_of(gradients.ids, features.ids)
    if (at < 0).any() or gradients.X.shape[1:] != features.X.shape[1:]:
        message = "the gradients are those of other samples, or have another shape than the feature maps"
        given = f"{list(gradients.X.shape)}, not {list(features.X.shape)}"
        raise InstrumentError(Problem("layer", message, given, fix="use the same selection in both hooks"))
    weight = gradients.X[at].astype(np.float64).mean((2, 3))  # [N, C]
    maps: Array = np.einsum("nkhw,nk->nhw", features.X.astype(np.float64), weight)
    return np.maximum(maps, 0.0)[:, None]
