"""Tasks: callables that compute the loss of a batch. A custom task implements the protocol `Task`."""

from .base import CountsTerms, Outcome, Task, accuracy, check_outcome, mean_loss
from .gan import WassersteinGAN
from .language import NextToken
from .reconstruction import Reconstruction
from .supervised import KLDivergence, Supervised, main_output, soft_targets

__all__ = [
    "CountsTerms",
    "KLDivergence",
    "NextToken",
    "Outcome",
    "Reconstruction",
    "Supervised",
    "Task",
    "WassersteinGAN",
    "accuracy",
    "check_outcome",
    "main_output",
    "mean_loss",
    "soft_targets",
]
