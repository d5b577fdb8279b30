"""Relation: no token is the majority of the targets of a language model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from torch import nn

from .relation import RELATIONS, Checked, Relation, Training
from .token_targets import token_targets

MIN_TARGETS = 500
LARGEST = 0.5


@RELATIONS.register("tokens_vary")
class TokensVary(Relation):
    """Counts the targets of all checked steps that are the next tokens, and compares the most frequent one with half of them."""

    sources = ("inputs", "losses")

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._counts: Counter[int] = Counter()

    def check(self) -> Iterator[Checked]:
        for each in token_targets(self.training):
            if each.shift == 1:
                tokens, counts = each.targets[each.counted].unique(return_counts=True)
                self._counts.update(dict(zip(tokens.tolist(), counts.tolist(), strict=True)))
        total = self._counts.total()
        if total < MIN_TARGETS:
            return
        ((token, count),) = self._counts.most_common(1)
        if count > LARGEST * total:
            text = f"{count / total:.0%} of {total} targets are token {token}"
            yield Checked(False, count / total, text, self._embedding(token))
        else:
            yield Checked(True, count / total, f"the most frequent token is {count / total:.0%} of {total} targets")

    def _embedding(self, token: int) -> str:
        """Return the name of the first embedding that has a token; empty without one."""
        parts = self.training.model.named_modules()
        return next(
            (name for name, part in parts if isinstance(part, nn.Embedding) and part.num_embeddings > token), ""
        )
