"""The logit lens: predictions, targets, output layers from modules, files and saved weights, and errors."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from attached_runs import forward_steps
from hook_runs import Calls, run_step
from torch import Tensor, nn

import instrument
from instrument import InstrumentError
from instrument.interpret import logit_lens, output_projection
from instrument.plot import logit_lens as plot

RECORD = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}
HOOKS: dict[str, dict[str, Any]] = {
    "residual": {**RECORD, "layers": "blocks.*"},
    "tokens": {**RECORD, "layers": ".", "kind": "forward_pre"},
}
WIDTH, VOCABULARY, LENGTH = 5, 11, 4


def residual() -> nn.Module:
    return Calls(lambda linear, hidden: hidden + torch.tanh(linear(hidden)), linear=nn.Linear(WIDTH, WIDTH))


class Model(nn.Module):
    """A language model without attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(residual(), residual())
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        nn.init.normal_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.blocks(self.embed(tokens))))
        return logits


def recorded(model: nn.Module, batch: Tensor, ids: Any, out: Path | None = None, **hooks: Any) -> instrument.Run:
    with torch.no_grad(), instrument.attach(model, hooks, out=out) as probe:
        if ids is not None:
            probe.batch(ids=ids, targets=torch.arange(len(batch)))
        model(batch)
        probe.end_step()
    return probe.run


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def run(model: Model, tokens: Tensor, tmp_path_factory: pytest.TempPathFactory) -> instrument.Run:
    """A run that saved its weights; the samples were recorded in the order 20, 10, 30."""
    folder = tmp_path_factory.mktemp("lens") / "run"
    run = recorded(model, tokens, [20, 10, 30], folder, **HOOKS)
    torch.save(model.state_dict(), folder / "weights.pt")
    return run


@pytest.mark.spread(1)
@pytest.mark.parametrize("block", [2**26, 1])
def test_predictions_equal_hand_written_code(
    model: Model, tokens: Tensor, run: instrument.Run, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(output_projection, "LOGITS_BYTES", block)
    table = logit_lens(run, model.head, norm=model.norm, top=3)
    assert list(table.columns) == [
        *("layer", "sample", "position", "top_tokens", "top_log_probs", "target", "target_log_prob", "target_rank")
    ]
    hidden, order = model.embed(tokens), [1, 0, 2]
    for layer, block_module in zip(("blocks.0", "blocks.1"), model.blocks, strict=True):
        hidden = block_module(hidden)
        log_probs = model.head(model.norm(hidden)).log_softmax(-1).detach()[order]
        rows = table[table["layer"] == layer].reset_index(drop=True)
        assert rows["sample"].tolist() == [10] * LENGTH + [20] * LENGTH + [30] * LENGTH
        assert rows["position"].tolist() == [*range(LENGTH)] * 3
        best = log_probs.topk(3)
        assert rows["top_tokens"].tolist() == best.indices.flatten(0, 1).tolist()
        np.testing.assert_allclose(rows["top_log_probs"].tolist(), best.values.flatten(0, 1), rtol=1e-5)
        wanted = tokens[order][:, 1:]
        has_target = rows["position"] < LENGTH - 1
        assert rows["target"][has_target].tolist() == wanted.flatten().tolist()
        assert rows.loc[~has_target, ["target", "target_log_prob", "target_rank"]].isna().all(axis=None)
        of_target = log_probs[:, :-1].gather(2, wanted[..., None])
        np.testing.assert_allclose(rows["target_log_prob"][has_target], of_target.flatten(), rtol=1e-5)
        ranks = (log_probs[:, :-1] > of_target).sum(-1).flatten()
        assert rows["target_rank"][has_target].tolist() == ranks.tolist()


def test_targets_of_a_decoder_are_its_own_tokens() -> None:
    def stack() -> nn.Module:
        return Calls(
            lambda embed, block, input_ids: block(embed(input_ids)), embed=nn.Embedding(11, 5), block=residual()
        )

    def both(encoder: nn.Module, decoder: nn.Module, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        return encoder(input_ids=input_ids) + decoder(input_ids=decoder_input_ids)

    model, source, answer = (
        Calls(both, encoder=stack(), decoder=stack()),
        torch.arange(4)[None],
        torch.arange(5, 9)[None],
    )
    hooks = {
        "residual": {**RECORD, "layers": "**.block"},
        "tokens": {**RECORD, "layers": [".", "encoder", "decoder"], "kind": "forward_pre"},
    }
    with torch.no_grad(), instrument.attach(model, hooks) as probe:
        probe.batch(ids=[0])
        model(input_ids=source, decoder_input_ids=answer)
        probe.end_step()
    table = logit_lens(probe.run, nn.Linear(5, 11))
    wanted = {layer: rows["target"].dropna().tolist() for layer, rows in table.groupby("layer")}
    assert wanted == {"encoder.block": [1, 2, 3], "decoder.block": [6, 7, 8]}


def test_output_layers_of_all_forms_are_equal(model: Model, run: instrument.Run) -> None:
    def lens(unembed: Any, norm: Any = None) -> pd.DataFrame:
        return logit_lens(run, unembed, norm=norm, layers=["blocks.1"])

    expected = lens(model.head, model.norm)
    pd.testing.assert_frame_equal(lens("head.weight", "norm"), expected)
    pd.testing.assert_frame_equal(lens("head", model.norm.forward), expected)
    bare = lens(model.head.weight)
    pd.testing.assert_frame_equal(lens(model.head.weight.detach().numpy()), bare)
    assert not bare["target_log_prob"].equals(expected["target_log_prob"])


@pytest.mark.slow
def test_weights_are_those_that_the_run_was_started_from(
    model: Model, tokens: Tensor, run: instrument.Run, tmp_path: Path
) -> None:
    again = recorded(model, tokens, [20, 10, 30], tmp_path / "again", **HOOKS)
    file = again.path / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"init_from": {"path": str(run.path)}}))
    found, expected = (logit_lens(each, "head", layers=["blocks.1"]) for each in (instrument.load(again.path), run))
    pd.testing.assert_frame_equal(found, expected)


def test_targets_and_tokens_can_be_given(model: Model, tokens: Tensor, run: instrument.Run) -> None:
    ordered = tokens[[1, 0, 2]]
    expected = logit_lens(run, model.head, layers=["blocks.1"])
    pd.testing.assert_frame_equal(logit_lens(run, model.head, tokens=ordered, layers=["blocks.1"]), expected)
    following = torch.cat([ordered[:, 1:], torch.full((3, 1), -100)], 1)
    given = logit_lens(run, model.head, targets=following.clamp(min=-1), layers=["blocks.1"])
    pd.testing.assert_frame_equal(given, expected)
    of_samples = logit_lens(run, model.head, targets=np.array([4, 5, 6]), layers=["blocks.1"])
    assert of_samples["target"].tolist() == [4] * LENGTH + [5] * LENGTH + [6] * LENGTH
    alone = recorded(model, tokens, [20, 10, 30], residual=HOOKS["residual"])
    assert logit_lens(alone, model.head, layers=["blocks.1"])["target"].tolist()[::LENGTH] == [1, 0, 2]


def test_runs_without_ids_and_with_vectors() -> None:
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, VOCABULARY))
    batch = torch.rand(4, 3)
    run = recorded(model, batch, None, all={**RECORD, "layers": "*"})
    table = logit_lens(run, model[1], top=1)
    assert table["layer"].unique().tolist() == ["0"]
    assert table[["sample", "position"]].to_numpy().tolist() == [[i, 0] for i in range(4)]
    assert [each[0] for each in table["top_tokens"]] == model(batch).argmax(-1).tolist()
    assert table["target"].isna().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "positions"),
    [
        ({"positions": [-1, 1]}, [3, 1]),
        pytest.param({"slice": ":, 1:3"}, [1, 2], marks=pytest.mark.slow),
        ({"slice": ":, 2"}, [2]),
    ],
)
def test_recorded_positions_keep_their_numbers_and_targets(
    model: Model, tokens: Tensor, run: instrument.Run, field: dict[str, Any], positions: list[int]
) -> None:
    part = recorded(model, tokens, [20, 10, 30], residual={**HOOKS["residual"], **field}, tokens=HOOKS["tokens"])
    table = logit_lens(part, model.head, layers=["blocks.1"])
    assert table["position"].tolist() == positions * 3
    complete = logit_lens(run, model.head, layers=["blocks.1"]).set_index(["layer", "sample", "position"])
    expected = complete.loc[table.set_index(["layer", "sample", "position"]).index].reset_index()
    pd.testing.assert_frame_equal(
        table.drop(columns="top_log_probs"), expected.drop(columns="top_log_probs"), rtol=1e-5
    )
    ordered = tokens[[1, 0, 2]]
    given = logit_lens(part, model.head, tokens=ordered, layers=["blocks.1"])
    assert given["target"].equals(table["target"])


def test_targets_are_input_ids_if_a_mask_was_recorded_too(tokens: Tensor) -> None:
    class Masked(Model):
        def forward(self, attention_mask: Tensor, input_ids: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(input_ids * attention_mask)

    model = Masked()
    _, probe = run_step(model, HOOKS, attention_mask=torch.ones_like(tokens), input_ids=tokens)
    table = logit_lens(probe.run, model.head, layers=["blocks.0"])
    assert table["target"].tolist()[: LENGTH - 1] == tokens[0, 1:].tolist()


def test_figure_shows_the_most_probable_tokens(model: Model, run: instrument.Run) -> None:
    table = logit_lens(run, model.head, norm=model.norm)
    names = [chr(ord("a") + i) for i in range(VOCABULARY)]
    axes, _ = plot(table, sample=20, tokens=names).axes
    rows = table[table["sample"] == 20]
    assert sorted(text.get_text() for text in axes.texts) == sorted(names[each[0]] for each in rows["top_tokens"])
    values = axes.collections[0].get_array()
    np.testing.assert_allclose(values.ravel(), [np.exp(each[0]) for each in rows["top_log_probs"]])
    hits = (rows["target_rank"] == 0).sum()
    assert len(axes.patches) == hits
    targets = [names[int(each)] for each in rows["target"][:3]]
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == [*(f"{i}: {each}" for i, each in enumerate(targets)), "3"]
    with pytest.raises(InstrumentError, match=r"(?s)sample: the table has no such sample.*'7'.*10, 20, 30"):
        plot(table, sample=7)
    with pytest.raises(InstrumentError, match=r"(?s)tokens: must have the text of each token id.*given    1 texts"):
        plot(table, tokens=["a"])


@pytest.mark.parametrize("ids", [None, [20, 10, 30]])
def test_call_of_a_shared_block_is_selected(model: Model, tokens: Tensor, ids: Any) -> None:
    shared, equal = copy.deepcopy(model), copy.deepcopy(model)
    shared.blocks[1] = shared.blocks[0]
    equal.blocks[1] = copy.deepcopy(equal.blocks[0])
    run = recorded(shared, tokens, ids, **HOOKS)
    with pytest.raises(InstrumentError, match=r"(?s)call: .*pass call=0"):
        logit_lens(run, model.head)
    for call, layer in enumerate(("blocks.0", "blocks.1")):
        found = logit_lens(run, model.head, call=call)
        expected = logit_lens(recorded(equal, tokens, ids, **HOOKS), model.head, layers=[layer])
        pd.testing.assert_frame_equal(found.drop(columns="layer"), expected.drop(columns="layer"))
        assert found["target"].notna().sum() == 3 * (LENGTH - 1)


def test_targets_have_no_rank_among_logits_that_are_nan(model: Model, run: instrument.Run) -> None:
    table = logit_lens(run, model.head, norm=lambda hidden: hidden.where(hidden[:, :1] > 0, torch.nan))
    is_nan = table["target_log_prob"].isna()
    assert 0 < is_nan[table["target"].notna()].sum() < table["target"].notna().sum()
    assert (table["target_rank"].isna() == is_nan).all()


def test_targets_without_ids_are_those_of_the_batch(model: Model) -> None:
    batches = torch.arange(4 * 2 * LENGTH).reshape(4, 2, LENGTH) % VOCABULARY
    hooks = {**HOOKS, "residual": {**HOOKS["residual"], "every": 2}}
    table = logit_lens(forward_steps(model, hooks, batches).run, model.head, layers=["blocks.1"])
    assert table["target"].dropna().tolist() == batches[::2, :, 1:].flatten().tolist()
    assert table["sample"].unique().tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"unembed": torch.zeros(VOCABULARY, 7)},
            r"layers: no layer was recorded with 7 features.*blocks\.0 \[3, 4, 5\]",
        ),
        (
            {"unembed": torch.zeros(VOCABULARY, 7), "layers": ["blocks.0"]},
            r"layers: the residual stream must have shape.*blocks\.0 \[3, 4, 5\]",
        ),
        ({"layers": ["block.1"]}, r"layers: no tensors of this layer.*given    block\.1.*similar  blocks\.1"),
        ({"layers": []}, r"layers: must be a list of names.*leave it out"),
        ({"top": 0}, r"top: must be positive.*given    0"),
        ({"unembed": torch.zeros(5)}, r"unembed: wrong shape.*\[5\].*\[vocabulary, features\]"),
        ({"unembed": "heads"}, r"unembed: the saved weights have no such name.*heads\.weight.*similar  head\.weight"),
        (
            {"unembed": "head", "norm": "head"},
            r"norm: the saved weights of this layer are not those of an nn\.LayerNorm",
        ),
        ({"tokens": torch.zeros(3, 4)}, r"tokens: wrong shape or dtype.*float32 \[3, 4\].*\[3, 4\]"),
        ({"targets": torch.full((3, 4), 99)}, r"targets: a target is not one of the 11 tokens.*given    99"),
    ],
)
def test_wrong_arguments_are_errors(model: Model, run: instrument.Run, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InstrumentError, match=f"(?s){message}"):
        logit_lens(run, **{"unembed": model.head, **options})


def test_weights_that_were_not_saved_are_an_error(model: Model) -> None:
    run = recorded(model, torch.zeros(1, 4, dtype=torch.int64), None, residual=HOOKS["residual"])
    with pytest.raises(InstrumentError, match=r"the run saved no weights.*weights\.pt"):
        logit_lens(run, "head")
