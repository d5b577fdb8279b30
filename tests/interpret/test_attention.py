"""Attention maps: values, heads, samples, tokens, selections of heads and positions, layouts, and errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attached_runs import forward_steps
from figures import overlaps
from hook_runs import Calls, run_step
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import instrument
from instrument import InstrumentError
from instrument.plot import attention

HEADS, LENGTH, WIDTH = 3, 6, 12
TOKENS = torch.tensor([[ord(letter) for letter in text] for text in ("the sea", "a_b$c\nd")])[:, :LENGTH]
FUNCTION = {"layers": "blocks.*", "kind": "function", "action": "record", "stats": "none", "tensors": True}
SOFTMAX = {**FUNCTION, "functions": "softmax"}
INPUT = {"layers": ".", "kind": "forward_pre", "action": "record", "stats": "none", "tensors": True}


class Attention(nn.Module):
    """Causal attention that keeps its last probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.probabilities = torch.empty(0)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [N, T, width] to the same shape."""
        parts = self.project(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        scores = 4 * parts[0] @ parts[1].transpose(-1, -2)
        mask = torch.ones(hidden.shape[1], hidden.shape[1], dtype=torch.bool).triu(1)
        self.probabilities = torch.softmax(scores.masked_fill(mask, -torch.inf), -1)
        return (self.probabilities @ parts[2]).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two attention layers on token ids."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.blocks = nn.ModuleList([Attention(), Attention()])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to [N, T, width]."""
        hidden: Tensor = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def run(model: Model, tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """Two steps with one batch each."""
    hooks = {"probabilities": SOFTMAX, "scores": {**FUNCTION, "functions": "masked_fill"}, "tokens": INPUT}
    folder = tmp_path_factory.mktemp("attention") / "run"
    return forward_steps(model, hooks, [TOKENS, TOKENS.flip(0)], sample_ids=[[7, 3], [4, 9]], out=folder).run


def maps_of(figure: Figure) -> dict[str, Axes]:
    return {axes.get_title(): axes for axes in figure.axes if axes.get_title()}


def values_of(axes: Axes) -> np.ndarray:
    (image,) = axes.images
    return np.ma.filled(image.get_array(), np.nan)


def labels_of(axes: Axes) -> tuple[list[str], list[str]]:
    ticks = (axes.get_yticklabels(), axes.get_xticklabels())
    queries, keys = ([label.get_text() for label in labels] for labels in ticks)
    return queries, keys


@pytest.mark.slow
def test_maps_equal_the_probabilities_of_the_module(model: Model, run: instrument.Run) -> None:
    maps = maps_of(attention(run, "blocks.1", sample=3))
    model(TOKENS)
    assert list(maps) == ["head 0", "head 1", "head 2"]
    for axes, expected in zip(maps.values(), model.blocks[1].probabilities[1].detach(), strict=True):
        np.testing.assert_array_equal(values_of(axes), expected)
        assert axes.images[0].get_clim() == (0.0, 1.0)  # the first token attends only to itself


@pytest.mark.slow
def test_sample_is_selected_by_id(run: instrument.Run) -> None:
    frame = run.tensors(hook="probabilities", layer="blocks.0")
    for sample, (step, position) in {3: (0, 1), 9: (1, 1), None: (1, 0)}.items():
        figure = attention(run, "blocks.0", head=1, sample=sample)
        expected = frame[frame.step == step]["values"].iloc[0][position, 1]
        np.testing.assert_array_equal(values_of(maps_of(figure)["head 1"]), expected)
        name = 4 if sample is None else sample
        assert (
            figure.get_suptitle() == f"blocks.0[softmax.0]: probabilities: function output, step {step}, sample {name}"
        )


@pytest.mark.slow
def test_frame_and_run_without_ids_select_by_position(model: Model, run: instrument.Run) -> None:
    frame = run.tensors(hook="probabilities", step=0)
    expected = frame[frame.layer == "blocks.0"]["values"].iloc[0][1, 2]
    unnamed = forward_steps(model, {"probabilities": SOFTMAX}, [TOKENS]).run
    for data in (frame, unnamed):
        (axes,) = maps_of(attention(data, "blocks.0", head=2, sample=1)).values()
        np.testing.assert_array_equal(values_of(axes), expected)
    named = forward_steps(model, {"probabilities": SOFTMAX}, [TOKENS], sample_ids=[["cat", "dog"]]).run
    (axes,) = maps_of(attention(named, "blocks.0", head=2, sample="dog")).values()
    np.testing.assert_array_equal(values_of(axes), expected)


@pytest.mark.slow
def test_tokens_are_labels(run: instrument.Run) -> None:
    ids = [str(token) for token in TOKENS[1].tolist()]
    texts = ["a", " _", "b", r"\$", "c", "↵"]
    words = ["one", "two", "three", "a long word indeed", "five", "␣six"]
    cases = [(None, ids), (chr, texts), (list("a_b$c\n"), texts), (TOKENS[1], ids)]
    cases += [
        (["\x07", "b", "c", "d", "e", "f"], [r"\x07", *"bcdef"]),
        (["one", "two", "three", "a long word indeed", "five", " six"], [*words[:3], "a␣lon…indeed", *words[4:]]),
    ]
    for tokens, expected in cases:
        (axes,) = maps_of(attention(run, "blocks.0", head=0, sample=3, tokens=tokens)).values()
        assert labels_of(axes) == (expected, expected)


@pytest.mark.slow
def test_tokens_of_a_long_sequence_are_thinned(model: Model) -> None:
    run = forward_steps(model, {"probabilities": SOFTMAX}, [torch.randint(0, 128, (1, 90))]).run
    figure = attention(run, "blocks.0", head=[0, 1])
    assert overlaps(figure) == []
    queries, keys = labels_of(next(iter(maps_of(figure).values())))
    assert queries == keys
    assert queries[:2] == ["0", "5"]


@pytest.mark.slow
def test_rows_are_layers_in_forward_order(run: instrument.Run) -> None:
    figure = attention(run, ["blocks.1", "blocks.0"], head=[2, 0])
    maps = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in maps] == ["head 2", "head 0"] * 2
    assert [axes.get_ylabel() for axes in maps] == ["blocks.0[softmax.0]", "", "blocks.1[softmax.0]", ""]
    assert [bool(axes.get_yticks().size) for axes in maps] == [True, False] * 2
    assert [bool(axes.get_xticks().size) for axes in maps] == [False, False, True, True]
    assert len([axes for axes in attention(run).axes if axes.images]) == 2 * HEADS


def test_selected_heads_and_positions_keep_their_numbers(model: Model) -> None:
    hooks = {"kept": {**SOFTMAX, "units": [2, 1], "samples": 1}}
    hooks["last"] = {**SOFTMAX, "slice": "1, :, -2:"}
    run = forward_steps(model, hooks, [TOKENS], sample_ids=[[5, 6]]).run
    model(TOKENS)
    expected = model.blocks[0].probabilities.detach()
    maps = maps_of(attention(run, "blocks.0", hook="kept"))
    assert list(maps) == ["head 2", "head 1"]
    np.testing.assert_array_equal(values_of(maps["head 1"]), expected[0, 1])
    (axes,) = maps_of(attention(run, "blocks.0", hook="last", head=0)).values()
    np.testing.assert_array_equal(values_of(axes), expected[1, 0, -2:])
    assert labels_of(axes) == (["4", "5"], list("012345"))
    message = r"(?s)sample: the attention of this sample was not recorded.*5.*allowed  6"
    with pytest.raises(InstrumentError, match=message):
        attention(run, "blocks.0", hook="last", sample=5)


@pytest.mark.slow
def test_reordered_heads_and_samples_keep_their_numbers(model: Model) -> None:
    hook = {**SOFTMAX, "units": [2, 0, 1], "samples": [1, 0]}
    run = forward_steps(model, {"kept": hook}, [TOKENS], sample_ids=[[5, 6]]).run
    model(TOKENS)
    expected = model.blocks[0].probabilities.detach()
    maps = maps_of(attention(run, "blocks.0", sample=6))
    assert list(maps) == ["head 2", "head 0", "head 1"]
    np.testing.assert_array_equal(values_of(maps["head 2"]), expected[1, 2])


def test_selected_heads_of_a_frame_are_unknown(model: Model) -> None:
    run = forward_steps(model, {"kept": {**SOFTMAX, "units": [2]}}, [TOKENS]).run
    with pytest.raises(InstrumentError, match=r"pass the run if the hook selects heads or positions"):
        attention(run.tensors())


@pytest.mark.slow
def test_ids_may_be_unknown_in_later_steps(model: Model) -> None:
    probe = forward_steps(model, {"probabilities": SOFTMAX}, [TOKENS, TOKENS], sample_ids=[[8, 9]])
    assert attention(probe.run, "blocks.0").get_suptitle().endswith("step 0, sample 8")


def test_title_names_the_first_of_several_calls(model: Model) -> None:
    with torch.no_grad(), instrument.attach(model, {"probabilities": SOFTMAX}) as probe:
        model(TOKENS)
        model(TOKENS.flip(0))
        probe.end_step()
    (axes,) = maps_of(figure := attention(probe.run, "blocks.0", head=0)).values()
    assert figure.get_suptitle().replace("\n", " ").endswith(", first call of each module")
    np.testing.assert_array_equal(values_of(axes), probe.run.tensors(call=0, layer="blocks.0")["values"].iloc[0][0, 0])


@pytest.mark.slow
def test_input_ids_are_preferred_to_a_mask() -> None:
    class Masked(Model):
        def forward(self, attention_mask: Tensor, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids * attention_mask)

    given = {"attention_mask": torch.ones_like(TOKENS), "input_ids": TOKENS}
    _, probe = run_step(Masked(), {"probabilities": SOFTMAX, "tokens": INPUT}, **given)
    (axes,) = maps_of(attention(probe.run, "blocks.0", head=0)).values()
    assert labels_of(axes)[1] == [str(token) for token in TOKENS[0].tolist()]


@pytest.mark.spread(1)
@pytest.mark.parametrize("average", [True, False])
def test_weights_that_a_module_returns_are_found(average: bool) -> None:
    returns = Calls(
        lambda attention, x: attention(x, x[:, :4], x[:, :4], average_attn_weights=average)[0],
        attention=nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
    )
    hook = {**FUNCTION, "kind": "forward", "layers": "**"}
    run = forward_steps(returns, {"all": hook}, [torch.rand(2, LENGTH, WIDTH)]).run
    axes = [axes for axes in attention(run).axes if axes.images]
    assert len(axes) == (1 if average else HEADS)
    assert labels_of(axes[0]) == (list("012345"), list("0123"))
    weights = run.tensors(path="1")["values"].iloc[0]
    np.testing.assert_array_equal(values_of(axes[-1]), weights[0] if average else weights[0, -1])


@pytest.mark.parametrize("hook", [{"functions": "softmax"}, {"kind": "forward", "layers": "1"}], ids=str)
def test_softmax_over_classes_and_units_is_not_attention(hook: dict[str, str]) -> None:
    units = {"units": {**FUNCTION, "kind": "forward", "layers": "0", "units": [7]}}
    run = forward_steps(nn.Sequential(nn.Conv1d(2, 8, 1)), units, [torch.rand(2, 2, 4)]).run
    with pytest.raises(InstrumentError, match="no attention probabilities were recorded"):
        attention(run)
    model = nn.Sequential(nn.Linear(3, 5), nn.Softmax(-1))
    run = forward_steps(model, {"all": {**FUNCTION, "layers": "**", **hook}}, [torch.rand(2, 4, 3)]).run
    with pytest.raises(InstrumentError, match="these tensors are not attention probabilities"):
        attention(run)


def test_masked_queries_are_blank(run: instrument.Run) -> None:
    frame = run.tensors(hook="probabilities", layer="blocks.0", step=0)
    values = frame["values"].iloc[0].copy()
    values[:, :, 2] = np.nan
    frame["values"] = [values]
    (axes,) = maps_of(attention(frame, head=0)).values()
    assert axes.images[0].get_array().mask.all(1).tolist() == [False, False, True, False, False, False]


@pytest.mark.slow
def test_scores_are_drawn_if_their_location_is_named(run: instrument.Run) -> None:
    figure = attention(run, "blocks.0[masked_fill.0]", sample=3)
    scores = run.tensors(hook="scores", layer="blocks.0", step=0)["values"].iloc[0][1, 0]
    np.testing.assert_array_equal(values_of(maps_of(figure)["head 0"]), np.where(np.isfinite(scores), scores, np.nan))
    assert figure.axes[-1].get_ylabel() == "value"
    hook = {**FUNCTION, "layers": "0.blocks.*", "functions": "masked_fill"}
    only = forward_steps(nn.Sequential(Model()), {"scores": hook}, [TOKENS]).run
    message = r"(?s)layer: these tensors are not attention prob.*0\.blocks\.0\[masked_fill\.0\] \[2, 3, 6, 6\]"
    with pytest.raises(InstrumentError, match=message):
        attention(only)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (
            lambda run: attention(run, "blocks.7"),
            r"layer: no tensor with attention.*'blocks\.7'.*blocks\.0\[softmax\.0\]",
        ),
        (
            lambda run: attention(run, "blocks.0", head=9),
            r"head: .*no such recorded head.*\[2, 3, 6, 6\].*given    9.*0, 1, 2",
        ),
        (lambda run: attention(run, "blocks.0", sample=0), r"sample: .*given    0\n.*allowed  7, 3, 4, 9"),
        (lambda run: attention(run, step=5), r"step: no attention was recorded at this step.*'5'.*0, 1"),
        (
            lambda run: attention(run, "blocks.0", tokens=["a", "b"]),
            r"tokens: the number of tokens is not that.*given    2.*allowed  6",
        ),
        (lambda run: attention(run, hook="attention"), r"hook: no data with this value.*'attention'.*probabilities"),
        (
            lambda run: attention(run.tensors(hook="probabilities"), tokens=chr),
            "tokens: a function requires the recorded token ids",
        ),
        (
            lambda run: attention(run.tensors(hook="tokens")),
            r"no attention probabilities were recorded.*functions: softmax",
        ),
    ],
)
def test_arguments_without_data_are_errors_with_options(run: instrument.Run, draw: Any, message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        draw(run)
