"""Sparse autoencoders of recorded activations: their data, their loss, and the loss of the model with their output patched in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..analysis.load import load
from ..config.parse import parse_config
from ..errors import ConfigError, Problem
from ..storage.run_record import read_record
from ..tasks.base import Outcome, WeightedMean, batch_weight, call_task
from ..values.nested import iter_tensors, map_tensors, to_device
from .data import loader_options
from .environment import process_state
from .experiment import Experiment
from .loader import Loader, Slice


def recorded_tokens(split: str, run: str, layer: str, **options: Any) -> Slice:
    """Return the recorded output of a layer as items of `Run.dataset`: its sequences without the last tenth, or the last tenth.

    Args:
        split: `train` for single tokens, {"x": [width], ...}; `test` for complete sequences, {"x": [T, width], "id", ...}.
        run: The folder of a run of `mode: forward`, which recorded outputs [N, T, width].
        layer: The name of the layer.
        options: Further arguments of `Run.dataset`, such as `hook` and `mask`.

    Raises:
        InstrumentError: There is no such run, or it recorded no such tensors.
        ValueError: There is no such split.
    """
    if split not in ("train", "test"):
        raise ValueError(f"there is no split {split!r}; the splits are train and test")
    _record(run, "data.dataset.run")
    recorded = load(run)
    sequences = recorded.dataset(layer, **options)
    border = len(sequences) * 9 // 10
    if split == "test":
        return Slice(sequences, range(border, len(sequences)))
    tokens = recorded.dataset(layer, flatten="tokens", **options)
    return Slice(tokens, range(tokens.items_before(border)))


class SparseReconstruction:
    """The loss of a sparse autoencoder, and the loss that the model recovers if the output of a layer is replaced by reconstructions.

    The loss is the mean over the tokens of |x - reconstruction|^2 + l1 * sum |features| (Bricken et al. 2023, "Towards
    monosemanticity"; Gao et al. 2024 without the second term). The metrics are `l0`, the mean number of features that are not zero,
    and `explained_variance`, 1 - sum |x - reconstruction|^2 / sum |x - mean|^2, with the mean over the tokens of a batch in one process.

    With `run`, an evaluation also runs the model of that run on the evaluated samples, and computes the loss of its own task three
    times: `loss_clean`; `loss_patched`, with the reconstructions as the output of the layer; `loss_zero`, with zeros. The metric

        loss_recovered = (loss_zero - loss_patched) / (loss_zero - loss_clean)

    is 1 if the model cannot tell reconstructions from activations, and 0 if they are as bad as zeros (Bricken et al. 2023;
    Rajamanoharan et al. 2024, "Improving dictionary learning with gated sparse autoencoders").

    Args:
        l1: The weight of the L1 penalty. Default: 0.
        run: The folder of the run of `mode: forward` that recorded the activations. Default: None, no loss of the model.
        layer: The layer whose output was recorded; required with `run`. Default: None.

    Raises:
        ConfigError: There is no such run, or it trained its model, so that its activations are those of several weights.
        AttributeError: The model has no such layer.
    """

    def __init__(self, l1: float = 0.0, run: str | None = None, layer: str | None = None) -> None:
        self.l1 = l1
        self.model = None if run is None else PatchedModel(run, layer or "")

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Outcome:
        """Compute the loss of a batch.

        Args:
            model: Maps activations [..., width] to reconstructions of the same shape and features [..., F].
            batch: "x": [..., width]; optional "mask": bool [...], the tokens that count; "id": int64 [N], for an evaluation with `run`.
        """
        x, mask = batch["x"].to(next(model.parameters()).dtype), batch.get("mask")
        reconstruction, features = model(x)
        patch = reconstruction
        if mask is not None:
            mask = mask != 0
            x, reconstruction, features = x[mask], reconstruction[mask], features[mask]
        x, reconstruction, features = (each.flatten(0, -2) for each in (x, reconstruction, features))
        errors = (reconstruction - x).square().sum(-1)
        with torch.no_grad():
            spread = (x - x.mean(0)).square().sum()
            metrics: dict[str, Any] = {
                "l0": (features != 0).sum(-1).double().mean(),
                "explained_variance": WeightedMean(1 - errors.sum() / spread, spread),
            }
        if self.model is not None and not torch.is_grad_enabled() and "id" in batch:
            metrics |= self.model.losses(batch["id"].tolist(), patch, mask)
        return Outcome((errors + self.l1 * features.abs().sum(-1)).mean(), len(batch["x"]), metrics=metrics)

    def number_of_terms(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of tokens."""
        return int((batch["mask"] != 0).sum()) if "mask" in batch else batch["x"][..., 0].numel()


class PatchedModel:
    """The model of a run of `mode: forward` without its hooks, whose loss is computed with a replaced output of a layer."""

    def __init__(self, run: str, layer: str) -> None:
        config = _record(run, "task.run")["config"]
        # Workers would start again for each evaluated batch.
        without = {"hooks": {}, "rules": {}, "device": "auto", "data": {**config["data"], "num_workers": 0}}
        parsed = parse_config({**config, **without})
        with process_state(seed=parsed.seed, deterministic=False):
            self.experiment = Experiment(parsed)
        if not isinstance(self.experiment.data.train, Slice):
            message = "the dataset of the run is iterable, so its samples have no index"
            raise ConfigError(Problem("task.run", message, given=run))
        self.dataset = self.experiment.data.train.dataset
        self.model = self.experiment.model.eval().requires_grad_(False)
        self.layer = self.model.get_submodule(layer)

    def losses(self, ids: Sequence[int], patch: Tensor, mask: Tensor | None) -> dict[str, WeightedMean]:
        """Return the losses of the model on samples with an output [N, T, width] of the layer at the tokens of a mask [N, T].

        Their weights are the numbers of terms of the task of the run. That of the recovered loss is its denominator.
        """
        config, device = self.experiment.config, self.experiment.device
        options = loader_options(config.data, config.seed, pins_memory=False)
        (loaded,) = Loader(Slice(self.dataset, ids), len(ids), options)
        batch = to_device(loaded.batch, device)
        selected = None if mask is None else mask[..., None].to(device)
        clean, patched, zero = (
            self._loss(batch, value, selected)
            for value in (None, patch.to(device), torch.zeros_like(patch, device=device))
        )
        weight = batch_weight(self.experiment.task, loaded.batch, len(ids))
        return {
            "loss_clean": WeightedMean(clean, weight),
            "loss_patched": WeightedMean(patched, weight),
            "loss_zero": WeightedMean(zero, weight),
            "loss_recovered": WeightedMean((zero - patched) / (zero - clean), (zero - clean) * weight),
        }

    def _loss(self, batch: Any, value: Tensor | None, selected: Tensor | None) -> Tensor:
        def replace(module: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001
            first, given = next(iter_tensors(output))
            if value is None:
                return None
            if value.shape != given.shape:
                raise ValueError(f"the layer returned {list(given.shape)}, but {list(value.shape)} was recorded")
            new = value.to(given.dtype) if selected is None else torch.where(selected, value.to(given.dtype), given)
            return map_tensors(output, lambda path, tensor: new if path == first else tensor)

        task = self.experiment.task
        with self.layer.register_forward_hook(replace), self.experiment.autocast():
            loss = call_task(task, self.model, batch).loss
        if loss is None:
            message = "the task of the run computes no loss"
            raise ConfigError(Problem("task.run", message, type(task).__name__, fix="set task.run=null"))
        return loss.double()


def _record(run: str, where: str) -> Mapping[str, Any]:
    folder = "runs/activations" if Path(run).exists() else run
    fix = (
        "record one: python -m instrument +exp=language train.save=true hydra.run.dir=runs/language, "
        f"and then python -m instrument +exp=activations hydra.run.dir={folder}"
    )
    if not Path(run).exists():
        raise ConfigError(Problem(where, "the folder does not exist", given=run, fix=fix))
    record = read_record(Path(run), where)
    if record["config"].get("mode") != "forward":
        message = "the run must have mode: forward, so that all its activations are those of the same weights"
        given = record["config"].get("mode", "a run of instrument.attach")
        raise ConfigError(Problem(where, message, given=given, allowed="forward", fix=fix))
    return record
