"""Why a hook did not fire: the words of the coverage table."""

from __future__ import annotations

from ..spec.kinds import Kind

NOT_CALLED = "the module was not called: nothing runs it, its parent uses it functionally or calls .forward() itself"
REPLACED = "the module was replaced by another one during the run, which has no hooks"
NO_TENSOR = "no tensor was there that the hook could take, or none at the path asked for"
NO_GRAPH = "the tensor needs no gradient: no_grad, frozen parameters, or an input that nothing trains"
NO_INPUT_GRAPH = "its input needs no gradient: it is data, or comes out of frozen layers"
TRANSFORMED = "it was called inside a transform of torch.func (vmap, grad, jvp), whose tensors no hook can take along"
NO_GRADIENT = "no gradient arrived: the loss does not depend on this tensor"
NO_PARAMETER_GRADIENT = "the parameter had no gradient: the loss does not depend on it"
NO_STEP = "the optimizer made no step"
SKIPPED_STEP = "the gradient scaler skipped the optimizer's step: a gradient was not finite"
NOT_OPTIMIZED = "the optimizer does not hold this parameter"
NO_STATE = "the optimizer keeps no such state for this parameter"
NO_LOSS = "the loss was not handed over: loss = probe.loss(loss) before loss.backward()"
NOT_SAVED = "no state dict was made while it was due"
NOT_LOADED = "no state dict was loaded while it was due"


def absent(kind: Kind) -> str:
    """Why a hook of this kind had no opportunity to fire, where nothing else is known."""
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
