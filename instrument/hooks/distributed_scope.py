"""The scope of a tensor if several processes train together, and the wrappers for such a training."""

from __future__ import annotations

import gc
from typing import Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..tables.kinds import Kind

Scope = Literal["global", "local", "averaged", "shard"]
"""The part of the distributed tensor that a row describes.

`global`: the complete batch. `local`: this rank's batch shard. `averaged`: identical on every rank, such as averaged
gradients, parameters, their updates and states. `shard`: this rank's shard of such a tensor.
"""

Parallel = Literal["ddp", "fsdp2", "own"]
"""How several processes train together: with DistributedDataParallel, with fully_shard, or in an unknown way."""


def scope_of(kind: Kind, role: str, parallel: Parallel | None) -> Scope:
    """Return the scope of a kind and role, for tensors that are not sharded.

    Module hooks and hooks on parameter gradients run before DistributedDataParallel averages, so they see values of
    this rank, and so do hooks on collective operations. At the optimizer boundary, all ranks have the same values,
    except for buffers such as BatchNorm's running mean.
    """
    if parallel is None:
        return "global"
    if parallel == "own" or kind.frequency in ("micro_step", "operation") or role == "buffer":
        return "local"
    return "averaged"


def wrappers_of(model: nn.Module) -> list[DistributedDataParallel]:
    """Return the wrappers in a model, or otherwise around it: a loop that calls the model itself does not call its wrapper."""
    inside = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    if inside:
        return inside
    classes: list[type] = [DistributedDataParallel]
    for each in classes:
        classes += each.__subclasses__()
    # An object refers to its class. This is faster than a test of the class of each object of the process.
    found = (each for each in gc.get_referrers(*classes) if type(each) in classes)
    return [each for each in found if getattr(each, "module", None) is model]
