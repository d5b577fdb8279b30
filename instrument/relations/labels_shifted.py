"""Relation: a model of the next token is trained on the next token."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .looks_ahead import reconstructs
from .relation import RELATIONS, Checked, Relation, Training
from .token_targets import MIN_DIFFERENT, MIN_TOKENS, Causality, TokenTargets, causality, token_targets

MAX_SAMPLES = 32  # whose targets are compared with other samples
MOST_SEEN = 2  # how many times as many targets are seen as masked; BERT keeps one masked token of ten
MIN_OF_SAMPLE = 4  # fewer targets of a sample can be equal by chance
_WRONG = {
    0: "tokens that the model sees already, at the same positions",
    2: "the tokens two positions ahead: the labels are shifted twice",
    -1: "the previous tokens, which the model sees already: the labels are shifted in the wrong direction",
}


@RELATIONS.register("labels_shifted")
class LabelsShifted(Relation):
    """Compares the targets of cross-entropy with the tokens of the input, for models whose outputs use no later tokens."""

    sources = ("inputs", "losses")

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._causality: dict[tuple[str, bool], Causality] = {}  # by input and order of its dimensions

    def check(self) -> Iterator[Checked]:
        found = token_targets(self.training)
        if following := [each for each in found if each.shift == 1]:
            count = sum(each.total for each in following)
            yield Checked(True, count, f"{count} targets are the next tokens")
            return
        for each in found:
            if each.shift is None:
                if _are_of_other_samples(each):
                    text = f"the targets are the next tokens of other samples of the batch (input {each.path})"
                    yield Checked(False, each.total, text)
                elif (seen := _seen(each)) and not reconstructs(self.training.model):
                    text = (
                        f"{seen} of {each.total} targets are tokens that the model sees: only masked ones have to count"
                    )
                    yield Checked(False, seen, text)
                continue
            key = each.path, each.is_time_first
            result = self._causality[key] = self._causality.get(key) or causality(self.training, each)
            if result.problem:
                yield Checked(None, None, result.problem)
            elif result.is_causal:
                yield Checked(False, each.shift, f"the targets are {_WRONG[each.shift]} (input {each.path})")


def _seen(of: TokenTargets) -> int:
    """Return how many targets of a masked language model are its input, if most are; otherwise 0.

    At the other positions, the input is one token, the mask, which is no target. Some of them may have a random token, as 10% in BERT
    (Devlin et al. 2019).
    """
    if of.targets.shape != of.tokens.shape:
        return 0
    hidden = of.counted & (of.targets != of.tokens)
    count, seen = int(hidden.sum()), of.total - int(hidden.sum())
    if count < MIN_TOKENS or seen < MOST_SEEN * count:
        return 0
    mask = of.tokens[hidden].mode().values
    is_mask = 2 * int((of.tokens[hidden] == mask).sum()) > count and not bool((of.targets[of.counted] == mask).any())
    return seen if is_mask else 0


def _are_of_other_samples(of: TokenTargets) -> bool:
    length = min(of.targets.shape[1], of.tokens.shape[1] - 1)
    targets, counted, tokens = of.targets[:, :length], of.counted[:, :length], of.tokens[:, 1 : length + 1]
    rows = (counted.sum(1) >= MIN_OF_SAMPLE).nonzero().flatten()[:MAX_SAMPLES]
    if len(rows) < 2 or of.total < MIN_TOKENS or len(targets[counted].unique()) < MIN_DIFFERENT:
        return False
    equal = ((targets[rows, None] == tokens[None]) | ~counted[rows, None]).all(2)  # [rows, samples]
    own = equal[torch.arange(len(rows)), rows]
    return bool(equal.any(1).all()) and 2 * int(own.sum()) < len(rows)
