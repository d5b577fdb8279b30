"""A check before a run that micro-batches and processes give the gradient of one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ..config.experiment import RunConfig
from ..errors import ConfigError, Problem
from ..plan.shape_inference import without_side_effects
from ..tasks import CountsTerms, KLDivergence, NextToken, Task, WassersteinGAN
from ..tasks.base import batch_weight, is_pytorch_loss, is_sum, weighted
from ..values.nested import to_device
from .loader import BatchShard, LoaderOptions, first_batch

_TOLERANCE = 1e-3  # of float32; kernels round batches of different sizes differently
_ABSOLUTE = 1e-5
_FIX = (
    "define `number_of_terms(batch)` in the task: the number by which the loss is divided, or, for a loss of each "
    "micro-batch (such as a contrastive loss), its number of samples; set the attribute `reduction` of the loss or task "
    "to 'sum' if losses add up"
)


def check_loss_of_parts(
    config: RunConfig, task: Task, model: nn.Module, dataset: Dataset[Any], shard: BatchShard, options: LoaderOptions
) -> None:
    """Check that the loss and its gradient are the weighted mean, or the sum, of those of two parts of a batch.

    The model is in eval mode. The check is made only with gradient accumulation or several processes. It is skipped for
    tasks whose number of terms is known or defined by the user, for losses that draw random numbers or do not exist
    in eval mode, and for custom code that fails for a part of a batch.

    Raises:
        ConfigError: The gradient would differ from that of one batch.
    """
    reason = (
        f"train.parallel={config.train.parallel}" if shard.size > 1 else f"train.accumulate={config.train.accumulate}"
    )
    if (shard.size == 1 and config.train.accumulate == 1) or _has_known_terms(task):
        return
    device = next(model.parameters()).device
    try:
        parts = _batch_and_parts(dataset, max(config.train.batch_size, 2 * shard.size), shard, options)
        # cuDNN computes no gradients of recurrent layers in eval mode.
        with (
            without_side_effects(model, training=False),
            torch.enable_grad(),
            torch.backends.cudnn.flags(enabled=False),
        ):
            measured = [_loss_and_gradient(task, model, to_device(batch, device)) for batch, _ in parts]
    except Exception:  # custom code that requires complete batches
        return
    results = [each for each in measured if each is not None]
    if len(results) < len(parts) or not _are_close(results[0], results[1], results):
        return
    weights = [batch_weight(task, *part) for part in parts[2:]]
    total = 1 if is_sum(task) else sum(weights)
    pairs = zip(*results[2:], strict=True)
    combined: list[Any] = [sum(weighted(v, w, total) for v, w in zip(values, weights, strict=True)) for values in pairs]
    if not _are_close(results[0], combined, results):
        how = "sum" if is_sum(task) else f"mean over {'terms' if isinstance(task, CountsTerms) else 'samples'}"
        message = (
            f"with {reason}, the gradient of a step would differ from that of one batch: the loss of the first batch is "
            f"not the {how} of the losses of its parts"
        )
        raise ConfigError(Problem("task", message, given=config.task.target, fix=_FIX))


def _has_known_terms(task: Task) -> bool:
    package = CountsTerms.__module__.rpartition(".")[0]
    if isinstance(task, CountsTerms) and not task.number_of_terms.__module__.startswith(package):
        return True
    loss = getattr(task, "loss", None)
    is_known = isinstance(task, NextToken | WassersteinGAN) or isinstance(loss, KLDivergence) or is_pytorch_loss(loss)
    return is_known and type(task).__module__.startswith(package)


def _batch_and_parts(
    dataset: Dataset[Any], size: int, shard: BatchShard, options: LoaderOptions
) -> list[tuple[Any, int]]:
    """Load the first batch twice, and two parts of it of different size, with their numbers of samples."""

    def collate(items: list[Any]) -> list[tuple[Any, int]]:
        split = max(1, len(items) // 3)
        return [(options.collate_fn(part), len(part)) for part in (items, items, items[:split], items[split:])]

    return first_batch(dataset, size, shard, replace(options, collate_fn=collate, pin_memory=False)).batch  # type: ignore[no-any-return]


def _loss_and_gradient(task: Task, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor] | None:
    """Return the loss of a batch, and its gradient with respect to the last parameter that it depends on; None without a loss."""
    loss = task(model, batch).loss
    if loss is None:
        return None
    for parameter in reversed([each for each in model.parameters() if each.requires_grad]):
        (gradient,) = torch.autograd.grad(loss, parameter, retain_graph=True, allow_unused=True)
        if gradient is not None:
            return loss.detach(), gradient.detach()
    return None


def _are_close(ones: Sequence[Any], others: Sequence[Any], results: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether loss and gradient are equal, within the rounding of their largest values in any result."""
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        largest = max(float(result[index].nan_to_num().float().norm()) for result in results)
        tolerance = max(_TOLERANCE, 8 * torch.finfo(one.dtype).eps)
        if float((one - other).float().norm()) > tolerance * largest + _ABSOLUTE:
            return False
    return True
