"""What a user sees who made a mistake: one screen, no traceback, where and what, the exit code 2; and what failures leave."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from _pytest.mark import ParameterSet
from forked import Command
from tiers import tiered
from waiting import until_it_trains

import instrument

Cli = Callable[..., Any]
SCREEN = 24
TABLES = ("stats", "distributions", "tensors", "effects", "metrics", "coverage", "layers", "events")
HOOKS = ("+exp=mnist_hooks", "data=digits", "data.dataset.size=28", "train.steps=2")
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
OWN = """# @package _global_
defaults:
  - override /data: digits
  - _self_
name: mine
train: {steps: 2}
model: {_target_: instrument.training.models.MLP, sizes: [64, 10]}
"""
ANY = "layers: '**', kind: forward"
ONE = "+hooks.x={layers:layers.0,kind:forward,"


def deep(*values: Any) -> ParameterSet:
    """A mistake that a quick test of the part that finds it tells of, and that is told as others here are."""
    return pytest.param(*values, marks=pytest.mark.slow)


def write(path: str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def refused(answer: Any) -> str:
    """What was told; on one screen, in words, with exit code 2, and with no step made."""
    told = answer.out + answer.err
    assert answer.code == 2, told
    assert "Traceback" not in told
    assert len(told.splitlines()) <= SCREEN
    assert all(len(line) < 1_000 for line in told.splitlines())
    assert "step " not in answer.out
    return str(answer.err)


def test_a_right_configuration_is_not_refused(cli: Cli) -> None:
    write("conf/exp/mine.yaml", OWN)
    assert cli("+exp=mine").code == 0


# ------------------------------------------------------------------------------------------------ on the command line


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["+exp=mnist_hoks"], ["exp:", "written  mnist_hoks", "mnist_hooks, mnist_record", "nearest  mnist_hooks"]),
        (["exp=mnist_hooks"], ["exp", "+exp=mnist_hooks"]),
        ([*HOOKS, "model=mnist_cn"], ["model:", "written  mnist_cn", "lenet, mlp, mnist_cnn", "nearest  mnist_cnn"]),
        ([*HOOKS, "hooks=[activations,gradient]"], ["hooks:", "written  gradient", "nearest  gradients"]),
        ([*HOOKS, "optimizr=sgd"], ["optimizr:", "nearest  optimizer"]),
        deep([*HOOKS, "train.stepz=3"], ["train.stepz:", "allowed  steps, epochs", "nearest  steps"]),
        ([*HOOKS, "hooks.tame.nrm=3"], ["hooks.tame.nrm:", "nearest  norm"]),
        ([*HOOKS, "+hooks.tame.nrm=3"], ["hooks.tame:", "written  nrm: 3", "allowed  layers, ", "nearest  norm"]),
        deep([*HOOKS, "+budgt=3"], ["unknown field 'budgt'", "written  budgt: 3", "allowed  name, seed"]),
        ([*HOOKS, "hooks.tame.kind=parametr_grad"], ["hooks.tame.kind:", "parametr_grad", "step_post", "nearest  parameter_grad"]),
        deep([*HOOKS, "hooks.tame.action=clp"], ["hooks.tame.action:", "clp", "allowed  record, clip, scale, modify", "nearest  clip"]),
        deep([*HOOKS, "hooks.activations.stats=[mean,stdd]"],
             ["hooks.activations.stats:", "written  stdd", "zero_fraction", "nearest  std"]),
        deep([*HOOKS, "hooks.noisy.fn=noize"], ["hooks.noisy.fn:", "noize", "zero, noise, mean", "nearest  noise"]),
        deep([*HOOKS, "apply.init.fn=kaiming"], ["apply.init.fn:", "kaiming", "xavier_normal_", "nearest  kaiming_normal_"]),
        deep([*HOOKS, "hooks.activations.every=0"], ["hooks.activations.every:", "greater than or equal to 1", "written  0"]),
        deep([*HOOKS, "~hooks.tame.norm", "+hooks.tame.min=2", "+hooks.tame.max=1"], ["hooks.tame:", "min (2.0) is above max (1.0)"]),
        deep([*HOOKS, "hooks.tame.norm=-1"], ["hooks.tame.norm:", "greater than or equal to 0", "written  -1"]),
        deep([*HOOKS, "hooks.quiet.factor=nan"], ["hooks.quiet.factor:", "finite", "written  nan"]),
        ([*HOOKS, "hooks.quiet.factor=.nan"], ["hooks.quiet.factor:", "number", "written  .nan"]),
        deep([*HOOKS, "hooks.quiet.factor=inf"], ["hooks.quiet.factor:", "finite", "written  inf"]),
        deep([*HOOKS, "hooks.noisy.std=-0.1"], ["hooks.noisy.std:", "written  -0.1"]),
        deep([*HOOKS, "hooks.noisy.start=-1"], ["hooks.noisy.start:", "written  -1"]),
        deep([*HOOKS, "+hooks.noisy.stop=50"], ["hooks.noisy:", "stop (50) has to be larger than start (50)"]),
        deep([*HOOKS, "hooks.tame.layers=decodr.**"],
             ["hooks.tame.layers:", "matches no module", "written  decodr.**", "nearest  decoder"]),
        deep([*HOOKS, "+hooks.tame.params=weigth"], ["hooks.tame.params:", "weigth", "allowed  weight, bias", "nearest  weight"]),
        deep([*HOOKS, "+hooks.tame.types=Linar"], ["hooks.tame.types:", "Linar", "nearest  Linear"]),
        deep([*HOOKS, "hooks.gradients.layers=encoder.*.2"], ["hooks.gradients.layers:", "parameter of its own", "encoder.*.2"]),
        deep([*HOOKS, "+apply.off={layers:decoder.**,action:freeze}"], ["hooks.tame.layers:", "frozen", "written  decoder.**"]),
        deep([*HOOKS, "model._target_=nope.Nope"], ["model:", "no module 'nope'", "written  nope.Nope"]),
        ([*HOOKS, "model._target_=torch.nn.Lineer"], ["model:", "torch.nn has no 'Lineer'", "nearest  torch.nn.Linear"]),
        deep(
            [*TINY, "+data.dataset.transform={_target_:torch.nn.Flattn}"],
            ["data.dataset.transform._target_:", "torch.nn has no 'Flattn'", "nearest  torch.nn.Flatten"],
        ),
        (
            [*TINY, "+model.layers=[{_target_:torch.nn.ReLU},{_target_:torch.nn.Lineer}]"],
            ["model.layers[1]._target_:", "nearest  torch.nn.Linear"],
        ),
        deep(
            [*HOOKS, "+hooks.x={layers:'**',kind:step_post,role:state.momentum_bufer,action:record}", "plan=true"],
            ["hooks.x.role: SGD keeps no such state", "written  state.momentum_bufer", "nearest  state.momentum_buffer"],
        ),
        ([*TINY, "optimizer.amsgrad=true"], ["optimizer.amsgrad: the configuration does not have", "+optimizer.amsgrad="]),
        deep([*HOOKS, "hooks.tmae.every=5"], ["hooks.tmae:", "nearest  tame"]),
        ([*HOOKS, "hooks.tame.std=5"], ["hooks.tame: unknown field 'std'", "written  std: 5"]),
        deep([*TINY, "data.slice.stp=5"], ["data.slice.stp:", "nearest  stop"]),
        deep([*TINY, "+hooks.q={layerz:fc,kind:forward,action:record}"],
         ["hooks.q: needs 'layers'", "unknown field 'layerz'", "nearest  layers"]),
        deep([*TINY, "+hooks.q={layerz:fc,acton:record}"], ["hooks.q.action: is missing", "unknown field 'layerz'"]),
        ([*HOOKS, "model._target_=math.pi"], ["model:", "math.pi is a float, not a class or function"]),
        ([*HOOKS, "model._target_=os.system"], ["model:", "os.system", "blocklisted"]),
        ([*HOOKS, "+model.wdth=3"], ["model:", "unexpected keyword argument 'wdth'", "wdth: 3"]),
        deep([*TINY, "optimizer=adam", "+optimizer.momentum=3"], ["optimizer:", "unexpected keyword argument 'momentum'"]),
        deep(["model=mlp", "+model.x=1", "data=digits"], ["model:", "unexpected keyword argument 'x'"]),
        (["+exp=mnist_record", "data.dataset.download=false", "data.root=nowhere"],
         ["data.dataset:", "not below nowhere", "Three ways out", "INSTRUMENT_DATA=", "download=true", "data=digits"]),
        deep([*TINY, "+data.slice.stop=0"], ["data.slice.stop:", "written  0"]),
        deep([*TINY, "+data.slice.start=5", "+data.slice.stop=5"], ["data.slice:", "the slice is empty"]),
        deep([*TINY, "+data.slice.classes=[77]"], ["data.slice:", "the slice is empty", "1437 samples", "77"]),
        deep([*TINY, "+data.slice.start=100000"], ["data.slice:", "the slice is empty", "100000"]),
        deep([*TINY, "+data.slice.indices=[1437]"], ["data.slice.indices:", "1437", "allowed  0 to 1436"]),
        ([*HOOKS, "data.dataset.size=32"], ["layer 'decoder.0.0' was given [64, 2048]", "weight [64, 1568]"]),
        deep(["model=resnet18", "data=digits"], ["layer 'conv1' was given [64, 1, 8, 8]", "weight [64, 3, 7, 7]"]),
        deep([*TINY, "device=gpu"], ["device:", "written  gpu", "allowed  auto, cpu, cuda"]),
        deep([*TINY, ONE + "action:scale,factor:[1,2,3]}"], ["hooks.x.factor:", "'layers.0'", "[64, 10]", "allowed  10 factors"]),
        deep([*TINY, ONE + "action:modify,fn:mean,dim:55}"], ["hooks.x.dim:", "dimension 55", "allowed  -2 to 1"]),
        deep([*TINY, ONE + "action:record,stats:dead_fraction,unit_dim:99}"], ["hooks.x.unit_dim:", "allowed  -2 to 1"]),
        deep([*TINY, ONE + "action:record,tensors:true,slice:'0:99'}"], ["hooks.x.slice:", "written  0:99", "samples: N"]),
        ([*TINY, ONE + "phase:eval,action:record,tensors:true,slice:'256'}"], ["hooks.x.slice:", "[256, 10]"]),
        deep([*TINY, ONE + "action:modify,fn:{_target_:torch.sum}}"], ["hooks.x.fn:", "torch.sum cannot be called as fn(tensor"]),
        deep([*TINY, "optimizer.lr=nan"], ["optimizer.lr: has to be finite", "written  nan"]),
        deep([*TINY, "optimizer.lr=inf"], ["optimizer.lr: has to be finite", "written  inf"]),
        ([*TINY, "optimizer.lr=-1"], ["optimizer: ", "Invalid learning rate"]),
        ([*TINY, "optimizer=adam", "optimizer.betas=[0.9,nan]"], ["optimizer.betas[1]: has to be finite"]),
        deep([*TINY, "scheduler=step", "scheduler.gamma=nan"], ["scheduler.gamma: has to be finite"]),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else None,
)  # fmt: skip
def test_a_mistake_is_told_with_its_place_what_was_written_what_is_allowed_and_the_nearest(
    cli: Cli, overrides: list[str], told: list[str]
) -> None:
    error = refused(cli(*overrides))
    for words in told:
        assert words in error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(cli: Cli) -> None:
    error = refused(cli(*TINY, "device=cuda"))
    assert "device: there is no GPU" in error
    assert "allowed  auto, cpu" in error


@pytest.mark.parametrize("mode", ["single", "sweep"])
def test_an_output_folder_that_cannot_be_written(cli: Cli, mode: str) -> None:
    write("file", "in the way")
    if mode == "single":
        error = refused(cli(*TINY, "hydra.run.dir=file/out"))
    else:
        error = refused(cli("-m", *TINY, "seed=1,2", "hydra.sweep.dir=file/out"))
    assert "cannot be written: Not a directory" in error
    assert "written  file/out" in error


def test_all_mistakes_of_a_file_are_told_at_once(cli: Cli) -> None:
    error = refused(cli(*HOOKS, "hooks.tame.norm=-1", "hooks.quiet.kind=x", "seed=-3", "train.batch_size=0"))
    for key in ("hooks.tame.norm:", "hooks.quiet.kind:", "seed:", "train.batch_size:"):
        assert key in error


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        deep(["plan=true"]),
        deep(["model=mlp"]),
        [*HOOKS, "hooks=3"],
        [*HOOKS, "hooks=null"],
        [*HOOKS, "hooks=nope"],
        [*HOOKS, "hooks.tame=5"],
        deep([*HOOKS, "hooks.tame=[]"]),
        deep([*HOOKS, "hooks.tame.layers=null"]),
        deep([*HOOKS, "hooks.tame.layers=[]"]),
        deep([*HOOKS, "hooks.tame.layers=3"]),
        deep([*HOOKS, "~hooks.noisy.fn"]),
        deep([*HOOKS, "~hooks.noisy.std"]),
        [*HOOKS, "~hooks.tame.kind"],
        deep([*HOOKS, "hooks.digit_maps.steps=3"]),
        deep([*HOOKS, "hooks.digit_maps.steps=[]"]),
        deep([*HOOKS, "hooks.digit_maps.steps=[-1]"]),
        deep([*HOOKS, "+hooks.digit_maps.slice='99,0,0,0'"]),
        deep([*HOOKS, "+hooks.digit_maps.slice=all"]),
        deep([*HOOKS, "apply.init=3"]),
        deep([*HOOKS, "+apply.x={layers:encoder,action:set,attribute:inplac,value:1}"]),
        [*HOOKS, "+apply.x={layers:encoder,action:call,fn:{_target_:builtins.print,x:3}}"],
        deep([*HOOKS, "+apply.x={layers:.,action:replace,module:{_target_:torch.nn.Identity}}"]),
        deep([*HOOKS, "+apply.x={layers:encoder,action:replace,module:{_target_:torch.nn.Linear}}"]),
        deep([*HOOKS, "+apply.x={layers:'**',action:freeze}", "~hooks.tame", "~hooks.gradients"]),
        deep([*TINY, "train.steps=abc"]),
        deep([*TINY, "train.steps=0"]),
        deep([*TINY, "train.steps=1.5"]),
        deep([*TINY, "train.steps=true"]),
        deep([*TINY, "train.steps=null"]),
        deep([*TINY, "train.epochs=2"]),
        [*TINY, "train=null"],
        deep([*TINY, "train.batch_size=0"]),
        [*TINY, "model=null"],
        [*TINY, "model=3"],
        [*TINY, "model=[1,2]"],
        [*TINY, "model="],
        [*TINY, "model.sizes=64"],
        deep([*TINY, "model.sizes=[a,b]"]),
        [*TINY, "data=null"],
        [*TINY, "data=5"],
        [*TINY, "data.dataset=null"],
        [*TINY, "data.dataset._target_=builtins.dict"],
        deep([*TINY, "data.slice.split=val"]),
        deep([*TINY, "+data.slice.classes=3"]),
        deep([*TINY, "+data.slice.stride=0"]),
        [*TINY, "task=null"],
        [*TINY, "task.loss=null"],
        deep([*TINY, "task.loss._target_=torch.nn.MSELos"]),
        [*TINY, "task._target_=torch.nn.Identity"],
        [*TINY, "optimizer=null"],
        [*TINY, "optimizer.lr=abc"],
        deep([*TINY, "optimizer.lr=-1"]),
        deep([*TINY, "optimizer._target_=torch.nn.Identity"]),
        deep([*TINY, "+scheduler._target_=torch.nn.Identity"]),
        [*TINY, "scheduler=3"],
        [*TINY, "sink=null"],
        deep([*TINY, "sink.when_full=perhaps"]),
        deep([*TINY, "seed=-1"]),
        deep([*TINY, "seed=99999999999999999999999999"]),
        deep([*TINY, "name=../../x"]),
        deep([*TINY, "name="]),
        deep([*TINY, "deterministic=5"]),
        [*TINY, "hydra.run.dir=null"],
        [*TINY, "+exp=null"],
        [*TINY, "===="],
        [*TINY, "words"],
        [*TINY, "hooks={"],
        [*TINY, "seed=1,2"],
        [*TINY, "--no-such-flag"],
        [*TINY, "--config-dir", "nowhere"],
        ["-m", *TINY, "hooks=3"],
        ["-m", *TINY, "model=mlp,nope"],
    ],
    ids=lambda overrides: " ".join(overrides[-2:]),
)
def test_no_mistake_on_the_command_line_ends_in_a_traceback(cli: Cli, overrides: list[str]) -> None:
    assert refused(cli(*overrides)).strip()


@pytest.mark.parametrize("name", ["é漢字" * 50, "x" * 2_000], ids=["unicode", "long"])
@pytest.mark.parametrize("place", ["+exp={}", "+hooks.{}=3", "hooks.tame.layers='{}'", "model._target_={}", "name={}/"])
def test_a_strange_or_very_long_name_is_refused_like_any_other(cli: Cli, place: str, name: str) -> None:
    answer = cli(*([] if "exp" in place else HOOKS), place.format(name))
    assert answer.code == 2
    assert "Traceback" not in answer.err
    assert name[:20] in answer.err


# ------------------------------------------------------------------------------------------------ in a file of one's own


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("hooks: {a: {layers: '**', kind: forward, action: record\n", ["mine.yaml:", "cannot be read as YAML"]),
        ("hooks:\n  a: {layers: **, kind: forward, action: record}\n", ["mine.yaml:9", "in quotes"]),
        ("hooks:\n\ta: 3\n", ["mine.yaml:9", "cannot be read as YAML"]),
        ("model: {a: 1}\n", ["mine.yaml:8", "duplicate key model"]),
        deep("hoks: {a: 3}\n", ["unknown field 'hoks'", "nearest  hooks"]),
        deep("hooks: 3\n", ["hooks:", "written  3"]),
        ("hooks: [3]\n", ["hooks.hooks_0:", "written  3"]),
        deep("hooks: {'a b': {" + ANY + ", action: record}}\n", ["hooks:", "written  a b"]),
        deep("hooks: {a: {kind: forward, action: record}}\n", ["hooks.a:", "needs 'layers'"]),
        deep("hooks: {a: {layers: '**', action: record}}\n", ["hooks.a.kind: is missing"]),
        deep("hooks: {a: {layers: '**', kind: forward}}\n", ["hooks.a.action: is missing", "record, clip, scale, modify"]),
        deep("hooks: {a: {" + ANY + ", action: modify}}\n", ["hooks.a.fn: is missing", "{_target_: package.function}"]),
        deep("hooks: {a: {" + ANY + ", action: modify, fn: {}}}\n", ["hooks.a.fn._target_: is missing"]),
        ("hooks: {a: {" + ANY + ", action: modify, fn: {_target_: torch.reluu}}}\n", ["hooks.a.fn:", "nearest  torch.relu"]),
        deep("hooks: {a: {" + ANY + ", action: modify, fn: {_target_: math.sqrt}}}\n", ["hooks.a.fn:", "math.sqrt"]),
        deep("hooks: {a: {" + ANY + ", action: scale, factor: .nan}}\n", ["hooks.a.factor:", "finite"]),
        deep("hooks: {a: {" + ANY + ", action: clip, norm: .nan}}\n", ["hooks.a.norm:", "finite"]),
        deep("hooks: {a: {" + ANY + ", action: clip}}\n", ["hooks.a:", "needs one of min/max, value, norm"]),
        deep("hooks: {a: {layers: '**', kind: backward, action: record}}\n", ["deprecated", "nearest  full_backward"]),
        deep("hooks: {a: {layers: 're:[', kind: forward, action: record}}\n", ["hooks.a.layers", "regular expression"]),
        deep("hooks: {a: {layers: {x: 1}, kind: forward, action: record}}\n", ["hooks.a.layers:"]),
        ("task: [1]\n", ["exp/mine"]),
        ("task:\n", ["task:"]),
        deep("optimizer: 3\n", ["optimizer:", "written  3"]),
        deep("sink: 3\n", ["sink:", "written  3"]),
        ("data: [1]\n", ["exp/mine"]),
        ("seed: ${nope}\n", ["seed:", "nope"]),
        ("seed: ${oc.env:NOPE}\n", ["seed:", "NOPE"]),
        deep("apply: {a: {types: Linear, action: init}}\n", ["apply.a.fn: is missing"]),
        deep("apply: {a: {types: Linear, action: fill, value: .inf}}\n", ["apply.a.value:", "finite"]),
        ("scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}\n", ["scheduler:", "LRScheduler"]),
    ],
    ids=lambda value: value.strip() if isinstance(value, str) else None,
)  # fmt: skip
def test_a_mistake_in_a_file_of_ones_own_is_told_in_its_words(cli: Cli, more: str, told: list[str]) -> None:
    write("conf/exp/mine.yaml", OWN + more)
    error = refused(cli("+exp=mine"))
    for words in told:
        assert words in error


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "# @package _global_"),
        deep("just words\n", "# @package _global_"),
        ("model: {_target_: torch.nn.Identity}\n", "# @package _global_"),
        ("# mine\n# @package _global_\ndefaults:\n  - override /model: mlp\n", "first line: # @package _global_"),
        ("# @package _global_\n- 1\n", "exp/mine"),
        ("# @package _global_\ndefaults: 3\n", "exp/mine"),
        ("# @package _global_\ndefaults:\n  - override /model: mlpp\n", "nearest  mlp"),
        ("# @package _global_\ndefaults:\n  - /model: mlp\n", "override model: mlp"),
        ("\x00", "mine.yaml"),
    ],
    ids=[
        "empty",
        "words",
        "no package line",
        "package line further down",
        "a list",
        "defaults",
        "no such option",
        "no override",
        "no text",
    ],
)
def test_a_file_that_is_no_experiment_at_all(cli: Cli, text: str, told: str) -> None:
    write("conf/exp/mine.yaml", text)
    assert told in refused(cli("+exp=mine"))


MODELS = {
    "not a Module": ("class Net:\n    pass\n", ["model:", "gave a Net", "allowed  a torch.nn.Module"]),
    "constructor fails": (
        "class Net(torch.nn.Module):\n    def __init__(self):\n        raise KeyError('x')\n",
        ["model:", "KeyError"],
    ),
    "syntax error": ("class Net(torch.nn.Module)\n", ["model:", "importing", "SyntaxError", "line 2"]),
    "import fails": ("import no_such_package\n", ["model:", "needs the module 'no_such_package'"]),
    "no parameter": (
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x.flatten(1)\n",
        ["model:", "no parameter trains"],
    ),
    "forward fails": (
        "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(8, 8)\n"
        "    def forward(self, x):\n        return x.nope\n",
        ["layer '.' was given [64, 1, 8, 8]", "has no attribute 'nope'", ".py:6, forward"],
    ),
    "no tensor comes out": (
        "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(8, 8)\n"
        "    def forward(self, x):\n        return {'a': 3}\n",
        ["task:", "the model returned dict"],
    ),
}


@pytest.mark.parametrize("case", tiered(MODELS, set(MODELS) - {"no parameter"}))
def test_a_model_of_ones_own_that_cannot_be_trained(cli: Cli, case: str) -> None:
    body, told = MODELS[case]
    module = "bad_" + case.replace(" ", "_")
    write(f"{module}.py", "import torch\n" + body)
    write("conf/exp/mine.yaml", OWN.replace("instrument.training.models.MLP, sizes: [64, 10]", f"{module}.Net"))
    error = refused(cli("+exp=mine"))
    for words in told:
        assert words in error


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("output.sum()", "gave a Tensor in place of an instrument.tasks.Outcome"),
        deep("Outcome(output, 64)", "shape [64, 10], not a scalar"),
        deep("Outcome(3.0, 64)", "the loss is a float"),
        deep("Outcome(output.sum().detach(), 64)", "does not depend on any parameter"),
    ],
)
def test_a_task_of_ones_own_that_gives_no_loss(cli: Cli, result: str, told: str) -> None:
    module = f"bad_task_{abs(hash(result))}"
    write(
        f"{module}.py",
        "from instrument.tasks import Outcome\n\n\ndef make(**given):\n    def task(model, batch):\n"
        f"        output = model(batch[0])\n        return {result}\n\n    return task\n",
    )
    error = refused(cli(*TINY, f"task._target_={module}.make"))
    assert "task: " in error
    assert told in error


def test_a_dataset_of_ones_own_whose_items_make_no_batch(cli: Cli) -> None:
    write(
        "bad_data.py",
        "class Words:\n    def __init__(self, **given):\n        pass\n    def __len__(self):\n        return 9\n"
        "    def __getitem__(self, i):\n        return object(), 1\n",
    )
    error = refused(cli(*TINY, "data.dataset._target_=bad_data.Words"))
    assert "data.dataset: no batch can be made of its items" in error


# ------------------------------------------------------------------------------------------------ before torch is loaded


def test_what_can_be_known_without_torch_is_told_before_it_is_imported(workdir: Path) -> None:
    refused = [
        ["+exp=mnist_hoks"],
        [*HOOKS, "hooks.tame.nrm=3"],
        [*HOOKS, "hooks.tame.kind=x"],
        [*HOOKS, "hooks.activations.stats=[x]"],
        [*HOOKS, "train.steps=0"],
        [*HOOKS, "hydra.run.dir=/dev/null/out"],
    ]
    script = (
        "import sys\nfrom instrument.__main__ import main\n"
        f"for overrides in {refused}:\n    sys.argv[1:] = overrides\n    try:\n        main()\n"
        "    except SystemExit as stop:\n        print(stop.code, {'torch', 'pandas', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 set()"] * len(refused), done.stderr


# ------------------------------------------------------------------------------------------------ failures while running


def kept(folder: str, status: str, rule: str) -> instrument.Run:
    """The run, of which every table can be read, and which says how it ended."""
    for table in TABLES:
        assert pd.read_parquet(f"{folder}/{table}") is not None
    assert json.loads(Path(folder, "run.json").read_text())["status"] == status
    run = instrument.load(folder)
    assert rule in set(run.events.rule)
    return run


def test_a_hook_function_of_ones_own_that_fails_is_named_and_what_was_recorded_is_kept(cli: Cli) -> None:
    write(
        "own_hook.py",
        "def bend(tensor, context):\n    if context.step == 3:\n        raise ValueError('boom')\n    return tensor * 1\n",
    )
    hook = "+hooks.mine={layers:layers.0,kind:forward,action:modify,fn:{_target_:own_hook.bend}}"
    answer = cli(*TINY, "train.steps=9", "hooks=activations", "hooks.activations.every=1", hook, "hydra.run.dir=out")
    assert answer.code == 1
    assert "Traceback" not in answer.err
    assert "hook 'mine' (forward) on layer 'layers.0' at step 3 failed: ValueError: boom" in answer.err
    assert "own_hook.py:3, bend" in answer.err
    assert "what was recorded so far is in out" in answer.err
    run = kept("out", "failed", "error")
    assert list(run.metrics.step) == [0, 1, 2]
    assert sorted(run.effects.step) == [0, 1, 2]
    assert set(run.stats.step) >= {0, 1, 2}
    assert "boom" in run.info["error"]
    assert run.events[run.events.severity == "error"].step.item() == 3


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        ("tensor[:3]", "shape [3, 10]"),
        deep("tensor.double()", "dtype"),
        deep("tensor.detach()", "cut off"),
        deep("None", "NoneType"),
    ],
)
def test_a_hook_function_whose_result_does_not_fit_is_named(cli: Cli, returned: str, told: str) -> None:
    module = f"misfit_{abs(hash(returned))}"
    write(f"{module}.py", f"def bend(tensor, context):\n    return {returned}\n")
    hook = f"+hooks.mine={{layers:layers.0,kind:forward,action:modify,fn:{{_target_:{module}.bend}}}}"
    error = refused(cli(*TINY, hook, "hydra.run.dir=out"))
    assert "hooks.mine.fn: " in error
    assert "hook 'mine' (forward) on layer 'layers.0' at step 0 returned" in error
    assert told in error


def test_a_model_that_raises_in_the_middle_of_training_leaves_what_was_recorded(cli: Cli) -> None:
    write(
        "fragile_net.py",
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n        self.calls = 0\n"
        "    def forward(self, x):\n        self.calls += 1\n        if self.calls == 6:\n"
        "            raise RuntimeError('worn out')\n        return super().forward(x)\n",
    )
    write("conf/exp/mine.yaml", OWN.replace("instrument.training.models.MLP, sizes: [64, 10]", "fragile_net.Net"))
    answer = cli("+exp=mine", "train.steps=9", "hooks=activations", "hooks.activations.every=1", "hydra.run.dir=out")
    assert answer.code == 1
    assert "RuntimeError: worn out" in answer.err
    assert "fragile_net.py" in answer.err
    assert "site-packages/hydra" not in answer.err
    run = kept("out", "failed", "error")
    assert list(run.metrics.step) == [0, 1, 2]  # two of the calls were the trial's
    assert run.info["error"] == "RuntimeError: worn out"


def test_ctrl_c_closes_the_files_and_ends_with_exit_code_130(workdir: Path) -> None:
    arguments = [*TINY, "train.steps=10000000", "hooks=activations", "hydra.run.dir=out"]
    process = Command(workdir, "instrument", arguments, {}, "process")
    until_it_trains(process)
    assert json.loads(Path("out/run.json").read_text())["status"] == "running"
    process.send(signal.SIGINT)
    done = process.wait()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted: what was recorded so far is in out" in done.stderr
    run = kept("out", "interrupted", "interrupted")
    steps = run.metrics.step
    assert list(steps) == list(range(len(steps)))
    assert len(steps) > 0
    assert not run.coverage.empty
