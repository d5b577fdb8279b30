"""`init_from` and `train.save`: weights of files and runs, and errors for weights that do not fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_comparison import identical
from torch import nn
from training_runs import CONFIG, failing_after, prepared, resume_here, train_here

import instrument
import instrument.training.models
from instrument import ConfigError
from instrument.training.checkpoint import Checkpoints
from instrument.training.experiment import Experiment

Cli = Callable[..., Any]
RUN = ["model=mlp", "model.sizes=[64,16,10]", "data=digits", "data.slice.stop=200", "train.steps=4"]


def prepare_mlp(path: Path | str, *, strict: bool = True, **changes: Any) -> Experiment:
    data = {**CONFIG["data"], "slice": {"stop": 20}}
    return prepared(data=data, init_from={"path": str(path), "strict": strict}, **changes)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """State dict of the model of `prepare_mlp`, with other weights."""
    torch.manual_seed(7)
    model = instrument.training.models.MLP([64, 16, 10])  # type: ignore[attr-defined]
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def write_safetensors(state: dict[str, torch.Tensor], path: Path) -> None:
    from safetensors.torch import save_file

    save_file(state, path)


def test_ignored_names_are_reported(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    name, *_ = weights
    weights["extra"] = weights.pop(name)
    weights = {key: value.fill_(float("nan")) for key, value in weights.items()}
    torch.save(weights, tmp_path / "weights.pt")
    loaded = prepare_mlp(tmp_path / "weights.pt", strict=False).weights
    assert loaded is not None
    assert (loaded.missing, loaded.unexpected) == ([name], ["extra"])
    assert loaded.ignored is not None
    assert name in loaded.ignored
    assert "extra" in loaded.ignored


@pytest.mark.spread(1)
@pytest.mark.parametrize("mode", ["train", "forward"])
@pytest.mark.parametrize("suffix", [".pt", ".pth", ".safetensors"])
def test_weights_of_a_file_are_loaded(tmp_path: Path, weights: dict[str, torch.Tensor], suffix: str, mode: str) -> None:
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        write_safetensors(weights, path)
    else:
        torch.save(weights, path)
    experiment = prepare_mlp(path, mode=mode)
    assert identical(dict(experiment.model.state_dict()), weights)
    assert experiment.weights is not None
    assert experiment.weights.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert experiment.weights.ignored is None


@pytest.mark.spread(1)
@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("key", [None, "state_dict", "model"])
def test_prefixes_of_wrappers_are_removed(
    tmp_path: Path, weights: dict[str, torch.Tensor], prefix: str, key: str | None
) -> None:
    state = {f"{prefix}{name}": tensor for name, tensor in weights.items()}
    torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / "weights.pt")
    assert identical(dict(prepare_mlp(tmp_path / "weights.pt").model.state_dict()), weights)


def test_missing_and_unexpected_names_are_reported(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    name = next(iter(weights))
    changed = {name.replace("layers", "layer") if old == name else old: value for old, value in weights.items()}
    torch.save(changed, tmp_path / "weights.pt")
    with pytest.raises(ConfigError) as caught:
        prepare_mlp(tmp_path / "weights.pt")
    missing, unexpected = caught.value.problems
    other = name.replace("layers", "layer")
    assert (missing.where, missing.message) == ("init_from", f"the state dict lacks names of the model: {name}")
    assert (missing.similar, unexpected.similar) == ([other], [name])
    assert unexpected.message == f"the state dict has names that the model lacks: {other}"
    experiment = prepare_mlp(tmp_path / "weights.pt", strict=False)
    last = list(weights)[-1]
    assert torch.equal(experiment.model.state_dict()[last], weights[last])


def test_weights_of_another_model_are_reported(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    *_, matrix, _ = weights
    torch.save({**weights, matrix: torch.zeros(5, 16)}, tmp_path / "weights.pt")
    torch.save(nn.LSTM(3, 4).state_dict(), tmp_path / "other.pt")
    for strict in (True, False):
        with pytest.raises(ConfigError) as caught:
            prepare_mlp(tmp_path / "weights.pt", strict=strict)
        assert f"size mismatch for {matrix}: copying a param with shape torch.Size([5, 16])" in str(caught.value)
        with pytest.raises(ConfigError, match="no name in the state dict is a name in the model"):
            prepare_mlp(tmp_path / "other.pt", strict=strict)


def test_tied_weights_may_be_missing(tmp_path: Path) -> None:
    model = {"_target_": f"{__name__}.Tied"}
    torch.save({"1.weight": torch.ones(64, 64)}, tmp_path / "weights.pt")
    experiment = prepare_mlp(tmp_path / "weights.pt", model=model)
    assert experiment.model.state_dict()["2.weight"].eq(1).all()


class Tied(nn.Sequential):
    """A model with two names for one weight."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        self[2].weight = self[1].weight


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "the file does not exist"),
        (b"nothing", "cannot be read with weights_only=True"),
        ([torch.ones(2)], "contains no state dict"),
        ({"epoch": 3}, "contains no state dict"),
        (nn.Linear(2, 2), "cannot be read with weights_only=True"),
    ],
)
def test_file_without_state_dict_is_reported(tmp_path: Path, content: Any, words: str) -> None:
    path = tmp_path / "weights.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=words) as caught:
        prepare_mlp(path)
    assert caught.value.problems[0].where == "init_from"


def test_missing_safetensors_package_is_named(
    tmp_path: Path, weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(weights, tmp_path / "weights.safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors.torch", None)
    with pytest.raises(ConfigError, match="pip install safetensors"):
        prepare_mlp(tmp_path / "weights.safetensors")


@pytest.mark.slow
def test_file_is_loaded_before_apply(cli: Cli, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "weights.pt")
    head = list(weights)[-2]
    layer = head.removesuffix(".weight")
    fill = f'+apply.head={{layers: "{layer}", action: fill, value: 0.5}}'
    path = ["init_from.path=weights.pt", "init_from.strict=false"]
    cli(*RUN, "mode=forward", *path, fill, "hydra.run.dir=out", "train.save=true").expect(0)
    saved = torch.load("out/weights.pt", weights_only=True)
    assert saved[head].eq(0.5).all()
    assert torch.equal(saved["layers.0.0.weight"], weights["layers.0.0.weight"])


@pytest.mark.slow
def test_weights_of_a_run_are_loaded_after_apply(workdir: Path) -> None:
    kaiming = "+apply.start={types: [Linear], action: init, fn: kaiming_normal_}"
    first = train_here(workdir / "first", *RUN, kaiming, "train.save=true", "train.checkpoint.every=3")
    trained = torch.load("first/weights.pt", weights_only=True)
    assert identical(trained, dict(Checkpoints(Path("first")).load()["model"]))
    again = [*RUN, kaiming, "mode=forward", "init_from=first", "train.save=true"]
    second = train_here(workdir / "second", *again)
    assert identical(torch.load("second/weights.pt", weights_only=True), trained)
    assert second.info["init_from"]["path"] == "first"
    assert second.info["init_from"]["sha256"] == hashlib.sha256(Path("first/weights.pt").read_bytes()).hexdigest()
    Path("first/weights.pt").unlink()
    train_here(workdir / "third", *again)
    assert identical(torch.load("third/weights.pt", weights_only=True), trained)
    assert first.info.get("init_from") is None


def test_run_without_weights_is_reported(workdir: Path) -> None:
    train_here(workdir / "first", *RUN)
    with pytest.raises(ConfigError, match="the run saved no weights"):
        train_here(workdir / "second", *RUN, "init_from=first")
    train_here(workdir / "third", *RUN, "mode=forward", "train.checkpoint.every=2")
    with pytest.raises(ConfigError, match="the checkpoint contains no weights, since the run had mode: forward"):
        train_here(workdir / "second", *RUN, "init_from=third")
    assert not Path("second").exists()


@pytest.mark.slow
def test_resumed_run_requires_the_same_weights(workdir: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "weights.pt")
    with failing_after(2, "loop.forward_step"), pytest.raises(RuntimeError, match="stopped here"):
        train_here(workdir / "out", *RUN, "mode=forward", "init_from=weights.pt", "train.checkpoint.every=1")
    content = Path("weights.pt").read_bytes()
    torch.save({name: tensor + 1 for name, tensor in weights.items()}, "weights.pt")
    with pytest.raises(ConfigError, match="the file has changed since the run was started"):
        resume_here(workdir / "out")
    Path("weights.pt").write_bytes(content)
    assert resume_here(workdir / "out").info["status"] == "done"


@pytest.mark.slow
def test_resumed_training_needs_no_weights(workdir: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, "weights.pt")
    with failing_after(2), pytest.raises(RuntimeError, match="stopped here"):
        train_here(workdir / "out", *RUN, "init_from=weights.pt", "train.checkpoint.every=1")
    Path("weights.pt").unlink()
    assert resume_here(workdir / "out").info["init_from"]["path"] == "weights.pt"


@pytest.mark.slow
def test_weights_that_cannot_be_saved_are_reported(cli: Cli) -> None:
    Path("out/weights.pt").mkdir(parents=True)
    answer = cli(*RUN, "train.save=true", "hydra.run.dir=out").expect(1)
    assert "weights.pt cannot be written: Is a directory" in answer.err
    assert not Path("out/weights.tmp").exists()
    assert len(instrument.load("out").metrics) == 5
