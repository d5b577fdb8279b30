"""Tasks: callables that compute the loss of a batch. A custom task implements the protocol `Task`."""

from .base import (
    CountsTerms,
    Generated,
    Outcome,
    SelectsTargets,
    Task,
    WeightedMean,
    accuracy,
    batch_with_targets,
    call_task,
    check_outcome,
    mean_loss,
    mean_metrics,
)
from .gan import WassersteinGAN
from .keywords import HuggingFace, LossDict
from .model_output import main_output
from .supervised import KLDivergence, NextToken, Reconstruction, Supervised, soft_targets
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
    "accuracy",
    "batch_with_targets",
    "call_task",
    "check_outcome",
    "main_output",
    "mean_loss",
    "mean_metrics",
    "soft_targets",
]
