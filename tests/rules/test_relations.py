"""Relations that hold in every correct training: each fault is found within a few steps, and no healthy program is reported."""

from __future__ import annotations

import json
import sys
import threading
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from distributed_runs import run_processes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, LRScheduler
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter

import instrument
from instrument.analysis.rule_events import rule_events
from instrument.config.parse import parse_rules
from instrument.config.rules import default_rules
from instrument.integrations.attached_probe import AttachedProbe
from instrument.relations.relation import RELATIONS, Checked, Relation
from instrument.relations.relation_set import RelationSet

VOCABULARY = 11


def rows_of(probe: AttachedProbe, relation: str) -> list[dict[str, Any]]:
    """Return the rows of a relation, in order."""
    table = probe.relations
    return table[table["relation"] == relation].to_dict("records") if len(table) else []


def violations(probe: AttachedProbe) -> list[tuple[str, int]]:
    """Return each relation that does not hold, with the step."""
    table = probe.relations
    return [(row["relation"], row["step"]) for row in table.to_dict("records") if row["holds"] is False]


def train(
    model: nn.Module,
    batches: Iterable[Any],
    loss_of: Callable[[nn.Module, Any], Tensor],
    change: Callable[[int], None] = lambda step: None,
    **options: Any,
) -> AttachedProbe:
    """Train with SGD, and return the probe. `change` is called before each step. Warnings are not raised."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.warns(instrument.InstrumentWarning),
        instrument.attach(model, {}, optimizer=optimizer, **options) as probe,
    ):
        for step, batch in enumerate(batches):
            change(step)
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


class Bigram(nn.Module):
    """A language model of one token, whose output layer is tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        nn.init.normal_(self.embedding.weight, std=0.2)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


def tokens(steps: int = 4, samples: int = 3, length: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, VOCABULARY, (samples, length), generator=generator) for _ in range(steps)]


def next_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def test_weights_that_are_no_longer_tied_are_reported() -> None:
    model = Bigram()

    def untie(step: int) -> None:
        if step == 2:
            model.head.weight = nn.Parameter(model.head.weight.detach() + 0.5)

    probe = train(model, tokens(), next_token_loss, untie)
    assert violations(probe) == [("tied_weights", 2)]
    first, violated = rows_of(probe, "tied_weights")
    assert (first["step"], first["holds"], first["value"]) == (0, True, 1.0)
    assert (violated["layer"], violated["path"]) == ("head", "weight")
    assert violated["value"] == pytest.approx(0.5, abs=0.1)  # SGD has changed both by a small amount
    (event,) = probe.events[probe.events["rule"] == "tied_weights"].to_dict("records")
    assert (event["layer"], event["step"], event["severity"]) == ("head", 2, "warning")
    assert "head.weight differs from embedding.weight" in event["message"]


def test_modules_that_are_replaced_after_the_optimizer_step_are_compared() -> None:
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.warns(instrument.InstrumentWarning, match="tied weights differ"),
        instrument.attach(model, {}, optimizer=optimizer) as probe,
    ):
        for step, batch in enumerate(tokens()):
            optimizer.zero_grad()
            loss = next_token_loss(model, batch)
            loss.backward()
            optimizer.step()
            if step == 2:
                model.head = nn.Linear(8, VOCABULARY, bias=False)
            probe.end_step(loss=loss)
    assert ("tied_weights", 2) in violations(probe)


def test_weights_that_a_transformer_declares_as_tied_are_compared() -> None:
    class Declared(Bigram):
        config = SimpleNamespace(tie_word_embeddings=True)
        _tied_weights_keys = ("head.weight",)

        def get_input_embeddings(self) -> nn.Module:
            return self.embedding

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    model = Declared()
    with instrument.attach(model, {}) as probe:
        probe.end_step()
    assert [row["holds"] for row in rows_of(probe, "tied_weights")] == [True]
    model.head = nn.Linear(8, VOCABULARY, bias=False)
    assert violations(train(model, tokens(), next_token_loss)) == [("tied_weights", 0)]


def test_equal_copies_of_tied_weights_hold() -> None:
    model = Bigram()
    frozen = nn.Parameter(model.head.weight.detach(), requires_grad=False)

    def copy(step: int) -> None:
        model.embedding.weight, model.head.weight = frozen, nn.Parameter(frozen.clone(), requires_grad=False)

    with instrument.attach(model, {}) as probe:
        for batch in tokens():
            copy(0)
            model(batch)
            probe.end_step()
    assert violations(probe) == []
    assert len(rows_of(probe, "tied_weights")) == 1


class Transformer(nn.Module):
    """A small language model, with or without a causal mask. Inputs are [positions, samples] unless `batch_first` is set."""

    def __init__(self, *, is_causal: bool = True, batch_first: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.position = nn.Parameter(torch.linspace(-1, 1, 16 * 8).view(16, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=batch_first)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, VOCABULARY)
        self.is_causal, self.batch_first, self.calls = is_causal, batch_first, 0

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.calls += 1
        length = tokens.shape[1 if self.batch_first else 0]
        position = self.position[:length] if self.batch_first else self.position[:length, None]
        mask = nn.Transformer.generate_square_subsequent_mask(length) if self.is_causal else None
        return self.head(self.layers(self.embedding(tokens) + position, mask=mask))


class Wrapper(nn.Module):
    """A model that passes any arguments on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.model(*args, **kwargs)


class Reconstruction(nn.Module):
    """An autoencoder of a text: the decoder gets a summary of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.encoder, self.decoder = (nn.GRU(8, 8, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.decoder(x, self.encoder(x)[1])[0])


class BothDirections(nn.Module):
    """Predicts the previous tokens from later ones, and the next tokens from earlier ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY)
        self.backward_part, self.forward_part = (nn.GRU(8, 8, batch_first=True) for _ in range(2))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        return self.head(self.backward_part(x.flip(1))[0].flip(1)), self.head(self.forward_part(x)[0])


def both_directions_loss(model: nn.Module, batch: Tensor) -> Tensor:
    previous, following = model(batch)
    loss = F.cross_entropy(following[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    return loss + F.cross_entropy(previous[:, 1:].flatten(0, 1), batch[:, :-1].flatten())


class Capacity(Bigram):
    """A mixture of experts, of which each computes the first tokens of a batch that choose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Embedding(VOCABULARY, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, choices = self.embedding(tokens).flatten(0, 1), self.router(tokens).flatten(0, 1).argmax(-1)
        out = x.clone()
        for index, expert in enumerate(self.experts):
            chosen = (choices == index).nonzero().flatten()[: len(x) // 3]
            out = out.index_add(0, chosen, expert(x[chosen]))
        return self.head(out.view(*tokens.shape, -1).cumsum(1))


def time_first_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch.T[:-1]).flatten(0, 1), batch.T[1:].flatten())


def same_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def two_ahead_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-2]).flatten(0, 1), batch[:, 2:].flatten())


def previous_token_loss(model: nn.Module, batch: Tensor) -> Tensor:
    shifted = batch.roll(1, 1)
    shifted[:, 0] = -100
    return F.cross_entropy(model(batch).transpose(1, 2), shifted)


def other_sample_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch.roll(1, 0)[:, 1:].flatten())


def equal_positions_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, position_ids=torch.zeros(1, batch.shape[1], dtype=torch.int64)).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def positions_loss(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch, position_ids=torch.arange(batch.shape[1])[None]).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def masked_loss(model: nn.Module, batch: Tensor) -> Tensor:
    hidden = torch.rand(batch.shape) < 0.4
    return F.cross_entropy(model(batch.masked_fill(hidden, 0)).flatten(0, 1), batch.where(hidden, -100).flatten())


def padded(batch: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens with padding of id 0 after 5 tokens of the first sample, and the mask."""
    mask = torch.ones_like(batch)
    mask[0, 5:] = 0
    return batch * mask, mask


def padding_loss(model: nn.Module, batch: Tensor) -> Tensor:
    text, mask = padded(batch)
    return F.cross_entropy(model(text[:, :-1], attention_mask=mask[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


def ignored_padding_loss(model: nn.Module, batch: Tensor) -> Tensor:
    text, mask = padded(batch)
    targets = text.where(mask > 0, -100)[:, 1:]
    return F.cross_entropy(model(text[:, :-1], attention_mask=mask[:, :-1]).flatten(0, 1), targets.flatten())


def weighted_padding_loss(model: nn.Module, batch: Tensor) -> Tensor:
    text, mask = padded(batch)
    losses = F.cross_entropy(
        model(text[:, :-1], attention_mask=mask[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none"
    )
    return (losses * mask[:, 1:]).sum() / mask[:, 1:].sum()


def sentences(batch: Tensor, lengths: tuple[int, int, int] = (4, 7, 9)) -> Tensor:
    """Return tokens with padding of id 0 after a few other tokens."""
    of_each = torch.tensor(lengths)[torch.arange(len(batch)).remainder(3)]
    return batch.clamp(min=1) * (torch.arange(batch.shape[1]) < of_each[:, None])


def sentences_loss(
    model: nn.Module, batch: Tensor, *, ignored: int = -100, lengths: tuple[int, int, int] = (4, 7, 9)
) -> Tensor:
    text = sentences(torch.cat([batch, batch]), lengths)
    return F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten(), ignore_index=ignored)


def denoising_loss(model: nn.Module, batch: Tensor, share: float = 0.15, *, everywhere: bool = True) -> Tensor:
    """Return the loss of masked words, or of all words; the mask is the last token."""
    text = torch.cat([batch] * 8).clamp(max=VOCABULARY - 2)
    hidden = torch.rand(text.shape, generator=torch.Generator().manual_seed(0)) < share
    targets = text if everywhere else text.where(hidden, -100)
    return F.cross_entropy(model(text.masked_fill(hidden, VOCABULARY - 1)).flatten(0, 1), targets.flatten())


def bert(kind: str = "BertForSequenceClassification", **changes: Any) -> nn.Module:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.BertConfig(
        **sizes, num_attention_heads=2, max_position_embeddings=16, pad_token_id=0, **changes
    )
    return getattr(transformers, kind)(config)


def sentence_loss(
    model: nn.Module, batch: Tensor, mask_of: Callable[[Tensor], Tensor | None] = torch.ones_like
) -> Tensor:
    text = sentences(batch)
    return F.cross_entropy(model(input_ids=text, attention_mask=mask_of(text)).logits, text[:, 0] % 2)


def causal_padding_loss(model: nn.Module, batch: Tensor) -> Tensor:
    text = sentences(batch)
    logits = model(input_ids=text[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), ignore_index=0)


class Encoder(nn.Module):
    """A classifier of sentences with the encoder of PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 1)
        self.lm_head = nn.Linear(8, 2)

    def forward(self, tokens: Tensor, src_key_padding_mask: Tensor | None = None) -> Tensor:
        x = self.encoder(self.embedding(tokens), src_key_padding_mask=src_key_padding_mask)
        return self.lm_head(x.mean(1))


def encoder_loss(model: nn.Module, batch: Tensor, *, inverted: bool = False) -> Tensor:
    text = sentences(torch.cat([batch, batch]))
    return F.cross_entropy(model(text, (text != 0) if inverted else (text == 0)), text[:, 0] % 2)


class Lines(Bigram):
    """A language model of characters, of which one that occurs in texts is the default for padding."""

    config = SimpleNamespace(pad_token_id=0)


def documents_loss(model: nn.Module, batch: Tensor, *, length: int | None = None) -> Tensor:
    """Return the loss of documents that start with the token 0, which is also that of padding; packed ones have several in a sample."""
    documents = batch.clamp(min=1)
    documents[:, :: length or batch.shape[1]] = 0
    return F.cross_entropy(model(input_ids=documents).logits, documents[:, 1] % 2)


def lines_loss(model: nn.Module, batch: Tensor) -> Tensor:
    batch[0, 3], batch[1, -3:] = 0, 0
    return next_token_loss(model, batch)


FAULTS = [
    ("looks_ahead", lambda: Transformer(is_causal=False), next_token_loss, None),
    ("looks_ahead", lambda: Transformer(is_causal=False, batch_first=False), time_first_loss, None),
    ("labels_shifted", Transformer, same_token_loss, 0.0),
    ("labels_shifted", Transformer, two_ahead_loss, 2.0),
    ("labels_shifted", Transformer, previous_token_loss, -1.0),
    ("labels_shifted", Transformer, other_sample_loss, 33.0),
    ("positions_differ", gpt2, equal_positions_loss, 12.0),
    # 6 of the 11 inputs of the first sample are padding, and the first of them may be the token for the end of the text.
    ("padding_in_loss", Transformer, padding_loss, 5.0),
    ("padding_in_loss", lambda: Wrapper(Transformer()), padding_loss, 5.0),
    # The 11 inputs of sentences with 4, 7 and 9 tokens have 7, 4 and 2 that are padding, and the first of them does not count.
    ("padding_in_loss", Transformer, sentences_loss, 2.0 * (6 + 3 + 1)),
    ("padding_attended", bert, sentence_loss, 13.0),
    ("padding_attended", bert, partial(sentence_loss, mask_of=lambda text: None), 13.0),
    ("padding_attended", bert, partial(sentence_loss, mask_of=lambda text: (text == 0).long()), 13.0),
    ("padding_attended", Encoder, partial(encoder_loss, inverted=True), 40.0),
    ("padding_attended", lambda: torch.compile(Encoder(), backend="eager"), partial(encoder_loss, inverted=True), 40.0),
    ("padding_attended", lambda: torch.compile(bert(), backend="eager"), sentence_loss, 13.0),
    ("labels_shifted", lambda: Transformer(is_causal=False), denoising_loss, None),
]


@pytest.mark.parametrize(("relation", "build", "loss_of", "value"), FAULTS)
def test_fault_of_a_language_model_is_reported_in_its_first_step(
    relation: str, build: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Any], Tensor], value: float | None
) -> None:
    probe = train(build(), tokens(), loss_of)
    assert violations(probe) == [(relation, 0)]
    (row,) = [row for row in rows_of(probe, relation) if row["holds"] is False]
    assert value is None or row["value"] == value
    assert [event["rule"] for event in probe.events.to_dict("records") if event["severity"] == "warning"] == [relation]


HEALTHY = [
    (gpt2, positions_loss, {"labels_shifted", "looks_ahead", "positions_differ"}),
    (Transformer, next_token_loss, {"labels_shifted", "looks_ahead"}),
    (lambda: Transformer(batch_first=False), time_first_loss, {"labels_shifted", "looks_ahead"}),
    (Transformer, ignored_padding_loss, {"labels_shifted", "looks_ahead", "padding_in_loss"}),
    (Transformer, weighted_padding_loss, {"labels_shifted", "looks_ahead"}),
    (lambda: Transformer(is_causal=False), same_token_loss, set()),
    (lambda: Transformer(is_causal=False), masked_loss, set()),
    (Reconstruction, same_token_loss, set()),
    (Reconstruction, next_token_loss, {"labels_shifted"}),
    (BothDirections, both_directions_loss, {"labels_shifted", "looks_ahead"}),
    (Capacity, next_token_loss, {"labels_shifted", "looks_ahead"}),
    (Lines, lines_loss, {"labels_shifted", "looks_ahead"}),
]


@pytest.mark.spread(3)
@pytest.mark.parametrize(("build", "loss_of", "verified"), HEALTHY)
def test_healthy_language_model_is_not_reported(
    build: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Any], Tensor], verified: set[str]
) -> None:
    optimizer = torch.optim.SGD((model := build()).parameters(), lr=0.01)
    with instrument.attach(
        model, {"h": {"layers": "re:embedding|lm_head", "kind": "forward", "action": "record"}}
    ) as probe:
        for batch in tokens():
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            probe.end_step()
    held = {row["relation"] for row in probe.relations.to_dict("records") if row["holds"]}
    assert held - {"dropout_keeps_units", "tied_weights", "constant_prediction"} == verified | {"double_softmax"}
    assert violations(probe) == []
    assert (probe.coverage()[0]["fired"], len(probe.stats)) == (4, 4)  # the call with a changed token runs no hook


HEALTHY_PADDED = [
    (Transformer, partial(sentences_loss, ignored=0), {"labels_shifted", "looks_ahead", "padding_in_loss"}),
    (Transformer, partial(sentences_loss, lengths=(7, 8, 9)), {"labels_shifted", "looks_ahead"}),  # 12 of 66 targets
    (bert, partial(sentence_loss, mask_of=lambda text: (text != 0).long()), {"padding_attended"}),
    (
        lambda: bert("BertLMHeadModel", is_decoder=True),
        causal_padding_loss,
        {"labels_shifted", "looks_ahead", "padding_in_loss", "padding_attended"},
    ),
    (Encoder, encoder_loss, {"padding_attended"}),
    (bert, documents_loss, set()),
    (bert, partial(documents_loss, length=11), set()),  # the last token starts a document
    (lambda: Transformer(is_causal=False), partial(denoising_loss, everywhere=False), set()),
]


@pytest.mark.spread(4)
@pytest.mark.parametrize(("build", "loss_of", "verified"), HEALTHY_PADDED)
def test_healthy_model_of_padded_sentences_is_not_reported(
    build: Callable[[], nn.Module], loss_of: Callable[[nn.Module, Any], Tensor], verified: set[str]
) -> None:
    with instrument.attach(model := build(), {}) as probe:
        for batch in tokens():
            loss_of(model, batch).backward()
            probe.end_step()
    assert violations(probe) == []
    held = {row["relation"] for row in probe.relations.to_dict("records") if row["holds"]}
    assert held & {"labels_shifted", "looks_ahead", "padding_in_loss", "padding_attended"} == verified


GENERATOR = torch.Generator()


class Noisy(Transformer):
    """Adds noise of a generator that is not a part of the model."""

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        logits = super().forward(tokens, attention_mask)
        return logits + torch.randn(logits.shape, generator=GENERATOR)


@pytest.mark.parametrize("build", [Transformer, Noisy])
def test_calling_a_model_again_changes_nothing(build: Callable[[], Transformer]) -> None:
    def weights(*, is_attached: bool) -> tuple[list[Tensor], Tensor, int]:
        torch.manual_seed(0)
        GENERATOR.manual_seed(0)
        model = build()
        optimizer = torch.optim.Adam(model.parameters())
        rules = "default" if is_attached else None
        with instrument.attach(
            model, {"h": {"layers": "head", "kind": "forward", "action": "record"}}, rules=rules
        ) as probe:
            for batch in tokens():
                optimizer.zero_grad()
                next_token_loss(model, batch).backward()
                optimizer.step()
                probe.end_step()
        assert bool((probe.relations["relation"] != "counts").any()) == is_attached
        return [*model.parameters()], torch.get_rng_state(), model.calls

    (one, state, calls), (other, other_state, other_calls) = weights(is_attached=True), weights(is_attached=False)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert torch.equal(state, other_state)
    assert calls == other_calls == 4


def test_model_that_cannot_be_called_again_is_skipped_with_the_reason() -> None:
    class Once(Transformer):
        def forward(self, tokens: Tensor) -> Tensor:  # type: ignore[override]
            if not self.training:
                raise RuntimeError("no evaluation")
            return super().forward(tokens)

    with instrument.attach(model := Once(), {}) as probe:
        for batch in tokens():
            next_token_loss(model, batch).backward()
            probe.end_step()
    row = rows_of(probe, "looks_ahead")[0]
    assert row["holds"] is None
    assert row["text"] == "the model cannot be called again: RuntimeError: no evaluation"


def test_functions_of_pytorch_are_restored() -> None:
    original = torch._C._nn.cross_entropy_loss
    first, second = (instrument.attach(Bigram(), {}) for _ in range(2))
    with first:
        second.__enter__()
        assert torch._C._nn.cross_entropy_loss is not original
    assert torch._C._nn.cross_entropy_loss is not original
    second.__exit__(None, None, None)
    assert torch._C._nn.cross_entropy_loss is original


def test_loss_that_other_code_replaces_later_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    with instrument.attach(Bigram(), {}):
        pass
    original, calls = torch._C._nn.cross_entropy_loss, []
    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", lambda *args: calls.append(args) or original(*args))
    with instrument.attach(model := Bigram(), {}):
        next_token_loss(model, tokens()[0])
    assert len(calls) == 1


def test_observed_losses_are_the_same_functions_in_all_steps() -> None:
    found = []
    with instrument.attach(Bigram(), {}) as probe:
        for step in range(9):
            if step in (4, 8):  # checked, with others between them
                found.append(torch._C._nn.cross_entropy_loss)
            probe.end_step()
    assert found[0] is found[1] is not torch._C._nn.cross_entropy_loss


def test_rules_of_a_finished_run_decide_as_live(tmp_path: Path) -> None:
    train(Transformer(is_causal=False), tokens(), next_token_loss, out=tmp_path / "run")
    run = instrument.load(tmp_path / "run")
    (live,) = run.events[run.events["rule"] == "looks_ahead"].to_dict("records")
    (again,) = rule_events(run, parse_rules(default_rules()))
    assert (again.rule, again.step, again.message) == ("looks_ahead", live["step"], live["message"])


@pytest.mark.slow
def test_relations_of_several_processes(tmp_path: Path) -> None:
    done = run_processes(tmp_path, processes=2, module=Path(__file__).with_name("relation_processes.py"))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    verified = [["distinct_data", True, "", ""], ["replicas_equal", True, "", ""]]
    assert found["healthy"] == found["inside"] == found["one_leaves"] == verified
    assert found["all_data"] == verified[1:]
    assert found["local"] == verified[:1]
    assert found["partly_wrapped"] == []
    (text,) = found["communicating"]
    assert "it communicates with other processes (c10d.allreduce_" in text
    # Without the bias before the batch normalization, which has a gradient of zero.
    names = ("0.weight", "1.bias", "1.weight", "3.bias", "3.weight")
    differing = [["replicas_equal", False, *name.split(".")] for name in names]
    assert found["not_synchronized"] == differing
    assert found["past_the_wrapper"] == [verified[0], *differing]
    assert found["by_hand"] == verified[1:]
    assert found["corrupted"] == [*differing, verified[1]]
    assert ["replicas_equal", False, "3", "bias"] in found["swapped_elements"]
    assert {row[2] for row in found["other_starts"]} == {"0", "3"}
    assert found["independent"] == found["without_loss"] == []
    assert found["healthy_fingerprints"] == found["averaged_fingerprints"] == []
    assert found["independent_fingerprints"] == []
    assert not any(found["different"].values()), found["different"]
    # The values of the other process arrive one step later, or two.
    texts = {
        name: [text.partition(": param ")[2] for *_, text in found[name]]
        for name in ("zeroed", "swapped", "swapped_by_hand")
    }
    differs = "{} of rank 1 differs from that of rank 0 after step {}"
    assert texts["zeroed"] == [differs.format(name, 3) for name in ("weight", "bias")]
    assert texts["swapped"] == texts["swapped_by_hand"] == [differs.format("bias", 6)]
    assert found["same_data"] == [["distinct_data", False, "", ""], verified[1]]


def classes(high: int) -> list[tuple[Tensor, Tensor]]:
    """Return 6 batches of 40 samples with labels below `high`."""
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(40, 5, generator=generator), torch.randint(high, (40,), generator=generator)) for _ in range(6)
    ]


def classifier(*last: nn.Module, units: int = 4, dropped: float = 0.5, outputs: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, units), nn.Dropout(dropped), nn.Linear(units, outputs), *last)


def class_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def logit_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1).float(), (batch[1] > 2).float())


def probability_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.binary_cross_entropy(model(batch[0]).squeeze(1).clamp(1e-6, 1 - 1e-6), (batch[1] > 2).float())


def number_loss(
    model: nn.Module, batch: Any, function: Callable[..., Tensor] = F.mse_loss, *, target_first: bool = False
) -> Tensor:
    pair = model(batch[0]), batch[1].float()
    with warnings.catch_warnings(action="ignore"):  # PyTorch warns of the shapes
        return function(*(pair[0].T, pair[1][:, None]) if target_first else pair)


def column_loss(model: nn.Module, batch: Any, low: float = 0.0, scale: float = 1.0) -> Tensor:
    """Return the squared error of targets from 0 to 5, or of other ones in an interval."""
    return F.mse_loss(model(batch[0]), low + scale * batch[1][:, None].float())


def likelihood(model: nn.Module, batch: Any) -> Tensor:
    return F.nll_loss(model(batch[0]), batch[1])


def number_losses(model: nn.Module, batch: Any) -> Tensor:
    """Return losses with targets of the same shape, one target of all samples, and pairs on purpose."""
    output, targets = model(batch[0]), batch[1].float()
    predictions, others = torch.broadcast_tensors(output, targets)
    pairs = F.mse_loss(predictions, others, reduction="none")
    return (
        F.mse_loss(output, targets[:, None])
        + F.l1_loss(output, targets[:1].expand(40, 1))
        + (pairs * pairs.lt(1)).mean()
    )


def special_loss(model: nn.Module, batch: Any, name: str) -> Tensor:
    """Return a loss whose documentation limits its input or its targets."""
    output, labels = model(batch[0]), batch[1]
    if name == "binary_cross_entropy":  # of a softmax
        return F.binary_cross_entropy(output, (torch.arange(6) <= labels[:, None]).float())
    if name == "one target":
        return F.binary_cross_entropy(output, F.one_hot(labels, 6).float())
    if name == "two softmaxes in each row":
        return F.binary_cross_entropy(output.view(-1, 12), F.one_hot(labels, 6).float().view(-1, 12))
    if name == "kl_div":
        return F.kl_div(output, F.one_hot(labels, 6).float(), reduction="batchmean")
    if name in ("ctc_loss", "padded"):  # 4 samples, 10 positions, 5 targets
        is_padding = torch.arange(5) > torch.arange(4)[:, None]
        targets = (
            labels[:20].view(4, 5) if name == "ctc_loss" else torch.where(is_padding, 5, 1 + labels[:20].view(4, 5) % 4)
        )
        return F.ctc_loss(output.view(10, 4, 6), targets, torch.full((4,), 10), torch.full((4,), 5), zero_infinity=True)
    if name == "cosine_embedding_loss":
        return F.cosine_embedding_loss(output, output.roll(1, 0).detach(), (labels > 2).float())
    function = {"hinge_embedding_loss": F.hinge_embedding_loss, "soft_margin_loss": F.soft_margin_loss}[name]
    return function(output, (labels[:, None] > 2).float().expand_as(output))


def special_losses(model: nn.Module, batch: Any) -> Tensor:
    """Return losses with the input and the targets that their documentation requires."""
    output, labels = model(batch[0]), batch[1]
    signs, letters = torch.where(labels > 2, 1.0, -1.0), 1 + torch.arange(20).view(4, 5) % 5
    letters[:, 4] = 0  # the blank, after the end
    return (
        F.kl_div(output, F.one_hot(labels, 6).float(), reduction="batchmean")
        + F.ctc_loss(output.view(10, 4, 6), letters, [10] * 4, [4] * 4)
        + F.ctc_loss(output.view(10, 4, 6), letters[:, :0], [10] * 4, [0] * 4)
        + F.cosine_embedding_loss(output, output.roll(1, 0).detach(), signs)
        + F.soft_margin_loss(output, 0.9 * signs[:, None].expand_as(output))
    )


LOSS_FAULTS = [
    ("double_softmax", "3", 0, lambda: classifier(nn.Softmax(1)), class_loss, 6),
    ("double_softmax", "3", 0, lambda: classifier(nn.Sigmoid()), class_loss, 6),
    ("double_softmax", "3", 0, lambda: classifier(nn.Sigmoid(), outputs=1), logit_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.Tanh(), outputs=1), probability_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.ReLU(), outputs=1), probability_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.ReLU(), outputs=1), logit_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.ReLU()), class_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.Tanh(), outputs=1), column_loss, 6),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.Sigmoid(), outputs=1), column_loss, 6),
    ("wrong_range_of_loss", "", 0, classifier, likelihood, 6),
    ("wrong_range_of_loss", "", 0, lambda: classifier(nn.Softmax(1)), likelihood, 6),
    ("wrong_range_of_loss", "", 0, lambda: classifier(nn.LogSoftmax(0)), likelihood, 6),
    (
        "wrong_range_of_loss",
        "3",
        0,
        lambda: classifier(nn.Softmax(1)),
        partial(special_loss, name="binary_cross_entropy"),
        6,
    ),
    ("wrong_range_of_loss", "3", 0, lambda: classifier(nn.Softmax(1)), partial(special_loss, name="kl_div"), 6),
    ("wrong_range_of_loss", "", 0, classifier, partial(special_loss, name="kl_div"), 6),
    ("wrong_range_of_loss", "", 0, lambda: classifier(nn.LogSoftmax(1)), partial(special_loss, name="ctc_loss"), 6),
    ("padding_in_loss", "", 0, lambda: classifier(nn.LogSoftmax(1)), partial(special_loss, name="padded"), 6),
    *(
        ("wrong_range_of_loss", "", 0, classifier, partial(special_loss, name=name), 6)
        for name in ("cosine_embedding_loss", "hinge_embedding_loss", "soft_margin_loss")
    ),
    *(
        (
            "loss_broadcasts",
            "",
            0,
            lambda: classifier(outputs=1),
            partial(number_loss, function=each, target_first=first),
            6,
        )
        for each, first in ((F.mse_loss, False), (F.l1_loss, True), (F.smooth_l1_loss, False), (F.huber_loss, False))
    ),
    ("narrow_layer", "0", 1, lambda: classifier(units=1), class_loss, 6),
    ("dropout_keeps_units", "1", 0, lambda: classifier(dropped=0.95), class_loss, 6),
]


@pytest.mark.parametrize(("relation", "layer", "step", "build", "loss_of", "high"), LOSS_FAULTS)
def test_fault_of_a_classifier_is_reported(
    relation: str, layer: str, step: int, build: Callable[[], nn.Module], loss_of: Callable[..., Tensor], high: int
) -> None:
    probe = train(build(), classes(high), loss_of)
    assert violations(probe) == [(relation, step)]
    assert [row["layer"] for row in rows_of(probe, relation) if row["holds"] is False] == [layer]


class Scored(nn.Module):
    """A classifier with a layer of one unit that weights its features, as in attention."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.head = nn.Linear(5, 1), nn.Linear(5, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.score(x).sigmoid())


HEALTHY_CLASSIFIERS = [
    (classifier, class_loss, 6, {"double_softmax", "dropout_keeps_units"}),
    (lambda: classifier(nn.LogSoftmax(1)), class_loss, 4, {"double_softmax", "dropout_keeps_units"}),
    (lambda: classifier(outputs=1), logit_loss, 6, {"double_softmax", "dropout_keeps_units"}),
    (lambda: classifier(nn.Sigmoid(), outputs=1), probability_loss, 6, {"wrong_range_of_loss", "dropout_keeps_units"}),
    (lambda: classifier(outputs=2, units=1), class_loss, 2, {"double_softmax", "dropout_keeps_units"}),
    (lambda: classifier(outputs=1), number_losses, 6, {"loss_broadcasts", "dropout_keeps_units"}),
    (Scored, class_loss, 6, {"double_softmax", "narrow_layer"}),
    (
        lambda: classifier(nn.LogSoftmax(1)),
        likelihood,
        6,
        {"wrong_range_of_loss", "dropout_keeps_units"},
    ),
    (
        lambda: classifier(nn.LogSoftmax(1)),
        special_losses,
        6,
        {"wrong_range_of_loss", "loss_broadcasts", "dropout_keeps_units"},
    ),
    *(
        (
            lambda: classifier(nn.Softmax(1)),
            partial(special_loss, name=name),
            6,
            {"wrong_range_of_loss", "dropout_keeps_units"},
        )
        for name in ("one target", "two softmaxes in each row")
    ),
    *(
        (
            lambda last=last: classifier(last, outputs=1),
            partial(column_loss, low=low, scale=scale),
            6,
            {"wrong_range_of_loss", "loss_broadcasts", "dropout_keeps_units"},
        )
        for last, low, scale in (
            (nn.ReLU(), 0, 1),
            (nn.Tanh(), -1, 0.4),
            (nn.Sigmoid(), 0, 0.2),
            (nn.Tanh(), -1.05, 0.42),  # a third of the targets is outside of the range, by a few percent
        )
    ),
]


@pytest.mark.spread(6)
@pytest.mark.parametrize(("build", "loss_of", "high", "verified"), HEALTHY_CLASSIFIERS)
def test_healthy_classifier_is_not_reported(
    build: Callable[[], nn.Module], loss_of: Callable[..., Tensor], high: int, verified: set[str]
) -> None:
    with instrument.attach(model := build(), {}) as probe:
        for batch in classes(high):
            loss_of(model, batch).backward()
            probe.end_step()
    assert violations(probe) == []
    rows = probe.relations.to_dict("records")
    assert [row["text"] for row in rows if row["holds"] is None] == []
    assert {row["relation"] for row in rows if row["holds"]} - {"mode_of_phase", "constant_prediction"} == verified


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_losses_of_tensors_without_values_are_not_checked(device: str) -> None:
    """Tensors of `torch.func` have no values after their transform."""
    x = torch.ones(40, 6, device=device, requires_grad=True)
    letters = torch.ones(4, 5, dtype=torch.long, device=device)
    losses = [
        F.mse_loss,
        F.hinge_embedding_loss,
        lambda x, y: F.binary_cross_entropy(x.softmax(-1), y),
        lambda x, _: F.ctc_loss(x.log_softmax(1).view(10, 4, 6), letters, [10] * 4, [5] * 4),
    ]
    with warnings.catch_warnings(action="ignore"), instrument.attach(nn.Linear(1, 1), {}) as probe:
        for loss in losses[: 4 if device == "meta" else 3]:
            if device == "meta":
                loss(x, torch.zeros_like(x))
            else:
                torch.func.vmap(torch.func.grad(lambda x, loss=loss: loss(x[None], torch.zeros_like(x[None]))))(x)
        probe.end_step()
    assert [row["text"] for row in probe.relations.to_dict("records") if not row["holds"]] == []


def test_number_of_targets_does_not_move_them() -> None:
    """The end of a sample of `ctc_loss` differs between steps, and one target has no variance."""
    output, letters = torch.zeros(10, 4, 6, requires_grad=True), 1 + torch.arange(20).view(4, 5) % 5
    torch.set_warn_always(True)
    try:
        with pytest.warns(instrument.InstrumentWarning) as warned, instrument.attach(nn.Linear(1, 1), {}) as probe:
            for step in range(10):
                F.mse_loss(output[0, 0, :1], torch.full((1,), float(step)))
                F.l1_loss(output[0].to(torch.complex64), torch.ones(4, 6, dtype=torch.complex64))
                F.ctc_loss(output.log_softmax(2), letters, [10] * 4, [4, 3, 2, 1] if step else [5] * 4)
                probe.end_step()
    finally:
        torch.set_warn_always(False)
    assert {warning.category for warning in warned} == {instrument.InstrumentWarning}
    assert rows_of(probe, "constant_prediction") == []


class SamplerWrapper(DistributedSampler[Any]):
    """Distributes the samples of another sampler, as that of Lightning."""


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ([0] * 2 + [1] * 2 + [2] * 2, [4]),
        ([0] * 6, []),  # as of a contrastive loss, whose positive sample is the first one
        ([0, 0, 1, 1, None, None], []),
        ([1, 0, 1, 1, 0, 1], []),  # as of the steps of a discriminator and a generator
        ([0, 0, 1, 1, 0, 0], [4]),  # two epochs
    ],
)
@pytest.mark.parametrize("how", ["loaded", "cast", "grouped", "rank", "shuffled", "wrapped"])
def test_batches_of_one_class_each_are_reported(order: list[int | None], steps: list[int], how: str) -> None:
    """Those of a loop or a sampler may be samples of a group, such as a patient with one diagnosis."""
    kinds = [torch.arange(8) % 6 if kind is None else torch.full((8,), kind) for kind in order]
    labels = torch.cat(kinds)
    data = TensorDataset(torch.randn(8 * len(order), 5), labels[:, None].int() if how == "cast" else labels)
    grouped = BatchSampler([*range(len(data))], 8, drop_last=True)
    loaded = DataLoader(data, batch_sampler=grouped) if how == "grouped" else DataLoader(data, 8)
    if how in ("rank", "shuffled", "wrapped"):
        kind = SamplerWrapper if how == "wrapped" else DistributedSampler
        loaded = DataLoader(data, 8, sampler=kind(data, 1, 0, shuffle=how == "shuffled"))
    optimizer = torch.optim.SGD((model := classifier()).parameters(), lr=0.01)
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}, optimizer=optimizer) as probe:
        for inputs, targets in loaded:
            optimizer.zero_grad()
            class_loss(model, (inputs, targets.flatten().long())).backward()
            optimizer.step()
            probe.end_step()
    assert violations(probe) == [
        ("samples_vary", step) for step in steps if how not in ("grouped", "shuffled", "wrapped")
    ]


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("scale", "temperature", "is_trained", "count"),
    [(100.0, 1.0, False, 1), (2.0, 1.0, False, 0), (1.0, 0.01, False, 0), (100.0, 1.0, True, 0)],
)
def test_first_loss_of_large_logits_is_reported(scale: float, temperature: float, is_trained: bool, count: int) -> None:
    hooks = {"outputs": {"layers": "**", "kind": "forward", "action": "record"}}
    torch.manual_seed(0)
    model = classifier(dropped=0.0)
    model[-1].get_parameter("weight").data *= scale
    x, y = classes(6)[0]
    expected = F.cross_entropy(model(x) / temperature, y).item() / np.log(6)
    if is_trained:
        class_loss(model, (x, y)).backward()
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, hooks) as probe:
        logits = model(x)
        F.cross_entropy(logits if temperature == 1 else logits / temperature, y).backward()
        probe.end_step()
    events = probe.events[probe.events["rule"] == "poor_initialization"]
    events = events[events["message"].str.contains("uniform prediction of 6 classes 1.79")]
    assert events["value"].tolist() == pytest.approx([expected] * count)
    assert count or scale == 2 or expected > 3


@pytest.mark.spread(2)
@pytest.mark.parametrize(("scale", "is_learned"), [(1.0, False), (0.25, False), (1.0, True)])
def test_loss_of_a_constant_prediction_is_reported(scale: float, is_learned: bool) -> None:
    """After a start with a higher loss, a model of random classes predicts their frequencies."""
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    nn.init.normal_(model.bias, std=2.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2 / scale)
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}, optimizer=optimizer) as probe:
        for _ in range(200):
            x = torch.randn(128, 5)
            y = x[:, :4].argmax(1) if is_learned else torch.randint(4, (128,))
            loss = scale * F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    events = probe.events[probe.events["rule"] == "loss_not_decreasing"].to_dict("records")
    if is_learned:
        assert events == []
    else:
        ((step, value, text),) = [(event["step"], event["value"], event["message"]) for event in events]
        assert (step, value) == (199, pytest.approx(scale * np.log(4), rel=0.02))
        assert "as of a constant prediction" in text


@pytest.mark.parametrize("moves", [True, False])
def test_rising_loss_of_moving_targets_is_not_reported(*, moves: bool) -> None:
    model = nn.Linear(4, 1)
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}) as probe:
        for step in range(200):
            targets = torch.linspace(0.0, 1.0, 32)[:, None] - moves * step / 10
            loss = F.smooth_l1_loss(model(torch.zeros(32, 4)), targets)
            probe.end_step(loss=loss if moves else loss.detach() + step)
    assert probe.events["rule"].tolist() == ["loss_not_decreasing"] * (not moves)
    moved = [(row["step"], row["value"]) for row in rows_of(probe, "constant_prediction") if row["holds"] is None]
    variance = float(torch.linspace(0.0, 1.0, 32).var())
    assert moved == [(8, pytest.approx(31 / 32 + 0.8**2 / variance, rel=1e-4))] * moves


@pytest.mark.parametrize("opposed", [True, False])
def test_constant_targets_of_opponents_are_not_compared(*, opposed: bool) -> None:
    """As those of a GAN, whose losses stay near log(2)."""
    model = nn.ModuleDict({"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 1)})
    optimizers = [torch.optim.SGD(part.parameters(), lr=1e-9) for part in model.values()]
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}, optimizer=optimizers) as probe:
        for step in range(200):
            scores = model["critic"](model["generator"](torch.full((4, 2), float(step % 2))))
            targets = [torch.full((4, 1), target) for target in (1.0, 1.0 - opposed)]
            first, second = (F.binary_cross_entropy_with_logits(scores, each) for each in targets)
            (first + second).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            probe.end_step(loss=first)
    assert ("loss_not_decreasing" in set(probe.events["rule"])) != opposed


def test_targets_of_several_optimizers_are_not_listed() -> None:
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
    with instrument.attach(model, {}, optimizer=optimizers) as probe:
        for step in range(2):
            loss = F.l1_loss(sum(part(torch.ones(1)) for part in model).expand(100_000), torch.randn(100_000))
            loss.backward()
            if step:
                tracemalloc.start()
            probe.end_step()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1e6


@pytest.mark.parametrize(
    ("low", "are_classes", "step"), [((), True, 10 + 19), ((15,), True, 16 + 19), ((), False, None)]
)
def test_loss_that_stays_above_a_constant_prediction_is_reported(
    low: tuple[int, ...], are_classes: bool, step: int | None
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4, bias=False)
    weights = model.weight.detach().clone()
    loss_function = F.cross_entropy if are_classes else F.mse_loss
    losses = []
    with warnings.catch_warnings(action="ignore"), instrument.attach(model, {}) as probe:
        for number in range(60):
            model.weight.data = weights * (1.0 if number < 10 or number in low else 1e3)
            y = torch.randint(4, (128,)) if are_classes else torch.randn(128, 4)
            loss = loss_function(model(torch.randn(128, 5)), y)
            loss.backward()
            losses.append(loss.item())
            probe.end_step(loss=loss)
    assert (np.array(losses) > 2 * max(losses[0], np.log(4))).tolist() == [
        number >= 10 and number not in low for number in range(60)
    ]
    events = probe.events[probe.events["rule"] == "loss_not_decreasing"].to_dict("records")
    assert [(event["step"], event["value"]) for event in events] == ([] if step is None else [(step, losses[step])])
    assert all(event["message"].startswith("diverging loss: ") for event in events)
    assert all(event["threshold"] == pytest.approx(2 * max(losses[0], np.log(4)), rel=0.02) for event in events)


@pytest.mark.parametrize("has_two_terms", [True, False])
def test_loss_whose_terms_get_other_weights_has_no_constant_prediction(has_two_terms: bool) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 4)
    with instrument.attach(model, {}) as probe:
        y = torch.arange(256) % 4
        loss = F.cross_entropy(outputs := model(torch.randn(256, 5)), y)
        if has_two_terms:
            loss = F.mse_loss(outputs, torch.zeros(256, 4)) + 0.1 * loss
        loss.backward()
        probe.end_step(loss=loss)
    assert [row["holds"] for row in rows_of(probe, "constant_prediction")] == ([] if has_two_terms else [True])


def test_loss_of_a_constant_number_is_the_variance_of_the_targets() -> None:
    model = nn.Linear(5, 1)
    x, y = torch.randn(64, 5), 3 * torch.randn(64, 1)
    with instrument.attach(model, {}) as probe:
        (loss := F.mse_loss(model(x), y)).backward()
        probe.end_step()
    (row,) = rows_of(probe, "constant_prediction")
    assert row["value"] * loss.item() == pytest.approx(y.numpy().var(ddof=1), rel=1e-5)


class Images(Dataset[Tensor]):
    """64 random vectors."""

    data = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]


class CopiedGenerator(Images):
    """Augments with a generator of which each worker gets a copy."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Tensor:
        return torch.from_numpy(self.generator.normal(size=5)).float()


class Unsharded(IterableDataset[Tensor]):
    """All data in each worker."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(Images.data)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def loader(dataset: Any = None, batch_size: int = 8, **options: Any) -> DataLoader[Tensor]:
    return DataLoader(Images() if dataset is None else dataset, batch_size, **options)


def first_batches() -> Iterator[Tensor]:
    data = loader()
    while True:
        yield next(iter(data))


def stale_batches() -> Iterator[Tensor]:
    first = None
    for batch in loader():
        first = batch if first is None else first
        yield first


def echoed_batches() -> Iterator[Tensor]:
    for batch in loader():
        yield from [batch] * 4


def few_labelled_batches() -> Iterator[Tensor]:
    """All labelled data in each step, next to a batch of other data, as in semi-supervised training."""
    for _ in loader():
        yield from loader(-Images.data[:8])


DATA_FAULTS = [
    ("samples_vary", 3, first_batches),
    ("samples_vary", 3, stale_batches),
    ("samples_vary", 2, lambda: (batch[:1].expand(8, 5) for batch in loader())),
    ("distinct_data", 3, lambda: loader(CopiedGenerator(), num_workers=2)),
    ("distinct_data", 3, lambda: loader(Unsharded(), num_workers=2)),
]


@pytest.mark.parametrize(("relation", "step", "batches"), DATA_FAULTS)
def test_fault_in_the_data_is_reported(relation: str, step: int, batches: Callable[[], Iterable[Tensor]]) -> None:
    probe = train(nn.Linear(5, 2), islice(batches(), 6), mean_square)
    assert violations(probe) == [(relation, step)]


class Repeated(Sampler[int]):
    """Repeats each batch several times, such as the answers to one prompt. Its length draws random numbers."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __iter__(self) -> Iterator[int]:
        for first in torch.randperm(8).tolist():
            for _ in range(self.times):
                yield from range(8 * first, 8 * first + 8)

    def __len__(self) -> int:
        return sum(1 for _ in self)


HEALTHY_DATA = [
    lambda: loader(sampler=Repeated(5)),
    lambda: loader(ConcatDataset([Subset(Images(), range(8))] * 6)),
    lambda: loader(sampler=Repeated(2), num_workers=2),
    loader,
    lambda: loader(shuffle=True, num_workers=2),
    lambda: [Images.data] * 8,
    lambda: (batch for _ in range(8) for batch in loader(batch_size=64)),
    lambda: [next(iter(loader()))] * 8,
    echoed_batches,
    few_labelled_batches,
    lambda: (torch.ones(8, 5) for _ in range(8)),
    lambda: (torch.ones(8, 5) * 2 for batch in loader(torch.arange(64))),
]


@pytest.mark.spread(1)
@pytest.mark.parametrize("batches", HEALTHY_DATA)
def test_healthy_data_is_not_reported(batches: Callable[[], Iterable[Tensor]]) -> None:
    with instrument.attach(model := nn.Linear(5, 2), {}) as probe:
        for batch in batches():
            mean_square(model, batch).backward()
            probe.end_step()
    assert violations(probe) == []


def test_lengths_of_samplers_draw_no_random_numbers() -> None:
    def state(*, is_attached: bool) -> Tensor:
        model = nn.Linear(5, 2)
        torch.manual_seed(0)
        with instrument.attach(model, {}) if is_attached else nullcontext():
            list(loader(sampler=Repeated(1)))
        return torch.get_rng_state()

    assert torch.equal(state(is_attached=True), state(is_attached=False))


def test_other_patches_of_pytorch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for owner, name in ((_BaseDataLoaderIter, "__next__"), (LRScheduler, "step")):
        original = getattr(owner, name)

        def patched(self: Any, original: Any = original, name: str = name) -> Any:
            calls.append(name)
            return original(self)

        monkeypatch.setattr(owner, name, patched)
    before = _BaseDataLoaderIter.__next__, LRScheduler.step
    optimizer = torch.optim.SGD((model := nn.Linear(5, 2)).parameters())
    with instrument.attach(model, {}, optimizer=optimizer):
        list(loader(batch_size=32))
        optimizer.step()
        ExponentialLR(optimizer, 0.9)
    assert (_BaseDataLoaderIter.__next__, LRScheduler.step) == before
    assert calls == ["__next__"] * 3 + [
        "step"
    ]  # the last batch ends the pass, and a scheduler makes a step when it is created


def test_failing_check_does_not_end_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Relation) -> Iterator[Checked]:
        raise ValueError("wrong shape")
        yield

    monkeypatch.setattr(RELATIONS["tied_weights"], "check", fail)
    with instrument.attach(Bigram(), {}) as probe:
        for _ in range(3):
            probe.end_step()
    (row,) = rows_of(probe, "tied_weights")
    assert (row["holds"], row["text"]) == (None, "the check failed: ValueError: wrong shape")


def test_relations_are_checked_in_the_first_and_some_later_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    def note(self: Relation) -> Iterator[Checked]:
        checked.append(self.training.clock.moment.step)
        yield Checked(True, 1.0, "")

    monkeypatch.setattr(RELATIONS["tied_weights"], "check", note)
    with instrument.attach(Bigram(), {}, step=30) as probe:
        for step in range(3010):
            probe.end_step()
            if step < 1000 or step in (1198, 1199, 1250, 2300):
                with probe.evaluating():
                    pass
    first = [0, 1, 2, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 200, 201, 400, 401, 600, 601, 800, 801]
    # The evaluations before the steps 1200 and 2301 begin 200 steps or more after the last check.
    later = [1000, 1001, 1201, 1202, 2000, 2001, 2302, 2303, 3000, 3001]
    assert checked == [30 + step for step in (*first, *later)]
    assert len(rows_of(probe, "tied_weights")) == 1


@pytest.mark.parametrize("ends_in", ["loop", "first hook", "last hook", "hook before a call of the model"])
def test_relations_run_in_no_step_of_an_optimizer_between_checked_ones(
    ends_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("instrument.relations.relation_set.has_compiled", lambda: False)
    called: Counter[tuple[str, int]] = Counter()
    model = Bigram()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def count(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and "relation_set" in code.co_filename and code.co_name in ("_before_step", "after_step"):
            called[code.co_name, probe.step] += 1

    if ends_in == "first hook":
        optimizer.register_step_post_hook(lambda *_: probe.end_step())
    with instrument.attach(model, {}, optimizer=optimizer, step=30) as probe:
        if ends_in not in ("loop", "first hook"):
            optimizer.register_step_post_hook(lambda *_: probe.end_step())
        if ends_in == "hook before a call of the model":
            optimizer.register_step_post_hook(lambda *_: model(torch.tensor([1])))
            optimizer.register_step_post_hook(lambda *_: None)
        for _ in range(45):
            model.head.weight.grad = torch.ones_like(model.head.weight)
            sys.setprofile(count)
            optimizer.step()
            sys.setprofile(None)
            if ends_in == "loop":
                probe.end_step()
    checked = [30 + since_start for since_start in (0, 1, 2, 3, 4, 8, 9, 16, 17, 32, 33)]
    assert called == {(name, step): 1 for name in ("_before_step", "after_step") for step in checked}


def test_resumed_probe_continues_the_relations() -> None:
    with instrument.attach(Bigram(), {}) as probe:
        for _ in range(3):
            probe.end_step()
        state = json.loads(json.dumps(probe.state_dict()))
    relations = RelationSet({"tied_weights"}, Bigram(), (), probe.clock)
    relations.load_state_dict(state["relations"])
    probe.clock.moment = probe.clock.moment._replace(step=4)
    relations.attach()
    assert relations.training.is_checked
    assert relations.check() == []  # it was verified before
    relations.detach()


def test_no_rule_that_reads_relations_registers_nothing() -> None:
    original = torch._C._nn.cross_entropy_loss
    with instrument.attach(model := Bigram(), {}, rules=None):
        assert torch._C._nn.cross_entropy_loss is original
        assert not model._forward_pre_hooks


def test_scripted_and_transformed_losses_work() -> None:
    class Loss(nn.Module):
        def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(logits, targets)

    model, batch = Bigram(), tokens()[0]
    with instrument.attach(model, {}) as probe:
        logits = torch.randn(3, 4, requires_grad=True)
        loss = torch.jit.script(Loss())(logits, torch.tensor([0, 1, 2]))
        assert loss == F.cross_entropy(logits, torch.tensor([0, 1, 2]))
        gradients = torch.func.grad(
            lambda weights: torch.func.vmap(
                lambda row: F.cross_entropy(torch.func.functional_call(model, weights, row[:-1]), row[1:])
            )(batch).mean()
        )(dict(model.named_parameters()))
        assert gradients
        probe.end_step()
    assert violations(probe) == []
    assert not any("failed" in row["text"] for row in probe.relations.to_dict("records"))


def test_threads_that_train_a_model_each_have_their_own_relations() -> None:
    barrier = threading.Barrier(2, timeout=60)  # each thread calls its losses while the other one is attached
    hooks = {"outputs": {"layers": ".", "kind": "forward", "action": "record"}}

    def train(micro_steps: int, wait: Callable[[], Any] = barrier.wait) -> list[tuple[str, Any]]:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with instrument.attach(model, hooks, optimizer=optimizer) as probe:
            for _ in range(3):
                wait()
                for _ in range(micro_steps):
                    F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
                wait()
                optimizer.step()
                optimizer.zero_grad()
                probe.end_step()
        return [
            (row["relation"], row["value"]) for name in ("double_softmax", "counts") for row in rows_of(probe, name)
        ]

    with ThreadPoolExecutor(2) as threads:
        found = [*threads.map(train, (1, 3))]
    assert found == [train(1, int), train(3, int)]
    assert [rows[0] for rows in found] == [("double_softmax", 1), ("double_softmax", 3)]


def test_thread_of_an_earlier_training_calls_the_losses_of_a_probe_of_another_thread() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"outputs": {"layers": ".", "kind": "forward", "action": "record"}}

    def steps(probe: Any) -> None:
        for _ in range(3):
            F.cross_entropy(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step()

    def train() -> None:
        with instrument.attach(model, hooks, optimizer=optimizer) as probe:
            steps(probe)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(train).result()
        with instrument.attach(model, hooks, optimizer=optimizer) as probe:
            thread.submit(steps, probe).result()
    assert [row["value"] for row in rows_of(probe, "double_softmax")] == [1]
    assert [row["step"] for row in rows_of(probe, "counts")] == [0, 1]
