"""The task `generate`: tokens, texts, hooks at each token, caches, sampling and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hook_runs import Calls, record
from torch import Tensor, nn

import instrument
from instrument import MemorySink, Probe
from instrument.config.experiment import DataConfig
from instrument.config.parse import parse_config
from instrument.tasks import Generate, Outcome
from instrument.tasks.base import check_outcome
from instrument.training.data import loader_options
from instrument.training.datasets import Prompts
from instrument.training.experiment import Experiment
from instrument.training.loader import Loader
from instrument.training.loop import evaluate, write_generated

PROMPTS: list[Any] = ["dcba", "ab"]
GPT2 = {"vocab_size": 32, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}


class Letters:
    """A tokenizer: each letter is a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("a") + 1 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(ord("a") + token - 1) for token in tokens)


def gpt2(eos: int | None = None) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(**GPT2, bos_token_id=0, eos_token_id=eos, tie_word_embeddings=False, initializer_range=1.0)
    return GPT2LMHeadModel(config).eval()


def tokens_of(outcome: Outcome) -> list[list[int]]:
    return [list(generated.tokens) for generated in outcome.generated]


def test_greedy_tokens_are_those_of_the_model() -> None:
    model, prompt = gpt2(), torch.tensor([4, 3, 2, 1])
    outcome = Generate(max_new_tokens=6)(model, [prompt])
    tokens = prompt.unsqueeze(0)
    for _ in range(6):  # without padding, mask and cache
        with torch.no_grad():
            tokens = torch.cat([tokens, model(tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert tokens_of(outcome) == [tokens[0, 4:].tolist()]
    assert len(set(tokens_of(outcome)[0])) > 1
    assert (outcome.loss, outcome.samples, outcome.generated[0].text) == (None, 1, None)
    assert outcome.generated[0].prompt_tokens == [4, 3, 2, 1]
    check_outcome(outcome, differentiable=False)


def test_prompts_of_different_lengths_are_padded() -> None:
    model, task = gpt2(), Generate(max_new_tokens=5, tokenizer=Letters())
    together = task(model, PROMPTS)
    for prompt, generated in zip(PROMPTS, together.generated, strict=True):
        assert task(model, [prompt]).generated == (generated,)
        assert generated.prompt == prompt
        assert generated.text == Letters().decode(list(generated.tokens))


def test_generation_stops_at_the_end_of_sequence() -> None:
    free = tokens_of(Generate(max_new_tokens=6)(gpt2(), [torch.tensor([4, 3, 2, 1])]))[0]
    end = free[2]
    stopped = tokens_of(Generate(max_new_tokens=6)(gpt2(eos=end), [torch.tensor([4, 3, 2, 1])]))[0]
    assert stopped == free[: free.index(end) + 1]


def test_sampling_depends_on_the_seed() -> None:
    model, task = gpt2(), Generate(max_new_tokens=8, sample=True, options={"temperature": 5.0})
    drawn = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        drawn.append(tokens_of(task(model, [torch.tensor([1, 2])])))
    assert drawn[0] == drawn[2] != drawn[1]


def table() -> nn.Module:
    """Return a language model that is not from Transformers: each token has one successor."""
    successors = nn.Embedding.from_pretrained(10 * torch.eye(8).roll(1, 1))
    return Calls(lambda table, tokens: table(tokens), table=successors).eval()


@pytest.mark.parametrize("sample", [False, True])
def test_other_language_models_generate_token_by_token(sample: bool) -> None:
    batch = [torch.tensor([0, 1]), torch.tensor([5, 6])]
    outcome = Generate(max_new_tokens=4, sample=sample)(table(), batch)
    assert sample or tokens_of(outcome) == [[2, 3, 4, 5], [7, 0, 1, 2]]
    assert [len(tokens) for tokens in tokens_of(outcome)] == [4, 4]


def test_encoder_and_decoder_generate() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, eos_token_id=None)).eval()
    outcome = Generate(max_new_tokens=3)(model, [torch.tensor([1, 2, 3, 4])])
    assert [len(tokens) for tokens in tokens_of(outcome)] == [3]


@pytest.mark.spread(1)
@pytest.mark.parametrize("use_cache", [True, False])
def test_hooks_run_once_per_token(use_cache: bool, tmp_path: Path) -> None:
    model, task = gpt2(), Generate(max_new_tokens=4, tokenizer=Letters(), use_cache=use_cache)
    expected = tokens_of(task(model, PROMPTS))
    hooks = {
        "seen": record("forward", ["transformer.h.*", "lm_head"], phase="eval"),
        "half": {"layers": "transformer.h.0", "kind": "forward", "action": "modify", "fn": "zero",
                 "phase": "eval", "start": 1},
    }  # fmt: skip
    with instrument.attach(model, hooks, out=tmp_path / "run") as probe:
        found = []
        for _ in range(2):
            with probe.evaluating():
                outcome = task(model, PROMPTS)
                write_generated(probe, outcome.generated)
            probe.end_step()
            found.append(tokens_of(outcome))
    assert found[0] == expected != found[1]  # the intervention begins at step 1
    run = instrument.load(tmp_path / "run")
    rows = run.stats.query("layer == 'transformer.h.1' and step == 0")
    assert rows["call"].tolist() == [0, 1, 2, 3]
    lengths = [4, 1, 1, 1] if use_cache else [4, 5, 6, 7]
    assert rows["numel"].tolist() == [2 * 16 * length for length in lengths]
    assert run.effects["call"].tolist() == [0, 1, 2, 3]
    table = run.generated
    assert table["prompt"].tolist() == PROMPTS * 2
    assert [list(tokens) for tokens in table["tokens"]] == [*found[0], *found[1]]
    assert [list(tokens) for tokens in table["prompt_tokens"][:2]] == [[4, 3, 2, 1], [1, 2]]
    assert table["text"][0] == Letters().decode(expected[0])
    assert table[["step", "sample"]].to_numpy().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]
    assert set(table["phase"]) == {"eval"}
    assert not run.coverage.query("fired < expected").size


def test_evaluation_writes_what_was_generated() -> None:
    text = {
        "model": {"_target_": f"{__name__}.gpt2"},
        "data": {"dataset": {"_target_": f"{__name__}.rows"}},
        "task": {"_target_": "instrument.tasks.HuggingFace"},
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
        "train": {"steps": 1, "batch_size": 2},
        "hooks": {"seen": {"layers": "lm_head", "kind": "forward", "action": "record", "phase": "eval"}},
    }
    experiment = Experiment(parse_config(text))
    config = DataConfig.model_validate(
        {"dataset": {"_target_": "x"}, "collate_fn": {"_target_": "instrument.training.loader.unchanged"}}
    )
    loader = Loader(Prompts(PROMPTS * 2), 3, options=loader_options(config, 0, pins_memory=False))
    experiment.task, experiment.eval_loader = Generate(3, Letters()), loader
    sink = MemorySink()
    with Probe(experiment.plan, sink) as probe:
        metrics = evaluate(experiment, probe)
    assert metrics["loss"] is None
    frame = sink.frame("generated")
    assert frame[["micro_step", "sample"]].to_numpy().tolist() == [[0, 0], [0, 1], [0, 2], [1, 0]]
    assert frame["prompt"].tolist() == PROMPTS * 2
    assert sink.frame("stats")["call"].tolist() == [0, 1, 2] * 2


def rows(split: str) -> list[dict[str, Tensor]]:
    return [{"input_ids": torch.arange(4), "labels": torch.arange(4)}] * 4


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (lambda: gpt2().train(), ["ab"], "computes no loss, so it cannot train"),
        (gpt2, ["ab"], r"the prompts are texts, but the task has no tokenizer; set task\.tokenizer"),
        (gpt2, [torch.zeros(3)], r"a prompt must be a text or int64 tokens \[T\], but the batch is \[float32 \[3\]\]"),
        (gpt2, {"input_ids": torch.ones(1)}, "the batch must be a list of prompts, but is {'input_ids'"),
        (table, [torch.tensor([1]), torch.tensor([1, 2])], "the prompts have 1, 2 tokens, but this model"),
    ],
)  # fmt: skip
def test_unsuitable_prompts_are_refused(model: Any, batch: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Generate()(model(), batch)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        Generate(0)


def test_prompts_come_from_a_list_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\nzwei, äöü\n", encoding="utf-8")
    dataset = Prompts(file=str(tmp_path / "prompts.txt"))
    assert [dataset[index] for index in range(len(dataset))] == ["one", "zwei, äöü"]
    tokens = Prompts(prompts=[[1, 2], [3]])[0]
    assert isinstance(tokens, Tensor)
    assert tokens.tolist() == [1, 2]
    for given in ({}, {"prompts": ["a"], "file": "b"}):
        with pytest.raises(ValueError, match="exactly one of prompts and file"):
            Prompts(**given)
