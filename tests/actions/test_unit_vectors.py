"""Functions with vectors along the units: from a file, or computed from the recorded tensors of other runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hook_runs import record
from test_selection import IMAGES, SEQUENCE, apply
from torch import Tensor, nn

import instrument
from instrument import ConfigError

DIRECTIONS = torch.randn(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
BATCHES = torch.randn(3, 4, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(4)) + 0.5


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with files of vectors and with recorded runs of an identity."""
    folder = tmp_path_factory.mktemp("recorded")
    np.save(folder / "one.npy", DIRECTIONS[0].numpy())
    np.save(folder / "two.npy", DIRECTIONS.numpy())
    np.save(folder / "three.npy", np.arange(3.0))
    np.save(folder / "last.npy", np.eye(12)[11])
    np.save(folder / "infinite.npy", np.full(12, np.inf))
    scaled = {"a": BATCHES, "b": 2 * BATCHES, "far": BATCHES + 1e6 * DIRECTIONS[0]}
    scaled |= {"nan": BATCHES.where(BATCHES > 0, torch.nan), "empty": BATCHES[:, :0]}
    for name, batches in scaled.items():
        kept = {"kept": "0", "other": "1", "again": "1"}
        hooks = {hook: record("forward", layer, tensors=True) for hook, layer in kept.items()}
        model = nn.Sequential(nn.Identity(), nn.Identity())
        with instrument.attach(model, hooks, out=folder / name) as probe:
            for batch in batches:
                model(batch)
                probe.end_step()
    return folder


@pytest.fixture
def folder(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in the folder of the vectors and runs. Tests write their own files elsewhere."""
    monkeypatch.chdir(recorded)
    return recorded


def result(tensor: Tensor, module: nn.Module | None = None, **fields: Any) -> tuple[Tensor, Tensor]:
    """Return output and gradient of a hook on layer `0`."""
    model = nn.Sequential(module or nn.Identity())
    output, gradient, _ = apply(tensor, None, model, **{"layers": "0", "action": "modify", **fields})
    return output, gradient


@pytest.mark.spread(2)
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_vector_of_a_file_is_added_to_the_units(dtype: torch.dtype) -> None:
    x = SEQUENCE.to(dtype)
    step = (DIRECTIONS[0].to(torch.promote_types(dtype, torch.float32)) * 0.5).to(dtype)
    output, gradient = result(x, fn="add", vector="one.npy", scale=0.5)
    assert torch.equal(output, x + step)
    assert torch.equal(gradient, torch.ones_like(x))
    output, _ = result(x, fn="add", vector="one.npy", scale=0.5, units=[0, 7, 3], positions=[-1])
    expected = x.clone()
    expected[:, -1, [0, 7, 3]] += step[[0, 7, 3]]
    assert torch.equal(output, expected)
    output, _ = result(x, fn="add", vector="three.npy", heads={"of": 4, "take": 2}, slice=None)
    expected = x.clone()
    expected[..., 6:9] += torch.arange(3.0, dtype=dtype)
    assert torch.equal(output, expected)


def test_vector_of_a_safetensors_file_is_selected_by_its_key(workdir: Path) -> None:
    from safetensors.torch import save_file

    save_file({"left": DIRECTIONS[0].float(), "right": DIRECTIONS[1].float()}, workdir / "v.safetensors")
    output, _ = result(SEQUENCE.float(), fn="add", vector="v.safetensors", key="right")
    assert torch.equal(output, SEQUENCE.float() + DIRECTIONS[1].float())
    for key, words in (
        (None, "requires the name of a tensor"),
        ("rihgt", r"no such tensor(.|\n)*left \[12\], right(.|\n)*similar  right"),
    ):
        with pytest.raises(ConfigError, match=rf"hooks\.h\.key: {'' if key is None else 'the file has '}{words}"):
            result(SEQUENCE, fn="add", vector="v.safetensors", key=key)


@pytest.mark.slow
@pytest.mark.usefixtures("folder")
def test_projection_equals_the_formula_and_has_its_gradient(tmp_path: Path) -> None:
    direction = DIRECTIONS[0] / DIRECTIONS[0].norm()
    along = (SEQUENCE @ direction)[..., None] * direction
    output, gradient = result(SEQUENCE, fn="project_out", vector="one.npy")
    assert torch.allclose(output, SEQUENCE - along, rtol=0, atol=1e-14)
    assert torch.allclose(gradient, (1 - direction.sum() * direction).expand_as(SEQUENCE), rtol=0, atol=1e-14)
    basis = torch.linalg.qr(DIRECTIONS.T).Q
    output, _ = result(SEQUENCE, fn="project_onto", vector="two.npy")
    assert torch.allclose(output, SEQUENCE @ basis @ basis.T, rtol=0, atol=1e-14)
    images = IMAGES[:, :3]
    unit = torch.arange(3.0, dtype=torch.float64) / 5**0.5
    output, _ = result(images, fn="project_out", vector="three.npy")
    expected = images - torch.einsum("nchw,c,d->ndhw", images, unit, unit)
    assert torch.allclose(output, expected, rtol=0, atol=1e-14)
    np.save(tmp_path / "same.npy", DIRECTIONS[[0, 0]].numpy())  # linearly dependent
    output, _ = result(SEQUENCE, fn="project_out", vector=str(tmp_path / "same.npy"))
    assert torch.allclose(output, SEQUENCE - along, rtol=0, atol=1e-14)
    module = nn.Identity()
    for fn in ("project_out", "project_onto"):
        spec = {"layers": ".", "kind": "forward", "action": "modify", "fn": fn, "vector": "two.npy", "slice": "1:, -1"}
        with instrument.attach(module, {"h": spec}):
            assert torch.autograd.gradcheck(module, SEQUENCE[:2, :2].clone().requires_grad_())


@pytest.mark.usefixtures("folder")
def test_vectors_of_other_runs_equal_those_by_hand() -> None:
    observations = BATCHES.reshape(-1, 12)
    mean = observations.mean(0)
    output, gradient = result(SEQUENCE, fn="mean_ablate", run="a", units=[1, 2, 5])
    expected = SEQUENCE.clone()
    expected[..., [1, 2, 5]] = mean[[1, 2, 5]]
    assert torch.allclose(output, expected, rtol=0, atol=1e-14)
    assert torch.equal(output[..., 6:], SEQUENCE[..., 6:])
    assert torch.equal(gradient, (output == SEQUENCE).double()), "no gradient flows through the mean"
    output, _ = result(SEQUENCE, fn="add", plus="b", minus="a", scale=-2.0)
    assert torch.allclose(output, SEQUENCE - 2 * mean, rtol=0, atol=1e-13)
    components = torch.linalg.svd(observations - mean, full_matrices=False).Vh[:3]
    for run, atol in (("a", 1e-12), ("far", 1e-8)):  # also with a mean that is far from zero
        output, _ = result(SEQUENCE, fn="project_onto", run=run, components=3)
        assert torch.allclose(output, SEQUENCE @ components.T @ components, rtol=0, atol=atol)
    output, _ = result(SEQUENCE, fn="mean_ablate", run="a", layer="1", hook="other")
    assert torch.allclose(output, mean.expand_as(SEQUENCE), rtol=0, atol=1e-14)


PROBLEMS = [
    ({"fn": "add", "vector": "oen.npy"}, r"hooks\.h\.vector: this file does not exist(.|\n)*similar  one\.npy"),
    ({"fn": "add", "vector": "one.txt"}, r"hooks\.h\.vector: unknown type of file(.|\n)*a \.npy or \.safetensors"),
    (
        {"fn": "add", "vector": "infinite.npy"},
        r"hooks\.h\.vector: the array has shape \[12\] and torch\.float64, with NaN or infinity",
    ),
    ({"fn": "add", "vector": "two.npy"}, r"hooks\.h\.vector: add requires one vector, but this file has 2"),
    ({"fn": "project_out", "vector": "last.npy", "units": [0, 1]}, r"vector: all directions are zero in the selected units"),
    ({"fn": "add", "vector": "one.npy", "key": "a"}, r"hooks\.h\.key: a \.npy file has no keys"),
    (
        {"fn": "project_out", "vector": "three.npy"},
        r"hooks\.h\.vector: the vector has 3 numbers, but the output of '0' has 12 units: shape \[3, 5, 12\](.|\n)*12 units",
    ),
    (
        {"fn": "add", "vector": "three.npy", "units": [0]},
        r"has 3 numbers, but the output of '0' has 1 units(.|\n)*each of the 1 units, or the 12 of the complete tensor",
    ),
    ({"fn": "add", "vector": "one.npy", "slice": ":, :, 0"}, r"hooks\.h\.fn: add requires a dimension of units"),
    ({"fn": "mean_ablate", "run": "c"}, r"hooks\.h\.run: "),
    ({"fn": "add", "plus": "a", "minus": "c"}, r"hooks\.h\.minus: "),
    ({"fn": "mean_ablate", "run": "nan"}, r"run: the recorded tensor of layer '0' has values that are not finite"),
    ({"fn": "project_out", "run": "empty"}, r"hooks\.h\.run: the recorded tensors of layer '0' are empty"),
    ({"fn": "mean_ablate", "run": "a", "hook": "kpet"}, r"hooks\.h\.hook: (.|\n)*similar  kept"),
    (
        {"fn": "mean_ablate", "run": "a", "layer": "7"},
        r"hooks\.h\.run: this run recorded no tensors of layer '7' with role 'output'(.|\n)*0 \[4, 5, 12\], 1 \[4, 5, 12\]",
    ),
    ({"fn": "mean_ablate", "run": "a", "layer": "1"}, r"hooks\.h\.run: several hooks of this run recorded layer '1': again, other"),
    ({"fn": "project_out", "run": "a", "components": 13}, r"hooks\.h\.components: .* has 12 components(.|\n)*1 to 12"),
]  # fmt: skip


@pytest.mark.usefixtures("workdir")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_projection_keeps_its_precision_under_autocast(dtype: torch.dtype) -> None:
    np.save("ones.npy", np.ones(64))
    tensor = torch.full((2, 64), 20000.0)
    with torch.autocast("cpu", dtype):
        output, _ = result(tensor, fn="project_onto", vector="ones.npy")
    assert torch.allclose(output, tensor, rtol=1e-6)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("fields", "message"), PROBLEMS, ids=lambda value: value.get("fn") if isinstance(value, dict) else None
)
def test_vector_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        result(SEQUENCE, **fields)
