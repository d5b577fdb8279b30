"""Where a `TorchFunctionMode` must not be active, because it would change what a module computes.

`nn.TransformerEncoder` converts a padded batch to a nested tensor, and `nn.MultiheadAttention` runs one fused function, unless
a mode is active. With a mode, padded positions would have other values, and attention would refuse nested tensors. A
compiled module would be compiled again with the mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..lazy_compiler import is_compiled_module
from ..values.nested import iter_tensors
from .function_calls import FunctionMode, module_frame

Pause = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def register_pauses(
    modules: Iterable[nn.Module], pause: Pause, end: Callable[..., None], resume: Callable[..., None]
) -> Iterator[RemovableHandle]:
    """Register the hooks that pause a mode.

    Args:
        modules: The modules in which the mode is active. Their submodules are included.
        pause: The forward pre hook, with keyword arguments, of a module that `needs_pause` is for.
        end: Its forward hook, which is called after an exception too.
        resume: The forward pre hook of the first layer of an encoder, which has chosen its path by then.
    """
    for part in {part: None for module in modules for part in module.modules()}:
        is_encoder = isinstance(part, nn.TransformerEncoder)
        if is_encoder or isinstance(part, nn.MultiheadAttention) or is_compiled_module(part):
            yield part.register_forward_pre_hook(pause, with_kwargs=True)
            yield part.register_forward_hook(end, prepend=True, always_call=True)
        if is_encoder:
            yield from (layer.register_forward_pre_hook(resume) for layer in cast(nn.ModuleList, part.layers)[:1])


def register_pauses_of(mode: FunctionMode, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
    """Register the hooks that pause one mode in modules and their submodules."""

    def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (frame := module_frame()[0]) is not None and needs_pause(module, args, kwargs):
            mode.pause(frame, None)

    def end(*_: Any) -> None:
        mode.leave(module_frame()[0], is_paused=True)

    return register_pauses(modules, pause, end, lambda *_: mode.resume())


def needs_pause(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a mode could change what a module computes: it is compiled, or may take PyTorch's fast path.

    The fast path is for evaluations without gradients. Some of PyTorch's conditions are not checked here.
    """
    if is_compiled_module(module):
        return True
    if module.training or not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    attention: Any = module.layers[0].self_attn if isinstance(module, nn.TransformerEncoder) else module
    tensors = iter_tensors((attention.in_proj_weight, args, kwargs))
    if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in tensors):
        return False
    if module is not attention:
        return True
    inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
    return bool(attention.batch_first) and all(each is inputs[0] for each in inputs)
