"""Whose numbers a tensor holds where several processes train together."""

from __future__ import annotations

from typing import Literal

from ..spec.kinds import Kind

Scope = Literal["global", "local", "averaged", "shard"]
"""`global`: of the whole batch. `local`: of this rank's part of the batch. `averaged`: the same on every rank: gradients after
they were averaged, parameters, their updates and states. `shard`: of this rank's shard of such a tensor."""

Parallel = Literal["ddp", "fsdp2", "own"]
"""How several processes train together: with DistributedDataParallel, with fully_shard, or in a way that is not known."""


def scope_of(kind: Kind, role: str, parallel: Parallel | None) -> Scope:
    """Whose numbers a kind sees in a role, of tensors that are no shards.

    Module hooks and hooks on a parameter's gradient come before DistributedDataParallel averages: what they see is the
    rank's own. At the optimizer boundary all ranks have the same, but for buffers, such as BatchNorm's running mean.

    Args:
        kind: The kind of hook.
        role: Which of its tensors.
        parallel: None for a single process.
    """
    if parallel is None:
        return "global"
    if parallel == "own" or kind.rhythm == "micro_step" or role == "buffer":
        return "local"
    return "averaged"
