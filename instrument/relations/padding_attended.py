"""Relation: a model does not attend to padding."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from ..values.nested import iter_tensors
from .padding_in_loss import leading, repeated_end
from .relation import RELATIONS, Checked, ModelCall, Relation
from .token_targets import TOLERANCE, call_again, call_with


@RELATIONS.register("padding_attended")
class PaddingAttended(Relation):
    """Compares the argument `attention_mask` with the padding of the argument `input_ids`, or a `*padding_mask` with that of its tokens."""

    sources = ("inputs",)

    _is_done = False

    def check(self) -> Iterator[Checked]:
        for call in [] if self._is_done else self.training.inputs[:1]:
            results = [*self._check_mask(call), *_check_padding_masks(call)]
            self._is_done = bool(results)
            yield from results

    def _check_mask(self, call: ModelCall) -> Iterator[Checked]:
        model, given, signature = self.training.modules[""], call.tensors, self.training.signature
        pad, ids = getattr(getattr(model, "config", None), "pad_token_id", None), given.get("input_ids")
        if not isinstance(pad, int) or ids is None or ids.ndim != 2:
            return
        if signature is None or "attention_mask" not in signature.parameters:
            return
        padded = _ends(ids == pad)
        mask = given.get("attention_mask", torch.ones_like(ids))
        if padded is None or not padded.any() or padded.all(1).any() or mask.shape != ids.shape:
            return
        attended = int((padded & (mask != 0)).sum())
        if not attended:
            yield Checked(True, int(padded.sum()), f"{int(padded.sum())} padded positions are masked")
            return
        correct = (~padded).to(mask.dtype)
        old = given.get("attention_mask")
        added = {} if old is not None else {"attention_mask": correct}
        calls = [partial(_outputs, call=call, old=old, new=old, added={})]
        calls += [partial(_outputs, call=call, old=old, new=correct, added=added)]
        outputs = call_again(self.training, calls)
        if isinstance(outputs, str):
            yield Checked(None, None, outputs)
            return
        change, tolerance = _change(outputs[0], outputs[1], ~padded)
        if change > tolerance:
            text = f"the model attends to {attended} padded positions of input_ids: their mask changes its outputs by {change:.2g}"
            yield Checked(False, attended, text)
        else:
            yield Checked(True, attended, f"{attended} padded positions do not change the outputs")


def _check_padding_masks(call: ModelCall) -> Iterator[Checked]:
    given = call.tensors
    for name, mask in given.items():
        for tokens in given.values() if "padding_mask" in name and mask.dtype == torch.bool else ():
            if tokens.dtype != torch.int64 or tokens.shape != mask.shape or tokens.ndim != 2:
                continue
            if (pad := repeated_end(tokens)) is not None:
                padded = leading((tokens == pad).flip(1)).flip(1)
                if torch.equal(mask, ~padded):
                    yield Checked(
                        False, int(mask.sum()), f"{name} is true for all tokens, and not for the padding {pad}"
                    )
                elif torch.equal(mask, padded):
                    yield Checked(True, int(mask.sum()), f"{name} is true for the padding {pad}")


def _ends(flags: Tensor) -> Tensor | None:
    """Return which flags are at the start or the end of a row, without the innermost ones; None if others are in between."""
    at_start, at_end = leading(flags), leading(flags.flip(1)).flip(1)
    if not torch.equal(flags, at_start | at_end):
        return None
    return (at_start & at_start.roll(-1, 1)) | (at_end & at_end.roll(1, 1))


def _outputs(
    model: nn.Module, call: ModelCall, old: Tensor | None, new: Tensor | None, added: dict[str, Tensor]
) -> list[Tensor]:
    result = call_with(model, call, old, new, **added)
    return [each for _, each in iter_tensors(result) if each.is_floating_point() and each.ndim > 1]


def _change(base: list[Tensor], other: list[Tensor], kept: Tensor) -> tuple[float, float]:
    """Return the largest change of outputs, relative to the largest output, and that of rounding. Not at positions that are left out."""
    changes = [(0.0, 0.0)]
    for one, two in zip(base, other, strict=True):
        if one.shape == two.shape and len(one) == len(kept):
            where = kept if one.shape[:2] == kept.shape else slice(None)
            scale = float(one[where].abs().amax()) or 1.0
            change = float((one[where] - two[where]).abs().amax()) / scale
            changes.append((change, TOLERANCE.get(one.dtype, 1e-2)))
    return max(changes)
