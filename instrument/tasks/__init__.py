"""Tasks: callables that compute the loss of a batch. A custom task implements the protocol `Task`."""

from .base import (
    CountsTerms,
    Generated,
    Outcome,
    SelectsTargets,
    Task,
    WeightedMean,
)
from .gan import WassersteinGAN
from .keywords import HuggingFace, LossDict
from .supervised import KLDivergence, NextToken, Reconstruction, Supervised
from .without_loss import ForwardOnly, Generate

__all__ = [
    "CountsTerms",
    "ForwardOnly",
    "Generate",
    "Generated",
    "HuggingFace",
    "KLDivergence",
    "LossDict",
    "NextToken",
    "Outcome",
    "Reconstruction",
    "SelectsTargets",
    "Supervised",
    "Task",
    "WassersteinGAN",
    "WeightedMean",
]
