"""Heat maps of what casts would lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import axis_labels, make_run, mesh_of

import instrument
from instrument.plot import casts

HOOKS: dict[str, dict[str, Any]] = {
    "inputs": {
        "kind": "forward_pre",
        "types": ["Conv2d", "Linear"],
        "cast": {"to": "float8_e4m3fn", "scale": "previous"},
    },
    "outputs": {"kind": "forward", "types": ["Conv2d", "ReLU"], "stats": "none", "cast": "mxfp4_e2m1"},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    return make_run(tmp_path_factory.mktemp("casts") / "run", hooks=HOOKS)


def test_cells_are_means_over_steps(run: instrument.Run) -> None:
    ratio, underflows = casts(run).axes[:2]
    assert axis_labels(ratio) == ["0", "1", "3"]
    labels = [label.get_text() for label in ratio.get_xticklabels()]
    assert labels == ["inputs: float8_e4m3fn", "outputs: mxfp4_e2m1"]
    table = run.casts.groupby(["layer", "hook"])[["quantization_error", "underflow_fraction"]].mean().unstack()
    decibels = -10 * np.log10(table["quantization_error"].to_numpy())
    np.testing.assert_allclose(np.ma.filled(mesh_of(ratio).get_array(), np.nan), decibels, rtol=1e-12)
    percent = 100 * table["underflow_fraction"].to_numpy()
    np.testing.assert_allclose(np.ma.filled(mesh_of(underflows).get_array(), np.nan), percent, rtol=1e-12)
    assert mesh_of(underflows).get_clim() == (0.0, max(1.0, np.nanmax(percent)))


def test_rows_of_a_table_and_errors(run: instrument.Run, tmp_path: Path) -> None:
    assert axis_labels(casts(run.casts).axes[0]) == ["0", "1", "3"]
    with pytest.raises(instrument.InstrumentError, match="the casts table has no rows; set 'cast' in a record hook"):
        casts(make_run(tmp_path / "run", hooks={"acts": {"kind": "forward"}}))
