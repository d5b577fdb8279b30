"""Tasks: callables that compute the loss of a batch. A custom task implements the protocol `Task`."""

from .autoencoder import Autoencoder
from .base import CountsTerms, Outcome, Task, accuracy, check_outcome, mean_loss
from .gan import WassersteinGAN
from .language import NextToken
from .supervised import KLDivergence, Supervised, main_output, soft_targets

__all__ = [
    "Autoencoder",
    "CountsTerms",
    "KLDivergence",
    "NextToken",
    "Outcome",
    "Supervised",
    "Task",
    "WassersteinGAN",
    "accuracy",
    "check_outcome",
    "main_output",
    "mean_loss",
    "soft_targets",
]
