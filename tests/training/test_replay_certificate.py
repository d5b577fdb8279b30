"""`certify_replay`: what a certificate shows if steps are missing, or if the run or the replay failed."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from run_folders import write_run

from instrument.training.verification import Certificate, ReplayCertificate, certify_replay, write_certificate

ENTRY = {"begin": 4, "steps": [5, 8], "first_step": None, "counterfactual": [], "changes": [], "changes_left_out": []}
FAILED: dict[str, Any] = {"status": "failed", "used": {"error": "RuntimeError: stopped here"}}


def folder(
    path: Path, steps: range, status: str = "done", used: dict[str, Any] | None = None, bits: int | None = None
) -> Path:
    """Write a run with the metrics of some steps, and with fingerprints of two tensors, of which the last one is `bits` in step 5."""
    metrics = [{"step": step, "loss": 1.0, "lr": 0.1} for step in steps]
    place = {
        "hook": "bits",
        "kind": "forward",
        "role": "output",
        "path": "",
        "module_type": "Linear",
        "scope": "global",
    }
    stats = [
        {**place, "step": step, "layer": layer, "fingerprint": bits if step == 5 and layer == "head" else 2**62 + 1}
        for step in steps
        for layer in ("stem", "head")
        if bits is not None
    ]
    return write_run(
        path, rows={"metrics": metrics, "stats": stats}, status=status, used={"error": None, **(used or {})}
    )


def certified(path: Path, run: dict[str, Any], replay: dict[str, Any], **fields: Any) -> ReplayCertificate:
    """Return the certificate of a replay from step 4 on, up to step 7, of a run with the steps 0 to 6."""
    used = {**replay.get("used", {}), "replay": {**ENTRY, **fields}}
    recorded: dict[str, Any] = {"steps": range(7), **run}
    repeated: dict[str, Any] = {"steps": range(4, 7), **replay, "used": used}
    return certify_replay(folder(path / "run", **recorded), folder(path / "replay", **repeated))


def test_step_that_the_replay_lacks_is_a_difference(tmp_path: Path) -> None:
    found = certified(tmp_path, {}, {"steps": range(4, 6), **FAILED})
    assert not found.holds
    assert (found.steps, found.repeats_failure) == (2, False)
    assert str(found.difference) == "step 6: loss is missing, but was 1.0"
    assert found.reasons == ("the replay ended before",)


def test_fingerprints_locate_a_difference_that_no_metric_shows(tmp_path: Path) -> None:
    found = certified(tmp_path, {"bits": 2**62}, {"bits": 2**62 + 1})
    assert (found.fingerprints, found.holds) == (6, False)
    assert str(found.difference) == (
        f"step 5: the fingerprint of head (forward output) is {2**62 + 1}, but was {2**62}"
    )
    same = certified(tmp_path / "same", {"bits": 2**62}, {"bits": 2**62})
    assert (same.fingerprints, same.holds) == (6, True)
    assert certified(tmp_path / "other_hooks", {"bits": 2**62}, {}).fingerprints == 0


def test_steps_without_values_are_not_compared(tmp_path: Path) -> None:
    """A task without a loss has no compared metric, so equal rows show nothing."""
    rows = {"metrics": [{"step": step, "seconds": 1.0} for step in range(2)]}
    used = {"error": None, "replay": {**ENTRY, "begin": 0, "steps": [0, 2]}}
    runs = [write_run(tmp_path / name, rows=rows, used=used) for name in ("run", "replay")]
    found = certify_replay(*runs)
    assert (found.steps, found.difference, found.holds) == (0, None, False)


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("run", "replay", "fields", "expected"),
    [
        ({}, {}, {}, (True, 3, None)),
        ({}, {"steps": range(7, 8)}, {"begin": 7}, (False, 0, None)),  # nothing is shown without a compared step
        (FAILED, FAILED, {}, (True, 3, True)),
        (FAILED, {**FAILED, "used": {"error": "ValueError: another error"}}, {}, (True, 3, False)),
        (FAILED, {"steps": range(4, 8)}, {}, (True, 3, False)),
        (FAILED, {}, {}, (True, 3, None)),
    ],
)
def test_certificate_of_equal_steps(
    tmp_path: Path, run: dict[str, Any], replay: dict[str, Any], fields: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    found = certified(tmp_path, run, replay, **fields)
    assert (found.holds, found.steps, found.repeats_failure) == expected
    assert found.difference is None


def test_certificate_with_infinite_numbers_is_json(tmp_path: Path) -> None:
    certificate = Certificate(1, 0, ("mine",), (), 2, 1, 3, None, largest=(inf, "fc.weight"))
    expected = {"steps": 1, "hooks": ["mine"], "largest": ["Infinity", "fc.weight"], "holds": True}
    text = write_certificate(certificate, tmp_path)
    assert (tmp_path / "certificate.json").read_text() == f"{text}\n"
    found = json.loads(text, parse_constant=pytest.fail)
    assert {name: found[name] for name in expected} == expected
