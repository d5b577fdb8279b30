"""Relation: padding does not count in the loss of a language model."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .observations import UNCOUNTED, is_readable
from .relation import RELATIONS, Checked, Relation
from .token_targets import TokenTargets, token_targets

MIN_SAMPLES, MIN_REPEATED, MIN_LENGTHS = 4, 2, 3
MIN_FRACTION = 0.2  # of the tokens; a program may repeat the end of its short texts on purpose


@RELATIONS.register("padding_in_loss")
class PaddingInLoss(Relation):
    """Compares the targets that count with the padding of the input: the same token at the end, or the start, of a sample."""

    sources = ("inputs", "losses")

    def check(self) -> Iterator[Checked]:
        for each in token_targets(self.training):
            can_tell = each.shift is not None and each.loss.is_reduced and each.loss.weight is None
            padded = self._padding(each) if can_tell else None
            if padded is None or each.shift is None or not padded.any():
                continue
            first, stop = max(0, -each.shift), min(each.targets.shape[1], padded.shape[1] - each.shift)
            predicted = padded[:, first + each.shift : stop + each.shift]
            counted = each.counted[:, first:stop] & predicted
            number = int(counted.sum())
            if number:
                text = f"{number} targets at padded positions count in the loss, of {each.total} (input {each.path})"
                yield Checked(False, number, text)
            else:
                yield Checked(
                    True, int(predicted.sum()), f"{int(predicted.sum())} targets at padded positions do not count"
                )
        for targets in [each.targets for each in self.training.pair_losses if each.name == "ctc_loss"]:
            is_filled = targets.ndim == 2 and targets.numel() and is_readable(targets)
            if is_filled and repeated_end(targets.cpu()) not in (None, UNCOUNTED):
                yield Checked(False, len(targets), "ctc_loss counts the class that fills up the targets of samples")

    def _padding(self, of: TokenTargets) -> Tensor | None:
        """Return which tokens are padding, without the first one after a text, bool [samples, positions]."""
        mask, smallest = of.call.tensors.get("attention_mask"), 0.0
        if mask is not None:
            mask = mask.detach().cpu()
            if mask.ndim != 2 or of.is_time_first or mask.shape != of.tokens.shape:
                return None
            padded = mask == 0
        else:
            pad = getattr(getattr(self.training.model, "config", None), "pad_token_id", None)
            if not isinstance(pad, int):
                pad, smallest = repeated_end(of.tokens), MIN_FRACTION
            if pad is None:
                return None
            padded = of.tokens == pad
        at_end = leading(padded.flip(1)).flip(1)
        at_start = leading(padded)
        if not torch.equal(padded, at_end) and not (mask is not None and torch.equal(padded, at_start)):
            return None  # the mask has another meaning, or the token also occurs in texts
        ids = of.tokens[padded]
        if mask is not None and len(ids.unique()) > 1:
            return None
        after = torch.zeros_like(at_end)
        after[:, 1:] = at_end[:, :-1] & at_end[:, 1:]  # without the first one
        after |= at_start & ~at_end if mask is not None else torch.zeros_like(after)
        return after if after.float().mean() >= smallest else None


def repeated_end(tokens: Tensor) -> int | None:
    """Return the token with which samples [samples, positions] are filled up; None without one.

    It is the last token of most samples, and it is repeated a different number of times in some of them. Samples of a continuous text
    end in different tokens.
    """
    token = tokens[:, -1].mode().values
    lengths = leading((tokens == token).flip(1)).sum(1)
    is_most = 2 * int((lengths >= MIN_REPEATED).sum()) > len(tokens) >= MIN_SAMPLES
    return int(token) if is_most and len(lengths.unique()) >= MIN_LENGTHS else None


def leading(flags: Tensor) -> Tensor:
    """Return which flags are set, with all flags before them in their row."""
    return flags.long().cumprod(1).bool()
