"""The command line, end to end: printed output, written files, plans, sweeps and errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import polars
import pytest
from conftest import Answer, contents, run_in, write
from state_comparison import assert_same_tables
from tiers import tiered

import instrument
from instrument.commands.interrupts import handle_interrupts
from instrument.commands.verbs import ALL
from instrument.storage.run_record import REQUIRED

Cli = Callable[..., Any]
TABLES = {
    *("stats", "distributions", "tensors", "effects", "metrics", "coverage", "layers", "events", "generated"),
    *("samples", "spectra", "experts", "position_losses", "relations", "operators", "collectives", "casts"),
}
MAIN = 'if __name__ == "__main__":'
SHORT = ("+exp=mnist_hooks", "data=digits", "data.dataset.size=28", "train.steps=6", "hooks.digit_maps.steps=[0]")
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")

WITHOUT_DATA = (
    *("model=mlp", "model.sizes=[784,10]", "train.steps=1"),
    *("data=mnist", "data.root=nowhere", "data.dataset.download=false", "data.fallback=digits"),
)
CLIPPED = (*TINY, "+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}")

SEEN = "+hooks.seen={layers:layers.0,kind:forward,action:record,tensors:true}"

EXPERIMENT = """# @package _global_
defaults:
  - override /data: digits
  - _self_
name: mine
train: {{steps: 2}}
model: {{_target_: {target}}}
hooks: {{seen: {{layers: "**", kind: forward, action: record}}}}
"""


def only_entry(folder: str | Path) -> Path:
    (found,) = Path(folder).iterdir()
    return found


def assert_same_rows(one: instrument.Run, other: instrument.Run) -> None:
    """Assert that two runs are bit-identical, except for measured times."""
    assert_same_tables(one, other, "stats", "effects", "metrics", "coverage", "layers")
    left, right = one.tensors(), other.tensors()
    assert len(left) == len(right) > 0
    assert all(a.tobytes() == b.tobytes() for a, b in zip(left["values"], right["values"], strict=True))


@pytest.fixture
def data(mnist_root: Path | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of the dataset to use: `mnist` if its files are available (with `INSTRUMENT_DATA` set), else `digits`."""
    if mnist_root is None:
        monkeypatch.setenv("INSTRUMENT_DATA", "nowhere")
        return "digits"
    monkeypatch.setenv("INSTRUMENT_DATA", str(mnist_root))
    return "mnist"


@pytest.mark.parametrize("steps", tiered([10, 100], [10]))
def test_main_experiment_prints_progress_and_writes_all_tables(cli: Cli, data: str, steps: int) -> None:
    half = steps // 2
    digits = {"hooks.digit.steps": [0], "hooks.digit_maps.steps": [0]}
    shorter = {"train.steps": steps, "train.eval_every": half, "hooks.noisy.start": half, **digits}
    changed = shorter if steps < 100 else {}
    overrides = ("data.dataset.download=false", "data.eval_slice.stop=300")
    answer = cli("+exp=mnist_hooks", *overrides, *(f"{key}={value}" for key, value in changed.items())).expect(0)
    folder = only_entry("runs/mnist_hooks")

    assert f"data  {data}:" in answer.out
    shown = [line for line in answer.out.splitlines() if line.startswith("step") and "evaluation" not in line]
    assert len(shown) == 10
    assert all(word in line for line in shown for word in ("loss", "accuracy", "rows"))
    evaluations = [line for line in answer.out.splitlines() if line.startswith("step") and "evaluation" in line]
    assert [line.split()[1] for line in evaluations] == [f"{half}/{steps}", f"{steps}/{steps}"]
    assert all(word in line for line in shown for word in ("samples/s", "kB"))
    summary = answer.out.split("Recorded", 1)[1]
    for hook in ("activations", "digit_maps", "gradients", "tame", "quiet", "noisy"):
        assert hook in summary
    for finding in ("clip norm 1", "scale factor 0.5", "modify noise std 0.05", "largest gradient norm", "loss"):
        assert any(line.startswith(finding) for line in summary.splitlines())
    assert f"files       {folder}" in answer.out
    assert f"instrument.load('{folder}')" in answer.out
    assert answer.out.splitlines()[-1] == f"report      python -m instrument.report {folder}"

    assert {path.name for path in folder.iterdir()} == {*TABLES, "blocks", "run.json", ".hydra", "instrument.log"}
    run = instrument.load(folder)
    assert run.info["status"] == "done"
    assert run.info["device"] in ("cpu", "cuda")
    assert run.info["config"]["hooks"]["tame"]["norm"] == 1.0
    given = {"exp": "mnist_hooks", "data.dataset.download": False, "data.eval_slice.stop": 300}
    assert run.info["overrides"] == {**given, **changed}
    assert {"python", "torch", "instrument"} <= set(run.info["versions"])

    assert set(run.stats.hook) == {"activations", "digit_maps", "gradients", "updates"}
    assert sorted(run.stats[run.stats.hook == "activations"].step.unique()) == list(range(0, steps, 5))
    assert set(run.effects.hook) == {"tame", "quiet", "noisy"}
    assert run.effects[run.effects.hook == "noisy"].step.min() == half
    quiet = run.effects[run.effects.hook == "quiet"]
    assert quiet.factor.eq(0.5).all()
    assert (quiet.norm_after / quiet.norm_before).sub(0.5).abs().max() < 1e-6
    clipped = run.effects[run.effects.hook == "tame"].groupby("step").norm_after
    assert clipped.agg(lambda norms: (norms**2).sum() ** 0.5).max() < 1.0 + 1e-5
    maps = run.tensors(layer="encoder.0", step=0)
    assert [array.shape for array in maps["values"]] == [(1, 16, 14, 14)]
    assert run.metrics.phase.value_counts().to_dict() == {"train": steps, "eval": 2}
    assert (run.coverage.expected == run.coverage.fired).all()
    assert len(run.layers) == 17
    assert run.layers.trainable.sum() == 105_914
    assert set(run.events.rule) == ({"fallback"} if data == "digits" else set())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    assert run_in(folder, *TINY, "hooks=activations", "hydra.run.dir=out").code == 0
    return folder / "out"


@pytest.mark.slow
def test_every_table_is_readable_with_pandas_polars_and_duckdb(finished: Path) -> None:
    filled = {"stats": 3, "metrics": 3, "coverage": 3, "layers": 3, "relations": 5}
    for table in TABLES:
        rows = filled.get(table, 0)
        assert len(pd.read_parquet(finished / table)) == rows
        assert polars.read_parquet(finished / table / "*.parquet").height == rows
        with duckdb.connect() as connection:
            count = connection.execute(f"select count(*) from '{finished}/{table}/*.parquet'").fetchall()
        assert count == [(rows,)]


@pytest.mark.slow
def test_plan_is_printed_and_writes_nothing(cli: Cli) -> None:
    answer = cli(*SHORT, "plan=true", "train.steps=100", "train.batch_size=4", "hooks.digit_maps.steps=[0,99]")
    assert answer.code == 0, answer.err
    for message in (
        "MnistCNN",
        "Conv2d  144 parameters  [4, 16, 28, 28]  activations, gradients, updates",
        "Linear  650 parameters  [4, 10]  gradients → tame, updates",
    ):
        assert message in answer.out
    rows = {line.split()[0]: line.split() for line in answer.out.splitlines() if line}
    assert rows["activations"][-4] == "440"  # rows of statistics and histograms
    assert rows["tame"][-4] == "400"
    assert rows["total"][-4] == "1,400"
    assert rows["total"][-2] in ("kB", "MB")
    assert rows["total"][-1].startswith(("+", "-"))
    assert "mean time per step" in answer.out
    assert "Not matched" in answer.out
    assert list(Path.cwd().iterdir()) == []


def test_plans_of_a_sweep_show_the_fallback_and_write_nothing(cli: Cli) -> None:
    clipped = "+hooks.tame={layers:layers.0,kind:parameter_grad,action:clip,norm:1}"
    answer = cli("-m", *WITHOUT_DATA, clipped, "plan=true", "hooks.tame.norm=1,2").expect(0)
    assert answer.out.count("FALLBACK  mnist is missing") == 2
    assert "clip norm 1" in answer.out
    assert "clip norm 2" in answer.out
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.slow
def test_run_works_in_the_repository_root(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    answer = cli(*TINY, f"hydra.run.dir={tmp_path / 'out'}")
    assert (answer.code, answer.err) == (0, "")
    assert instrument.load(tmp_path / "out").info["status"] == "done"


@pytest.fixture(scope="module")
def sweep_of_four(tmp_path_factory: pytest.TempPathFactory) -> tuple[Answer, Path]:
    """The output and the folder of a sweep of two norms and two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    answer = run_in(folder, "-m", *CLIPPED, SEEN, "name=norms", "hooks.tame.norm=0.1,10", "seed=1,2").expect(0)
    return answer, only_entry(folder / "runs" / "norms")


@pytest.mark.slow
def test_sweep_loads_as_one_frame_with_typed_overrides(sweep_of_four: tuple[Answer, Path], cli: Cli) -> None:
    answer, folder = sweep_of_four
    for norm, seed in ((0.1, 1), (0.1, 2), (10, 1), (10, 2)):
        assert f"  hooks.tame.norm={norm} seed={seed}  loss" in answer.out
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set("0123")
    assert "4 jobs in" in answer.out

    sweep = instrument.load(folder)
    frame = sweep.metrics[sweep.metrics.phase == "train"]
    assert frame.groupby(["hooks.tame.norm", "seed"]).size().to_dict() == {
        (norm, seed): 2 for norm in (0.1, 10) for seed in (1, 2)
    }
    assert pd.api.types.is_float_dtype(frame["hooks.tame.norm"])
    assert pd.api.types.is_integer_dtype(frame["seed"])
    assert sweep.runs.status.eq("done").all()

    assert cli(*CLIPPED, SEEN, "hooks.tame.norm=10", "seed=2", "hydra.run.dir=alone").code == 0
    alone = instrument.load("alone")
    assert_same_rows(instrument.load(sweep.folders[3]), alone)
    assert (instrument.load(sweep.folders[2]).metrics.loss != alone.metrics.loss).all()  # a run with another seed


@pytest.mark.slow
def test_custom_model_gets_only_its_own_arguments(cli: Cli) -> None:
    write(
        "own_net.py",
        "import torch\n\nGIVEN = {}\n\n\nclass MyNet(torch.nn.Sequential):\n"
        "    def __init__(self, **given):\n        GIVEN.update(given)\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, given['width']), torch.nn.Linear(32, 10))\n",
    )
    write("conf/exp/mine.yaml", EXPERIMENT.format(target="own_net.MyNet, width: 32"))
    answer = cli("+exp=mine")
    assert (answer.code, answer.err) == (0, "")
    assert sys.modules["own_net"].GIVEN == {"width": 32}  # type: ignore[attr-defined]
    run = instrument.load(only_entry("runs/mine"))
    assert list(run.layers.module_type) == ["MyNet", "Flatten", "Linear", "Linear"]
    assert set(run.stats.layer) == {"", "0", "1", "2"}


def test_custom_files_are_found_but_do_not_replace_builtin_files(cli: Cli) -> None:
    write("conf/hooks/gradients.yaml", 'stolen: {layers: "**", kind: forward, action: record}\n')
    write("conf/hooks/mine.yaml", 'seen: {layers: "**", kind: forward, action: record}\n')
    answer = cli(*TINY, "hooks=[mine,gradients]", "hydra.run.dir=out").expect(0)
    assert "warning: conf/hooks/gradients.yaml is ignored" in answer.err
    assert "conf/hooks/mine.yaml" not in answer.err
    assert set(instrument.load("out").stats.hook) == {"seen", "output_gradients", "parameter_gradients"}


PRESETS = {
    "activations": {"activations"},
    "gradients": {"output_gradients", "parameter_gradients"},
    "parameters": {"parameters", "updates"},
    "dead_relu": {"dead_relu"},
    "inputs": {"inputs", "model_inputs"},
    "fingerprints": {"weights"},
}
ALL_PRESETS = f"[{','.join(PRESETS)}]"


@pytest.mark.slow
@pytest.mark.parametrize("preset", tiered([*PRESETS, ALL_PRESETS], [ALL_PRESETS]))
def test_hook_presets_are_selected_by_name(cli: Cli, preset: str) -> None:
    hooks = PRESETS.get(preset) or set.union(*PRESETS.values())
    cli(*TINY, "model.sizes=[64,16,10]", f"hooks={preset}", "train.steps=1", "hydra.run.dir=out").expect(0)
    run = instrument.load("out")
    assert set(run.stats.hook) == hooks
    assert (run.coverage.fired == run.coverage.expected).all()


@pytest.mark.slow
def test_hooks_are_added_changed_and_removed_by_overrides(cli: Cli) -> None:
    cli(
        *SHORT,
        "~hooks.noisy",
        "hooks.quiet=null",
        "hooks.tame.norm=0.001",
        "+hooks.mine={layers:decoder.1,kind:forward,action:record}",
        "hydra.run.dir=out",
    ).expect(0)
    run = instrument.load("out")
    assert set(run.effects.hook) == {"tame"}
    assert run.effects.norm_after.max() <= 0.001 * (1 + 1e-5)
    assert set(run.stats[run.stats.hook == "mine"].layer) == {"decoder.1"}


SHARED = """# @package _global_
defaults:
  - override /data: digits
  - override /model: mlp
  - _self_
quiet: true
{key}
train: {{steps: "${{{name}}}"}}
hooks:
  a: {{layers: layers.0, kind: forward, action: record, stop: "${{{name}}}"}}
"""


@pytest.mark.slow
def test_hooks_can_be_a_list(cli: Cli) -> None:
    text = EXPERIMENT.format(target="instrument.training.models.MLP, sizes: [64, 10]").splitlines()[:-1]
    items = (
        "[{layers: ., kind: forward, action: record}, {name: last, layers: layers.0, kind: forward, action: record}]"
    )
    write("conf/exp/listed.yaml", "\n".join([*text, f"hooks: {items}", ""]))
    cli("+exp=listed", "hydra.run.dir=out").expect(0)
    assert set(instrument.load("out").stats.hook) == {"hooks_0", "last"}


@pytest.mark.slow
def test_fallback_is_reported_on_screen_and_in_the_files(cli: Cli) -> None:
    answer = cli(*WITHOUT_DATA, "quiet=true", "hydra.run.dir=out").expect(0)
    assert "FALLBACK" in answer.out
    assert "digits" in answer.out
    assert "using the digits of scikit-learn instead" in " ".join(answer.out.split())
    run = instrument.load("out")
    assert "using the digits of scikit-learn instead" in run.info["data"]["fallback"]
    assert list(run.events.rule) == ["fallback"]
    assert "using the digits of scikit-learn instead" in run.events.message[0]
    start, summary = cli(*WITHOUT_DATA, "hooks=gradients").out.split("Recorded", 1)
    for part in (start, summary):
        assert "using the digits of scikit-learn instead" in " ".join(part.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("logging", "has_log"),
    [
        ([], True),
        (["hydra/job_logging=none", "hydra/hydra_logging=none"], False),
        (["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"], False),
    ],
)
def test_quiet_run_prints_nothing(cli: Cli, logging: list[str], has_log: bool) -> None:
    """`none` and `disabled` are options of Hydra."""
    answer = cli(*TINY, "hooks=activations", "quiet=true", "hydra.run.dir=out", *logging)
    assert (answer.code, answer.out, answer.err) == (0, "", "")
    assert Path("out/instrument.log").exists() == has_log


@pytest.mark.slow
def test_shared_values_are_interpolated(cli: Cli) -> None:
    write("conf/exp/shared.yaml", SHARED.format(key="vars: {length: 4}", name="vars.length"))
    answer = cli("+exp=shared", "vars.length=3", "hydra.run.dir=out").expect(0)
    run = instrument.load("out")
    assert (len(run.metrics.query("phase == 'train'")), sorted(run.stats.step.unique())) == (3, [0, 1, 2])
    write("conf/exp/shared.yaml", SHARED.format(key="length: 4", name="length"))
    answer = cli("+exp=shared").expect(2)
    assert "unknown field 'length'" in answer.err
    assert "set vars.length, and write ${vars.length}" in answer.err


@pytest.mark.slow
def test_quiet_run_warns_about_an_unregistered_module(cli: Cli) -> None:
    write(
        "hiding_net.py",
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n"
        "        self.blocks = [torch.nn.Linear(10, 10)]\n",
    )
    write("conf/exp/hiding.yaml", EXPERIMENT.format(target="hiding_net.Net"))
    answer = cli("+exp=hiding", "quiet=true", "hydra.run.dir=out").expect(0)
    (line,) = answer.out.splitlines()
    assert line.startswith("warning")
    assert "blocks[0] (Linear)" in line
    events = instrument.load("out").events
    assert list(events.rule) == ["hidden_module"]
    assert events.severity[0] == "warning"


@pytest.mark.slow
def test_quiet_run_warns_about_a_hook_that_did_not_fire(cli: Cli) -> None:
    hook = "+hooks.late={layers:layers,kind:forward,action:record,start:50}"
    answer = cli(*TINY, hook, "quiet=true").expect(0)
    assert answer.out.startswith("warning hook 'late'")
    assert "never scheduled" in " ".join(answer.out.split())


def test_single_process_with_a_rank_records_its_environment(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # a cluster may set it without WORLD_SIZE
    cli(*TINY, "hydra.run.dir=out").expect(0)
    record = json.loads(Path("out/run.json").read_text())
    assert [name for name in REQUIRED if not record[name]] == []


def test_existing_run_is_not_overwritten(finished: Path, cli: Cli) -> None:
    shutil.copytree(finished, "out")
    before = contents("out")
    assert "hydra.run.dir: the folder already contains a run" in cli(*TINY, "seed=5", "hydra.run.dir=out").expect(2).err
    assert contents("out") == before


@pytest.mark.slow
def test_existing_sweep_is_not_overwritten(sweep_of_four: tuple[Answer, Path], cli: Cli) -> None:
    shutil.copytree(sweep_of_four[1], "out")
    before = contents("out")
    answer = cli("-m", *TINY, "seed=3,4", "hydra.sweep.dir=out").expect(2)
    assert "hydra.sweep.dir: the folder already contains a sweep" in answer.err
    assert contents("out") == before


# Runs each command as `python -m` or the installed script does, in a forked process, and interrupts its first import.
INTERRUPTED = """
import os, runpy, sys
for command in sys.argv[1:]:
    if child := os.fork():
        print(command, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    class Interrupted:
        @staticmethod
        def find_spec(name, path=None, target=None):
            before = "instrument", "instrument.__main__", "instrument.commands", "instrument.commands.interrupts", command
            if name.partition(".")[0] not in sys.stdlib_module_names and name not in (*before, command + ".__main__"):
                raise KeyboardInterrupt
    sys.meta_path.insert(0, Interrupted)
    if command == "script":
        from instrument.__main__ import main
        main()
    sys.orig_argv, sys.argv = [sys.executable, "-m", command, "RUN"], ["-m", "RUN"]
    runpy._run_module_as_main(command)
"""


@pytest.mark.slow
def test_interrupted_import_of_any_command_ends_with_one_line(tmp_path: Path) -> None:
    package = Path(instrument.__file__).parent
    modules = [file.stem for file in package.glob("commands/*.py") if MAIN in file.read_text()]
    commands = ["script", "instrument", *(f"instrument.{module}" for module in (*modules, "report"))]
    assert {f"instrument.{verb}" for verb in ALL} - {"instrument.run", "instrument.plan"} < {*commands}
    script = tmp_path / "script.py"
    script.write_text(INTERRUPTED)
    done = subprocess.run([sys.executable, script, *commands], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines() == [f"{command} 130" for command in commands]
    assert done.stderr.split() == ["interrupted"] * len(commands)


def test_interrupt_before_the_job_ends_with_one_line(
    cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hydra.main", interrupt)
    answer = cli("model=mlp")
    assert (answer.code, answer.err.split()) == (130, ["interrupted"])


def test_warnings_of_commands_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", usual := warnings.formatwarning)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("atexit.register", lambda _: None)
    handle_interrupts()
    assert warnings.formatwarning("text", instrument.InstrumentWarning, "a.py", 1) == "warning text\n"
    assert warnings.formatwarning("text", UserWarning, "a.py", 1) == usual("text", UserWarning, "a.py", 1)


@pytest.mark.spread(1)
@pytest.mark.parametrize(("option", "code"), [("-u", 141), ("-I", 0)], ids=["unbuffered", "buffered"])
def test_command_whose_reader_has_ended_prints_no_traceback(option: str, code: int) -> None:
    path = str(Path(instrument.__file__).parents[1])
    program = (
        f"import sys; sys.path.insert(0, {path!r})\nfrom instrument.commands.interrupts import handle_interrupts\n"
    )
    program += "handle_interrupts()\nprint('a line')"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    read_end, write_end = os.pipe()
    os.close(read_end)
    for more, expected in (("", code), ("\nraise BrokenPipeError", 141), ("\nraise ValueError", 1)):
        done = subprocess.run(
            [sys.executable, option, "-c", program + more],
            stdout=write_end,
            stderr=subprocess.PIPE,
            env=environment,
            check=False,
        )
        assert (done.returncode, b"BrokenPipe" in done.stderr) == (code if option == "-u" else expected, False)
    os.close(write_end)
    done = subprocess.run([sys.executable, "-c", f"{program}\nraise BrokenPipeError"], capture_output=True, check=False)
    assert done.returncode == 1  # the pipe of other code
    assert b"Traceback" in done.stderr
