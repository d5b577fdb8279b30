"""docs/guides/megatron.md and torchtitan.md: their lines run with the models, loops, names and calls of these libraries.

A slow test runs the lines of torchtitan.md with torchtitan.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from tracker_files import read_tensorboard
from training_libraries import LAYERS, VOCABULARY, FP32Optimizer, GPTModel, MegatronDDP, TitanTrainer, Transformer
from waiting import TIMEOUT

import instrument
from instrument.fields.field_types import StructureName
from instrument.plan.modules import Layers
from instrument.plan.structure import find_structure

GUIDES = REPOSITORY / "docs" / "guides"
TITAN = REPOSITORY / ".torchtitan" / "bin" / "python"  # created by `make test-all`
STEPS = 3
NAMED = {
    "hidden": {
        "layers": ["**.linear_fc1", "**.core_attention"],
        "kind": "forward",
        "action": "record",
        "path": "re:0?",
    },
    "first": {"layers": "**.decoder.layers.0", "kind": "forward", "action": "record"},
}


def page(name: str) -> tuple[list[str], dict[str, set[str]]]:
    """Return the Python blocks of a page, and the modules of its table by structure, with N for the number of a block."""
    text = (GUIDES / f"{name}.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", text, re.M)
    return re.findall(r"```python\n(.*?)```", text, re.S), {
        role: {*re.findall(r"`([\w.]+)`", row)} for role, row in rows
    }


def batch(number: int) -> Tensor:
    return torch.randint(VOCABULARY, (3, 8), generator=torch.Generator().manual_seed(number))


@pytest.mark.parametrize(
    ("name", "model"), [("megatron", lambda: MegatronDDP(GPTModel())), ("torchtitan", Transformer)]
)
def test_structure_finds_the_modules_of_the_page(name: str, model: Callable[[], nn.Module]) -> None:
    found = find_structure(Layers.of(model()), get_args(StructureName))
    _, table = page(name)
    assert len(table) == 6
    for role, modules in table.items():
        names = {re.sub(r"\.\d+", ".N", layer.name.removeprefix("module.")) for layer in found[role]}
        listed = {each for each in modules if not re.fullmatch(r"(qkv_linear\.)?w[a-z0-9]+", each)}
        assert {next(each for each in names if f".{each}".endswith(f".{one}")) for one in listed} == names, role
        assert len(found[role]) in (1, 2, LAYERS, 2 * LAYERS + 1)


def megatron(optimizer: FP32Optimizer, model: nn.Module, state: dict[str, Any], size: int = 2) -> Callable[..., Any]:
    """Return Megatron's `train_step`: two micro-batches, then a step of the optimizer."""
    mask, positions = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1), torch.arange(8).expand(3, 8)

    def train_step(*_: object) -> tuple[dict[str, Tensor], int]:
        losses = []
        for number in range(size):
            tokens = batch(size * state["step"] + number)
            losses.append(model(tokens, positions, mask, tokens.roll(-1, 1)).mean())
            (losses[-1] / size).backward()
        state["step"] += 1
        state["gradient"] = {name: parameter.main_grad.norm() for name, parameter in model.named_parameters()}  # type: ignore[attr-defined]
        optimizer.step()
        return {"lm loss": torch.stack(losses).mean().detach()}, 0

    return train_step


@pytest.mark.slow
def test_lines_of_the_megatron_page_record_its_loop(tmp_path: Path) -> None:
    blocks, _ = page("megatron")
    results = []
    for code in (blocks[0].replace('"transformer"', "hooks"), ""):
        torch.manual_seed(0)
        model = MegatronDDP(GPTModel())
        optimizer, state = FP32Optimizer(model), {"step": 0}
        train_step = megatron(optimizer, model, state)
        given = {"train_step": train_step, "model": [model], "optimizer": optimizer, "torch": torch, "iteration": 0}
        given |= dict.fromkeys(("forward_step_func", "train_data_iterator", "opt_param_scheduler", "config"))
        given |= {"args": SimpleNamespace(save=tmp_path, train_iters=STEPS), "hooks": ["transformer", NAMED]}
        exec(code, given) if code else [train_step() for _ in range(STEPS)]
        results.append((state["gradient"], [parameter.detach().clone() for parameter in model.parameters()]))
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))

    run = instrument.load(tmp_path / "instrument")
    assert (run.coverage["fired"] == run.coverage["expected"]).all()
    assert run.metrics["step"].tolist() == [0, 1, 2]
    assert set(run.coverage.query("expected == 0")["hook"]) == {"queries_and_keys"}  # no scaled_dot_product_attention
    assert set(run.stats.query("hook == 'first'")["layer"]) == {"0.module.decoder.layers.0"}
    rows = run.stats.query("hook == 'hidden' and layer.str.endswith('linear_fc1')")
    assert rows.groupby(["step", "layer"])["call"].agg(list).tolist() == [[0, 1]] * STEPS * LAYERS


def test_parameter_gradients_of_megatron_are_its_main_gradients(tmp_path: Path) -> None:
    model = MegatronDDP(GPTModel())
    optimizer, state = FP32Optimizer(model), {"step": 0}
    hooks = {"grads": {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": "l2"}}
    with instrument.attach(model, hooks, optimizer=optimizer.optimizer) as probe:
        megatron(optimizer, model, state)()
        probe.end_step()
    rows = probe.stats
    found = dict(zip(rows["layer"] + "." + rows["path"], rows["l2"], strict=True))
    assert found == pytest.approx({name: float(norm) for name, norm in state["gradient"].items()}, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_compiled", [False, True])
def test_lines_of_the_torchtitan_page_record_its_trainer(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks, _ = page("torchtitan")

    def config() -> TitanTrainer.Config:
        torch.manual_seed(0)
        model = Transformer()
        for number, block in model.layers.named_children():  # as apply_ac and apply_compile
            model.layers.register_module(number, checkpoint_wrapper(block, preserve_rng_state=False))
            if is_compiled:
                model.layers.get_submodule(number).compile(backend="aot_eager", fullgraph=True)
        return TitanTrainer.Config(model=model, loaded=9, steps=12)

    registry = SimpleNamespace(config_registry=SimpleNamespace(llama3_debugmodel=config))
    monkeypatch.setitem(sys.modules, "torchtitan.models.llama3", registry)
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", SimpleNamespace(Trainer=TitanTrainer))
    given: dict[str, Any] = {"__name__": "my_run"}
    monkeypatch.setitem(sys.modules, "my_run", SimpleNamespace())  # in which dataclasses looks up names
    exec(blocks[0], given)
    if is_compiled:
        exec(blocks[1], given)
    made = given["llama3_debugmodel"]()
    assert made.training.disable_cuda_graphs is True
    trainer, baseline = made.owner(made), TitanTrainer(config())
    trainer.train()
    baseline.train()
    assert trainer.losses == baseline.losses
    assert all(map(torch.equal, trainer.model_parts[0].parameters(), baseline.model_parts[0].parameters()))
    run = instrument.load("runs/titan")
    assert (run.coverage["fired"] == run.coverage["expected"]).all()
    assert run.metrics["step"].tolist() == [9, 10, 11]
    assert run.metrics["loss"].tolist() == pytest.approx(baseline.losses, rel=1e-6)
    rows = run.stats.query("hook == 'residual_stream'")  # every 10 steps
    found = {(row.step, row.micro_step, row.layer.rpartition("layers.")[2]) for row in rows.itertuples()}
    assert found == {(10, micro, str(number)) for micro in range(2) for number in range(LAYERS)}
    assert ("residual_changes" in set(run.stats["hook"])) == (not is_compiled)


def train_with_titan(folder: Path, arguments: str, name: str, steps: int) -> list[float]:
    """Run torchtitan in two processes in a folder, with a checkpoint after each training, and return the logged losses."""
    options = {
        "dump_folder": name, "debug.seed": 0, "metrics.enable_tensorboard": "", "checkpoint.enable": "",
        "training.steps": steps, "lr_scheduler.total_steps": STEPS, "training.seq_len": 64,
        "training.local_batch_size": 2, "training.global_batch_size": 8, "training.mixed_precision_param": "float32",
    }  # fmt: skip
    arguments += "".join(f" --{option} {value}" for option, value in options.items())
    launcher = [TITAN, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "titan_on_cpu"]
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(
        [*launcher, *arguments.split()],
        cwd=folder,
        env={**os.environ, **paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    newest = max((folder / name / "tb").rglob("events*"), key=lambda file: file.stat().st_mtime_ns)
    return [loss for _, loss in read_tensorboard(newest)["scalars"]["loss_metrics/global_avg_loss"]]


@pytest.mark.slow
def test_lines_of_the_torchtitan_page_run_with_torchtitan(tmp_path: Path) -> None:
    if not TITAN.exists():
        pytest.skip("requires the environment .torchtitan of `make test-all`")
    text = (GUIDES / "torchtitan.md").read_text()
    (tmp_path / "my_run.py").write_text(page("torchtitan")[0][0])
    tokenizer, data = (tmp_path / "tests" / "assets" / name for name in ("tokenizer", "c4_test"))
    tokenizer.mkdir(parents=True)
    data.mkdir()
    (tokenizer / "vocab.json").write_text(json.dumps({chr(number): number for number in range(33, 127)}))
    (tokenizer / "merges.txt").touch()
    (data / "page.json").write_text("\n".join(json.dumps({"text": line}) for line in text.splitlines() if line))

    (printed,) = re.findall("^torchrun --nproc_per_node 8 -m torchtitan.train (.*)$", text, re.M)
    losses = train_with_titan(tmp_path, printed.replace("my_run", "llama3"), "bare", STEPS)
    assert len(losses) == STEPS
    recorded = []
    for name, steps in (("start", [0, 1]), ("continued", [2])):
        assert train_with_titan(tmp_path, printed, "hooks", steps[-1] + 1) == [losses[step] for step in steps]
        run = instrument.load((tmp_path / "runs").rename(tmp_path / name) / "titan")
        assert (run.coverage["fired"] == run.coverage["expected"]).all()
        ranks = run.metrics.pivot(index="step", columns="rank", values="loss").astype(np.float32)
        assert ranks.index.tolist() == steps
        recorded += (ranks[0] + ranks[1]).tolist()
        if name == "start":
            assert set(run.coverage.query("expected > 0")["hook"]) == {*run.coverage["hook"]}
            rows = run.stats.query("hook == 'residual_stream'")
            assert rows.groupby(["rank", "micro_step", "layer"]).size().tolist() == [1] * 2 * 2 * 6
    assert recorded == losses
