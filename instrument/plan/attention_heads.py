"""Where attention heads lie in a model. `heads` is refused at modules whose tensors are not divided into heads."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from torch import nn

from ..config.hook_specs import HookSpec
from ..errors import ConfigError, Problem
from ..formatting import shorten
from .modules import Layer, Layers
from .structure import ATTENTION

# Names of output projections in attention modules of transformers, timm, torchvision and common custom code.
_OUTPUT_PROJECTION = re.compile(
    r"((att|attn|c|o|out|output|post)_)?proj|(out_|output_)?projection|proj_out|projection_layer|"
    r"((attention|attn|fc|linear|to)_)?out|out_lin|out_linear|output|dense|merge|(linear_|w_?)?o",
    re.IGNORECASE,
)
_PROJECTION_TYPES = ("*Linear*", "Conv1D", "Conv[12]d")


def check_heads(spec: HookSpec, hooked: Sequence[Layer], layers: Layers, where: str) -> None:
    """Refuse `heads` at tensors in which features belong to no head. The ConfigError names the modules at which the heads are."""
    if spec.heads is None:
        return
    projections = [*_output_projections(layers)]
    conflicts = [
        (layer, projection, attention)
        for layer in hooked
        for projection, attention in projections
        if _contains(layer, projection) and not _has_heads(spec, layer, projection, attention)
    ]
    if not conflicts:
        return
    layer, _, attention = conflicts[0]
    if isinstance(attention.module, nn.MultiheadAttention):
        function = nn.functional.multi_head_attention_forward.__name__
        places = shorten([*dict.fromkeys(attention.label for _, _, attention in conflicts)], 4)
        fix = f"layers: {places}, kind: function, functions: {function}, role: input, path: {function}.0.11"
        fix += (
            "; in evaluations without gradients, turn off the fast path: torch.backends.mha.set_fastpath_enabled(False)"
        )
        reason = "nn.MultiheadAttention does not call its output projection, but passes the weight to a function"
    else:
        places = shorten([*dict.fromkeys(projection.label for _, projection, _ in conflicts)], 4)
        fix = f"layers: {places}, kind: {'full_backward' if spec.definition.gradient else 'forward_pre'}"
        reason = "heads are side by side in the input of the output projection"
    message = f"features in the {spec.tensor_role} of {layer.label!r} belong to no head; {reason}"
    allowed = "'units: [...]' for attention weights [N, heads, T, T]"
    raise ConfigError(Problem(f"{where}.heads", message, given=spec.heads.model_dump(), allowed=allowed, fix=fix))


def _has_heads(spec: HookSpec, layer: Layer, projection: Layer, attention: Layer) -> bool:
    is_called = not isinstance(attention.module, nn.MultiheadAttention)
    if spec.definition.of_functions:
        return spec.tensor_role == "input" or layer is not (projection if is_called else attention)
    return spec.tensor_role in ("input", "grad_input") and is_called and not _contains(layer, attention)


def _contains(layer: Layer, other: Layer) -> bool:
    return any(module is other.module for module in layer.module.modules())


def _output_projections(layers: Layers) -> Iterator[tuple[Layer, Layer]]:
    by_name = {name: layer for layer in layers for name in layer.names}
    for layer in layers:
        segments = re.sub(r"(\.\d+)+$", "", layer.name).split(".")  # `to_out.0` is a part of `to_out`
        if not _OUTPUT_PROJECTION.fullmatch(segments[-1]) or not any(map(layer.is_a, _PROJECTION_TYPES)):
            continue
        for end in (-1, -2):  # BertAttention contains `output.dense`
            parent = by_name[".".join(segments[:end])]
            if ATTENTION.search(f"{parent.name.rpartition('.')[2]} {parent.type}"):
                yield layer, parent
                break
