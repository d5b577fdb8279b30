"""Rule: most tokens of a language model are the same."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class TokensVaryRule(RuleBase):
    """One token is more than half of the targets of a model of the next token: unknown words, or padding.

    The most frequent word of a text has a share of less than 0.1 (Zipf's law), and a space between the characters of a text about 0.2.
    It is decided after 500 targets of `torch.nn.functional.cross_entropy` that count.
    """

    rule: Literal["tokens_vary"]


@RULES.register("tokens_vary")
class TokensVary(RelationRule):
    fields = TokensVaryRule
    relation = "tokens_vary"
    what = "most tokens are the same"
    advice = "Check the tokenizer and its vocabulary on a few samples, and set the labels of padding to -100."
