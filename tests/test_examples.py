"""The examples: each runs with the command in its first line, and its results match plain PyTorch."""

from __future__ import annotations

import itertools
import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.special
import scipy.stats
import torch
import yaml
from conftest import REPOSITORY, Answer
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from torch import nn

import instrument
from instrument.tables.kinds import KINDS

EXAMPLES = REPOSITORY / "examples"
Script = Callable[..., list[str]]
Experiment = Callable[..., instrument.Run]


@pytest.fixture
def folder(cli: Callable[..., Answer], workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Working directory with a copy of the examples."""
    shutil.copytree(EXAMPLES, workdir, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    monkeypatch.setattr(sys, "path", [str(workdir), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    return workdir


@pytest.fixture
def script(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Script:
    """Function that runs a script and returns the printed lines."""

    def run(name: str, *arguments: str) -> list[str]:
        assert (folder / name).read_text().splitlines()[0] == f"# python {name}"
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        capfd.readouterr()
        runpy.run_path(name, run_name="__main__")
        return capfd.readouterr().out.splitlines()

    return run


@pytest.fixture
def experiment(folder: Path, cli: Callable[..., Answer]) -> Experiment:
    """Function that runs an experiment and loads the run."""

    def run(name: str, *overrides: str) -> instrument.Run:
        lines = (folder / "conf" / "exp" / f"{name}.yaml").read_text().splitlines()
        assert lines[1] == f"# python -m instrument +exp={name}"
        cli(f"+exp={name}", *overrides).expect(0)
        return instrument.load(f"runs/{name}")

    return run


def test_readme_lists_every_example_with_its_command() -> None:
    rows = re.findall(r"^\| .+ \| \[(\S+)\]\((\S+)\) \| `(.+)` \|$", (EXAMPLES / "README.md").read_text(), re.M)
    files = [*EXAMPLES.glob("*.py"), *EXAMPLES.glob("conf/exp/*.yaml")]
    assert sorted(path for _, path, _ in rows) == sorted(
        str(file.relative_to(EXAMPLES)) for file in files if file.name != "mine.py"
    )
    for name, path, command in rows:
        assert path.endswith(name)
        assert f"# {command}" in (EXAMPLES / path).read_text().splitlines()[:2]
    tested = Path(__file__).read_text()
    assert [name for name, _, _ in rows if f'("{name.removesuffix(".yaml")}"' not in tested] == []


def test_shapes_are_printed_in_forward_order(script: Script) -> None:
    from torchvision.models import squeezenet1_1

    lines = script("shapes.py")
    expected: list[str] = []
    model = squeezenet1_1(weights=None).eval()
    for name, module in model.named_modules():
        label = f"{name or 'the model'}: {type(module).__name__}"
        module.register_forward_pre_hook(lambda m, args, at=label: expected.append(f"{at} {list(args[0].shape)}"))
        module.register_forward_hook(lambda m, args, out, at=label: expected.append(f"-> {at} {list(out.shape)}"))
    model(torch.zeros(1, 3, 224, 224))
    assert [line.strip() for line in lines] == expected
    assert len(lines) == 2 * len(list(model.modules()))


@pytest.mark.slow
def test_features_equal_the_layer_outputs(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision.models
    from torchvision.models.feature_extraction import create_feature_extractor

    resnet = torchvision.models.resnet18
    monkeypatch.setattr(torchvision.models, "resnet50", resnet)
    lines = script("features.py")
    run = instrument.load("runs/features")
    torch.manual_seed(0)
    model = resnet(weights=None).eval()
    images = torch.randn(4, 3, 224, 224)
    with torch.no_grad():
        expected = create_feature_extractor(model, ["layer4", "avgpool"])(images)
    for layer, shape in (("layer4", (4, 512, 7, 7)), ("avgpool", (4, 512, 1, 1))):
        values = run.tensors(layer=layer)["values"][0]
        assert values.shape == shape
        assert np.array_equal(values, expected[layer].numpy())
        zeros = (values == 0).mean()
        assert f"{layer}: {shape}, mean {values.mean():.4f}, {zeros:.0%} zeros" in lines


def test_hooks_of_all_kinds_fire_in_order(script: Script) -> None:
    lines = script("order.py")
    fired = [line.split() for line in lines]
    assert [int(number) for number, *_ in fired] == list(range(1, len(fired) + 1))
    assert {kind for _, kind, *_ in fired} == set(KINDS) - {"collective"}
    first = {kind: i for i, (_, kind, *_) in reversed(list(enumerate(fired)))}
    order = [
        *("forward_pre", "function", "forward", "loss", "full_backward_pre", "parameter_grad_micro"),
        *("post_accumulate_grad", "parameter_grad", "step_pre", "step_post", "state_dict_pre", "state_dict_post"),
        *("load_state_dict_pre", "load_state_dict_post"),
    ]
    assert sorted(order, key=first.__getitem__) == order
    backward = [layer for _, kind, _, layer in fired if kind == "full_backward_pre"]
    assert backward == ["2", "1", "0"]


def test_tensor_hook_doubles_upstream_gradients(script: Script) -> None:
    rows = [line.split() for line in script("double_gradient.py")[1:]]
    assert [(row[0], row[-1]) for row in rows] == [("0.weight", "2"), ("2.weight", "2"), ("4.weight", "1")]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    model(torch.randn(16, 8)).sum().backward()
    norms = [f"{model[i].weight.grad.norm():.3f}" for i in (0, 2, 4)]
    assert [row[1] for row in rows] == norms


@pytest.mark.slow
def test_l2_hook_equals_weight_decay(script: Script) -> None:
    lines = script("weight_decay.py")
    assert lines[0] == "L2 by hook and weight_decay: bit-identical"
    assert float(lines[1].split()[-1]) < 1e-6
    assert float(lines[2].split()[-1]) > 1e-3


@pytest.mark.slow
def test_functions_have_a_trained_bias(experiment: Experiment) -> None:
    run = experiment("biased_functions")
    tensors = run.tensors()
    before, after = (tensors[tensors.hook == hook]["values"].iloc[0] for hook in ("before", "after"))
    assert np.array_equal(after, 2 * before + np.float32(0.5))
    biases = [float(value) for value in tensors[tensors.hook == "biases"]["values"]]
    assert len(biases) == 10
    assert len(set(biases)) == 10
    assert 0.5 not in biases


def test_hooks_of_parameter_buffer_and_plain_tensor(script: Script) -> None:
    assert [re.split(r"\s{2,}", line) for line in script("tensors.py")] == [
        ["weight", "parameter", "trains: True", "hooks: gradient, param, saved"],
        ["offset", "buffer", "trains: False", "hooks: buffer, saved"],
        ["plain", "plain tensor", "trains: False", "hooks: none"],
    ]


def test_custom_gradients_match_their_formulas(script: Script) -> None:
    found = {}
    for line in script("custom_gradient.py"):
        name, output, gradient = re.fullmatch(r"(.+?)\s+output (\[.*\])\s+gradient (\[.*\])", line).groups()
        found[name] = yaml.safe_load(output), yaml.safe_load(gradient)
    x, weight = torch.tensor([-1.5, -0.2, 0.3, 1.1]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert list(found) == ["no hooks", "sign", "sign, straight-through", "reversal"]
    assert found["no hooks"][1] == weight.tolist()
    assert found["sign"] == (x.sign().tolist(), [0.0] * 4)
    assert found["sign, straight-through"] == (x.sign().tolist(), weight.tolist())
    assert found["reversal"][0] == found["no hooks"][0]
    assert found["reversal"][1] == (-0.5 * weight).tolist()


def test_hooks_before_and_after_the_optimizer_step(script: Script) -> None:
    _, _, *lines = script("optimizer_steps.py")
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step, line in enumerate(lines):
        before = model.weight.detach().clone()
        optimizer.zero_grad()
        (model(torch.randn(32, 4)) - 1).square().mean().backward()
        optimizer.step()
        state = optimizer.state[model.weight]
        after = model.weight.detach()
        tensors = [before, model.weight.grad, after - before, after, state["exp_avg"], state["exp_avg_sq"]]
        assert [float(cell) for cell in line.split()] == [step, *(round(tensor.norm().item(), 4) for tensor in tensors)]
    assert len(lines) == 4


def test_state_dict_hooks_change_files_but_not_the_model(script: Script) -> None:
    answers = dict(line.split(": ") for line in script("state_dict.py"))
    assert [answer for answer in answers.values() if answer in ("True", "False")] == ["True"] * 3
    kept, all_of_them = map(int, answers["different values in the file"].split(" of "))
    assert kept <= 255 < all_of_them
    torch.manual_seed(0)
    largest = nn.Linear(64, 64).weight.abs().max().item()
    assert 0 < float(answers["largest rounding error"]) <= round(largest / 127 / 2, 4)


@pytest.mark.slow
def test_wrapped_module_is_recorded(experiment: Experiment) -> None:
    run = experiment("wrapped")
    stats = run.stats
    inner, outer = (stats[(stats.hook == hook) & (stats.step == 0)] for hook in ("inner", "outer"))
    assert inner.layer.tolist() == ["layers.1.inner"]
    assert (inner.module_type.item(), outer.module_type.item()) == ("Sequential", "Residual")
    assert (inner.numel.item(), outer.numel.item()) == (64 * 32, 64 * 32)
    scales = [float(value) for value in run.tensors(hook="scale")["values"]]
    assert len(scales) == 20
    assert scales[0] != 0.0


@pytest.mark.slow
def test_wgan_penalty_sweep(script: Script) -> None:
    lines = script("wgan_penalty.py", "train.steps=6")
    run = instrument.load("runs/wgan_penalty")
    rows = {line.split()[0]: [float(cell) for cell in line.split()[1:]] for line in lines[-3:]}
    assert list(rows) == ["0", "1", "10"]
    losses = pd.DataFrame(run.metrics).query("phase == 'train' and step == 5").set_index("task.penalty").loss
    for penalty, (loss, spread, gradient) in rows.items():
        assert loss == pytest.approx(losses[int(penalty)], abs=6e-4)
        assert spread > 0
        assert gradient > 0
    assert len({tuple(row) for row in rows.values()}) == 3
    assert not run.events.severity.isin(["warning", "error"]).any()


@pytest.mark.slow
def test_patching_reports_the_effect_of_each_layer(script: Script) -> None:
    first, *lines = script("patching.py")
    clean, damaged = (float(number) for number in re.findall(r"[\d.]+", first))
    assert clean < 0.1
    assert damaged > 1
    mended = {int(line.split()[1]): line for line in lines if line.startswith("layer")}
    assert list(mended) == [0, 1, 2, 3, 4]
    losses = {layer: float(re.search(r"loss ([\d.]+)", line).group(1)) for layer, line in mended.items()}
    assert all(clean < loss < damaged for loss in losses.values())
    assert losses[0] == losses[1]  # patching half of the units before or after the ReLU is equivalent
    assert losses[2] == losses[3]
    table = dict(line.split() for line in lines[lines.index("run") + 1 :])
    assert {int(layer): float(loss) for layer, loss in table.items()} == losses
    patched = instrument.load("runs/patching_b").effects
    assert (patched.changed_fraction > 0).all()
    assert set(patched.layer) == {"0", "1", "2", "3", "4"}


def trained_on_digits(
    sizes: list[int], lr: float, steps: int, classes: int
) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """Return the network that an example trains on the first 1400 digits, all images, and the digits."""
    images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
    images = images.float() / 16
    torch.manual_seed(0)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[:1400]), digits[:1400] % classes).backward()
        optimizer.step()
    return model, images, digits


@pytest.mark.slow
def test_probes_find_the_digit_in_each_layer(script: Script) -> None:
    rows = [line.split() for line in script("probe.py")]
    model, images, digits = trained_on_digits([64, 32, 16, 2], 0.01, 200, classes=2)
    found = {}
    outputs = images
    for layer, (row, module) in enumerate(zip(rows, model, strict=True)):
        with torch.no_grad():
            outputs = module(outputs)
        recorded = instrument.load("runs/probe/test").features(str(layer))
        np.testing.assert_array_equal(recorded.X, outputs[1400:].numpy())
        assert row[:4] == ["layer", str(layer), type(module).__name__, str(outputs.shape[1])]
        reference = LogisticRegression(C=100, max_iter=10_000).fit(outputs[:1400], digits[:1400])
        found[layer] = float(row[-1].rstrip("%")) / 100
        best = reference.score(outputs[1400:], digits[1400:])
        assert best - 0.25 < found[layer] < best + 0.1  # the probe of the example has not converged
    assert found[0] > 0.8
    assert found[4] < 0.5


@pytest.mark.slow
def test_student_learns_from_recorded_logits(script: Script) -> None:
    before, after, *rows = script("distillation.py")
    teacher, images, digits = trained_on_digits([64, 128, 128, 10], 0.005, 100, classes=10)
    with torch.no_grad():
        logits = teacher(images)
        torch.manual_seed(1)
        student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))(images[:1400])
    target, found = (scipy.special.softmax(each[:1400].double().numpy() / 4, axis=1) for each in (logits, student))
    expected = 16 * scipy.stats.entropy(target, found, axis=1).mean()
    assert float(before.split()[-1]) == pytest.approx(expected, rel=1e-4)
    assert float(after.split()[-1]) < expected / 100
    accuracies = {row.split()[0]: float(row.split()[-1].rstrip("%")) / 100 for row in rows}
    truth = (logits[1400:].argmax(1) == digits[1400:]).float().mean().item()
    assert accuracies["teacher"] == pytest.approx(truth, abs=6e-4)
    assert accuracies["student"] > truth - 0.05
