"""The cross entropy of a language model by position: the table `position_losses`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_statistics import use_device_statistics
from hook_runs import record, refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from training_runs import train_here

import instrument
from instrument.actions.base import Context, StepContext
from instrument.stats import portable
from instrument.stats.position_losses import PositionLosses
from instrument.values.dtensor import NOT_SHARDED, Shards

LOSSES: dict[str, Any] = {"stats": "none", "position_losses": [0, 1, 3]}


def row_of(logits: Tensor, targets: Any, **fields: Any) -> dict[str, Any]:
    """Return the row of a module that returns logits, in a loop that passes targets."""
    module = nn.Identity()
    with instrument.attach(module, {"h": record("forward", **{**LOSSES, **fields})}) as probe:
        probe.batch(ids=range(len(logits)), targets=targets)
        module(logits)
        probe.end_step()
    (row,) = probe.sink.records("position_losses")
    return row


def losses_of(logits: Tensor, targets: Tensor) -> np.ndarray[Any, Any]:
    """Return the loss at each position, [N, T]; 0 for targets of -100."""
    return F.cross_entropy(logits.double().movedim(-1, 1), targets, reduction="none").numpy()


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_of_bins_are_means_of_cross_entropy(
    dtype: torch.dtype, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(portable, "PART", 40)  # the logits are read in several parts
    if on_device:
        use_device_statistics(monkeypatch)
    logits, targets = torch.randn(3, 5, 7, dtype=dtype), torch.randint(7, (3, 5))
    targets[1, 3:] = -100
    row = row_of(logits, targets)
    losses, counted = losses_of(logits, targets), (targets != -100).numpy()
    expected = [losses[:, part][counted[:, part]].mean() for part in (slice(0, 1), slice(1, 3), slice(3, 5))]
    assert row["losses"] == pytest.approx(expected, rel=1e-7)
    assert (row["first_positions"], row["targets"], row["shape"]) == ([0, 1, 3], [3, 6, 4], [3, 5, 7])


def test_bins_without_a_target_have_no_loss() -> None:
    row = row_of(torch.zeros(2, 3, 4), torch.tensor([[1, -100, 2], [3, -100, 9]]), position_losses=[1, 2, 5])
    assert (row["losses"], row["targets"]) == ([None, pytest.approx(math.log(4)), None], [0, 1, 0])


def test_true_gives_bins_of_powers_of_two() -> None:
    row = row_of(torch.zeros(1, 9, 2), torch.zeros(1, 9, dtype=torch.int64), position_losses=True)
    assert row["first_positions"] == [0, *(2**power for power in range(18))]
    assert row["targets"] == [1, 1, 2, 4, 1, *[0] * 14]


def test_targets_of_the_samples_are_those_of_the_last_position() -> None:
    logits = torch.randn(2, 4, 3)
    row = row_of(logits, [2, 0])
    expected = F.cross_entropy(logits[:, -1].double(), torch.tensor([2, 0])).item()
    assert (row["losses"], row["targets"]) == ([None, None, pytest.approx(expected)], [0, 0, 2])


def test_losses_of_parts_of_a_batch_are_those_of_the_batch() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 4, 6), torch.randint(6, (5, 4))
    measures = [PositionLosses((0, 2, 9), targets[part]) for part in (slice(0, 2), slice(2, 2), slice(2, 5))]
    assert len({*map(repr, measures)}) == 1  # all processes must have the same
    parts = [
        measure.part(logits[begin:end], NOT_SHARDED).numpy()
        for measure, (begin, end) in zip(measures, ((0, 2), (2, 2), (2, 5)), strict=True)
    ]
    firsts, losses, counts, shape = measures[0].merged(np.stack([*parts, np.full(6, math.nan)]))
    expected = losses_of(logits, targets)
    assert losses == [pytest.approx(expected[:, :2].mean()), pytest.approx(expected[:, 2:].mean()), None]
    assert (firsts, counts, shape) == ([0, 2, 9], [10, 10, 0], None)


def test_losses_that_are_unknown_are_refused() -> None:
    module, logits = nn.Identity(), torch.zeros(2, 3, 4)
    with instrument.attach(module, {"h": record("forward", **LOSSES)}) as probe:
        with pytest.raises(
            instrument.ConfigError, match=r"hooks.h.position_losses: the targets of the batch are unknown"
        ):
            module(logits)
        for targets in (torch.zeros(2, 2).long(), torch.zeros(2)):
            probe.end_micro_step()
            probe.batch(ids=[0, 1], targets=targets)
            with pytest.raises(instrument.ConfigError, match=r"do not match the logits \[2, 3, 4\]"):
                module(logits)
    assert "'position_losses' requires the logits of all positions" in refused(
        module, {"h": record("forward", samples=[0], **LOSSES)}
    )
    assert "position_losses requires role output" in refused(module, {"h": record("forward_pre", **LOSSES)})
    assert "requires role output of a kind without gradients" in refused(module, {"h": record("tensor", **LOSSES)})
    context = Context(
        "h", "forward", "output", "", module, "", StepContext(0, 0, 0, "train"), shards=Shards((2,), (2, 3, 2))
    )
    with pytest.raises(ValueError, match="sharded along their positions or classes"):
        PositionLosses((0,)).of_call(logits, context)


class Tokens(nn.Module):
    """A language model that sees one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 6), nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def sequences(split: str) -> TensorDataset:
    return TensorDataset(torch.randint(11, (8, 6), generator=torch.Generator().manual_seed(len(split))))


def pairs(split: str) -> TensorDataset:
    (tokens,) = sequences(split).tensors
    return TensorDataset(tokens[:, :-1], tokens[:, 1:])


class Labelled(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        (tokens,) = super().__getitem__(index)
        return {"input_ids": tokens, "labels": tokens}


def labelled(split: str) -> Labelled:
    return Labelled(*sequences(split).tensors)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def arguments(model: str, dataset: str, task: str, head: str) -> list[str]:
    hook = f"layers: {head}, kind: forward, action: record, stats: none, position_losses: [0, 2]"
    return [
        f"+model={{_target_: {__name__}.{model}}}",
        f"+data={{dataset: {{_target_: {__name__}.{dataset}}}}}",
        *(f"task={task}", "train.steps=2", "train.batch_size=8", "optimizer.lr=0"),
        *(f"+hooks.h={{{hook}}}", f"+hooks.e={{{hook}, phase: eval}}"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dataset", "task", "head", "counts"),
    [
        ("Tokens", "sequences", "next_token", "head", [16, 24]),
        ("Tokens", "pairs", "next_token", "head", [16, 24]),
        ("gpt2", "labelled", "huggingface", "lm_head", [16, 24]),
    ],
)
def test_mean_of_the_positions_is_the_loss_of_the_run(
    model: str, dataset: str, task: str, head: str, counts: list[int], tmp_path: Path
) -> None:
    run = train_here(tmp_path / "out", *arguments(model, dataset, task, head))
    rows = run.position_losses
    assert set(rows.phase) == {"train", "eval"}
    for row in rows.to_dict("records"):
        assert list(row["targets"]) == counts
        of_run = run.metrics[(run.metrics.phase == row["phase"]) & (run.metrics.step == row["step"])]
        assert np.average(row["losses"], weights=row["targets"]) == pytest.approx(of_run.loss.item(), rel=1e-6)


def test_task_without_targets_of_positions_is_refused_before_the_run(tmp_path: Path) -> None:
    given = arguments("Tokens", "sequences", f"{{_target_: {__name__}.Squares}}", "head")
    with pytest.raises(instrument.ConfigError, match=r"hooks.h.position_losses: the targets of the batch are unknown"):
        train_here(tmp_path / "out", *[each.replace("task=", "+task=") for each in given], "~task")
    assert not (tmp_path / "out").exists()


class Squares:
    def __call__(self, model: nn.Module, batch: Any) -> instrument.Outcome:
        return instrument.Outcome(model(batch[0]).square().mean(), len(batch[0]))
