"""Changes to a run of several processes: all of them follow rank 0."""

from __future__ import annotations

from pathlib import Path

from distributed_runs import train


def test_all_processes_follow_rank_zero(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "out",
        *("device=cpu", "data=digits", "model=mlp", "model.sizes=[64,8,10]", "optimizer=sgd", "optimizer.lr=0.1"),
        *("train={steps: 8, batch_size: 16, checkpoint: {every: 100}}", "train.parallel=ddp"),
        "+hooks.seen={layers: '**', kind: forward, action: record, every: 10}",
        "+hooks.sender={layers: ., kind: forward, action: call, fn: {_target_: control_sender.send_messages}}",
        processes=2,
    )
    assert run.info["status"] == "stopped"
    assert list((tmp_path / "out" / "checkpoints").glob("step-*.pt"))
    steps = run.stats[run.stats["hook"] == "seen"].groupby("rank")["step"].unique().map(sorted)
    assert steps[0] == steps[1]
    assert steps[0][:2] in ([0, 2], [0, 3])  # rank 0 reads a message of the other process at the end of step 1 or 2
    assert run.metrics["lr"].tolist()[0] == 0.1
    assert run.metrics["lr"].tolist()[-1] == 0.05
    events = run.events[run.events["rule"] == "control"]
    assert events["message"].tolist() == ["hooks.seen.every: 10 -> 1", "lr_scale: 1.0 -> 0.5", "stop"]
    assert set(events["rank"]) == {0}
