"""The example models compute what their docstrings say."""

from __future__ import annotations

import torch
from torch import nn

from instrument.training.models import RNN


def test_rnn_equals_the_recurrent_network_of_pytorch() -> None:
    model = RNN(inputs=2, hidden=5, classes=3)
    reference = nn.RNN(2, 5, batch_first=True)
    reference.load_state_dict({f"{name}_l0": values for name, values in model.cell.state_dict().items()})
    images = torch.randn(4, 1, 3, 6)
    states, _ = reference(images.reshape(4, 9, 2))
    torch.testing.assert_close(model(images), model.classifier(states[:, -1]))
