"""Pruning over rounds: which weights a round keeps, and that the others are zero before step 0 and after each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Answer, run_in
from training_runs import train_here

import instrument
from instrument import ConfigError
from instrument.training.pruning import Pruned

ARGUMENTS = (
    *("-m", "+exp=lottery_ticket", "train.steps=3", "model.sizes=[64,20,8,10]"),
    *(
        f"+hooks.{kind}={{layers: '**', kind: {kind}, params: weight, action: record, stats: none, tensors: true}}"
        for kind in ("step_pre", "step_post")
    ),
    "quiet=true",
)


def rounds(folder: Path, indices: str) -> Answer:
    return run_in(folder, *ARGUMENTS, f"apply.ticket.fn.round={indices}", "hydra.sweep.dir=runs/lottery_ticket")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of three rounds."""
    folder = tmp_path_factory.mktemp("rounds")
    rounds(folder, "0,1,2").expect(0)
    return folder / "runs/lottery_ticket"


def weights(run: Path, kind: str, layer: str) -> list[np.ndarray]:
    return list(instrument.load(run).tensors(kind=kind, layer=layer)["values"])


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["layers.0.0", "layers.1.0"])
@pytest.mark.parametrize("index", [1, 2])
def test_each_round_keeps_the_largest_weights_of_the_previous_one(folder: Path, layer: str, index: int) -> None:
    final = torch.load(folder / str(index - 1) / "weights.pt", weights_only=True)[f"{layer}.weight"].abs().numpy()
    expected = final >= np.sort(final, axis=None)[-round(final.size * 0.5**index)]
    initial = weights(folder / "0", "step_pre", layer)[0]
    before, after = weights(folder / str(index), "step_pre", layer), weights(folder / str(index), "step_post", layer)
    assert np.array_equal(before[0], np.where(expected, initial, 0))
    assert all(np.array_equal(values != 0, expected) for values in (*before, *after))
    assert not np.array_equal(after[-1], before[0])


@pytest.mark.slow
def test_first_round_and_output_layer_are_dense(folder: Path) -> None:
    assert all((values != 0).all() for values in weights(folder / "0", "step_post", "layers.0.0"))
    assert all((values != 0).all() for values in weights(folder / "2", "step_post", "layers.2"))


def test_missing_round_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"apply\.ticket[\s\S]*runs/lottery_ticket/1/weights\.pt"):
        train_here(tmp_path / "out", *ARGUMENTS[1:], "apply.ticket.fn.round=2")


@pytest.mark.parametrize(
    ("round_index", "keep", "message"), [(-1, 0.5, "round must be at least 0"), (1, 1.5, "keep must be from 0 to 1")]
)
def test_invalid_arguments_are_refused(round_index: int, keep: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pruned("runs/lottery_ticket", round_index, keep)
