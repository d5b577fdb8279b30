"""Reports of invalid input: one screen, no traceback, exit code 2; and the files that a failed run leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from conftest import write
from fork_server import Command
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from waiting import wait_until_training

import instrument
from instrument import ConfigError
from instrument.commands.job import as_instrument_error, read_config
from instrument.config.hydra_internals import config_loader
from instrument.tables.schemas import TABLES
from instrument.training.experiment import Experiment

Cli = Callable[..., Any]
SCREEN = 24
HOOKS = ("+exp=mnist_hooks", "data=digits", "data.dataset.size=28", "train.steps=2")
TINY = ("model=mlp", "model.sizes=[64,10]", "data=digits", "train.steps=2")
EXPERIMENT = """# @package _global_
defaults:
  - override /data: digits
  - _self_
name: mine
train: {steps: 2}
model: {_target_: instrument.training.models.MLP, sizes: [64, 10]}
"""
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
ANY = "layers: '**', kind: forward"
ONE = "+hooks.x={layers:layers.0,kind:forward,"


def error_of(answer: Any) -> str:
    """Return the error text; assert exit code 2, no traceback, at most one screen and no training step."""
    text = answer.out + answer.err
    assert answer.code == 2, text
    assert "Traceback" not in text
    assert "step " not in answer.out
    check_size(text)
    return str(answer.err)


def check_size(text: str) -> None:
    """Assert that a text fits on one screen, in lines of limited length."""
    assert len(text.splitlines()) <= SCREEN
    assert all(len(line) < 1_000 for line in text.splitlines())


def refusal_of(*overrides: str) -> str:
    """Return the error of an experiment that is composed and prepared, without the command line."""
    setup_globals()
    try:
        config = config_loader().load_configuration("config", list(overrides), RunMode.RUN)
    except Exception as error:
        text = str(as_instrument_error(error, overrides))
    else:
        with pytest.raises(ConfigError) as refused:
            Experiment(read_config(config)[0])
        text = str(refused.value)
    check_size(text)
    return text


def last_override(value: object) -> str | None:
    return str(value[-1]) if isinstance(value, list) else None


@pytest.mark.spread(30)
@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["+exp=mnist_hoks"], ["exp:", "given    mnist_hoks", "mnist_hooks, mnist_record", "similar  mnist_hooks"]),
        (["exp=mnist_hooks"], ["exp: the defaults contain no option", "fix      add it with one plus: +exp=mnist_hooks"]),
        (["++exp=mnist_hooks"], ["exp: the defaults contain no option", "fix      add it with one plus: +exp=mnist_hooks"]),
        (["+model=mlp"], ["model: the defaults contain an option", "given    mlp", "fix      replace it without a plus: model=mlp"]),
        ([*HOOKS, "model=mnist_cn"], ["model:", "given    mnist_cn", "mlp, mnist_cnn", "similar  mnist_cnn"]),
        ([*HOOKS, "hooks=[activations,gradient]"], ["hooks:", "given    gradient", "similar  gradients"]),
        ([*HOOKS, "seed=1,2"], ["seed: has several values", "given    1,2", "fix      add -m", "list: seed=[1,2]"]),
        ([*HOOKS, "optimizr=sgd"], ["optimizr:", "similar  optimizer"]),
        ([*HOOKS, "init_from=[1]"], ["init_from: must be a mapping", "given    [1]"]),
        ([*HOOKS, "model=mlp", "model.sizes={a: 1}"], ["model.sizes: must be a list", "given    {a: 1}"]),
        ([*HOOKS, "sink={_target_: mine.Sink}"], ["sink._target_:", "not set yet", "prefix the override with a plus: +sink="]),
        ([*HOOKS, "train.stepz=3"], ["train.stepz:", "allowed  steps, epochs", "similar  steps"]),
        ([*HOOKS, "hooks.tame.nrm=3"], ["hooks.tame.nrm:", "similar  norm"]),
        ([*HOOKS, "+hooks.tame.nrm=3"], ["hooks.tame:", "given    nrm: 3", "allowed  layers, ", "similar  norm"]),
        ([*HOOKS, "+budgt=3"], ["unknown field 'budgt'", "given    budgt: 3", "allowed  name, vars, seed", "similar  budget"]),
        ([*HOOKS, "hooks.tame.kind=parametr_grad"], ["hooks.tame.kind:", "parametr_grad", "step_post", "similar  parameter_grad"]),
        ([*HOOKS, "hooks.tame.action=clp"], ["hooks.tame.action:", "call, clip, modify, print, record, scale", "similar  clip"]),
        ([*HOOKS, "hooks.activations.stats=[mean,stdd]"],
             ["hooks.activations.stats:", "given    stdd", "zero_fraction", "similar  std"]),
        ([*HOOKS, "hooks.noisy.fn=noize"], ["hooks.noisy.fn:", "noize", "allowed  add, ", "similar  noise"]),
        ([*HOOKS, "apply.init.fn=kaiming"], ["apply.init.fn:", "kaiming", "xavier_normal_", "similar  kaiming_normal_"]),
        ([*HOOKS, "hooks.activations.every=0"], ["hooks.activations.every:", "greater than or equal to 1", "given    0"]),
        ([*HOOKS, "~hooks.tame.norm", "+hooks.tame.min=2", "+hooks.tame.max=1"], ["hooks.tame:", "min (2.0) is above max (1.0)"]),
        ([*HOOKS, "hooks.tame.norm=-1"], ["hooks.tame.norm:", "greater than or equal to 0", "given    -1"]),
        ([*HOOKS, "hooks.quiet.factor=nan"], ["hooks.quiet.factor:", "finite", "given    nan"]),
        ([*HOOKS, "hooks.quiet.factor=.nan"], ["hooks.quiet.factor:", "number", "given    .nan"]),
        ([*HOOKS, "hooks.quiet.factor=inf"], ["hooks.quiet.factor:", "finite", "given    inf"]),
        ([*HOOKS, "hooks.noisy.std=-0.1"], ["hooks.noisy.std:", "given    -0.1"]),
        ([*HOOKS, "hooks.noisy.start=-1"], ["hooks.noisy.start:", "given    -1"]),
        ([*HOOKS, "+hooks.noisy.stop=50"], ["hooks.noisy:", "stop (50) must be larger than start (50)"]),
        ([*HOOKS, "hooks.tame.layers=decodr.**"],
             ["hooks.tame.layers:", "matches no module", "given    decodr.**", "similar  decoder"]),
        ([*TINY, "train.compile=true", "+hooks.q={layers:'**',kind:function,functions:linear,action:record}"],
             ["hooks.q.kind: breaks the graphs of torch.compile", "given    function", "hook the modules instead"]),
        ([*TINY, "train.compile=true", "+hooks.total={layers:'**',kind:tensor,role:input,action:record}"],
             ["hooks.total.role: breaks the graphs of torch.compile", "set train.compile={graph_breaks: true}"]),
        ([*HOOKS, "+hooks.tame.params=weigth"], ["hooks.tame.params:", "weigth", "allowed  weight, bias", "similar  weight"]),
        ([*HOOKS, "+hooks.tame.types=Linar"], ["hooks.tame.types:", "Linar", "similar  Linear"]),
        ([*HOOKS, "hooks.gradients.layers=encoder.*.2"], ["hooks.gradients.layers:", "directly contains a parameter", "encoder.*.2"]),
        ([*HOOKS, "+apply.off={layers:decoder.**,action:freeze}"], ["hooks.tame.layers:", "frozen", "given    decoder.**"]),
        ([*HOOKS, "model._target_=nope.Nope"], ["model:", "no module named 'nope'", "given    nope.Nope"]),
        ([*HOOKS, "model._target_=torch.nn.Lineer"], ["model:", "torch.nn has no 'Lineer'", "similar  torch.nn.Linear"]),
        (
            [*TINY, "+data.dataset.transform={_target_:torch.nn.Flattn}"],
            ["data.dataset.transform._target_:", "torch.nn has no 'Flattn'", "similar  torch.nn.Flatten"],
        ),
        (
            [*HOOKS, "+hooks.x={layers:'**',kind:step_post,role:state.momentum_bufer,action:record}", "plan=true"],
            ["hooks.x.role: role 'state.momentum_bufer' requires", "given    state.momentum_bufer", "similar  state.momentum_buffer"],
        ),
        ([*TINY, "optimizer.amsgrad=true"], ["optimizer.amsgrad: the configuration does not have", "+optimizer.amsgrad="]),
        ([*TINY, "runs/mine"], ["cannot parse this override", "given    runs/mine", "KEY=VALUE without spaces, such as +exp=NAME"]),
        ([*TINY, "plan=yaml"], ["plan: must be true or false"]),
        ([*TINY, "lr=0.1"], ["lr: the configuration does not have this key", "fix      write optimizer.lr"]),
        ([*TINY, "train.lr=0.1"], ["train.lr: the configuration does not have this key", "fix      write optimizer.lr"]),
        ([*TINY, "data.batch_size=8"], ["data.batch_size: the", "fix      write train.batch_size"]),
        ([*TINY, "train.device=cpu"], ["train.device: the", "fix      write device"]),
        (["data=digits", "model=mlp", "model.sizes=[64]"], ["sizes must be a list of at least two numbers, such as [64, 32, 10]"]),
        ([*HOOKS, "hooks.tmae.every=5"], ["hooks.tmae:", "similar  tame"]),
        ([*TINY, "train.parallel={mesh: {tp: 2}, plan: {a: {style: colwise, output: shard(1)}}}"], ["Unknown function", "'shard(...)'"]),
        ([*TINY, "forward.of=logits[:,3]"], ["cannot parse this override", """for Hydra: 'forward.of="logits[:,3]"'"""]),
        (["-m", *TINY, "hooks.nope.every=1,2"], ["hooks.nope: the configuration does not have", "prefix it with a plus: +hooks.nope="]),
        (
            ["-m", *TINY, "seed=1,2", "hydra.run.dir=out"],
            ["hydra.run.dir: a sweep does not use", "fix      set hydra.sweep.dir=out"],
        ),
        ([*HOOKS, "hooks.tame.std=5"], ["hooks.tame: unknown field 'std'", "given    std: 5"]),
        ([*TINY, "data.slice.stp=5"], ["data.slice.stp:", "similar  stop"]),
        ([*TINY, "+hooks.q={layerz:fc,kind:forward,action:record}"],
         ["unknown field 'layerz'", "similar  layers"]),
        ([*TINY, "+hooks.q={layerz:fc,acton:record}"], ["hooks.q.action: is missing", "unknown field 'layerz'"]),
        ([*TINY, "optimizer=adam", "+optimizer.momentum=3"], ["optimizer:", "unexpected keyword argument 'momentum'"]),
        (["model=mlp", "+model.x=1", "data=digits"], ["model:", "unexpected keyword argument 'x'"]),
        (["+exp=mnist_record", "data.dataset.download=false", "data.root=nowhere"],
         ["data.dataset:", "not found in nowhere", "Do one of the following", "INSTRUMENT_DATA=", "download=true", "data=digits"]),
        ([*TINY, "+data.slice.stop=0"], ["data.slice.stop:", "given    0"]),
        ([*TINY, "+data.slice.start=5", "+data.slice.stop=5"], ["data.slice:", "the slice is empty"]),
        ([*TINY, "+data.slice.classes=[77]"], ["data.slice:", "the slice is empty", "1437 samples", "77"]),
        ([*TINY, "+data.slice.start=100000"], ["data.slice:", "the slice is empty", "100000"]),
        ([*TINY, "+data.slice.indices=[1437]"], ["data.slice.indices:", "1437", "allowed  0 to 1436"]),
        ([*TINY, "data.sampler={_target_: torch.utils.data.Sampler}"], ["data.sampler:", "could not be built"]),
        ([*TINY, "data.collate_fn={_target_: builtins.min}"], ["data.collate_fn: its items cannot be collated"]),
        ([*TINY, "data.num_workers=-1"], ["data.num_workers:", "given    -1"]),
        (["model=resnet18", "data=digits"], ["layer 'conv1' was given [64, 1, 8, 8]", "weight [64, 3, 7, 7]"]),
        ([*TINY, "device=gpu"], ["device:", "given    gpu", "allowed  auto, cpu, cuda"]),
        pytest.param([*TINY, "device=cuda"], ["device: no GPU is available", "allowed  auto, cpu"], marks=NO_GPU),
        ([*TINY, ONE + "action:scale,factor:[1,2,3]}"], ["hooks.x.factor:", "'layers.0'", "[64, 10]", "allowed  10 factors"]),
        ([*TINY, ONE + "action:modify,fn:mean,dim:55}"], ["hooks.x.dim:", "dim 55 is out of range", "allowed  -2 to 1"]),
        ([*TINY, ONE + "action:record,stats:dead_fraction,unit_dim:99}"], ["hooks.x.unit_dim:", "allowed  -2 to 1"]),
        ([*TINY, ONE + "action:record,tensors:true,slice:'0:99'}"], ["hooks.x.slice:", "given    0:99", "samples: N"]),
        ([*TINY, ONE + "action:modify,fn:{_target_:torch.sum}}"], ["hooks.x.fn:", "torch.sum cannot be called as fn(tensor"]),
        ([*TINY, ONE + "action:call,fn:{_target_:operator.truth}}"], ["hooks.x", "cannot be called as fn(tensor, context)"]),
        ([*HOOKS, "+hooks.tame={norm: 5}"], ["hooks.tame: exists already", "fix      hooks.tame={...} without +"]),
        ([*TINY, "optimizer.lr=nan"], ["optimizer.lr: must be finite", "given    nan"]),
        ([*TINY, "optimizer.lr=inf"], ["optimizer.lr: must be finite", "given    inf"]),
        ([*TINY, "optimizer.lr=-1"], ["optimizer: ", "Invalid learning rate"]),
        ([*TINY, "scheduler=step", "scheduler.gamma=nan"], ["scheduler.gamma: must be finite"]),
        ([*TINY, "+hooks.q={layers:'**',kind:function,functions:[flatten,liner],action:record}"],
         ["hooks.q.functions:", "matches no torch function", "given    liner", "allowed  flatten, linear", "similar  linear"]),
        (
            [*TINY, "+model.layers=[{_target_:torch.nn.ReLU},{_target_:torch.nn.Lineer}]"],
            ["model.layers[1]._target_:", "similar  torch.nn.Linear"],
        ),
        ([*HOOKS, "model._target_=math.pi"], ["model:", "math.pi is a float, not a class or function"]),
        ([*HOOKS, "model._target_=os.system"], ["model:", "os.system", "blocklisted"]),
        ([*HOOKS, "+model.wdth=3"], ["model:", "unexpected keyword argument 'wdth'", "wdth: 3"]),
        ([*TINY, "task=huggingface"],
         ["task:", "keywords.HuggingFace, batch [float32 [64, 1, 8, 8], int64 [64]]", "entries of a mapping"]),
        ([*HOOKS, "data.dataset.size=32"], ["layer 'decoder.0.0' was given [64, 2048]", "weight [64, 1568]"]),
        ([*TINY, ONE + "action:modify,fn:zero,heads:{of:4,take:[0]}}"],
         ["hooks.x.heads.of: 4 heads do not divide dimension 1 of the output of 'layers.0'", "[64, 10]", "such as 1, 2, 5"]),
        ([*TINY, ONE + "phase:eval,action:record,tensors:true,slice:'256'}"], ["hooks.x.slice:", "[256, 10]"]),
        (
            [*TINY, "optimizer=lbfgs", "train.precision=fp16"],
            ["train.precision: the step of LBFGS requires a closure, which the gradient scaler"],
        ),
        ([*TINY, "optimizer=adam", "optimizer.betas=[0.9,nan]"], ["optimizer.betas[1]: must be finite"]),
    ],
    ids=last_override,
)  # fmt: skip
def test_invalid_override_is_reported_with_a_suggestion(cli: Cli, overrides: list[str], expected: list[str]) -> None:
    error = error_of(cli(*overrides)) if "-m" in overrides else refusal_of(*overrides)
    for words in expected:
        assert words in error


@pytest.mark.spread(1)
@pytest.mark.parametrize("mode", ["single", "sweep"])
def test_unwritable_output_folder_is_reported(cli: Cli, mode: str) -> None:
    write("file", "not a folder")
    if mode == "single":
        error = error_of(cli(*TINY, "hydra.run.dir=file/out"))
    else:
        error = error_of(cli("-m", *TINY, "seed=1,2", "hydra.sweep.dir=file/out"))
    assert "not writable: Not a directory" in error
    assert "given    file/out" in error


def test_all_errors_are_reported_at_once() -> None:
    error = refusal_of(*HOOKS, "hooks.tame.norm=-1", "hooks.quiet.kind=x", "seed=-3", "train.batch_size=0")
    for key in ("hooks.tame.norm:", "hooks.quiet.kind:", "seed:", "train.batch_size:"):
        assert key in error


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("hooks.first.every=2", "hooks: must be a mapping, since the items of a list cannot be overridden by name"),
        ("+hooks.new={kind: loss, action: record}", "hooks: must be a mapping, since the items of a list"),
        ("hooks=gradients", "exp/listed.yaml: a key of this file is a list here and a mapping in another file"),
    ],
)
def test_override_of_listed_hooks_asks_for_a_mapping(override: str, expected: str) -> None:
    write("conf/exp/listed.yaml", "# @package _global_\nhooks: [{name: first, kind: loss, action: record}]\n")
    error = refusal_of(*TINY, "+exp=listed", override)
    assert expected in error
    assert "hooks: {NAME: {...}}" in error


INVALID_IN_HOOKS = [
    "hooks=3", "hooks=null", "hooks=nope", "hooks.tame=5", "hooks.tame=[]", "hooks.tame.layers=null", "hooks.tame.layers=[]",
    "hooks.tame.layers=3", "~hooks.noisy.fn", "~hooks.noisy.std", "~hooks.tame.kind", "hooks.digit_maps.steps=3",
    "hooks.digit_maps.steps=[]", "hooks.digit_maps.steps=[-1]", "+hooks.digit_maps.slice='99,0,0,0'", "+hooks.digit_maps.slice=all",
    "apply.init=3", "+apply.x={layers:encoder,action:set,attribute:inplac,value:1}",
    "+apply.x={layers:encoder,action:call,fn:{_target_:builtins.print,x:3}}",
    "+apply.x={layers:.,action:replace,module:{_target_:torch.nn.Identity}}",
    "+apply.x={layers:encoder,action:replace,module:{_target_:torch.nn.Linear}}",
]  # fmt: skip
INVALID_IN_TINY = [
    "train.steps=abc", "train.steps=0", "train.steps=1.5", "train.steps=true", "train.steps=null", "train.epochs=2", "train=null",
    "train.batch_size=0", "model=null", "model=3", "model=[1,2]", "model=", "model.sizes=64", "model.sizes=[a,b]", "data=null",
    "data=5", "data.dataset=null", "data.dataset._target_=builtins.dict", "data.slice.split=val", "+data.slice.classes=3",
    "+data.slice.stride=0", "task=null", "task.loss=null", "task.loss._target_=torch.nn.MSELos", "task._target_=torch.nn.Identity",
    "optimizer=null", "optimizer.lr=abc", "optimizer.lr=-1", "optimizer._target_=torch.nn.Identity",
    "+scheduler._target_=torch.nn.Identity", "scheduler=3", "sink=null", "sink.when_full=perhaps", "seed=-1",
    "seed=99999999999999999999999999", "name=../../x", "name=", "deterministic=5",
]  # fmt: skip


@pytest.mark.spread(10)
@pytest.mark.parametrize(
    "overrides",
    [
        ["model=mlp"],
        [*HOOKS, "+apply.x={layers:'**',action:freeze}", "~hooks.tame", "~hooks.gradients"],
        *([*HOOKS, override] for override in INVALID_IN_HOOKS),
        *([*TINY, override] for override in INVALID_IN_TINY),
    ],
    ids=last_override,
)
def test_invalid_value_is_refused(overrides: list[str]) -> None:
    assert refusal_of(*overrides).strip()


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan=true"],
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
    ids=" ".join,
)
def test_invalid_command_line_gives_no_traceback(cli: Cli, arguments: list[str]) -> None:
    assert error_of(cli(*arguments)).strip()


@pytest.mark.spread(1)
@pytest.mark.combinations
@pytest.mark.parametrize("name", ["é漢字" * 50, "x" * 2_000], ids=["unicode", "long"])
@pytest.mark.parametrize(
    "override", ["+exp={}", "+hooks.{}=3", "hooks.tame.layers='{}'", "model._target_={}", "name={}/"]
)
def test_unicode_or_very_long_name_is_refused(cli: Cli, override: str, name: str) -> None:
    answer = cli(*([] if "exp" in override else HOOKS), override.format(name)).expect(2)
    assert "Traceback" not in answer.err
    assert name[:20] in answer.err


@pytest.mark.spread(8)
@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("hooks: {a: {layers: '**', kind: forward, action: record\n", ["mine.yaml:", "invalid YAML"]),
        ("hooks:\n  a: {layers: **, kind: forward, action: record}\n", ["mine.yaml:9", "quotes around a value"]),
        ("hooks:\n\ta: 3\n", ["mine.yaml:9", "invalid YAML"]),
        ("model: {a: 1}\n", ["mine.yaml:8", "duplicate key model"]),
        ("hoks: {a: 3}\n", ["unknown field 'hoks'", "similar  hooks"]),
        ("hooks: 3\n", ["hooks:", "given    3"]),
        ("hooks: [3]\n", ["hooks[0]:", "given    3"]),
        ("hooks: {'a b': {" + ANY + ", action: record}}\n", ["hooks:", "given    a b"]),
        ("hooks: {a: {kind: forward, action: record}}\n", ["hooks.a:", "requires 'layers'"]),
        ("hooks: {a: {layers: '**', action: record}}\n", ["hooks.a.kind: is missing"]),
        ("hooks: {a: {layers: '**', kind: forward}}\n", ["hooks.a.action: is missing", "call, clip, modify, print, record, scale"]),
        ("hooks: {a: {" + ANY + ", action: call}}\n", ["hooks.a.fn: is missing", "called as `fn(tensor, context)`"]),
        ("hooks: {a: {" + ANY + ", action: modify}}\n", ["hooks.a.fn: is missing", "{_target_: package.function}"]),
        ("hooks: {a: {" + ANY + ", action: modify, fn: {}}}\n", ["hooks.a.fn._target_: is missing"]),
        ("hooks: {a: {" + ANY + ", action: modify, fn: {_target_: torch.reluu}}}\n", ["hooks.a.fn:", "similar  torch.relu"]),
        ("hooks: {a: {" + ANY + ", action: modify, fn: {_target_: math.sqrt}}}\n", ["hooks.a.fn:", "math.sqrt"]),
        ("hooks: {a: {" + ANY + ", action: scale, factor: .nan}}\n", ["hooks.a.factor:", "finite"]),
        ("hooks: {a: {" + ANY + ", action: clip, norm: .nan}}\n", ["hooks.a.norm:", "finite"]),
        ("hooks: {a: {" + ANY + ", action: clip}}\n", ["hooks.a:", "requires exactly one of min/max, value, norm"]),
        ("hooks: {a: {layers: '**', kind: backward, action: record}}\n", ["deprecated", "similar  full_backward"]),
        ("hooks: {a: {layers: 're:[', kind: forward, action: record}}\n", ["hooks.a.layers", "regular expression"]),
        ("hooks: {a: {layers: {x: 1}, kind: forward, action: record}}\n", ["hooks.a.layers:"]),
        ("task: [1]\n", ["exp/mine"]),
        ("task:\n", ["task:"]),
        ("optimizer: 3\n", ["optimizer:", "given    3"]),
        ("optimizer: {lr: abc}\n", ["optimizer.lr: must be a number", "given    abc"]),
        ("sink: 3\n", ["sink:", "given    3"]),
        ("data: [1]\n", ["exp/mine"]),
        ("seed: ${nope}\n", ["seed:", "nope"]),
        ("seed: ${oc.env:NOPE}\n", ["seed:", "NOPE"]),
        ("apply: {a: {types: Linear, action: init}}\n", ["apply.a.fn: is missing"]),
        ("apply: {a: {types: Linear, action: fill, value: .inf}}\n", ["apply.a.value:", "finite"]),
        ("scheduler: {_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}\n", ["scheduler:", "LRScheduler"]),
    ],
    ids=lambda value: value.strip() if isinstance(value, str) else None,
)  # fmt: skip
def test_error_in_a_custom_file_is_reported(workdir: Path, more: str, expected: list[str]) -> None:
    write("conf/exp/mine.yaml", EXPERIMENT + more)
    error = refusal_of("+exp=mine")
    for words in expected:
        assert words in error


@pytest.mark.spread(12)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", "# @package _global_", id="empty"),
        pytest.param("just words\n", "# @package _global_", id="words"),
        pytest.param("model: {_target_: torch.nn.Identity}\n", "# @package _global_", id="no package line"),
        pytest.param(
            "# mine\n# @package _global_\ndefaults:\n  - override /model: mlp\n",
            "add the first line: # @package _global_",
            id="package line further down",
        ),
        pytest.param("# @package _global_\n- 1\n", "exp/mine", id="a list"),
        pytest.param("# @package _global_\ndefaults: 3\n", "exp/mine", id="defaults"),
        pytest.param(
            "# @package _global_\ndefaults:\n  - override /model: mlpp\n", "similar  mlp", id="unknown option"
        ),
        pytest.param("# @package _global_\ndefaults:\n  - /model: mlp\n", "override /model: mlp", id="no override"),
        pytest.param(
            "# @package _global_\ndefaults:\n  - override model: mlp\n",
            "exp/mine: a group in the defaults list must begin with a slash\n    given    model\n    fix      override /model: ...",
            id="no slash",
        ),
        pytest.param(
            "# @package _global_\ndefaults:\n  - override /optimzer: adam\n",
            "given    optimzer\n    similar  optimizer",
            id="unknown group",
        ),
        pytest.param(
            "# @package _global_\ndefaults:\n  - override /exp: adam\n",
            "fix      add it without override: /exp: ...",
            id="group without an option",
        ),
        pytest.param("\x00", "mine.yaml", id="no text"),
    ],
)
def test_file_that_is_not_an_experiment_is_refused(workdir: Path, text: str, expected: str) -> None:
    write("conf/exp/mine.yaml", text)
    assert expected in refusal_of("+exp=mine")


def test_missing_experiment_names_the_file_that_is_expected(workdir: Path) -> None:
    assert f"the file conf/exp/mine.yaml in the working folder, {workdir}" in refusal_of("+exp=mine")


MODELS = {
    "not a Module": ("class Net:\n    pass\n", ["model: must be a torch.nn.Module, but", "returned Net"]),
    "constructor fails": (
        "class Net(torch.nn.Module):\n    def __init__(self):\n        raise KeyError('x')\n",
        ["model:", "KeyError"],
    ),
    "syntax error": ("class Net(torch.nn.Module)\n", ["model:", "importing", "SyntaxError", "line 2"]),
    "import fails": ("import no_such_package\n", ["model:", "requires the module 'no_such_package'"]),
    "no parameter": (
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        return x.flatten(1)\n",
        ["model:", "the model has no trainable parameter"],
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


def write_model(case: str) -> list[str]:
    """Write an experiment with a model, and return the expected words of its error."""
    body, expected = MODELS[case]
    module = "bad_" + case.replace(" ", "_")
    write(f"{module}.py", "import torch\n" + body)
    write("conf/exp/mine.yaml", EXPERIMENT.replace("instrument.training.models.MLP, sizes: [64, 10]", f"{module}.Net"))
    return expected


@pytest.fixture
def importable(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory whose modules can be imported."""
    monkeypatch.syspath_prepend(workdir)
    return workdir


@pytest.mark.spread(3)
@pytest.mark.parametrize("case", MODELS)
def test_custom_model_that_cannot_train_is_refused(importable: Path, case: str) -> None:
    expected = write_model(case)
    error = refusal_of("+exp=mine")
    for words in expected:
        assert words in error


@pytest.mark.slow
def test_error_in_a_custom_model_is_reported(cli: Cli) -> None:
    expected = write_model("forward fails")
    error = error_of(cli("+exp=mine"))
    for words in expected:
        assert words in error


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("result", "expected"),
    [
        ("output.sum()", "the task must return instrument.tasks.Outcome, but returned Tensor"),
        ("Outcome(output, 64)", "shape [64, 10], not a scalar"),
        ("Outcome(3.0, 64)", "the loss is a float"),
        ("Outcome(output.sum().detach(), 64)", "does not depend on any trainable parameter"),
    ],
)
def test_custom_task_without_a_loss_is_refused(importable: Path, result: str, expected: str) -> None:
    module = f"bad_task_{abs(hash(result))}"
    write(
        f"{module}.py",
        "from instrument.tasks import Outcome\n\n\ndef make(**given):\n    def task(model, batch):\n"
        f"        output = model(batch[0])\n        return {result}\n\n    return task\n",
    )
    error = refusal_of(*TINY, f"task._target_={module}.make")
    assert "task: " in error
    assert expected in error


def test_custom_dataset_that_cannot_be_batched_is_refused(importable: Path) -> None:
    write(
        "bad_data.py",
        "class Words:\n    def __init__(self, **given):\n        pass\n    def __len__(self):\n        return 9\n"
        "    def __getitem__(self, i):\n        return object(), 1\n",
    )
    error = refusal_of(*TINY, "data.dataset._target_=bad_data.Words")
    assert "data.dataset: its items cannot be collated into a batch" in error
    text = Path("bad_data.py").read_text().replace("object(), 1", "[][i]")
    write("few_data.py", text)
    error = refusal_of(*TINY, "data.dataset._target_=few_data.Words")
    assert "data.dataset: its samples cannot be loaded (in " in error
    assert "IndexError" in error
    assert "collate" not in error


@pytest.mark.slow
def test_configuration_errors_are_reported_without_importing_torch(workdir: Path) -> None:
    cases = [
        ["+exp=mnist_hoks"],
        [*HOOKS, "hooks.tame.nrm=3"],
        [*HOOKS, "hooks.tame.kind=x"],
        [*HOOKS, "hooks.activations.stats=[x]"],
        [*HOOKS, "train.steps=0"],
        [*HOOKS, "hydra.run.dir=/dev/null/out"],
    ]
    script = (
        "import sys\nfrom instrument.__main__ import main\n"
        f"for overrides in {cases}:\n    sys.argv[1:] = overrides\n    try:\n        main()\n"
        "    except SystemExit as stop:\n        print(stop.code, {'torch', 'pandas', 'pyarrow'} & set(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["2 set()"] * len(cases), done.stderr


def load_failed_run(folder: str, status: str, rule: str) -> instrument.Run:
    """Load a run; assert that all tables are readable, and that its status and events are as expected."""
    for table in TABLES:
        assert pd.read_parquet(f"{folder}/{table}") is not None
    assert json.loads(Path(folder, "run.json").read_text())["status"] == status
    run = instrument.load(folder)
    assert rule in set(run.events.rule)
    return run


@pytest.mark.slow
def test_failing_hook_function_is_named_and_rows_are_kept(cli: Cli) -> None:
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
    assert "the data recorded so far is in out" in answer.err
    run = load_failed_run("out", "failed", "error")
    assert list(run.metrics.step) == [0, 1, 2]
    assert sorted(run.effects.step) == [0, 1, 2]
    assert set(run.stats.step) >= {0, 1, 2}
    assert "boom" in run.info["error"]
    assert run.events[run.events.severity == "error"].step.item() == 3


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("returned", "expected"),
    [("tensor[:3]", "shape [3, 10]"), ("tensor.double()", "dtype"), ("tensor.detach()", "detached from the graph")],
)
def test_hook_function_with_an_invalid_result_is_named(importable: Path, returned: str, expected: str) -> None:
    module = f"misfit_{abs(hash(returned))}"
    write(f"{module}.py", f"def bend(tensor, context):\n    return {returned}\n")
    hook = f"+hooks.mine={{layers:layers.0,kind:forward,action:modify,fn:{{_target_:{module}.bend}}}}"
    error = refusal_of(*TINY, hook)
    assert "hooks.mine.fn: " in error
    assert "hook 'mine' (forward) on layer 'layers.0' at step 0 must return" in error
    assert expected in error


@pytest.mark.slow
def test_exit_of_custom_code_is_an_error(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path.cwd())
    write(
        "leaves.py",
        "import sys\n\n\ndef at_start():\n    sys.exit(0)\n\n\ndef in_step(tensor, context):\n    sys.exit(0)\n",
    )
    write("no_module.py", "import sys\n\nsys.exit('install it')\n")
    error = refusal_of(*TINY[2:], "model={_target_: leaves.at_start}")
    assert "model: leaves.at_start could not be built: SystemExit: 0" in error
    error = refusal_of(*TINY[2:], "model={_target_: no_module.Net}")
    assert "importing no_module failed: SystemExit: install it" in error
    hook = "+hooks.x={layers:layers.0,kind:forward,action:call,fn:{_target_:leaves.in_step}}"
    answer = cli("-m", *TINY, hook, "hooks.x.start=0,9", "hydra.sweep.dir=out").expect(1)
    assert "sys.exit(0) was called (in " in answer.err
    assert "out/0 failed; the other jobs continue" in answer.err
    assert list(instrument.load("out").runs.status) == ["failed", "done"]


@pytest.mark.slow
def test_model_error_during_training_keeps_the_rows(cli: Cli) -> None:
    write(
        "fragile_net.py",
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n    def __init__(self):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(64, 10))\n        self.calls = 0\n"
        "    def forward(self, x):\n        self.calls += 1\n        if self.calls == 7:\n"
        "            raise RuntimeError('worn out')\n        return super().forward(x)\n",
    )
    write(
        "conf/exp/mine.yaml", EXPERIMENT.replace("instrument.training.models.MLP, sizes: [64, 10]", "fragile_net.Net")
    )
    answer = cli("+exp=mine", "train.steps=9", "hooks=activations", "hooks.activations.every=1", "hydra.run.dir=out")
    assert answer.code == 1
    assert "RuntimeError: worn out" in answer.err
    assert "fragile_net.py" in answer.err
    assert "site-packages/hydra" not in answer.err
    run = load_failed_run("out", "failed", "error")
    assert list(run.metrics.step) == [0, 1, 2]  # shape inference made three of the calls
    assert run.info["error"] == "RuntimeError: worn out"


@pytest.mark.slow
def test_run_continues_after_stdout_is_closed(workdir: Path) -> None:
    printed = workdir / ".process.out"
    os.mkfifo(printed)
    process = Command(workdir, "instrument", [*TINY, "train.steps=12", "hydra.run.dir=out"], {}, "process")
    with printed.open() as pipe:
        assert pipe.readline().startswith("run")
    printed.unlink()
    printed.touch()
    done = process.wait()
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    run = instrument.load("out")
    assert run.info["status"] == "done"
    assert run.metrics.step.max() == 12


def test_ctrl_c_closes_files_and_exits_with_code_130(workdir: Path) -> None:
    arguments = [*TINY, "train.steps=10000000", "hooks=activations", "hydra.run.dir=out"]
    process = Command(workdir, "instrument", arguments, {}, "process")
    wait_until_training(process)
    assert json.loads(Path("out/run.json").read_text())["status"] == "running"
    process.send(signal.SIGINT)
    done = process.wait()
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "interrupted: the data recorded so far is in out\n" in done.stderr
    run = load_failed_run("out", "interrupted", "interrupted")
    steps = run.metrics.step
    assert list(steps) == list(range(len(steps)))
    assert len(steps) > 0
    assert not run.coverage.empty
