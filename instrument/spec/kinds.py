"""The kinds of hook: where PyTorch lets us in, which tensors are there, which of them an intervention can change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Family = Literal["module", "parameter", "optimizer"]


@dataclass(frozen=True)
class Kind:
    """One kind of hook.

    Attributes:
        name: As in `kind:`; PyTorch's `register_<name>_hook` wherever there is one.
        family: The file in `instrument/kinds/` that serves it.
        roles: The tensors to be had there; the first is the default. A role that ends in `.*` is a prefix.
        changes: The roles that an intervention can change.
        gradient: Whether it needs a backward pass.
        meaning: What an intervention there changes, for the docs.
    """

    name: str
    family: Family
    roles: tuple[str, ...]
    changes: tuple[str, ...]
    gradient: bool
    meaning: str

    @property
    def at_boundary(self) -> bool:
        """Whether it acts around the optimizer's step, once a step; the others act in every micro-step."""
        return self.name == "parameter_grad" or self.family == "optimizer"

    @property
    def repeats(self) -> bool:
        """Whether it acts a second time on the same tensors where checkpointing runs a forward pass again; a gradient
        comes once, also if it is the one of the second pass."""
        return not self.gradient

    def has_role(self, role: str) -> bool:
        """Whether `role` is one of this kind's, `state.exp_avg` being one of `state.*`."""
        return any(
            role == known or (known.endswith(".*") and role.startswith(known[:-1]) and len(role) >= len(known))
            for known in self.roles
        )


_ALL = (
    Kind("forward_pre", "module", ("input",), ("input",), False, "the input"),
    Kind("forward", "module", ("output", "input"), ("output",), False, "the output"),
    Kind(
        "full_backward_pre",
        "module",
        ("grad_output",),
        ("grad_output",),
        True,
        "the gradient on its way into the module: also its own weights' gradients",
    ),
    Kind("full_backward", "module", ("grad_input", "grad_output"), ("grad_input",), True, "what flows on upstream"),
    Kind(
        "tensor",
        "module",
        ("output", "input"),
        ("output", "input"),
        True,
        "the gradient of that tensor, from all who use it",
    ),
    Kind(
        "parameter_grad",
        "parameter",
        ("param_grad",),
        ("param_grad",),
        True,
        "at the optimizer boundary: the gradient that the optimizer will use, after accumulation",
    ),
    Kind(
        "post_accumulate_grad",
        "parameter",
        ("param_grad",),
        ("param_grad",),
        True,
        "the running sum of the micro-batches' gradients",
    ),
    Kind(
        "step_post",
        "optimizer",
        ("param", "param_grad", "update", "buffer", "state.*"),
        ("param",),
        True,
        "the parameter, after `optimizer.step` has updated it",
    ),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}
