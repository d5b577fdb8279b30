"""Reasons why a hook did not fire, for the coverage table. An uncertain reason lists the possible ones."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

from ..spec.kinds import Kind

NOT_CALLED = (
    "the module was not called while the hook was due: nothing runs it, its parent uses it functionally or calls .forward() "
    "itself, or an exception ended the forward pass before it"
)
NOT_CALLED_COPIED = (
    "the module was not called while the hook was due: a copy of it (deepcopy, pickle) runs in its place, whose hooks do "
    "nothing, or nothing runs it, its parent uses it functionally or calls .forward() itself, or an exception ended the "
    "forward pass before it"
)
AT_OTHER_STEPS = "the module was not called at steps at which the hook was due; it was called at others"
RAISED = "the module was called, but an exception ended its forward pass, and was caught"
REPLACED = "the module was replaced by another one during the run, which has no hooks"
REMOVED = "the parameter was removed from its module during the run (set to None)"
PROJECTION = (
    "the module was not called: nn.MultiheadAttention uses the weights of its projection functionally; hook the attention "
    "itself, or the parameters"
)
NO_TENSOR = "no tensor was there that the hook could take, or none at the path asked for"
NO_GRAPH = "the tensor needs no gradient: it is data, is detached, or comes out of frozen parameters"
NO_GRAD = "the module was called under torch.no_grad()"
INFERENCE = "the module was called under torch.inference_mode()"
NO_INPUT_GRAPH = "its input needs no gradient: it is data, or comes out of frozen layers"
TRANSFORMED = "it was called inside a transform of torch.func (vmap, grad, jvp), whose tensors no hook can take along"
NO_GRADIENT = "no gradient arrived: no backward pass was made, or the loss does not depend on this tensor"
NO_PARAMETER_GRADIENT = (
    "the parameter had no gradient: no backward pass was made while the hook was due, or the loss does not depend on it (it "
    "is not used, or only under torch.no_grad or detach)"
)
FROZEN = "the parameter is frozen (requires_grad is False)"
NO_STEP = "the optimizer made no step, or another optimizer than the one that was handed over made it"
OTHER_STEP = "the optimizer that holds the parameter made no step, and another one did"
SKIPPED_STEP = "the gradient scaler skipped the optimizer's step: a gradient was not finite"
NOT_OPTIMIZED = "the optimizer does not hold this parameter"
NO_STATE = "the optimizer keeps no such state for this parameter"
NO_LOSS = "the loss was not handed over: loss = probe.loss(loss) before loss.backward()"
NOT_SAVED = "no state dict was made while it was due"
NOT_LOADED = "no state dict was loaded while it was due"
CHECKPOINT = (
    "only the run's own checkpoints were made, which hold the live values: an intervention does not change them"
)

_HAPPENED = {  # what happened in another phase instead
    NOT_CALLED: "the module was called",
    NO_LOSS: "the loss was handed over",
}
_PHASES = {"sanity": "the sanity check before training"}


def absent(kind: Kind) -> str:
    """Return the default reason why a hook of this kind had no opportunity to fire."""
    match kind.family:
        case "module":
            return NOT_CALLED
        case "parameter":
            return NO_STEP if kind.rhythm == "step" else NO_PARAMETER_GRADIENT
        case "optimizer":
            return NO_STEP
        case "state_dict":
            return NOT_LOADED if kind.name.startswith("load") else NOT_SAVED
        case "loss":
            return NO_LOSS


def in_another_phase(cause: str, phase: str, elsewhere: Set[str]) -> str | None:
    """Return the reason if a hook could have fired in other phases, or at other steps of its phase; None otherwise.

    Args:
        cause: The reason that is known so far.
        phase: The phase of the hook.
        elsewhere: The phases in which it had an opportunity but was not scheduled.
    """
    if cause not in _HAPPENED or not elsewhere:
        return None
    if phase in elsewhere:
        return AT_OTHER_STEPS if cause == NOT_CALLED else None
    phases = " and ".join(_PHASES.get(other, f"phase {other}") for other in sorted(elsewhere))
    return f"{_HAPPENED[cause]} in {phases} only, and the hook is for phase {phase}"


def never_entered(phase: str) -> str:
    """Return the reason for a hook whose phase never occurred."""
    return f"never due: the hook is for phase {phase}, which the loop never entered (with probe.evaluating(): ...)"


def around(module: Any, parents: Iterable[Any]) -> str | None:
    """Return why a module was not called, if the surrounding modules explain it: attention in a fused function.

    Args:
        module: The module that was not called.
        parents: The modules that contain it, innermost first.

    Returns:
        The reason; None if they do not explain it.
    """
    attention = fused = None
    for parent in parents:
        classes = [cls.__name__ for cls in type(parent).__mro__]
        if "MultiheadAttention" in classes and getattr(parent, "out_proj", None) is module:
            return PROJECTION
        if attention is None and any("attention" in name.lower() for name in classes):
            attention = parent
        if attention is not None and fused is None:
            fused = _fused(parent)
    if fused is None or any(True for _ in module.parameters()):
        return None
    return (
        f"the module was not called: the attention around it runs with {fused[0]}, which computes softmax and dropout in one "
        f"function and calls no module for them; {fused[1]} calls those that the model's code has for them"
    )


def _fused(module: Any) -> tuple[str, str] | None:
    """Return the setting that makes a module compute attention in a fused function, and the setting that changes it."""
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)  # for transformers
    if isinstance(how, str) and how != "eager":
        return f'attn_implementation="{how}"', 'attn_implementation="eager"'
    if getattr(module, "fused_attn", False) is True:  # for timm
        return "fused_attn=True", "timm.layers.set_fused_attn(False) before the model is made"
    return None
