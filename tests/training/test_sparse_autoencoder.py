"""Sparse autoencoders of recorded activations: the model, its loss and the recovered loss equal those of plain PyTorch code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Answer, finished
from distributed_runs import run_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from training_runs import prepared, run_in_memory

import instrument
from instrument import ConfigError
from instrument.config.parse import parse_config
from instrument.training.datasets import english
from instrument.training.models import SparseAutoencoder, TinyGPT, unit_directions
from instrument.training.runner import run
from instrument.training.sparse_autoencoder import PatchedModel, recorded_tokens
from instrument.training.terminal import Terminal

LENGTH, WIDTH, PADDED = 16, 8, 6
SMALL = ("quiet=true", f"model.width={WIDTH}", f"model.length={LENGTH}", f"data.dataset.length={LENGTH}")
RECORD = {"action": "record", "stats": "none", "tensors": True}
AUTOENCODER = (
    *(
        "+exp=sparse_autoencoder",
        "data.dataset.run=activations",
        f"model.width={WIDTH}",
        "model.features=32",
        "model.k=3",
    ),
    *("train.steps=4", "train.eval_every=2", "train.eval_batch_size=3", "quiet=true"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the runs of a trained transformer, its activations on 50 sequences, and an autoencoder of them."""
    folder = tmp_path_factory.mktemp("sparse") / "runs"
    folder.mkdir()
    finished(folder / "language", "+exp=language", *SMALL, "train.steps=5", "train.save=true")
    finished(
        folder / "activations",
        "+exp=activations",
        *SMALL,
        "init_from=language",
        "data.slice.stop=50",
        "train.batch_size=20",
    )
    finished(folder / "autoencoder", *AUTOENCODER)
    return folder


def by_hand(weights: dict[str, Tensor], x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return reconstructions and features: the k largest positive values of each token, found by sorting."""
    codes = (x - weights["bias"]) @ weights["encoder.weight"].T + weights["encoder.bias"]
    limit = codes.sort(-1, descending=True).values[..., k - 1 : k]
    features = torch.where((codes >= limit) & (codes > 0), codes, 0.0)
    return features @ weights["decoder.weight"].T + weights["bias"], features


def patched(model: nn.Module, layer: nn.Module, value: Tensor | None, inputs: dict[str, Tensor]) -> Any:
    """Return the output of a model with another output of a layer."""

    def replace(module: nn.Module, args: object, output: Any) -> Any:
        return output if value is None else value if isinstance(output, Tensor) else (value, *output[1:])

    handle = layer.register_forward_hook(replace)
    with torch.no_grad():
        output = model(**inputs)
    handle.remove()
    return output


def check_losses(metrics: dict[str, Any], sums: dict[str, float], count: int) -> None:
    """Compare the metrics with the sums of the losses of all predicted tokens."""
    losses = {name: total / count for name, total in sums.items()}
    for name, loss in losses.items():
        assert metrics[f"loss_{name}"] == pytest.approx(loss, rel=1e-5)
    recovered = (losses["zero"] - losses["patched"]) / (losses["zero"] - losses["clean"])
    assert metrics["loss_recovered"] == pytest.approx(recovered, rel=1e-3)
    assert losses["zero"] != pytest.approx(losses["clean"], rel=1e-3)


def test_loss_recovered_of_the_experiment_equals_plain_pytorch(folder: Path) -> None:
    found = instrument.load(folder / "autoencoder")
    gpt = TinyGPT(width=WIDTH, length=LENGTH).eval()
    gpt.load_state_dict(torch.load(folder / "language/weights.pt"))
    weights = torch.load(folder / "autoencoder/weights.pt")
    windows = english("train", LENGTH)[45:50]  # the last tenth of 50
    sums, errors, counts, spread = dict.fromkeys(("clean", "patched", "zero"), 0.0), 0.0, 0.0, 0.0
    for tokens in windows.split(3):
        seen: list[Tensor] = []
        gpt.blocks[0].register_forward_hook(lambda m, a, out, seen=seen: seen.append(out))
        patched(gpt, gpt.blocks[0], None, {"tokens": tokens})
        x = seen[0]
        reconstruction, features = by_hand(weights, x, 3)
        for name, value in {"clean": None, "patched": reconstruction, "zero": torch.zeros_like(x)}.items():
            logits = patched(gpt, gpt.blocks[0], value, {"tokens": tokens})
            sums[name] += F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        errors += (reconstruction - x).square().sum().item()
        counts += (features != 0).sum().item()
        spread += (x - x.mean((0, 1))).square().sum().item()
    metrics = found.info["metrics"]
    check_losses(metrics, sums, 5 * (LENGTH - 1))
    assert metrics["loss"] == pytest.approx(errors / (5 * LENGTH), rel=1e-5)
    assert metrics["l0"] == pytest.approx(counts / (5 * LENGTH))
    assert metrics["explained_variance"] == pytest.approx(1 - errors / spread, rel=1e-4)
    assert found.metrics.query("phase == 'eval'").loss_recovered.notna().tolist() == [True, True]
    assert found.metrics.query("phase == 'train'").loss_recovered.isna().all()
    norms = weights["decoder.weight"].norm(dim=0)
    torch.testing.assert_close(norms, torch.ones_like(norms))


@pytest.mark.slow
def test_two_processes_report_the_losses_of_one(folder: Path) -> None:
    done = run_processes(folder, *AUTOENCODER, "train.parallel=ddp", "device=cpu", "hydra.run.dir=two", processes=2)
    assert done.returncode == 0, done.stderr
    one, two = (instrument.load(folder / name).metrics for name in ("autoencoder", "two"))
    for name in ("step", "loss", "l0", "loss_clean", "loss_patched", "loss_zero", "loss_recovered"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-4, err_msg=name)


@pytest.mark.slow
def test_recorded_tokens_are_split_by_sequence(folder: Path) -> None:
    recorded = instrument.load(folder / "activations").features("blocks.0")
    x = torch.from_numpy(recorded.X)  # [50, T, width]
    train, test = (
        recorded_tokens(split, str(folder / "activations"), "blocks.0", mask=None) for split in ("train", "test")
    )
    assert (len(train), len(test)) == (45 * LENGTH, 5)
    assert train.dataset.items_before(50) == len(train.dataset) == 50 * LENGTH
    tokens = torch.stack([train[i]["x"] for i in range(len(train))])
    torch.testing.assert_close(tokens, x[:45].flatten(0, 1), rtol=0, atol=0)
    for i in range(5):
        torch.testing.assert_close(test[i]["x"], x[45 + i], rtol=0, atol=0)
        assert int(test[i]["id"]) == recorded.ids[45 + i]


class Padded(Dataset[dict[str, Tensor]]):
    """Sequences of 3 to 6 random tokens, padded on the right to 6."""

    def __init__(self, samples: int = 30) -> None:
        generator = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(32, (samples, PADDED), generator=generator)
        self.mask = torch.arange(PADDED) < torch.randint(3, PADDED + 1, (samples, 1), generator=generator)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        labels = self.tokens[index].masked_fill(~self.mask[index], -100)
        return {"input_ids": self.tokens[index], "attention_mask": self.mask[index].long(), "labels": labels}


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": PADDED, "n_embd": WIDTH, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.5))


def test_padding_is_left_out_of_a_transformers_model(tmp_path: Path) -> None:
    raw = {
        "mode": "forward",
        "device": "cpu",
        "model": {"_target_": f"{__name__}.gpt2"},
        "data": {"dataset": {"_target_": f"{__name__}.Padded"}},
        "task": {"_target_": "instrument.tasks.HuggingFace"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "train": {"steps": 1, "batch_size": 8},
        "hooks": {
            "stream": {"layers": "transformer.h.0", "kind": "forward", **RECORD},
            "mask": {"layers": ".", "kind": "forward_pre", "path": "attention_mask", **RECORD},
        },
    }
    run(parse_config(raw), tmp_path / "gpt2", Terminal(quiet=True), raw=raw, overrides={})
    at = {"run": str(tmp_path / "gpt2"), "layer": "transformer.h.0"}
    experiment = prepared(
        model={"_target_": "instrument.training.models.SparseAutoencoder", "width": WIDTH, "features": 16},
        data={
            "dataset": {
                "_target_": "instrument.training.sparse_autoencoder.recorded_tokens",
                **at,
                "mask": "attention_mask",
            }
        },
        task={"_target_": "instrument.training.sparse_autoencoder.SparseReconstruction", "l1": 0.1, **at},
        train={"steps": 2, "batch_size": 16, "eval_batch_size": 2},
    )
    padded, model = Padded(), gpt2().eval()
    assert len(experiment.data.train) == int(padded.mask[:27].sum())
    _, metrics = run_in_memory(experiment)
    sums, loss, count = dict.fromkeys(("clean", "patched", "zero"), 0.0), 0.0, 0
    state = experiment.model.state_dict()
    for batch in ([27, 28], [29]):
        inputs = {name: torch.stack([padded[i][name] for i in batch]) for name in padded[0]}
        mask = inputs["attention_mask"].bool()
        x = patched(model, model.transformer.h[0], None, {**inputs, "output_hidden_states": True}).hidden_states[1]
        reconstruction, features = by_hand(state, x, 16)
        for name, value in {"clean": x, "patched": reconstruction, "zero": torch.zeros_like(x)}.items():
            logits = patched(model, model.transformer.h[0], torch.where(mask[..., None], value, x), inputs).logits
            labels = inputs["labels"][:, 1:]
            sums[name] += F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum").item()
            count += int((labels >= 0).sum()) if name == "clean" else 0
        loss += ((reconstruction - x).square().sum(-1) + 0.1 * features.sum(-1))[mask].sum().item()
    check_losses(metrics, sums, count)
    assert metrics["loss"] == pytest.approx(loss / int(padded.mask[27:].sum()), rel=1e-5)


def test_model_starts_with_unit_directions_and_a_tied_encoder() -> None:
    model = SparseAutoencoder(6, k=2)
    norms = model.decoder.weight.norm(dim=0)
    torch.testing.assert_close(norms, torch.ones(48))
    torch.testing.assert_close(model.encoder.weight, model.decoder.weight.T, rtol=0, atol=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    x = torch.randn(5, 3, 6)
    for found, expected in zip(model(x), by_hand(model.state_dict(), x, 2), strict=True):
        torch.testing.assert_close(found, expected)
    scaled = unit_directions(torch.tensor([[3.0, 0.0], [4.0, 0.0]]))
    assert scaled.tolist() == [[pytest.approx(0.6), 0.0], [pytest.approx(0.8), 0.0]]


def test_experiment_without_its_run_names_the_commands(cli: Callable[..., Answer]) -> None:
    answer = cli("+exp=sparse_autoencoder").expect(2)
    for command in (
        "+exp=language train.save=true hydra.run.dir=runs/language",
        "+exp=activations hydra.run.dir=runs/activations",
    ):
        assert f"python -m instrument {command}" in " ".join(answer.err.split())


def test_model_of_the_run_is_checked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(AttributeError, match="TinyGPT has no attribute `block`"):
        PatchedModel("activations", "block.0")
    with pytest.raises(ConfigError, match=r"task.run: [\s\S]*must have mode: forward[\s\S]*train"):
        PatchedModel("language", "blocks.0")
    with instrument.attach(torch.nn.Linear(2, 2), {}, out=folder / "attached"):
        pass
    with pytest.raises(
        ConfigError, match=r"mode: forward[\s\S]*given +a run of instrument.attach[\s\S]*\+exp=activations"
    ):
        PatchedModel("attached", "blocks.0")
    config = {**instrument.load("activations").info["config"], "hooks": {}, "rules": {}}
    config |= {"task": {"_target_": "instrument.tasks.ForwardOnly"}, "data": {**config["data"], "slice": {"stop": 2}}}
    run(parse_config(config), folder / "without_loss", Terminal(quiet=True), raw=config, overrides={})
    with pytest.raises(ConfigError, match=r"task.run: the task of the run computes no loss[\s\S]*ForwardOnly"):
        PatchedModel("without_loss", "blocks.0").losses([0], torch.zeros(1, LENGTH, WIDTH), None)
    with pytest.raises(ValueError, match=r"the layer returned \[1, 16, 8\], but \[1, 2, 8\] was recorded"):
        PatchedModel("activations", "blocks.0").losses([0], torch.zeros(1, 2, WIDTH), None)
    with pytest.raises(ValueError, match="'valid'"):
        recorded_tokens("valid", "activations", "blocks.0")
