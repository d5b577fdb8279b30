"""One example of each plot, with long names, many layers and values of several decades."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import torch
from attached_runs import forward_steps
from compiled_circuit import CompiledCircuit, prompts
from figures import make_run, stats_of
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import instrument
from instrument.training.models import MnistCNN

Draw = Callable[..., Figure]
TEXT = ["the", "trophy", "does", "not", "fit", "into", "the", "suitcase", "because", "it", "is", "too"]


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def tensor_rows(values: np.ndarray, **columns: Any) -> dict[str, Any]:
    """Return a row of the table `tensors`."""
    zeros = dict.fromkeys(("step", "micro_step", "rank", "call", "backward"), 0)
    moment = {**zeros, "dtype": "float32", "recompute": False, "phase": "train"}
    seen = {"hook": "h", "kind": "forward", "role": "output", "layer": "a", "path": ""}
    return {**moment, **seen, "values": values, "shape": values.shape, "source_shape": values.shape, **columns}


def stats_table() -> pd.DataFrame:
    """Return gradient norms and update ratios of 16 parameters in 40 steps, with zeros and missing values."""
    names = [f"encoder.layers.{i}.{part}" for i in range(4) for part in ("attention.query", "attention.out", "ffn.up")]
    steps = np.arange(40)
    lines = {
        name: (10 ** (-4 + 3.5 * np.exp(-steps / 15) - 0.2 * i + 0.1 * noise(40, seed=i))).tolist()
        for i, name in enumerate(["embedding", *names, "decoder"])
    }
    lines["embedding"][:6] = [0.0] * 6
    lines["decoder"][20:24] = [float("nan")] * 4
    norms = stats_of(lines).assign(step=lambda rows: 25 * rows["step"])
    ratios = norms.assign(hook="updates", kind="step_post", role="update", update_ratio=norms["l2"] * 1e-2)
    return pd.concat([norms, ratios.assign(l2=np.nan)], ignore_index=True)


def distribution_table() -> pd.DataFrame:
    levels = [0.01, 0.25, 0.5, 0.75, 0.99]
    rows = []
    for step in range(30):
        values = noise(4000, seed=step) * (1 + step / 10) + step / 20
        counts, edges = np.histogram(values, 24)
        quantiles = np.quantile(values, levels).tolist()
        cells = {"levels": levels, "quantiles": quantiles, "low": edges[0], "high": edges[-1], "counts": counts}
        same = {"hook": "h", "kind": "forward", "role": "output", "phase": "train", "path": "", "recompute": False}
        rows.append({**same, "layer": "encoder.layers.3", "step": 100 * step, **cells})
    return pd.DataFrame(rows)


def sweep_metrics(seeds: int = 4) -> pd.DataFrame:
    """Return the losses of a sweep over four learning rates, two activations and seeds."""
    rows = []
    for rate in (0.001, 0.003, 0.01, 0.03):
        for act in ("relu", "gelu"):
            for seed in range(seeds):
                name = f"{rate}-{act}-{seed}"
                bumps = noise(20, seed=len(rows) + 1)
                for step in range(20):
                    loss = 2.3 * np.exp(-step * rate * 20) + 0.4 + 0.1 * (act == "gelu") + 0.05 * bumps[step]
                    rows.append((name, 10 * step, loss, rate, act, seed))
    frame = pd.DataFrame(rows, columns=["run", "step", "loss", "optimizer.lr", "model.activation", "seed"])
    return frame.assign(phase="train", rank=0, accuracy=np.nan)


def cast_table() -> pd.DataFrame:
    same = {"kind": "forward", "role": "output", "phase": "train", "path": "", "step": 0, "recompute": False}
    formats = {"weights": "float8_e4m3fn", "outputs": "float8_e5m2", "gradients": "mxfp4_e2m1"}
    rows = [
        {**same, "layer": f"encoder.layers.{i}", "hook": hook, "format": to, "quantization_error": error}
        for (hook, to), error in zip(formats.items(), (1e-4, 1e-3, 1e-2), strict=True)
        for i in range(8)
    ]
    frame = pd.DataFrame(rows)
    return frame.assign(
        quantization_error=frame["quantization_error"] * np.exp(noise(24)), underflow_fraction=0.1 * noise(24) ** 2
    )


def waves(*shape: int, seed: float) -> np.ndarray:
    """Return smooth maps, whose pixels change little if a map moves by a fraction of a pixel."""
    channels, height, width = np.indices(shape[1:])
    values = np.sin((channels + 1) * width / shape[-1] + seed) * np.cos((channels + 2) * height / shape[-2])
    return np.broadcast_to(values, shape)


def map_table() -> pd.DataFrame:
    image = tensor_rows(
        waves(2, 1, 28, 28, seed=0.5), role="input", kind="forward_pre", layer="", hook="image", path="0"
    )
    maps = [
        tensor_rows(waves(2, 8 * (i + 1), 14, 14, seed=i + step), layer=f"encoder.{i}", step=step, hook="maps")
        for step in (0, 100, 200)
        for i in range(2)
    ]
    return pd.DataFrame([{**image, "step": step} for step in (0, 100, 200)] + maps)


def attention_table() -> pd.DataFrame:
    scores = 2 * noise(2, 1, 6, len(TEXT), len(TEXT)) + np.where(np.tri(len(TEXT)) > 0, 0.0, -np.inf)
    maps = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    return pd.DataFrame(
        [tensor_rows(maps[i], kind="function", layer=f"blocks.{i}.attention", path="softmax.0") for i in range(2)]
    )


def lens_table() -> pd.DataFrame:
    rows = []
    for i in range(6):
        for position, (word, following) in enumerate(pairwise(TEXT)):
            top = following if i > 3 and position % 3 else word
            probability = float(np.clip(0.15 * i + 0.1 * np.abs(noise(1, seed=position)[0]), 0.01, 0.99))
            ids = {"top_tokens": [TEXT.index(top)], "target": TEXT.index(following)}
            place = {"layer": f"blocks.{i}", "sample": 0, "position": position}
            rows.append({**place, **ids, "top_log_probs": [np.log(probability)]})
    return pd.DataFrame(rows)


def similarity_table() -> pd.DataFrame:
    names = [f"{part}.layers.{i}" for part in ("encoder", "decoder") for i in range(5)]
    at = np.arange(10)
    table = pd.DataFrame(np.exp(-np.abs(at[:, None] - at) / 4), names, names)
    table.attrs["samples"] = 512
    return table


def patching_sweep(folder: Path) -> instrument.Run:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    batch = torch.linspace(-1.0, 1.0, 2 * 5 * 6).reshape(2, 5, 6)
    zero = {"kind": "forward", "action": "modify", "fn": "zero"}

    def run(name: str, **fields: Any) -> None:
        hooks = {"patch": {**zero, **fields}} if fields else {}
        with torch.no_grad(), instrument.attach(model, hooks, out=folder / name) as probe:
            probe.end_step(loss=model(batch)[:, -1].square().mean())

    run("baseline")
    for layer in range(8):
        for position in range(5):
            run(f"{layer}-{position}", layers=str(layer), positions=[position])
    return instrument.load(folder)


def attributed() -> instrument.interpret.Attribution:
    """Return the attribution of the compiled circuit, whose embedding has a long name, with exact effects."""
    clean, corrupted, answers = prompts(8)
    circuit = nn.Sequential(OrderedDict(transformer_decoder=CompiledCircuit()))
    layers = ["**.tokens", "**.heads.*", "**.mlp"]

    def logit(output: torch.Tensor) -> torch.Tensor:
        return output[range(8), -1, answers]

    return instrument.interpret.attribute(
        circuit, clean, baseline=corrupted, of=logit, layers=layers, method="attribution_patching", exact=True
    )


def replayed(folder: Path) -> instrument.Run:
    make_run(folder / "source", hooks={}, steps=30)
    run = make_run(folder / "replay", hooks={}, steps=12, seed=1)
    entry = {"source": str(folder / "source"), "counterfactual": ["hooks.clip_the_gradient_norm"], "first_step": 4}
    file = folder / "replay" / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"replay": entry}))
    return instrument.load(run.path)


def difference(folder: Path) -> Any:
    hooks = {"activations": {"kind": "forward"}, "gradients": {"kind": "parameter_grad"}}
    for seed in range(2):
        make_run(folder / str(seed), hooks=hooks, steps=6, seed=seed)
    return instrument.diff(folder / "0", folder / "1", tolerance=1e-3)


def activated() -> Draw:
    torch.manual_seed(1)
    model = MnistCNN(encoder=(3, 6), decoder=(), image_size=8, classes=4, global_pooling=True).eval()
    record = {"action": "record", "stats": "none", "tensors": True}
    hooks = {
        "image": {**record, "layers": ".", "kind": "forward_pre"},
        "maps": {**record, "layers": "encoder.*", "kind": "forward"},
    }
    images = torch.tensor(np.stack([waves(1, 1, 8, 8, seed=1.5 * i)[0] for i in range(3)]), dtype=torch.float32)
    run = forward_steps(model, hooks, [images], sample_ids=[[30, 10, 20]]).run
    weight = model.decoder[-1].weight.detach()
    return partial(instrument.plot.class_activation_map, run, "encoder.1", classifier=weight, classes=[0, 2])


def when_drawn(create: Callable[[], Draw]) -> Draw:
    """Return a plot whose data is created when it is first drawn: a run or several take half a second."""
    created = cache(create)

    def draw(**look: Any) -> Figure:
        return created()(**look)

    return draw


def plot_examples(folder: Path) -> dict[str, Draw]:
    """Return a function of the arguments of `Look` for each plot, by name; the runs are in the folder."""
    plot = instrument.plot
    stats = stats_table()
    metrics = sweep_metrics()
    return {
        "attention": partial(plot.attention, attention_table(), tokens=TEXT),
        "casts": partial(plot.casts, cast_table()),
        "class_activation_map": when_drawn(activated),
        "compare": partial(plot.compare, metrics, x="optimizer.lr"),
        "compare_steps": partial(plot.compare, metrics),
        "compare_runs": partial(plot.compare, metrics[metrics["seed"] == 0]),
        "diff": when_drawn(lambda: partial(plot.diff, difference(folder / "diff"))),
        "feature_maps": partial(plot.feature_maps, map_table()),
        "gradient_flow": partial(plot.gradient_flow, stats),
        "heatmap": partial(plot.heatmap, stats, "l2"),
        "histogram_over_time": partial(plot.histogram_over_time, distribution_table(), "encoder.layers.3"),
        "importance": partial(plot.importance, metrics),
        "layer_similarity": partial(plot.layer_similarity, similarity_table()),
        "logit_lens": partial(plot.logit_lens, lens_table(), tokens=TEXT),
        "patching": when_drawn(lambda: partial(plot.patching, patching_sweep(folder / "patching"))),
        "patching_attribution": when_drawn(
            lambda: partial(plot.patching, attributed(), tokens=["A", "B/X", "C", "D", "A", "B"])
        ),
        "replay": when_drawn(lambda: partial(plot.replay, replayed(folder / "replay"))),
    }


IMAGES = Path(__file__).parent / "plot" / "images"
WIDTHS = (3.4, 7.0)  # inches: one and two columns of a page
TOLERANCE = 6.0  # root mean square of the differences of the pixels, of 255; of equal data it is 0, and below 6 with other fonts
DPI = 60


def save_image(figure: Figure, file: Path) -> Path:
    """Save a figure with few colors, so that the file is small."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    Image.open(stream).convert("RGB").quantize(32, dither=Image.Dither.NONE).convert("RGB").save(file, optimize=True)
    return file


if __name__ == "__main__":  # PYTHONPATH=tests python tests/plot_examples.py
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as temporary:
        for name, draw in plot_examples(Path(temporary)).items():
            for width in WIDTHS:
                save_image(draw(width=width), IMAGES / f"{name}-{width:g}.png")
