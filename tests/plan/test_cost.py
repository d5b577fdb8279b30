"""Number of scheduled steps in a run of a given length."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from instrument.config.experiment import TrainConfig
from instrument.config.schedule import Evaluations
from instrument.plan.cost import Length
from instrument.training.loader import Batches


@given(
    samples=st.integers(1, 60),
    batch_size=st.integers(1, 12),
    accumulate=st.integers(1, 5),
    steps=st.integers(1, 30),
    every=st.integers(1, 4),
)
def test_micro_steps_match_those_of_the_batches(
    samples: int, batch_size: int, accumulate: int, steps: int, every: int
) -> None:
    dataset: Any = torch.utils.data.TensorDataset(torch.zeros(samples))
    batches = Batches(dataset, TrainConfig(steps=steps, batch_size=batch_size, accumulate=accumulate))
    length = Length(steps, accumulate, batches.micro_batches_per_epoch, Evaluations(steps, 0), 0)
    groups = [len(group) for _, group in batches]
    due = range(0, steps, every)
    wanted = sum(groups[step] for step in due)
    assert length.micro_steps(due) == length.micro_steps(list(due)) == wanted
