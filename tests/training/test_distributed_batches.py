"""Dict batches, a sampler, a stream and loader processes in distributed runs: as with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_runs import train
from tiers import tiered

ARGUMENTS = (
    *("device=cpu", "model={_target_: keyword_data.Classifier}", "task=huggingface"),
    "task.loss={_target_: torch.nn.CrossEntropyLoss, weight: {_target_: torch.tensor, data: [1.0, 5.0, 20.0]}}",
    "train={steps: 5, batch_size: 6, accumulate: 2, eval_batch_size: 8}",
    "+hooks.seen={layers: layers.0, kind: forward, action: record}",
)
DATA = {
    "items": "data={dataset: {_target_: keyword_data.rows}, num_workers: 1}",
    "sampler": "data={dataset: {_target_: keyword_data.rows}, sampler: {_target_: keyword_data.weighted}}",
    "stream": "data={dataset: {_target_: keyword_data.Stream}, num_workers: 1}",
}


@pytest.mark.parametrize("data", tiered(DATA, quick=["stream"]))
def test_two_processes_train_as_one(data: str, tmp_path: Path) -> None:
    one = train(tmp_path, "one", *ARGUMENTS, DATA[data])
    two = train(tmp_path, "two", *ARGUMENTS, DATA[data], "train.parallel=ddp", "reduce=global", processes=2)
    for metric in ("loss", "accuracy", "grad_norm"):
        assert two.metrics[metric].tolist() == pytest.approx(one.metrics[metric].tolist(), rel=1e-5, nan_ok=True)
    assert two.stats["numel"].tolist() == one.stats["numel"].tolist()
