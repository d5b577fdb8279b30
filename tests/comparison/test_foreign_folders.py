"""Folders of tensors of other programs: which tensors are read, what their names mean, and how they are computed and aligned."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, Call
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

import instrument
from instrument.commands.diff import main
from instrument.comparison import foreign_folder
from instrument.comparison.foreign_folder import read_folder
from instrument.errors import ConfigError

X = torch.arange(24.0).reshape(2, 3, 4)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {entry.label: entry.load() for entry in read_folder(folder).entries}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))


def write(file: Path, tensors: Mapping[str, Tensor]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".npz":
        np.savez(file, **{name: tensor.numpy() for name, tensor in tensors.items()})
    elif file.suffix == ".safetensors":
        save_file(dict(tensors), file)
    else:
        torch.save(dict(tensors), file)
    return file.parent


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".npz"])
def test_formats_are_read(suffix: str, tmp_path: Path) -> None:
    given = {"layers.2.out": X, "layers.10.out": -X, "fc.weight": X[0] + 1.0}
    folder = write(tmp_path / f"tensors{suffix}", given)
    found = tensors_of(folder)
    assert {*found} == {"layers.2.out", "layers.10.out", "fc:param.weight"}
    assert torch.equal(found["layers.10.out"], -X)
    if suffix == ".safetensors":  # does not keep the order
        assert [*found][1:] == ["layers.2.out", "layers.10.out"]


def test_file_with_one_tensor_is_named_after_its_path(tmp_path: Path) -> None:
    (tmp_path / "step_3" / "h.0").mkdir(parents=True)
    torch.save(X, tmp_path / "step_3" / "h.0" / "mlp.pt")
    np.save(tmp_path / "step_3" / "logits.npy", X.numpy())
    assert {(entry.layer, entry.step) for entry in read_folder(tmp_path).entries} == {
        ("step_3.h.0.mlp", 3),
        ("step_3.logits", 3),
    }


def test_names_of_msprobe_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "step5" / "rank0"
    (folder / "dump_tensor_data").mkdir(parents=True)
    calls = ["Module.layers.0.Linear.forward.0", "Functional.relu.1.forward", "Module.layers.0.Linear.backward.0"]
    (folder / "dump.json").write_text(
        json.dumps({"task": "tensor", "level": "mix", "data": {call: {} for call in calls}})
    )
    names = [
        "Module.layers.0.Linear.backward.0.input.0",
        "Module.layers.0.Linear.forward.0.output.0",
        "Module.layers.0.Linear.forward.0.input.0",
        "Functional.relu.1.forward.output.0",
        "Module.layers.0.Linear.parameters_grad.weight",
    ]
    for index, name in enumerate(names):
        torch.save(X + index, folder / "dump_tensor_data" / f"{name}.pt")
    entries = read_folder(tmp_path).entries
    assert [(entry.label, entry.call, entry.module_type) for entry in entries] == [
        ("layers.0:input.0", 0, "Linear"),
        ("layers.0:output.0", 0, "Linear"),
        ("Functional.relu:output.0", 1, ""),
        ("layers.0:grad_output.0", 0, "Linear"),
        ("layers.0:param_grad.weight", 0, "Linear"),
    ]
    assert {entry.step for entry in entries} == {5}
    assert torch.equal(entries[1].load(), X + 1)


def msprobe_dump(folder: Path, layer: nn.Linear) -> Path:
    """Write a step in the layout of `PrecisionDebugger` of msprobe 26.2 on one process: level mix, task tensor."""
    x = X.reshape(-1, 4)[:2].clone().requires_grad_()
    out = layer(x)
    gradients = torch.autograd.grad(out.sum(), (x, layer.weight, layer.bias))
    tensors = {
        "Functional.linear.0.forward": {"input_args": [x, layer.weight], "input_kwargs": {}, "output": [out]},
        "Module.fc.Linear.forward.0": {
            "input_args": [x],
            "input_kwargs": {},
            "output": [out],
            "parameters": {"weight": layer.weight, "bias": layer.bias},
        },
        "Module.fc.Linear.parameters_grad.0": {"weight": [gradients[1]], "bias": [gradients[2]]},
        "Module.fc.Linear.backward.0": {"input": [torch.ones_like(out)], "output": [gradients[0]]},
    }
    place = folder / "step0" / "proc5200"
    (place / "dump_tensor_data").mkdir(parents=True)
    for call, sides in tensors.items():
        for side, values in sides.items():
            for path, value in tree_flatten_with_path(values)[0]:
                keys = [
                    side.removesuffix("_args"),
                    *(str(getattr(key, "key", getattr(key, "idx", ""))) for key in path),
                ]
                name = side if "parameters_grad" in call else ".".join(keys)
                torch.save(value.detach(), place / "dump_tensor_data" / f"{call}.{name}.pt")
    (place / "dump.json").write_text(json.dumps({"task": "tensor", "data": {call: {} for call in tensors}}))
    return folder


def test_dumps_of_msprobe_are_compared_with_a_run(tmp_path: Path) -> None:
    fc = nn.Linear(4, 3)
    theirs = msprobe_dump(tmp_path / "theirs", fc)
    hooks = {
        "outputs": {"layers": "fc", "kind": "forward"},
        "inputs": {"layers": "fc", "kind": "forward_pre"},
        "parameters": {"layers": "fc", "kind": "step_pre", "role": "param"},
        "gradients": {"layers": "fc", "kind": "parameter_grad"},
        "input_gradients": {"layers": "fc", "kind": "full_backward"},
    }
    specs = {name: {**spec, "action": "record", "tensors": True} for name, spec in hooks.items()}
    x = X.reshape(-1, 4)[:2].clone().requires_grad_()
    net, optimizer = nn.Sequential(OrderedDict(fc=fc)), torch.optim.SGD(fc.parameters(), lr=0.0)
    with instrument.attach(net, specs, optimizer=optimizer) as probe:
        net(x).sum().backward()
        optimizer.step()
        probe.end_step()
    difference = instrument.diff(probe.run, theirs, foreign=True)
    assert len(difference.layers) == 7
    assert "EQUAL BITS" in str(difference)
    changed = nn.Linear(4, 3)
    changed.load_state_dict({"weight": fc.weight * 1.01, "bias": fc.bias})
    other = instrument.diff(probe.run, msprobe_dump(tmp_path / "other", changed), foreign=True)
    assert "DIFFERENT" in str(other)


NAMES = """
tensors:
  embedding: {layer: embed}
  "blk{n}/attn": {layer: "layers.{n}.attn", dims: [tokens, batch]}
  "blk{n}/mlp": {layer: "layers.{n}.mlp", role: input, path: x}
  "debug{any}": null
  "head.{step}": {layer: head}
ids: {input_ids: "ids"}
"""


def test_file_of_names_gives_names_their_meaning(tmp_path: Path) -> None:
    names = ["blk10/attn", "blk2/mlp", "blk2/attn", "embedding", "debug/1", "head.0", "other"]
    write(tmp_path / "a.pt", dict.fromkeys(names, X) | {"ids": torch.zeros(2, 3, dtype=torch.long)})
    (tmp_path / "names.yaml").write_text(NAMES)
    folder = read_folder(tmp_path)
    assert [entry.label for entry in folder.entries] == [
        "embed",
        "layers.2.attn",
        "layers.2.mlp:input.x",
        "layers.10.attn",
        "head",
    ]
    assert folder.entries[1].dims == ("tokens", "batch")
    assert folder.ids[0]["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("- a", "must be a mapping"),
        ("layers: {}", "tensors"),
        ("tensors: {a: {layr: b}}", "similar  layer"),
        ("tensors: {a: {role: outputs}}", "similar  output"),
        ("tensors: {a: {dims: [token]}}", "similar  tokens"),
        ("tensors: {a: 3}", "tensors.a"),
        ("tensors: {'a{n}': {layer: 'x.{m}'}}", "has no placeholder {m}"),
        ("tensors: {}\nids: {tokens: a}", "allowed  input_ids"),
        ("tensors: {z: {}}", "no name is matched"),
        ("tensors: [", "is not valid YAML"),
        ("tensors: {'a{1}': {}}", "no name is matched"),
    ],
)
def test_problems_in_the_file_of_names_are_reported(text: str, problem: str, tmp_path: Path) -> None:
    write(tmp_path / "a.pt", {"a1": X})
    (tmp_path / "names.yaml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(problem)):
        read_folder(tmp_path)


def test_problems_of_folders_are_reported(tmp_path: Path, call: Call) -> None:
    one = write(tmp_path / "one" / "a.pt", {"x": X})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.safetensors").write_bytes(b"nothing")
    write(tmp_path / "twice" / "a.pt", {"x": X})
    write(tmp_path / "twice" / "b.pt", {"x": X})
    assert "cannot be read" in call(main, one, tmp_path / "broken").expect(2).err
    assert "two tensors have the same name" in call(main, one, tmp_path / "twice").expect(2).err
    assert "folder not found" in call(main, one, tmp_path / "missing").expect(2).err
    (tmp_path / "empty").mkdir()
    assert "contains no tensors" in call(main, one, tmp_path / "empty", "--as", "foreign").expect(2).err


def test_tensors_that_cannot_be_read_are_reported(tmp_path: Path, call: Call) -> None:
    one, other = write(tmp_path / "a" / "x.pt", {"x": X}), tmp_path / "b"
    other.mkdir()
    np.savez(other / "x.npz", x=np.array([{}], dtype=object))
    assert "b: x: cannot be read: Object arrays" in call(main, one, other).expect(2).err
    for name, ids in (("c", [[1, 2, 3], [4, 5, 6]]), ("d", [[4, 5, 6], [1, 2, 3]])):
        folder = write(tmp_path / name / "x.pt", {"x": X, "ids": torch.tensor(ids)})
        (folder / "names.yaml").write_text("{tensors: {x: {dims: [tokens, batch]}}, ids: {input_ids: ids}}")
    assert "correct its dims" in call(main, tmp_path / "c", tmp_path / "d").expect(2).err
    (other / "dump.json").write_text("{")
    assert "not valid JSON" in call(main, one, other).expect(2).err
    torch.save([X, {"y": X}], one / "x.pt")
    assert {*tensors_of(one)} == {"0", "1.y"}


@pytest.mark.slow
def test_equal_bits_are_stated(tmp_path: Path, call: Call) -> None:
    one = write(tmp_path / "a" / "x.pt", {"x": X, "y": X.to(torch.bfloat16)})
    other = write(tmp_path / "b" / "x.npz", {"x": X})
    write(other / "y.safetensors", {"y": X.to(torch.bfloat16)})
    assert "EQUAL BITS: all compared elements have equal bits" in call(main, one, other).expect(0).out
    zeros = [write(tmp_path / name / "x.pt", {"x": sign * torch.zeros(3)}) for name, sign in (("c", 1.0), ("d", -1.0))]
    assert "EQUAL: all compared elements are equal" in call(main, *zeros).expect(0).out


EXPRESSIONS: dict[str, tuple[str, Tensor]] = {
    "sum": ("a + b", X + X**2),
    "difference": ("b - a", X**2 - X),
    "transpose": ("a.T", X.transpose(1, 2)),
    "dimensions": ("transpose(a, 0, 1)", X.transpose(0, 1)),
    "slice": ("a[..., 1:3]", X[..., 1:3]),
    "index": ("a[0]", X[0]),
    "concatenation": ("cat(a, b)", torch.cat([X, X**2], -1)),
    "concatenation of rows": ("cat(a, b, dim=0)", torch.cat([X, X**2])),
    "part": ("split(a, 1, 2)", X[..., 2:]),
    "heads": ("heads(a, 2)", X.unflatten(-1, (2, 2)).transpose(1, 2)),
    "queries of fused heads": ("merge(split(heads(a, 2), 0, 2))", X[..., [0, 2]]),
    "nested": ("cat(a.T[:, :2], split(b, 0, 2).T)", torch.cat([X.mT[:, :2], (X**2)[..., :2].mT], -1)),
    "wildcard": ("blocks.*.q", X + 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions_compute_tensors(name: str, tmp_path: Path) -> None:
    text, expected = EXPRESSIONS[name]
    one = write(tmp_path / "a" / "x.pt", {"h.3.c": expected.contiguous()})
    other = write(tmp_path / "b" / "x.pt", {"a": X, "b": X**2, "blocks.3.q": X + 1})
    rename = {"h.*.c": text} if name != "wildcard" else {"h.*.c:output": text}
    found = instrument.diff(one, other, rename=rename)
    assert found.is_identical
    assert len(found.tensors) == 1


@pytest.mark.parametrize(
    ("old", "text", "problem"),
    [
        ("c", "a +", "invalid expression"),
        ("c", "mean(a, 1)", "not allowed at character 0: mean"),
        ("c", "(a + b).real", "not allowed at character 0: (a + b).real"),
        ("c", "a * 2 + b[0]", "invalid expression"),
        ("c", "a[2**3]", "not allowed at character 2: 2**3"),
        ("c", "split(a)", "missing 2 required positional arguments"),
        ("c", "cat(a, b, dim=lambda: 0)", "not allowed"),
        ("c", "a['x']", "B has no tensor x"),
        ("c", "a + missing", "B has no tensor missing:output"),
        ("c:outputs", "a + b", "similar  output"),
        ("d", "a + b", "matches no recorded tensor of A"),
        ("c", "cat(a, 3)", "cannot be computed"),
        ("c", "().real + a", "not allowed"),
        ("c", "(1 + 2).T", "names no tensor"),
        ("c", "(1 + 2).T + a", "cannot be computed"),
        ("c", "3 - split", "B has no tensor split"),
        ("c", "a[0] + cat(a, b)", "cannot be computed"),
        ("c", "a[5:, :] - x.*.q", "more wildcards"),
    ],
)
def test_problems_in_expressions_are_reported(old: str, text: str, problem: str, tmp_path: Path, call: Call) -> None:
    one = write(tmp_path / "a" / "x.pt", {"c": X})
    other = write(tmp_path / "b" / "x.pt", {"a": X, "b": X**2})
    answer = call(main, one, other, "--rename", f"{old}={text}").expect(2)
    assert problem in answer.err
    assert f"{old}={text}" in answer.err


def test_expression_requires_tensors_as_b(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "x.pt", {"0": X})
    probe = recorded(model(), X)
    with pytest.raises(ConfigError, match="requires a folder of tensors as B"):
        instrument.diff(one, probe, rename={"0": "a + b"})


def recorded(network: nn.Module, x: Tensor) -> Any:
    hook = {"layers": "**", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
    with instrument.attach(network, {"kept": hook}) as probe:
        network(x)
        probe.end_step()
    return probe.run


@pytest.mark.slow
def test_run_is_compared_with_a_folder_of_tensors(tmp_path: Path) -> None:
    network = model()
    run = recorded(network, X)
    instrument.dump(network, X, out=tmp_path)
    found = instrument.diff(run, tmp_path)
    assert found.is_identical
    assert [*found.layers["layer"]] == ["0", "1", "2", ""]
    with torch.no_grad():
        network[2].bias.add_(1.0)  # type: ignore[index,operator,union-attr]
    assert instrument.diff(recorded(network, X), tmp_path).suspect == "2"


def test_other_token_ids_are_reported(tmp_path: Path) -> None:
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for name, tokens in (("a", ids), ("b", ids + 1), ("c", ids.roll(1, 0))):
        samples = {"samples": torch.tensor([0, 1])} if name != "c" else {}
        instrument.dump(model(), X, out=tmp_path / name, ids={"input_ids": tokens, **samples})
    with pytest.raises(ConfigError, match="sample 0, position 0: the token ids differ"):
        instrument.diff(tmp_path / "a", tmp_path / "b")
    instrument.dump(model(), X, out=tmp_path / "d", ids={"input_ids": ids + 7})
    with pytest.raises(ConfigError, match="no sample has the same tokens"):
        instrument.diff(tmp_path / "c", tmp_path / "d")


def test_samples_correspond_by_the_tokens_that_both_have(tmp_path: Path) -> None:
    ids, positions = torch.tensor([[1, 2, 3], [1, 5, 6]]), torch.arange(3).expand(2, 3)
    instrument.dump(model(), X, out=tmp_path / "a", ids={"input_ids": ids})
    rest = {"input_ids": ids[[1, 0], 1:], "position_ids": positions[:, 1:]}  # the first tokens were in a cache
    instrument.dump(model(), X[[1, 0], 1:], out=tmp_path / "b", ids=rest)
    found = instrument.diff(tmp_path / "a", tmp_path / "b")
    assert "aligned: 4 of 6 tokens of A and 4 of B" in found.alignment
    assert found.is_within_tolerance
    assert found.first is None
    instrument.dump(model(), X, out=tmp_path / "c", ids={"input_ids": ids, "attention_mask": torch.ones(3, 4)})
    with pytest.raises(ConfigError, match="the shapes of the ids do not fit"):
        instrument.diff(tmp_path / "a", tmp_path / "c")


def test_other_inputs_are_stated(tmp_path: Path) -> None:
    for name, x in (("a", X), ("b", X + 1)):
        instrument.dump(model(), x, out=tmp_path / name)
    text = str(instrument.diff(tmp_path / "a", tmp_path / "b"))
    assert "The inputs of the models differ" in text
    assert "record the inputs" not in text


def test_names_with_a_hyphen_are_not_expressions(tmp_path: Path) -> None:
    one, other = write(tmp_path / "a" / "x.pt", {"a-1": X}), write(tmp_path / "b" / "x.pt", {"b-1": X})
    assert instrument.diff(one, other, rename={"a-1": "b-1"}).is_identical


@pytest.mark.slow
def test_given_tolerance_replaces_the_noise(tmp_path: Path) -> None:
    one = write(tmp_path / "a" / "x.pt", {"x": X, "y": X})
    other = write(tmp_path / "b" / "x.pt", {"x": X, "y": X * 1.01})
    found = instrument.diff(one, other)
    assert found.suspect == "y"
    assert found.tensors["ratio"][1] > 1000
    found = instrument.diff(one, other, tolerance=0.1)
    assert found.is_within_tolerance
    assert "noise" not in found.tensors
    assert "tolerance: 0.1" in str(found)


def test_model_that_fails_leaves_no_dump_and_no_hooks(tmp_path: Path) -> None:
    network = model()
    with pytest.raises(RuntimeError):
        instrument.dump(network, X[..., :3], out=tmp_path)
    assert not [*tmp_path.iterdir()]
    assert not [module for module in network.modules() if module._forward_hooks or module._forward_pre_hooks]


def test_first_tensors_correspond_if_paths_differ(tmp_path: Path) -> None:
    class Tuple(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.sum()

    for name, network in (("a", model()), ("b", Tuple(*model()))):
        instrument.dump(network, X, out=tmp_path / name)
    found = instrument.diff(tmp_path / "a", tmp_path / "b")
    row = found.layers[(found.layers["layer"] == "") & (found.layers["role"] == "output")].iloc[0]
    assert (row["path"], row["path_b"]) == ("", "0")
    assert [*found.unmatched["path"]] == ["1"]


@pytest.mark.slow
def test_leading_dimension_of_size_one_is_no_difference(tmp_path: Path) -> None:
    positions = torch.arange(5.0)
    for name, tensor in (("a", positions[None]), ("b", positions), ("c", positions[None] + 1), ("d", positions[:4])):
        write(tmp_path / name / "x.safetensors", {"positions": tensor.contiguous()})
    found = instrument.diff(tmp_path / "a", tmp_path / "b")
    assert found.first is None
    assert "EQUAL BITS" in str(found)
    assert instrument.diff(tmp_path / "b", tmp_path / "c").first is not None
    text = str(instrument.diff(tmp_path / "a", tmp_path / "d"))
    assert "  shape [1, 5] and [4]" in text
    assert "rounding noise of this layer" not in text


def test_renaming_that_is_no_mapping_is_reported() -> None:
    with pytest.raises(ConfigError, match="rename: must be a mapping"):
        instrument.diff("a", "b", rename=[("x", "y")])  # type: ignore[arg-type]


@pytest.mark.slow
def test_dump_requires_only_torch(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    source = (REPOSITORY / "instrument/integrations/dump.py").read_text()
    (tmp_path / "code" / "dump.py").write_text(source)
    ast.parse(source, feature_version=(3, 8))
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "code")!r})
sys.modules["safetensors"] = None
import torch
from dump import dump
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
dump(model, torch.arange(24.0).reshape(2, 3, 4), "**", out={str(tmp_path / "port")!r})
assert not [name for name in sys.modules if name.startswith("instrument")]
"""
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=120)
    instrument.dump(model(), X, out=tmp_path / "own")
    assert [file.suffix for file in (tmp_path / "port").iterdir()] == [".pt"]
    assert instrument.diff(tmp_path / "own", tmp_path / "port").is_identical


class Nested(nn.Module):
    """Calls a module twice, returns nested values, and has a module that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Any]:
        once = self.twice(x * scale)
        return {"first": once, "rest": [self.twice(once), (x.to(torch.float16), 3)], "sparse": x[0].to_sparse()}


def test_dump_keeps_calls_nested_values_and_dtypes(tmp_path: Path) -> None:
    network = Nested().bfloat16()
    before, state = torch.get_rng_state(), {name: value.clone() for name, value in network.state_dict().items()}
    batch = {"x": X.bfloat16(), "scale": torch.tensor(2.0, dtype=torch.bfloat16)}
    instrument.dump(network, batch, out=tmp_path, float64=True)
    expected = network(**batch)
    found = tensors_of(tmp_path)
    calls = [entry.call for entry in read_folder(tmp_path).entries if entry.layer == "twice" and entry.role == "output"]
    assert calls == [0, 1]
    assert [*found] == [
        ".:input.x",
        ".:input.scale",
        "twice:input.input",
        "twice",
        ".:output.first",
        ".:output.rest.0",
        ".:output.rest.1.0",
    ]
    assert torch.equal(found[".:output.rest.0"], expected["rest"][0])
    assert found[".:output.rest.1.0"].dtype == torch.float16
    shutil.copytree(tmp_path, tmp_path.parent / "copy")
    assert "not written by A: :output.sparse (" in str(instrument.diff(tmp_path, tmp_path.parent / "copy"))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert not [module for module in network.modules() if module._forward_hooks or module._forward_pre_hooks]
    assert tensors_of(tmp_path / "float64")["twice"].dtype == torch.float64
    assert tensors_of(tmp_path / "float64")[".:output.rest.1.0"].dtype == torch.float16


def test_order_of_execution_includes_repeated_calls(tmp_path: Path) -> None:
    class Repeated(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.activation, self.linear, self.factor = nn.ReLU(), nn.Linear(4, 4), factor

        def forward(self, x: Tensor) -> Tensor:
            return cast(Tensor, self.activation(self.linear(self.activation(x)) * self.factor))

    for name, factor, weight in (("a", 1.0, 1.0), ("b", 1.0, 2.0), ("c", 2.0, 1.0)):
        torch.manual_seed(0)
        network = Repeated(factor)
        network.linear.weight.data.mul_(weight)
        instrument.dump(network, X, out=tmp_path / name)
    assert instrument.diff(tmp_path / "a", tmp_path / "b").suspect == "linear"
    found = instrument.diff(tmp_path / "a", tmp_path / "c")
    assert found.suspect == ""
    assert "activation[input] (ReLU), forward_pre input, call 1" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128], ids=["safetensors", "pt"])
def test_dump_of_another_process_is_not_overwritten(tmp_path: Path, dtype: torch.dtype) -> None:
    network = nn.Identity()
    first, second = (instrument.Dump(network, out=tmp_path) for _ in range(2))
    with first:
        network(torch.ones(2, dtype=dtype))
    (file,) = tmp_path.iterdir()
    before = file.read_bytes()
    with pytest.raises(FileExistsError), second:
        network(torch.zeros(2, dtype=dtype))
    assert file.read_bytes() == before


def test_dump_selects_layers_and_refuses_mistakes(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    instrument.dump(network, X, ["0.*", "1"], out=tmp_path)
    assert {entry.layer for entry in read_folder(tmp_path).entries} == {"0.0", "0.1", "1"}
    instrument.dump(network, X, ".", out=tmp_path / "root")
    assert {entry.layer for entry in read_folder(tmp_path / "root").entries} == {""}
    with pytest.raises(FileExistsError, match="contains a dump"):
        instrument.dump(network, X, out=tmp_path)
    with pytest.raises(ValueError, match="matches no module"):
        instrument.dump(network, X, "encoder.**", out=tmp_path / "other")
    with pytest.raises(ValueError, match="matches no module"):
        instrument.dump(network, X, [], out=tmp_path / "other")
    with pytest.raises(ValueError, match="'tokens' is unknown"):
        instrument.dump(network, X, out=tmp_path / "other", ids={"tokens": X})


def test_float64_pass_has_the_same_dropout(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(), nn.Linear(6, 2))
    instrument.dump(network, X, out=tmp_path, float64=True)
    one, exact = tensors_of(tmp_path)["1"], tensors_of(tmp_path / "float64")["1"]
    assert torch.allclose(one.double(), exact, rtol=1e-4)


def test_dtypes_that_safetensors_does_not_have_are_written(tmp_path: Path) -> None:
    class Complex(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.complex(x.double(), x.double())

    instrument.dump(Complex(), X, out=tmp_path, ids={"samples": cast(Any, [3, 4])})
    assert torch.equal(tensors_of(tmp_path)["."], Complex()(X))
    assert read_folder(tmp_path).ids[0]["samples"].tolist() == [3, 4]


def test_added_tensor_belongs_to_its_pass(tmp_path: Path) -> None:
    instrument.dump(model(), X, out=tmp_path / "one")
    with instrument.Dump(network := model(), out=tmp_path / "many") as dump:
        for _ in range(2):
            network(X)
            dump.add("total", X.sum())
    files = sorted((tmp_path / "many").iterdir())
    assert [file.name for file in files] == ["pass-000000.safetensors", "pass-000001.safetensors"]
    assert all("total:output" in load_file(file) for file in files)
    found = instrument.diff(tmp_path / "one", tmp_path / "many")
    assert found.is_identical
    assert [*found.unmatched["layer"]] == ["total"]


class Single(nn.Linear):
    """A layer without a kernel in float64."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("not implemented for Double")
        return super().forward(x)


def test_model_that_does_not_run_in_float64_is_reported(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="does not run in float64.*not implemented for Double"):
        instrument.dump(nn.Sequential(model(), Single(2, 2)), X, out=tmp_path / "a", float64=True)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    found = instrument.diff(tmp_path / "a", tmp_path / "b")
    assert "estimated" in found.noise
    assert found.is_identical


def test_tensors_are_read_at_most_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for the comparison, and once for the shapes or for the rounding noise."""
    reads: Counter[str] = Counter()
    given = foreign_folder.Reader.__call__

    def read(self: Any) -> Tensor:
        tensor = given(self)
        reads[f"{tensor.dtype}"] += 1
        return tensor

    monkeypatch.setattr(foreign_folder.Reader, "__call__", read)
    one, other = write(tmp_path / "a" / "x.npz", {"x": X}), write(tmp_path / "b" / "x.npz", {"x": X})
    write(one / "float64" / "x.npz", {"x": X.double()})
    assert instrument.diff(one, other, foreign=True).first is None
    assert reads == {"torch.float32": 4, "torch.float64": 1}
