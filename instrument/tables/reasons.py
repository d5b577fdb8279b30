"""Reasons why a hook did not fire, for the coverage table. An uncertain reason lists the possible ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from .kinds import Kind

NEVER_DUE = "never scheduled: its schedule contains none of the completed steps"
NOT_CALLED = (
    "the module was not called while the hook was scheduled: no code calls it, its parent uses its parameters functionally "
    "or calls .forward() directly, an exception ended the forward pass before the call, or end_step was called without a forward pass"
)
NOT_CALLED_COPIED = NOT_CALLED.replace(
    "no code", "a copy of it (deepcopy, pickle), whose hooks are no-ops, runs instead, no code"
)
NOT_ALWAYS_CALLED = (
    "the module was not called in some of the steps at which the hook was scheduled: the forward pass skipped it (an inactive adapter, a "
    "dropped layer, an early exit), an exception ended the pass before the call, or end_step was called without a forward pass"
)
OTHER_CALLS = "the module was called, but in none of the calls that 'calls' selects"
AT_OTHER_STEPS = "the module was not called at steps at which the hook was scheduled; it was called at other steps"
RAISED = "the module was called, but its forward pass raised an exception, which was caught"
REPLACED = "the module was replaced or removed during the run; a new module has no hooks: replace it before the hooks are attached"
MOVED = "the module was moved to {} during the run; its hooks still run, and its rows keep this name"
MOVED_TOGETHER = (
    "the modules were moved during the run, the first one to {}; their hooks still run, and their rows keep these names"
)
REMOVED = "the parameter was removed from its module during the run (set to None)"
SWAPPED = "its parameter was changed by torch.utils.swap_tensors, and PyTorch calls no more hooks on it; attach hooks afterwards"
_NO_PROJECTION_CALL = "the module was not called: nn.MultiheadAttention uses the weights of its projection functionally"
PROJECTION = f"{_NO_PROJECTION_CALL}; hook the attention module or the parameters"
PROJECTION_OF_MATCHED_ATTENTION = f"{_NO_PROJECTION_CALL}; the hook matches the attention module, too"
INLINED = (
    "the module was not called: the graph of torch.fx or torch.export runs its operations itself; use kind function at the module "
    "of the graph, or hook the parameters"
)
OWN_CALL = (
    "the class of the module overrides __call__: no code calls the module, or the override does not call nn.Module.__call__, which runs "
    "the hooks; hook another module, or the parameters"
)
SCRIPT = "it is a TorchScript module, for which PyTorch calls no hooks: hook the module around it, or its parameters"
NOT_TURNED_ON = "no rule turned it on"
NO_TENSOR = "the value contains no tensor that the hook accepts, or none at the given path"
NO_ARGUMENTS = "the module is called without arguments, such as a parametrization: it has no input"
NO_CHANGE = (
    "the first tensor of the output has another shape than the first tensor of the input, or one of them is not a floating-point, "
    "dense tensor: there is no difference of output and input"
)
REPLACED_INPUT = (
    "a forward pre-hook that ran after those of instrument replaced the input: attach the hooks after it is registered"
)
NO_GRAPH = (
    "the tensor requires no gradient: it is data, is detached, has integer or bool values, or depends on frozen parameters "
    "only"
)
NO_GRAD = "the module was called under torch.no_grad()"
INFERENCE = "the module was called under torch.inference_mode()"
NO_INPUT_GRAPH = "its input requires no gradient: it is data, or the output of frozen layers"
NO_OUTPUT_GRAPH = (
    "its output requires no gradient: it is computed under torch.no_grad(), is detached, or has integer or bool values"
)
OLD_NO_INPUT_GRAPH = (
    "its input needs no gradient: it is data, or comes out of frozen layers"  # in runs of earlier versions
)
TRANSFORMED = "it was called inside a transform of torch.func (vmap, grad, jvp), whose tensors hooks cannot use"
WRAPPED = "the tensor belongs to a transform of torch.func (vmap, grad, jvp) or to is_grads_batched of autograd: hooks cannot use it"
NO_FUNCTION = "the module was called, but none of the functions was called in it"
NO_VISIBLE_FUNCTION = (
    f"{NO_FUNCTION}; if a part of it is compiled by torch.compile (also torch.cond and flex_attention), functions in that part "
    "are not seen"
)
NO_ATTENTION = (
    "the module was called, but computed no attention by softmax, scaled_dot_product_attention or multi_head_attention_forward; in a "
    "part that is compiled by torch.compile (also torch.cond and flex_attention), attention is not seen"
)
NOT_ATTENTION = "the module called softmax, but not for attention: along another dimension than the last one, or of fewer than 3 dimensions"
ATTENTION_ELSEWHERE = "the module computes no attention; other modules that the hook matches do"
OTHER_SOFTMAX = (
    "a softmax of 3 dimensions counts as attention only if the last two have the same size: kind function with role output records it, "
    "and other 'layers' leave out a softmax over classes or experts"
)
NO_OPTIONAL_FUNCTION = "the module calls none of the functions of the hook, which is optional"
ONLY_IN_OTHER_MODULES = "the module calls none of the functions; other modules that the hook matches call them"
FAST_PATH = (
    "the module, or one inside it, took PyTorch's fast path for evaluations without gradients (nn.MultiheadAttention, "
    "nn.TransformerEncoder), in which functions are not seen; torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
PARTLY_COMPILED = (
    "a part of the module runs in code compiled by torch.compile (also torch.cond and flex_attention), in which functions are "
    "not seen"
)
COMPILED = "the module runs in code compiled by torch.compile, in which no function is called"
REPEATED_ARGUMENT = "the module got one tensor as several arguments, and their separate gradients are unknown: {}"
NO_GRADIENT = "no gradient arrived: no backward pass was run, or the loss does not depend on this tensor"
NO_GRADIENT_OF_CALL = (
    "gradients of other calls in the same step arrived, but the loss does not depend on this call: its result is unused, or is "
    "detached"
)
NO_PARAMETER_GRADIENT = (
    "the parameter had no gradient: no backward pass was run while the hook was scheduled, or the loss does not depend on it "
    "(it is unused, or used only under torch.no_grad or detach)"
)
NO_SHARD_GRADIENT = (
    f"{NO_PARAMETER_GRADIENT}, or fully_shard delivers it after a later micro-batch (set_requires_gradient_sync)"
)
NO_GRADIENT_AT_STEP = (
    f"{NO_PARAMETER_GRADIENT}, or the gradient was cleared before the step (by zero_grad, or by an optimizer step inside of "
    "backward)"
)
FROZEN = "the parameter is frozen (requires_grad is False)"
NO_STEP = "the optimizer made no step before end_step, or an optimizer that was not passed to the probe made it"
OTHER_STEP = "the optimizer that holds the parameter made no step, but another one did"
SKIPPED_STEP = "the gradient scaler skipped the optimizer's step: a gradient was not finite"
NOT_OPTIMIZED = "the optimizer does not hold this parameter"
NO_STATE = "the optimizer keeps no such state for this parameter"
NO_LOSS = "the loss was not passed to the probe: call loss = probe.loss(loss) before loss.backward()"
NO_COLLECTIVE = (
    "no collective operation that the hook selects was called while it was scheduled; a single process calls none"
)
NOT_AWAITED = "the code did not wait for the result of an asynchronous operation before the hooks were removed"
AWAITED_LATER = (
    "the code waited for the result of an asynchronous operation in a later step, in which the hook is not scheduled"
)
NOT_DRAWN = "the tensor is not in the fraction that was drawn"
OTHER_RANKS = "the hook acts in other processes only"
NOT_SAVED = "no state dict was created while the hook was scheduled"
NOT_LOADED = "no state dict was loaded while the hook was scheduled"
CHECKPOINT = (
    "only checkpoints of the run were saved; interventions do not change them, since they contain the original values"
)

_HAPPENED = {  # what happened in another phase instead
    NOT_CALLED: "the module was called",
    NO_LOSS: "the loss was passed to the probe",
}


CLEARED = (
    "the parameter had no gradient when the hook ran: another post-accumulate hook, which ran first, cleared it (as an optimizer "
    "step inside of backward does); attach before that hook is registered, or use kind parameter_grad_micro"
)


def not_floating_point(dtypes: Iterable[Any]) -> str:
    """Return the reason for an intervention on tensors of other dtypes."""
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return f"an intervention changes floating-point tensors only, and the value has {names}"


def unknown_attention(function: str, type_name: str) -> str:
    """Return the reason why the attention of a function is not recorded for the type of its arguments."""
    return f"attention of {function} is not recorded for arguments of this type: {type_name}"


def default_reason(kind: Kind) -> str:
    """Return the default reason why a hook of this kind had no opportunity to fire."""
    match kind.family:
        case "module":
            return NOT_CALLED
        case "parameter":
            return NO_STEP if kind.frequency == "step" else NO_PARAMETER_GRADIENT
        case "optimizer":
            return NO_STEP
        case "state_dict":
            return NOT_LOADED if kind.name.startswith("load") else NOT_SAVED
        case "loss":
            return NO_LOSS
        case "collective":
            return NO_COLLECTIVE


def in_another_phase(reason: str, phase: str, elsewhere: Set[str]) -> str | None:
    """Return the reason if a hook had an opportunity in other phases (`elsewhere`), in which it was not scheduled; None otherwise.

    The phase of the hook is one of them if it had the opportunity at other steps.
    """
    if reason not in _HAPPENED or not elsewhere:
        return None
    if phase in elsewhere:
        return AT_OTHER_STEPS if reason == NOT_CALLED else None
    names = ("the sanity check before training" if each == "sanity" else f"phase {each}" for each in sorted(elsewhere))
    phases = " and ".join(names)
    return f"{_HAPPENED[reason]} in {phases} only, but the hook is for phase {phase}"


def phase_never_entered(phase: str) -> str:
    """Return the reason for a hook whose phase never occurred."""
    block = "probe.evaluating()" if phase == "eval" else f"probe.in_phase({phase!r})"
    return f"never scheduled: the hook is for phase {phase}, which the loop never entered (with {block}: ...)"


def fused_attention_reason(module: Any, parents: Sequence[Any]) -> str | None:
    """Return why a module was not called, if attention in a fused function explains it; otherwise None. `parents`: innermost first."""
    classes = [cls.__name__ for cls in type(parents[0]).__mro__] if parents else []
    if "MultiheadAttention" in classes and getattr(parents[0], "out_proj", None) is module:
        return PROJECTION
    is_of_attention = any("attention" in name.lower() for name in classes)  # not of a part of it, such as an adapter
    fused = next(filter(None, map(_fused, parents)), None) if is_of_attention else None
    if fused is None or any(True for _ in module.parameters()):
        return None
    return (
        f"the module was not called: the attention that contains it runs with {fused[0]}, which computes softmax and dropout "
        f"in one function and calls no module for them; with {fused[1]}, it calls these modules"
    )


def _fused(module: Any) -> tuple[str, str] | None:
    """Return the setting that makes a module compute attention in a fused function, and the setting that changes it."""
    how = getattr(getattr(module, "config", None), "_attn_implementation", None)  # for transformers
    if isinstance(how, str) and how != "eager":
        return f'attn_implementation="{how}"', 'attn_implementation="eager"'
    if getattr(module, "fused_attn", False) is True:  # for timm
        return "fused_attn=True", "timm.layers.set_fused_attn(False) before the model is created"
    return None


def is_incomplete(row: Mapping[str, Any]) -> bool:
    """Return whether a row of the coverage table requires a warning: a hook fired less often than expected, or never.

    A record of an input or a gradient that cannot exist, such as that of the input data, requires none. Neither does a module without the
    functions of a hook that other modules call or that is optional, a projection whose attention module the hook matches too, and a
    hook that waits for a rule, or a further call of a module on which the loss does not depend.
    """
    elsewhere = (ATTENTION_ELSEWHERE, PROJECTION_OF_MATCHED_ATTENTION, NO_GRADIENT_OF_CALL)
    if row["expected"] and row["cause"] not in elsewhere:
        return bool(row["fired"] < row["expected"])
    no_input = (NO_INPUT_GRAPH, OLD_NO_INPUT_GRAPH, NO_ARGUMENTS)
    others = (ONLY_IN_OTHER_MODULES, NO_OPTIONAL_FUNCTION, NOT_TURNED_ON, OTHER_RANKS)
    return row["cause"] not in ("", *no_input, *elsewhere, *others)
