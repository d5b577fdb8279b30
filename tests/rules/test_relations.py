"""Relations that hold in every correct training: each fault is found within a few steps, and no healthy program is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import instrument
from instrument.integrations.attached_probe import AttachedProbe

VOCABULARY = 11


def rows_of(probe: AttachedProbe, relation: str) -> list[dict[str, Any]]:
    """Return the rows of a relation, in order."""
    table = probe.relations
    return table[table["relation"] == relation].to_dict("records") if len(table) else []


def violations(probe: AttachedProbe) -> list[tuple[str, int]]:
    """Return each relation that does not hold, with the step."""
    table = probe.relations
    return [(row["relation"], row["step"]) for row in table.to_dict("records") if row["holds"] is False]


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    change: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> AttachedProbe:
    """Train with SGD, and return the probe. `change` is called before each step. Warnings are not raised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.warns(instrument.InstrumentWarning),
        instrument.attach(model, {}, optimizer=optimizer, **options) as probe,
    ):
        for step, batch in enumerate(batches):
            change(step)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


class Bigram(nn.Module):
    """A language model of one token, whose output layer is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def tokens(steps: int = 4, samples: int = 3, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (samples, length), generator=generator) for _ in range(steps)]


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def test_weights_that_are_no_longer_tied_are_reported() -> None:
    model = Bigram()

    def untie(step: int) -> None:
        if step == 2:
            model.head.weight = nn.Parameter(model.head.weight.detach() + 0.5)

    probe = train(model, tokens(), next_token_loss, untie)
    assert violations(probe) == [("tied_weights", 2)]
    first, violated = rows_of(probe, "tied_weights")
    assert (first["step"], first["holds"], first["value"]) == (0, True, 1.0)
    assert (violated["layer"], violated["path"]) == ("head", "weight")
    assert violated["value"] == pytest.approx(0.5, abs=0.1)  # SGD has changed both by a small amount
    (event,) = probe.events[probe.events["rule"] == "tied_weights"].to_dict("records")
    assert (event["layer"], event["step"], event["severity"]) == ("head", 2, "warning")
    assert "head.weight differs from embedding.weight" in event["message"]


def test_equal_copies_of_tied_weights_hold() -> None:
    model = Bigram()
    frozen = nn.Parameter(model.head.weight.detach(), requires_grad=False)

    def copy(step: int) -> None:
        model.embedding.weight, model.head.weight = frozen, nn.Parameter(frozen.clone(), requires_grad=False)

    with instrument.attach(model, {}) as probe:
        for batch in tokens():
            copy(0)
            model(batch)
            probe.end_step()
    assert violations(probe) == []
    assert len(rows_of(probe, "tied_weights")) == 1
