"""A transformer whose weights are set by hand, as Tracr compiles them (Lindner et al. 2023), so that the role of each part is known.

The program: find the token that followed the previous occurrence of the last token, and answer its successor.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

VOCABULARY, LENGTH = 8, 6
SPACES = (
    "token",
    "previous",
    "found",
    "answer",
    "unused",
)  # parts of the residual stream, each with one unit per token
WIDTH = len(SPACES) * VOCABULARY + LENGTH
POSITION = slice(len(SPACES) * VOCABULARY, WIDTH)  # one unit per position
SHARPNESS = 10.0  # of the attention: a match has exp(10) times the weight of another position
ROLES = {"tokens": 1, "blocks.0.heads.0": 2, "blocks.1.heads.1": 5, "blocks.1.mlp": 5}
"""The parts that carry the token of position 1 to the answer, and the position at which each of them does."""


def space(name: str) -> slice:
    start = SPACES.index(name) * VOCABULARY
    return slice(start, start + VOCABULARY)


def writes(source: str, target: str, shift: int = 0) -> Tensor:
    """Return the matrix [WIDTH, WIDTH] that copies one space to another one, with the tokens shifted."""
    matrix = torch.zeros(WIDTH, WIDTH)
    matrix[space(target), space(source)] = torch.eye(VOCABULARY).roll(shift, 0)
    return matrix


class Head(nn.Module):
    """A causal attention head: scores = hidden @ match @ hidden.T, values = hidden @ copied.T."""

    def __init__(self, match: Tensor, copied: Tensor) -> None:
        super().__init__()
        self.match, self.copied = (nn.Parameter(SHARPNESS * match), nn.Parameter(copied))

    def forward(self, hidden: Tensor) -> Tensor:
        scores = hidden @ self.match @ hidden.transpose(-1, -2)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -torch.inf).softmax(-1) @ hidden @ self.copied.T


class MLP(nn.Module):
    """relu(hidden) @ copied.T"""

    def __init__(self, copied: Tensor) -> None:
        super().__init__()
        self.copied = nn.Parameter(copied)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.relu() @ self.copied.T


class Block(nn.Module):
    def __init__(self, heads: list[Head], mlp: MLP) -> None:
        super().__init__()
        self.heads, self.mlp = nn.ModuleList(heads), mlp

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + sum(head(hidden) for head in self.heads)
        return hidden + self.mlp(hidden)


class CompiledCircuit(nn.Module):
    """Four parts implement the program. One head and one MLP of block 0 and one head of block 1 write to unused units."""

    def __init__(self) -> None:
        super().__init__()
        before, same, matching = (torch.zeros(WIDTH, WIDTH) for _ in range(3))
        before[POSITION, POSITION] = torch.eye(LENGTH).roll(-1, 1)  # position i matches position i - 1
        before[POSITION.start] = 0.0  # the first position has no previous one
        same[POSITION, POSITION] = torch.eye(LENGTH)
        matching[space("token"), space("previous")] = torch.eye(VOCABULARY)
        idle = writes("token", "unused")
        self.tokens = nn.Embedding.from_pretrained(torch.eye(VOCABULARY, WIDTH))
        self.blocks = nn.Sequential(
            Block([Head(before, writes("token", "previous")), Head(same, idle)], MLP(idle)),
            Block([Head(0 * same, idle), Head(matching, writes("token", "found"))], MLP(writes("found", "answer", 1))),
        )
        self.register_buffer("places", torch.eye(WIDTH)[POSITION])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, LENGTH] to logits [N, LENGTH, VOCABULARY]."""
        return self.blocks(self.tokens(tokens) + self.places)[..., space("answer")]


def prompts(count: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return clean prompts A B C D A B, corrupted ones A X C D A B, and the answers: the successors of C."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.stack([torch.randperm(VOCABULARY, generator=generator) for _ in range(count)])
    clean, corrupted = drawn[:, [0, 1, 2, 3, 0, 1]], drawn[:, [0, 4, 2, 3, 0, 1]]
    return clean, corrupted, (drawn[:, 2] + 1) % VOCABULARY
