"""Published results on a small model: induction heads, causal tracing, and steering along a direction.

The experiments of `conf/exp` run here with the numbers that docs/guides/induction.md, causal_tracing.md and
linear_steering.md describe.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Answer, run_in
from hydra.types import RunMode
from page_blocks import SERIES, run_blocks
from torch import Tensor
from torch.nn import functional as F

import instrument
from instrument import MemorySink
from instrument.commands.job import read_config
from instrument.config.hydra_internals import config_loader
from instrument.config.parse import parse_config
from instrument.probe.probe import Probe
from instrument.training.experiment import Experiment
from instrument.training.loop import run_forward

pytestmark = pytest.mark.slow

PERIOD, HEADS = 8, 4
# Arguments of commands of the pages.
TRAINING = "+exp=induction hydra.run.dir=runs/induction"
ANSWERS = (
    "-m +exp=steering hooks.steer=null data.slice.split=train 'data.slice.classes=[3],[9]' hydra.sweep.dir=runs/answers"
)


class Study:
    """A trained model, and the experiments on it.

    Args:
        folder: The folder that contains `runs/induction`, the run that trained the model.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configs: dict[str, dict[str, Any]] = {}

    def config(self, name: str) -> dict[str, Any]:
        """Return a copy of the configuration of an experiment."""
        if name not in self.configs:
            config = config_loader().load_configuration("config", [f"+exp={name}"], RunMode.RUN)
            self.configs[name] = read_config(config)[1]
        return deepcopy(self.configs[name])

    def run(self, name: str, **interventions: dict[str, Any] | None) -> tuple[float, MemorySink]:
        """Run an experiment with other fields of its interventions; None removes one.

        Returns:
            The mean loss, and the records.
        """
        config = self.config(name)
        for hook, fields in interventions.items():
            config["hooks"][hook] = None if fields is None else {**config["hooks"][hook], **fields}
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(self.folder)
            experiment = Experiment(parse_config(config))
            sink = MemorySink()
            with Probe(experiment.plan, sink, archive=experiment.archive) as probe:
                loss = run_forward(experiment, probe, lambda _: None)["loss"]
        assert loss is not None
        return loss, sink


def recorded(sink: MemorySink, hook: str, layer: str = "") -> Tensor:
    """Return the only recorded tensor of a hook at a layer."""
    (row,) = [row for row in sink.records("tensors") if (row["hook"], row["layer"]) == (hook, layer)]
    values: Tensor = row["values"]
    return values


@pytest.fixture(scope="module", params=range(5))
def study(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Study:
    """A model trained by `+exp=induction`, with its seed 1 or longer with another one: some seeds learn later."""
    folder = tmp_path_factory.mktemp("published")
    other = () if request.param == 1 else (f"seed={request.param}", "train.steps=500")
    run_in(folder, *TRAINING.split(), *other, "quiet=true").expect(0)
    return Study(folder)


@pytest.fixture(scope="module")
def intact(study: Study) -> tuple[float, MemorySink]:
    """The loss of the model without an ablation, and its records."""
    return study.run("head_ablation", ablate=None)


def mean_attention(sink: MemorySink, layer: int, offset: int, queries: range) -> Tensor:
    """Return the mean attention of each head to the key that is `offset` positions before the query: [heads]."""
    maps = recorded(sink, "attention", f"blocks.{layer}")  # [N, heads, queries, keys]
    at = torch.tensor(queries)
    return maps[:, :, at, at - offset].mean((0, 2))


def induction_scores(sink: MemorySink, layer: int) -> Tensor:
    """Return the mean attention of each head from t to t - PERIOD + 1 in the second repetition: [heads]."""
    return mean_attention(sink, layer, PERIOD - 1, range(PERIOD, 2 * PERIOD))


def evaluation_loss(run: Path) -> float:
    loss: float = instrument.load(run).info["metrics"]["loss"]
    return loss


def test_loss_drops_where_tokens_repeat(study: Study, intact: tuple[float, MemorySink]) -> None:
    assert evaluation_loss(study.folder / "runs/induction") < 1.4
    loss, sink = intact
    tokens, logits = recorded(sink, "tokens"), recorded(sink, "logits")
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(0)  # by position
    assert losses[: PERIOD - 1].min() > 2.3  # not less than the entropy of the remaining tokens
    assert losses[PERIOD:].max() < 0.3
    assert loss < 0.2


def test_one_layer_does_not_learn_to_continue_repetitions(tmp_path: Path) -> None:
    run_in(tmp_path, "+exp=induction", "model.layers=1", "hydra.run.dir=runs/one", "quiet=true").expect(0)
    assert evaluation_loss(tmp_path / "runs/one") > 1.7


def test_layer_0_has_a_previous_token_head_and_layer_1_an_induction_head(intact: tuple[float, MemorySink]) -> None:
    _, sink = intact
    assert mean_attention(sink, 0, 1, range(1, PERIOD)).max() > 0.6
    assert induction_scores(sink, 1).max() > 0.5
    assert induction_scores(sink, 0).max() < 0.3


def test_ablated_induction_heads_raise_the_loss_of_repeated_tokens(
    study: Study, intact: tuple[float, MemorySink]
) -> None:
    loss, sink = intact

    def rise(*heads: int) -> float:
        return study.run("head_ablation", ablate={"heads": {"of": HEADS, "take": heads}})[0] - loss

    scores = induction_scores(sink, 1).tolist()
    rises = [rise(head) for head in range(HEADS)]
    induction = [head for head in range(HEADS) if scores[head] > 0.5]
    others = [head for head in range(HEADS) if scores[head] < 0.3]
    assert rises.index(max(rises)) in induction
    assert max(rises) > 0.4
    assert max((rises[head] for head in others), default=0.0) < max(rises) / 4
    assert rise(*induction) > 1.5  # a training can result in several induction heads, which replace each other
    if others:
        assert rise(*others) < 0.5


def test_causal_tracing_follows_the_induction_circuit(study: Study) -> None:
    def loss_with(layer: str, position: int) -> float:
        return study.run("causal_tracing", patch={"layers": layer, "positions": [position]})[0]

    corrupted, _ = study.run("causal_tracing", patch=None)
    losses = np.array([[loss_with(layer, at) for at in range(6)] for layer in ("tokens", "blocks.0", "blocks.1")])
    clean = losses[0, 1]  # the only token that differs
    assert losses[2, 5] == pytest.approx(clean, abs=1e-5)  # the logits depend on the last position only
    effects = (corrupted - losses) / (corrupted - clean)
    on_path = [(0, 1), (1, 2), (2, 5)]
    assert corrupted - clean > 2.0
    assert min(effects[place] for place in on_path) > 0.8
    assert max(abs(effects[place]) for place in np.ndindex(effects.shape) if place not in on_path) < 0.2


@pytest.fixture(scope="module")
def answers(study: Study) -> Study:
    """The study with `runs/answers`: recorded prompts with the answers 3 and 9."""
    run_in(study.folder, *shlex.split(ANSWERS), "quiet=true").expect(0)
    return study


def differences(study: Study, scales: np.ndarray, **fields: Any) -> np.ndarray:
    """Return the logit of token 9 minus that of token 3 for each scale and prompt: [scales, prompts]."""

    def difference(scale: float) -> Tensor:
        _, sink = study.run("steering", steer={**fields, "scale": float(scale)})
        logits = recorded(sink, "logits")[:, -1]
        return logits[:, 9] - logits[:, 3]

    return torch.stack([difference(scale) for scale in scales]).numpy()


SCALES = np.array([0.0, 0.5, 1.0, 1.5, 2.0])


def residuals(differences: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the slope of each column over SCALES, and R^2 of the means of the rows."""
    means = differences.mean(1)
    line = np.polyval(np.polyfit(SCALES, means, 1), SCALES)
    return np.polyfit(SCALES, differences, 1)[0], float(
        1 - ((means - line) ** 2).sum() / ((means - means.mean()) ** 2).sum()
    )


def test_steering_the_last_layer_is_exactly_linear(answers: Study) -> None:
    found = differences(answers, SCALES)
    steps = np.diff(found, axis=0)  # each step adds the same to each prompt
    assert steps == pytest.approx(np.full_like(steps, steps.mean()), rel=1e-3)
    assert steps.mean() > 1.0
    assert (found[0] < 0).all()
    assert (found[2] > 0).all()


def test_steering_an_earlier_layer_is_nearly_linear(answers: Study) -> None:
    found = differences(answers, SCALES, layers="blocks.0", positions=[2])
    slopes, r_squared = residuals(found)
    assert r_squared > 0.95
    assert slopes.min() > 0
    assert (found[0] < 0).all()
    assert (found[2] > 0).mean() > 0.8


@pytest.mark.parametrize("study", [1], indirect=True)
def test_blocks_of_the_pages_run(answers: Study, cli: Callable[..., Answer], workdir: Path) -> None:
    (workdir / "runs").symlink_to(answers.folder / "runs")
    for page in SERIES:
        run_blocks(page, cli, workdir, done=(TRAINING, ANSWERS))
