"""Dict batches, a sampler, a stream and loader processes in distributed runs: as with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed_runs import run_processes
from tiers import tiered

import instrument

ARGUMENTS = (
    "device=cpu",
    "model={_target_: keyword_data.Classifier}",
    "task=huggingface",
    "train={steps: 5, batch_size: 6, accumulate: 2, eval_batch_size: 8}",
    "+hooks.seen={layers: layers.0, kind: forward, action: record}",
)
DATA = {
    "items": "data={dataset: {_target_: keyword_data.Rows}, num_workers: 1}",
    "sampler": "data={dataset: {_target_: keyword_data.Rows}, sampler: {_target_: keyword_data.weighted}}",
    "stream": "data={dataset: {_target_: keyword_data.Stream}, num_workers: 1}",
}


@pytest.mark.parametrize("data", tiered(DATA, quick=["stream"]))
def test_two_processes_train_as_one(data: str, tmp_path: Path) -> None:
    for name, processes, parallel in (("one", 1, []), ("two", 2, ["train.parallel=ddp", "reduce=global"])):
        arguments = (*ARGUMENTS, DATA[data], *parallel, f"hydra.run.dir={name}")
        done = run_processes(tmp_path, *arguments, processes=processes)
        assert done.returncode == 0, done.stderr
    one, two = (instrument.load(tmp_path / name) for name in ("one", "two"))
    for metric in ("loss", "accuracy", "grad_norm"):
        assert two.metrics[metric].tolist() == pytest.approx(one.metrics[metric].tolist(), rel=1e-5, nan_ok=True)
    assert two.stats["numel"].tolist() == one.stats["numel"].tolist()
