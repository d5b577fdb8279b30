"""Relation: a model of the next token does not use later tokens."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .relation import RELATIONS, Checked, Relation
from .token_targets import causality, token_targets


@RELATIONS.register("looks_ahead")
class LooksAhead(Relation):
    """Changes one token of the first batch whose targets are the next tokens, and compares the outputs at earlier positions."""

    sources = ("inputs", "losses")

    _is_done = False

    def check(self) -> Iterator[Checked]:
        found = [] if self._is_done else [each for each in token_targets(self.training) if each.shift == 1]
        if not found:
            return
        self._is_done = True
        if reconstructs(self.training.model):
            yield Checked(None, None, "it has an encoder, which may use all tokens, and a decoder")
            return
        results = [(each, causality(self.training, each)) for each in {each.path: each for each in found}.values()]
        if problem := next((result.problem for _, result in results if result.problem), None):
            yield Checked(None, None, problem)
        elif all(result.looks_ahead for _, result in results):
            (each, result), *_ = results
            text = (
                f"the model is trained to predict the next token, and its outputs use later tokens of the input {each.path}: "
                f"changing one changes earlier outputs by {result.ahead:.2g} of the largest output"
            )
            yield Checked(False, result.ahead, text)
        else:
            yield Checked(True, 0.0, "a later token does not change earlier outputs")


def reconstructs(model: nn.Module) -> bool:
    """Return whether a model may reconstruct its input: it has an encoder and a decoder that are more than one matrix."""
    parts = [
        name.rpartition(".")[2].lower()
        for name, part in model.named_modules()
        if not isinstance(part, nn.Embedding | nn.Linear)
    ]
    return all(any(word in name for name in parts) for word in ("enc", "dec"))
