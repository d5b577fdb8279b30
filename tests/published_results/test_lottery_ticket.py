"""Frankle & Carbin 2019: lottery tickets. The experiment of docs/gallery/lottery_ticket.md, with several seeds."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from conftest import run_in
from page_blocks import run_gallery_page

import instrument

pytestmark = pytest.mark.slow

ROUND = "apply.ticket.fn.round"
SPARSE = (3, 4, 5)  # 12.5%, 6.3% and 3.1% of the weights


def evaluations(folder: Path) -> pd.DataFrame:
    """Return the evaluations of a sweep by round and step."""
    return instrument.load(folder).metrics.query("phase == 'eval'").set_index([ROUND, "step"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The evaluations of tickets, and of the sparse masks with other initial weights: means over the seeds."""
    page, *others = (tmp_path_factory.mktemp(f"seed_{seed}") for seed in range(3))
    run_gallery_page("lottery_ticket", page)
    for seed, folder in enumerate(others, 1):
        for rounds, weights, name in (
            ("0,1,2,3,4,5", seed, "lottery_ticket"),
            (",".join(map(str, SPARSE)), seed + 10, "other_weights"),
        ):
            arguments = (f"{ROUND}={rounds}", f"seed={weights}", f"hydra.sweep.dir=runs/{name}", "quiet=true")
            run_in(folder, "-m", "+exp=lottery_ticket", *arguments).expect(0)
    columns = ["loss", "accuracy"]
    tickets, other_weights = (
        pd.concat([evaluations(folder / "runs" / name) for folder in (page, *others)])[columns]
        .groupby(level=[0, 1])
        .mean()
        for name in ("lottery_ticket", "other_weights")
    )
    return tickets, other_weights


def test_ticket_with_a_quarter_of_the_weights_is_as_accurate_as_the_dense_network(
    trained: tuple[pd.DataFrame, pd.DataFrame],
) -> None:
    tickets, _ = trained
    accuracy = tickets["accuracy"]
    assert accuracy[2, 300] > accuracy[0, 300] - 0.015
    assert accuracy[1, 300] > accuracy[0, 300] - 0.01


def test_tickets_learn_faster_than_the_dense_network(trained: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    tickets, _ = trained
    loss = tickets["loss"]
    assert loss[1, 30] < loss[0, 30]
    assert loss[2, 30] < loss[0, 30]


def test_other_initial_weights_learn_slower_and_are_less_accurate(trained: tuple[pd.DataFrame, pd.DataFrame]) -> None:
    tickets, others = trained
    for index in SPARSE:
        assert tickets["accuracy"][index, 50] > others["accuracy"][index, 50] + 0.05
        assert tickets["loss"][index, 300] < others["loss"][index, 300]
    final = tickets["accuracy"][:, 300] - others["accuracy"][:, 300]
    assert final[list(SPARSE)].mean() > 0.005
