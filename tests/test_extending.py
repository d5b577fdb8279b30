"""A statistic, action, kind, sink, task, dataset and chart are added to a copy of the package, as CONTRIBUTING describes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# By file, the text that is replaced and the new text; an empty text to replace means a new file.
ADDITIONS: dict[str, tuple[tuple[str, str], ...]] = {
    # A statistic
    "instrument/spec/statistics.py": (
        (
            '    Statistic("inf_count", "number of +inf and -inf", "count", "int64", merged="max"),\n',
            '    Statistic("inf_count", "number of +inf and -inf", "count", "int64", merged="max"),\n'
            '    Statistic("value_range", "max(x) - min(x)", "value", "float64", default=False),\n',
        ),
    ),
    "instrument/stats/formulas.py": (
        (
            '    "inf_count": lambda s: s.inf_count,\n',
            '    "inf_count": lambda s: s.inf_count,\n    "value_range": lambda s: s.high - s.low,\n',
        ),
    ),
    # An action
    "instrument/spec/clip_and_scale.py": (
        (
            "class ScaleSpec(InterventionSpec):",
            'class NegateSpec(InterventionSpec):\n    """Change the sign."""\n\n    action: Literal["negate"]\n\n\n'
            "class ScaleSpec(InterventionSpec):",
        ),
    ),
    "instrument/spec/hooks.py": (
        ("import ClipSpec, ScaleSpec", "import ClipSpec, NegateSpec, ScaleSpec"),
        ("    | ScaleSpec\n", "    | ScaleSpec\n    | NegateSpec\n"),
        ('    "scale": ScaleSpec,\n', '    "scale": ScaleSpec,\n    "negate": NegateSpec,\n'),
    ),
    "instrument/actions/make_action.py": (
        ("import ClipSpec, ScaleSpec", "import ClipSpec, NegateSpec, ScaleSpec"),
        ("from .modify import Modify\n", "from .modify import Modify\nfrom .negate import Negate\n"),
        (
            "        case ScaleSpec():\n",
            "        case NegateSpec():\n            return Intervention(Negate(), rows)\n        case ScaleSpec():\n",
        ),
    ),
    "instrument/actions/negate.py": (
        (
            "",
            "class Negate:\n    entrywise = True\n\n    def prepare(self, tensors):\n        pass\n\n"
            "    def __call__(self, tensor, context):\n        return -tensor, -1.0\n",
        ),
    ),
    # A kind of a family that exists
    "instrument/spec/kinds.py": (
        (
            "_ALL = (\n",
            '_ALL = (\n    Kind("output", "module", "micro_step", ("output",), ("output",), False, "the output"),\n',
        ),
    ),
    "instrument/kinds/module_tensors.py": (
        ('if kind == "forward" and role == "output"', 'if kind in ("forward", "output") and role == "output"'),
    ),
    # A task and a dataset
    "instrument/tasks/absolute.py": (
        (
            "",
            "from .base import Outcome\n\n\nclass AbsoluteError:\n    def __call__(self, model, batch):\n"
            "        inputs, targets = batch\n        return Outcome((model(inputs) - targets).abs().mean(), len(inputs))\n",
        ),
    ),
    "conf/task/absolute.yaml": (("", "_target_: instrument.tasks.absolute.AbsoluteError\n"),),
    "instrument/training/lines.py": (
        (
            "",
            "import torch\n\n\ndef lines(split, samples=64):\n    x = torch.linspace(-1, 1, samples)[:, None]\n"
            "    return torch.utils.data.TensorDataset(x, 2 * x)\n",
        ),
    ),
    "conf/data/lines.yaml": (
        (
            "",
            "dataset: {_target_: instrument.training.lines.lines}\nslice: {split: train}\neval_slice: {split: test}\n",
        ),
    ),
    # A chart
    "instrument/plot/loss_chart.py": (
        (
            "",
            "from .figure import Picture\n\n\ndef loss_chart(run):\n    figure = Picture(figsize=(4, 3))\n"
            "    figure.add_subplot().plot(run.metrics.step, run.metrics.loss)\n    return figure\n",
        ),
    ),
    "instrument/plot/__init__.py": (
        ("from .heatmap import heatmap\n", "from .heatmap import heatmap\nfrom .loss_chart import loss_chart\n"),
    ),
}

USE = """
import sys
import torch
import instrument
from instrument.__main__ import main
from instrument.spec.tables import TABLES
from instrument.plan.hook_plan import make_plan
from instrument.spec.spec_file import read_specs

# The task, the dataset, the statistic, the action and the kind, from the command line
assert not main()
run = instrument.load("out")
stats = run.stats
assert (stats.value_range == stats["max"] - stats["min"]).all() and (stats.value_range > 0).any()
assert set(stats.kind) == {"forward", "output"}
assert (stats[stats.kind == "forward"].value_range.values == stats[stats.kind == "output"].value_range.values).all()
assert set(run.effects.hook) == {"negative"} and (run.effects.factor == -1).all()
assert run.metrics.loss.notna().all()
instrument.plot.loss_chart(run).savefig("chart.png")

# A sink is an argument
class Counts:
    def __init__(self):
        self.rows, self.closed = {}, False
    def write(self, table, rows):
        self.rows[table] = self.rows.get(table, 0) + len(rows)
    def keep(self, key, source_shape, tensor, dtype=None):
        self.rows["tensors"] = self.rows.get("tensors", 0) + 1
        return tensor.nbytes
    def end_step(self):
        pass
    def close(self):
        self.closed = True

model, sink = torch.nn.Linear(2, 2), Counts()
specs = read_specs({"seen": {"layers": ".", "kind": "forward", "action": "record", "tensors": True}})
with instrument.Probe(make_plan(specs, model), sink) as probe:
    model(torch.ones(3, 2))
    probe.end_step()
assert sink.rows["stats"] == sink.rows["tensors"] == 1 and sink.rows["coverage"] == 1 and sink.closed
"""
ARGUMENTS = (
    *("model=mlp", "model.sizes=[1,8,1]", "task=absolute", "data=lines", "train.steps=3", "hydra.run.dir=out"),
    "+hooks.seen={layers: layers.0, kind: forward, action: record, stats: [value_range, min, max]}",
    "+hooks.also={layers: layers.0, kind: output, action: record, stats: [value_range, min, max]}",
    "+hooks.negative={layers: layers.1, kind: forward, action: negate}",
)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Folder of a copy of the package with all additions."""
    for name in ("instrument", "conf"):
        shutil.copytree(REPOSITORY / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name, replacements in ADDITIONS.items():
        file = tmp_path / name
        text = file.read_text() if file.exists() else ""
        for old, new in replacements:
            assert old in text, f"{name} does not contain {old!r}"
            text = text.replace(old, new, 1)
        file.write_text(text)
    return tmp_path


@pytest.mark.slow
def test_statistic_action_kind_sink_task_dataset_and_chart_can_be_added(copy: Path) -> None:
    place = copy / "elsewhere"
    place.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", USE, *ARGUMENTS],
        cwd=place,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (place / "chart.png").stat().st_size > 1000
