"""tdhook: ActivationCaching of all leaves, forward and backward."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from job import Job, Step, Training
from tdhook.latent.activation_caching import ActivationCaching
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F


def _tensor(**arguments: Any) -> Tensor:
    """Return the tensor to cache. Backward hooks of modules receive tuples, which the cache does not accept."""
    value = arguments["grad_output"] if "grad_output" in arguments else arguments["output"]
    tensor: Tensor = value[0] if isinstance(value, tuple) else value
    return tensor


@contextmanager
def caching(training: Training, folder: Path, directions: tuple[str, ...]) -> Iterator[Step]:  # noqa: ARG001
    pattern = "|".join(f"(?:.*\\.)?{re.escape(name)}$" for name in training.leaves())
    method = ActivationCaching(pattern, callback=_tensor, directions=list(directions), use_nested_keys=True)
    with method.prepare(training.model, in_keys=["input"], out_keys=["output"]) as hooked:

        def step() -> Sequence[Tensor]:
            training.optimizer.zero_grad()
            data = hooked(TensorDict({"input": training.inputs}, batch_size=[]))
            F.cross_entropy(data["output"].flatten(0, -2), training.targets.flatten()).backward()
            training.optimizer.step()
            cache = hooked.hooking_context.cache
            return [tensor.detach() for tensor in cache.values(include_nested=True, leaves_only=True)]

        yield step


JOBS = (
    Job("references to outputs, in memory", partial(caching, directions=("fwd",))),
    Job("references to outputs and gradients, in memory", partial(caching, directions=("fwd", "bwd"))),
)
