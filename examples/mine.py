"""Functions and modules of one's own, which the experiments in conf/exp name by `_target_`."""

import torch
from torch import nn


def linear(tensor, context, weight):
    """A linear transformation of a module's output, with the bias that `apply` gave the module."""
    return weight * tensor + context.module.bias


class Residual(nn.Module):
    """A module with a way around it, and a share of its own that starts at zero."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.share = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.share * self.inner(x)
