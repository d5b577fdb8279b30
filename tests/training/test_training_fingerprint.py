"""run.json has a fingerprint of the training, which a later training can be compared with."""

from __future__ import annotations

from pathlib import Path

import pytest
from training_runs import stop_and_resume, train_here

import instrument
from instrument.errors import ConfigError, FingerprintError

RUN = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=4", "train.batch_size=8", "train.eval_every=2")
HOOK = "+hooks.seen={layers:layers.0,kind:forward,action:record}"


def parts(run: instrument.Run) -> list[str]:
    fingerprint: str = run.info["fingerprint"]
    return fingerprint.split("-")


@pytest.mark.slow
def test_fingerprint_is_that_of_losses_and_weights(tmp_path: Path) -> None:
    one = train_here(tmp_path / "one", *RUN)
    losses, weights = parts(one)
    assert parts(train_here(tmp_path / "hooks", *RUN, HOOK)) == [losses, weights]
    resumed = stop_and_resume(tmp_path / "resumed", *RUN, "train.checkpoint.every=1", calls=3)
    assert parts(resumed) == [losses, weights]
    other = parts(train_here(tmp_path / "other", *RUN, "seed=1"))
    assert losses != other[0]
    assert weights != other[1]
    # Another last update: the losses of the steps are the same, but the evaluation after it is not.
    clipped = "+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:0.001,steps:[3]}"
    last = parts(train_here(tmp_path / "last", *RUN, clipped))
    assert weights != last[1]

    expected = f"train.fingerprint={one.info['fingerprint']}"
    assert train_here(tmp_path / "again", *RUN, expected).info["status"] == "done"
    with pytest.raises(
        FingerprintError, match="the losses and the parameters and buffers of the training differ"
    ) as found:
        train_here(tmp_path / "differs", *RUN, "seed=1", expected)
    assert found.value.exit_code == 4
    assert "-".join(other) in str(found.value)
    run = instrument.load(tmp_path / "differs")
    assert (run.info["status"], parts(run)) == ("done", other)


def test_invalid_fingerprint_is_an_error_before_the_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.fingerprint"):
        train_here(tmp_path / "run", *RUN, "train.fingerprint=12ab")
    assert not (tmp_path / "run").exists()
