"""The attention that a function call computes: its weights and its scores, for the roles `attention` and `scores`.

A softmax is attention if it is along the last dimension of a tensor with at least 4 dimensions, or with 3 of which the last two have the
same size. Class probabilities [N, C], routers of experts [tokens, experts] and maps of classes are therefore not. Fused functions
return no weights: these are computed again from the arguments, without dropout.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..tables.reasons import NOT_ATTENTION, OTHER_SOFTMAX, unknown_attention
from ..values.dtensor import is_sharded

Attention = Mapping[str, Tensor]
"""By role: `attention`, the weights after the softmax, and `scores`, the logits before it, with scale and mask.

[..., heads, queries, keys]: dimension -3 has size 1 if the function gets no dimension of heads.
"""

_MASKS = "torch.nn.attention.bias"  # of its classes, which only the fused function supports; the import is slow
_PARAMETERS = inspect.signature(F.multi_head_attention_forward)


def attention_of(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Attention | str:
    """Return the attention of a call of one of `ATTENTION_FUNCTIONS`, whose arguments are not modified, or the reason why it is unknown."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, Tensor) and (each.is_nested or is_sharded(each) or type(each).__module__ == _MASKS):
            return unknown_attention(name, "nested tensors" if each.is_nested else type(each).__name__)
    if name == "softmax":
        return _of_softmax(result, *args, **kwargs)
    with torch.no_grad():
        return (_of_product if name == "scaled_dot_product_attention" else _of_module)(*args, **kwargs)


def _of_softmax(result: Tensor, input: Tensor, dim: int | None = None, *_: Any, **__: Any) -> Attention | str:
    if dim is None or input.dim() < 3 or dim % input.dim() != input.dim() - 1:
        return NOT_ATTENTION
    if input.dim() == 3 and input.shape[1] != input.shape[2]:
        return OTHER_SOFTMAX
    return _with_heads(result, input)


def _of_product(  # noqa: PLR0917
    query: Tensor,
    key: Tensor,
    value: Tensor,  # noqa: ARG001
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,  # noqa: ARG001
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Attention:
    """Compute the attention as the documentation of `scaled_dot_product_attention` does, in float32 or float64."""
    device = query.device.type
    if torch.is_autocast_enabled(device):  # the function gets arguments of this dtype
        query, key = (each.to(torch.get_autocast_dtype(device)) for each in (query, key))
    with torch.autocast(device, enabled=False):
        query, key = (each.to(torch.promote_types(each.dtype, torch.float32)) for each in (query, key))
        if enable_gqa:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = (query @ key.transpose(-2, -1)).mul_(factor)
        if is_causal:
            scores += torch.full(scores.shape[-2:], -math.inf, device=scores.device).triu_(1)
            return _with_heads(scores.softmax(-1), scores)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = scores.new_zeros(attn_mask.shape).masked_fill_(attn_mask.logical_not(), -math.inf)
        if attn_mask is not None:
            scores = scores + attn_mask
        return _with_heads(_safe_softmax(scores), scores)


def _of_module(*args: Any, **kwargs: Any) -> Attention:
    """Call `multi_head_attention_forward` again, so that it computes its weights, and take the arguments of their softmax."""
    given = _PARAMETERS.bind(*args, **kwargs).arguments
    needs_weights = given.get("need_weights", True)
    given |= {"dropout_p": 0.0, "need_weights": True, "average_attn_weights": False}
    with _SoftmaxArguments() as softmax:
        _, weights = F.multi_head_attention_forward(**given)
    assert weights is not None, "they are requested"
    scores = softmax.scores.view(weights.shape)
    return {"attention": weights if needs_weights else _safe_softmax(scores), "scores": scores}


def _with_heads(weights: Tensor, scores: Tensor) -> Attention:
    """Return an attention with a dimension of heads, of size 1 if the tensors have none: [..., heads, queries, keys]."""
    has_heads = scores.dim() >= 4
    return {
        role: each if has_heads else each.unsqueeze(-3) for role, each in (("attention", weights), ("scores", scores))
    }


def _safe_softmax(scores: Tensor) -> Tensor:
    """Return the softmax, with zeros for a query without keys, as `scaled_dot_product_attention` does."""
    weights = scores.softmax(-1)
    return weights.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0.0) if weights.numel() else weights


class _SoftmaxArguments(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: PyTorch would import the compiler, which is slow, to exclude the method below from compilation."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.scores = torch.empty(0, device="cpu")

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._softmax.default:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))
