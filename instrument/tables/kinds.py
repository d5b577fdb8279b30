"""The hook kinds: the hook point in PyTorch, its tensors, and the tensors that an intervention can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from ..fields.registry import Registry

Family = Literal["module", "parameter", "optimizer", "state_dict", "loss", "collective"]
Frequency = Literal["micro_step", "step", "occasion", "operation"]

ATTENTION_FUNCTIONS = ("softmax", "scaled_dot_product_attention", "multi_head_attention_forward")
"""The torch functions by which modules compute attention."""
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "gather", "scatter", "all_to_all")
"""The names of collective operations, for kind collective. Variants have the same name: all_gather_into_tensor is an all_gather."""
ATTENTION_ROLES = ("attention", "scores")
"""The roles of kind function at these functions: the attention weights, and the logits before their softmax."""


@dataclass(frozen=True)
class Kind:
    """One hook kind."""

    name: str  # the value of `kind:`; PyTorch's `register_<name>_hook` if it exists
    family: Family  # the file in `instrument/hooks/` that implements it
    # How often it is expected to fire: in every micro-step, once per step around the optimizer step, occasionally, or in each collective
    # operation.
    frequency: Frequency
    # The available tensors. The first one is the default. A role that ends in `.*` is a prefix.
    roles: tuple[str, ...]
    changes: tuple[str, ...]  # the roles that an intervention can change
    gradient: bool  # whether it requires a backward pass
    meaning: str  # what an intervention changes, for the documentation
    of_functions: bool = False  # whether it sees the torch functions that a module calls, and not the module itself
    # For a kind of an installed package: the class with the hooks of a module, `package.module:Class`. It is called with the module, the
    # attached hooks and the clock, and has the methods of `HookGroup`.
    hooks: str | None = None

    @property
    def repeats(self) -> bool:
        """Whether the kind fires again if checkpointing recomputes a forward pass.

        A gradient is delivered only once, even if it is that of the recomputed pass.
        """
        return not self.gradient

    def has_role(self, role: str) -> bool:
        """Return whether this kind has a role. `state.exp_avg` is one of `state.*`."""
        return any(_covers(known, role) for known in self.roles)

    def can_change(self, role: str) -> bool:
        """Return whether an intervention with this kind can change a role."""
        return any(_covers(known, role) for known in self.changes)


def _covers(known: str, role: str) -> bool:
    return role == known or (known.endswith(".*") and role.startswith(known[:-1]) and len(role) >= len(known))


# name | family | frequency | roles | roles that an intervention can change | whether it is a gradient | what it changes
_TABLE = """
forward_pre | module | micro_step | input | input | no | the input
forward | module | micro_step | output, input, change | output | no | the output
full_backward_pre | module | micro_step | grad_output | grad_output | yes | the gradient that enters the module's backward pass; \
this also changes the gradients of its weights
full_backward | module | micro_step | grad_input, grad_output | grad_input | yes | the gradient that flows to the previous modules
tensor | module | micro_step | output, input | output, input | yes | the gradient of the tensor, summed over all its uses
function | module | micro_step | output, input, attention, scores | output, input | no | the result or the arguments of a torch \
function that the module calls
function_grad | module | micro_step | grad_output | grad_output | yes | the gradient of the function's result, summed over all its uses
parameter_grad | parameter | step | param_grad | param_grad | yes | the gradient before `optimizer.step`, after accumulation and unscaling
parameter_grad_micro | parameter | micro_step | param_grad | param_grad | yes | the gradient of each micro-batch, before accumulation
post_accumulate_grad | parameter | micro_step | param_grad | param_grad | yes | the accumulated gradient after each micro-batch
step_pre | optimizer | step | param, param_grad, buffer, state.* | param, param_grad | yes | the parameter or its gradient, before \
`optimizer.step`
step_post | optimizer | step | param, param_grad, update, buffer, state.* | param, state.* | yes | the parameter or the optimizer state, \
after `optimizer.step`
state_dict_pre | state_dict | occasion | entry, state.* | | no | nothing; it records the values before they are saved
state_dict_post | state_dict | occasion | entry, state.* | entry, state.* | no | the saved values, not the live weights
load_state_dict_pre | state_dict | occasion | entry, state.* | entry, state.* | no | the loaded values, not the file
load_state_dict_post | state_dict | occasion | entry, state.* | | no | nothing; it records the loaded values
loss | loss | micro_step | loss | loss | no | the loss, before the backward pass
collective | collective | operation | input, output | input, output | no | what this process sends, or what it receives
"""
KINDS: Registry[Kind] = Registry("kinds", "kind")
for _line in _TABLE.strip().splitlines():
    _name, _family, _frequency, _roles, _changes, _gradient, _meaning = (cell.strip() for cell in _line.split("|"))
    KINDS.register(_name)(
        Kind(
            _name,
            cast("Family", _family),
            cast("Frequency", _frequency),
            roles=tuple(_roles.split(", ")),
            changes=tuple(_changes.split(", ")) if _changes else (),
            gradient=_gradient == "yes",
            meaning=_meaning,
            of_functions=_family == "module" and _name.startswith("function"),
        )
    )
