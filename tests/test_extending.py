"""A package adds an extension of each kind with one file and one entry point each, as CONTRIBUTING describes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# By entry point: its group, and the only file that it needs.
EXTENSIONS: dict[str, tuple[str, str]] = {
    "negate": (
        "actions",
        """
from typing import Literal
from instrument.config.base import InterventionSpec

class negate(InterventionSpec):
    action: Literal["negate"]

    def change(self, tensor, context):
        return -tensor
""",
    ),
    "double": (
        "functions",
        """
from typing import Literal
from instrument.config.hook_specs import ModifySpec

class double(ModifySpec):
    fn: Literal["double"]

    def change(self, tensor, context):
        return tensor * 2
""",
    ),
    "result": (
        "kinds",
        """
from instrument.tables.kinds import Kind

class Hooks:
    def __init__(self, module, attached_hooks, clock):
        self.module, self.attached_hooks = module, attached_hooks

    def attach(self):
        self.handle = self.module.register_forward_hook(self.after)

    def refresh(self):
        pass

    def detach(self):
        self.handle.remove()

    def after(self, module, args, output):
        for attached in self.attached_hooks:
            if not attached.is_scheduled:
                attached.count_unscheduled()
            elif attached.count_and_check_readable(output):
                output = attached.fire(output, "")
        return output

result = Kind("result", "module", "micro_step", ("output",), ("output",), False, "the output", hooks="extra.result:Hooks")
""",
    ),
    "absolute": (
        "tasks",
        """
from instrument import Outcome

class absolute:
    def __call__(self, model, batch):
        inputs, targets = batch
        return Outcome((model(inputs).sum(1) - targets).abs().mean(), len(inputs))
""",
    ),
    "steps_file": (
        "trackers",
        """
class steps_file:
    def __init__(self, run, folder):
        self.file = folder / "steps.txt"

    def log(self, step, summary):
        with self.file.open("a") as file:
            file.write(f"{step} {len(summary.scalars)}\\n")

    def close(self, outcome):
        with self.file.open("a") as file:
            file.write(outcome)
""",
    ),
    "loss_plot": (
        "plots",
        """
from instrument.plot.figure import Picture

def loss_plot(run):
    figure = Picture(figsize=(4, 3))
    figure.add_subplot().plot(run.metrics.step, run.metrics.loss)
    return figure
""",
    ),
    "loss_by_step": (
        "panels",
        """
def loss_by_step(run):
    return f"<p>{len(run.metrics)} losses</p>"
""",
    ),
}
USE = """
from pathlib import Path
import instrument
from instrument.__main__ import main
assert not main()
run = instrument.load("out")
stats = run.stats
at = lambda hook: stats[stats.hook == hook]["max"].values
assert set(stats.kind) == {"forward", "result"}
assert (at("first") > 0).all() and (at("second") == -stats[stats.hook == "first"]["min"].values).all()  # negated
assert (at("third") == 2 * at("second")).all()  # doubled
assert set(run.effects.hook) == {"negative", "twice"} and (run.effects.changed_fraction > 0).all()
assert (run.coverage.fired == run.coverage.expected).all()
assert Path("out/steps.txt").read_text().startswith("0 ") and Path("out/steps.txt").read_text().endswith("done")
instrument.plot.loss_plot(run).savefig("plot.png")
assert Path("plot.png").stat().st_size > 1000
html = Path("out/report.html").read_text()
assert '<section id="panel-loss_by_step"><h2>Loss by step</h2>' in html and "<p>4 losses</p>" in html
"""
ARGUMENTS = (
    *("model=mlp", "model.sizes=[64,8,8,1]", "data=digits", "task=absolute", "train.steps=3", "hydra.run.dir=out"),
    *("report=true", "sink.steps_file=true"),
    "+hooks.first={layers: layers.0, kind: forward, action: record}",
    "+hooks.negative={layers: layers.0, kind: result, action: negate}",
    "+hooks.second={layers: layers.0, kind: result, action: record}",
    "+hooks.twice={layers: layers.0, kind: result, action: modify, fn: double}",
    "+hooks.third={layers: layers.0, kind: result, action: record}",
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of an installed package with one file for each extension."""
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra" / "__init__.py").touch()
    info = tmp_path / "extra-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extra\nVersion: 3.1\n")
    points = []
    for name, (group, text) in EXTENSIONS.items():
        (tmp_path / "extra" / f"{name}.py").write_text(text)
        points.append(f"[instrument.{group}]\n{name} = extra.{name}:{name}\n")
    (info / "entry_points.txt").write_text("".join(points))
    return tmp_path


def run(package: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder next to the package."""
    folder = package / "elsewhere"
    folder.mkdir()
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(package), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_package_adds_each_kind_of_extension_with_one_file(package: Path) -> None:
    files = [file for file in (package / "extra").iterdir() if file.name != "__init__.py"]
    assert len(files) == len({group for group, _ in EXTENSIONS.values()}) == 7
    done = run(package, USE, *ARGUMENTS)
    assert done.returncode == 0, done.stderr + done.stdout


UNKNOWN = """
import instrument
from instrument.errors import ConfigError
from instrument.config.parse import parse_config
base = {"layers": "*", "kind": "forward"}
hooks = {
    "a": {**base, "action": "negat"},
    "b": {**base, "action": "modify", "fn": "duble"},
    "c": {**base, "kind": "resul", "action": "record"},
}
try:
    parse_config({"hooks": hooks, "model": "x"})
except ConfigError as error:
    print(error)
try:
    instrument.plot.los_plot
except AttributeError as error:
    print(error)
"""


@pytest.mark.slow
def test_unknown_names_list_installed_extensions(package: Path) -> None:
    printed = run(package, UNKNOWN).stdout
    for name in ("negate", "double", "result", "loss_plot"):
        assert f"similar  {name}" in printed, printed


@pytest.mark.slow
def test_unknown_task_and_tracker_list_installed_ones(package: Path) -> None:
    code = "from instrument.__main__ import main; raise SystemExit(main())"
    done = run(package, code, "model=mlp", "data=digits", "task=absolut")
    assert done.returncode == 2
    assert "similar  absolute" in done.stderr


@pytest.mark.slow
def test_broken_extension_names_package_and_entry_point(package: Path) -> None:
    (package / "extra" / "absolute.py").write_text("import no_such_module")
    code = "from instrument.__main__ import main; raise SystemExit(main())"
    done = run(package, code, "model=mlp", "data=digits", "task=absolute")
    assert done.returncode == 2, done.stderr
    assert "entry point absolute = extra.absolute:absolute (group instrument.tasks, package extra 3.1)" in done.stderr
