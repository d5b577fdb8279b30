"""Transformers trained by ratings, rollouts and teachers, and for retrieval, prompts, long rows, images, sounds and series; with faults."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
import transformers
from data import PAD, VOCABULARY, batches, digits, padded
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, OneCycleLR

DEEP_CRIME = "Humbatova et al., DeepCrime: mutation testing of deep learning systems based on real faults, 2021"
DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
EXAMPLES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
PYTORCH_FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2026"
TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
NUMBERS = 20
ASKED, ANSWERED = 4, 6  # the tokens of a question and the most of an answer


def fit(model: nn.Module, optimizer: Any, losses: Iterable[Tensor], schedule: Any = None) -> None:
    """Train with one loss of a generator in each step, with clipped gradients."""
    model.train()
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)
    model.eval()


def pretrain(model: nn.Module, losses: Iterable[Tensor]) -> None:
    """Train without instrumentation."""
    model.train()
    optimizer = Adam(model.parameters(), lr=3e-3)
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def rows_of(tables: Tensor, chosen: Tensor, length: int, lag: int = 1) -> Tensor:
    """Return rows of numbers, each of which mostly follows from an earlier one in the table of its row, int64 [rows, length]."""
    rows = torch.randint(NUMBERS, (len(chosen), length))
    for time in range(lag, length):
        follows = torch.rand(len(chosen)) < 0.94
        rows[:, time] = torch.where(follows, tables[chosen, rows[:, time - lag]], rows[:, time])
    return rows


def encoder_of(size: int, dropout: float = 0.0) -> nn.TransformerEncoder:
    """Return two layers with a normalization before each branch and after the last one."""
    layer = nn.TransformerEncoderLayer(size, 4, 2 * size, dropout, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)


def rated_answers(count: int, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Return questions with answers, int64 [count, tokens], and whether each answer was liked.

    Each token of an answer follows from one of the question: in the first table if it was liked, otherwise mostly in the second one.
    """
    asked, is_liked = torch.randint(NUMBERS, (count, ASKED)), torch.rand(count) < 0.6
    answers = torch.where(is_liked[:, None], tables[0][asked], tables[1][asked])
    is_noise = torch.rand(answers.shape) < 0.05
    return torch.cat([asked, torch.where(is_noise, torch.randint(NUMBERS, answers.shape), answers)], 1), is_liked


def log_probability(model: nn.Module, rows: Tensor) -> Tensor:
    """Return that of each answer, float32 [rows]."""
    chosen = model(input_ids=rows).logits[:, :-1].log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
    return chosen[:, ASKED - 1 :].sum(1)


@program(
    "transformers",
    "TRL, KTOTrainer with the loss of Ethayarajh et al., KTO: model alignment as prospect theoretic optimization, 2024, and StarCoder2",
    Fault("ratings_read_as_text", "labels", PYTORCH_FORUM,
          ("class_imbalance", "labels_of_other_positions", "wrong_loss", "overtraining")),
)  # fmt: skip
def rated_texts(fault: str = "") -> Tensor:
    rows, is_liked = rated_answers(1800, torch.stack([torch.randperm(NUMBERS) for _ in range(2)]))
    config = transformers.Starcoder2Config(
        vocab_size=NUMBERS, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.1, embedding_dropout=0.0,
        residual_dropout=0.0, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = transformers.Starcoder2ForCausalLM(config)
    source = islice(batches(rows[:1500], size=32), 240)
    pretrain(model, (model(input_ids=batch, labels=batch).loss for (batch,) in source))
    others = torch.cat([rows[:, :ASKED], rows.roll(1, 0)[:, ASKED:]], 1)  # answers of other questions
    ratings = [str(bool(each)) for each in is_liked]  # the column of a table of text
    read = [bool(each) if fault == "ratings_read_as_text" else each == "True" for each in ratings]
    with torch.no_grad():
        before, others_before = log_probability(model, rows), log_probability(model, others)
    optimizer = AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.1, total_iters=200)

    def loss_of(batch: Tensor, reference: Tensor, others: Tensor, others_reference: Tensor, liked: Tensor) -> Tensor:
        with torch.no_grad():
            drift = (log_probability(model, others) - others_reference).mean().clamp(min=0)
        gain = log_probability(model, batch) - reference - drift
        return (1 - torch.sigmoid(torch.where(liked, 0.3, -0.3) * gain)).mean()

    data = (rows, before, others, others_before)
    source = islice(batches(*(x[:1500] for x in data), torch.tensor(read[:1500]), size=12), 200)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*(x[1500:] for x in (*data, is_liked)))


class Actor(nn.Module):
    """A decoder with a head for the next token and one for the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.GPTNeoConfig(
            vocab_size=NUMBERS + 1, hidden_size=48, num_layers=2, num_heads=4, attention_types=[[["global"], 2]],
            max_position_embeddings=16, initializer_range=0.1, intermediate_size=96, bos_token_id=None,
            eos_token_id=None, embed_dropout=0.1, resid_dropout=0.1, attention_dropout=0.0,
        )  # fmt: skip
        self.body = transformers.GPTNeoModel(config)
        self.head, self.value = nn.Linear(48, NUMBERS + 1, bias=False), nn.Linear(48, 1)
        nn.init.zeros_(self.value.weight)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities [samples, time, tokens] of the next tokens, and values [samples, time]."""
        x = self.body(input_ids=rows).last_hidden_state
        return self.head(x).log_softmax(-1), self.value(x)[..., 0]


def rolled_out(actor: Actor, rows: Tensor, top: int | None = None) -> Tensor:
    """Return rows with sampled answers of `ANSWERED` tokens, from all tokens or from the most likely ones."""
    for _ in range(ANSWERED):
        scores = actor(rows)[0][:, -1]
        if top is not None:
            scores = scores.masked_fill(scores < scores.topk(top, 1).values[:, -1:], -math.inf)
        rows = torch.cat([rows, scores.exp().multinomial(1)], 1)
    return rows


def advantages_of(rewards: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Return generalized advantages and returns, float32 [samples, tokens], without a discount."""
    advantages, last = torch.zeros_like(rewards), torch.zeros(len(rewards))
    after = F.pad(values[:, 1:], (0, 1))
    for time in reversed(range(rewards.shape[1])):
        last = rewards[:, time] + after[:, time] - values[:, time] + 0.95 * last
        advantages[:, time] = last
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8), advantages + values


@program(
    "transformers",
    "TRL, PPOTrainer, after Ziegler et al., Fine-tuning language models from human preferences, 2019, with GPT-Neo",
    Fault("only_likely_tokens_sampled", "data", HUGGING_FACE,
          ("distinct_data", "samples_vary", "input_drift", "class_imbalance", "loss_not_decreasing")),
    Fault("dropout_not_disabled", "mode", HUGGING_FACE,
          ("mode_of_phase", "dropout_keeps_units", "samples_vary", "@*drop*")),
)  # fmt: skip
def rewarded_texts(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(4)])
    length, liked = ASKED + ANSWERED, torch.arange(NUMBERS + 1) % 3 == 0
    rows = rows_of(tables, torch.randint(4, (3000,)), length)
    actor = Actor()
    texts = islice(batches(rows, size=32), 160)
    pretrain(actor, (F.nll_loss(actor(batch[:, :-1])[0].flatten(0, 1), batch[:, 1:].flatten()) for (batch,) in texts))
    if fault != "dropout_not_disabled":
        for module in actor.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    top = 3 if fault == "only_likely_tokens_sampled" else None
    reference = Actor().requires_grad_(False).eval()
    reference.load_state_dict(actor.state_dict())
    optimizer = AdamW(actor.parameters(), lr=3e-4, weight_decay=0.0, eps=1e-5)

    def taken(rows: Tensor, model: Actor) -> tuple[Tensor, Tensor]:
        scores, values = (x[:, ASKED - 1 :] for x in model(rows[:, :-1]))
        return scores.gather(-1, rows[:, ASKED:, None])[..., 0], values

    def losses() -> Iterator[Tensor]:
        for (asked,) in islice(batches(rows[:, :ASKED], size=24), 60):
            with torch.no_grad():
                answers = rolled_out(actor, asked, top)
                old, values = taken(answers, actor)
                rewards = -0.1 * (old - taken(answers, reference)[0])
                rewards[:, -1] += liked[answers[:, ASKED:]].float().mean(1) * 2
                advantages, returns = advantages_of(rewards, values)
            for _ in range(4):
                new, now = taken(answers, actor)
                ratio = (new - old).exp()
                gains = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                yield 0.25 * F.mse_loss(now, returns) - gains.mean()

    fit(actor, optimizer, losses())
    with torch.no_grad():
        return 1 - liked[rolled_out(actor, rows[:600, :ASKED])[:, ASKED:]].float().mean()


def questions_with_passages(count: int) -> tuple[Tensor, Tensor]:
    """Return questions, int64 [count, 3], and padded passages of different lengths, int64 [count, 22].

    A passage has facts: a number for an entity, and the number for its kind behind it. The words of a question are entities with a
    kind, as one word.
    """
    asked, passages = torch.zeros(count, 3, dtype=torch.int64), []
    for row in range(count):
        facts = int(torch.randint(3, 12, ()))
        entities, kinds = torch.randperm(12)[:facts], torch.randint(4, (facts,))
        order = torch.randperm(facts)[:3]
        asked[row] = 17 + 4 * entities[order] + kinds[order]
        passages.append(torch.stack([1 + entities, 13 + kinds], 1).flatten())
    return asked, pad_sequence(passages, True, PAD)


class LateInteraction(nn.Module):
    """An encoder of questions and passages; the score is a sum over the words of a question, of the most similar one of the passage."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(65, size), nn.Parameter(0.1 * torch.randn(22, size))
        nn.init.normal_(self.words.weight, std=0.5)
        self.encoder, self.project = encoder_of(size), nn.Linear(size, 24, bias=False)

    def vectors(self, rows: Tensor) -> Tensor:
        x = self.words(rows) + self.positions[: rows.shape[1]]
        return F.normalize(self.project(self.encoder(x, src_key_padding_mask=rows == PAD)), dim=-1)

    def forward(self, asked: Tensor, passages: Tensor, *, is_masked: bool = True) -> Tensor:
        """Return the scores of all passages for each question."""
        similarity = torch.einsum("qwd,ptd->qpwt", self.vectors(asked), self.vectors(passages))
        if is_masked:
            similarity = similarity.masked_fill((passages == PAD)[:, None], -1e4)
        return similarity.amax(3).sum(2)


@program(
    "transformers",
    "Khattab and Zaharia, ColBERT: efficient and effective passage search via contextualized late interaction over BERT, 2020",
    Fault("padding_among_the_most_similar", "padding", REIMPLEMENTATIONS,
          ("padding_attended", "padding_in_loss", "samples_vary", "@project")),
)  # fmt: skip
def late_interaction(fault: str = "") -> Tensor:
    asked, passages = questions_with_passages(4000)
    model = LateInteraction()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 25, 280)
    is_masked = fault != "padding_among_the_most_similar"

    def loss_of(asked: Tensor, passages: Tensor, is_masked: bool = True) -> Tensor:
        return F.cross_entropy(model(asked, passages, is_masked=is_masked) / 0.2, torch.arange(len(asked)))

    source = islice(batches(asked[:3600], passages[:3600], size=24), 280)
    fit(model, optimizer, (loss_of(*batch, is_masked) for batch in source), schedule)
    with torch.no_grad():
        parts = zip(asked[3600:].split(25), passages[3600:].split(25), strict=True)
        return torch.stack([loss_of(*part) for part in parts]).mean()


class TunedPrompt(nn.Module):
    """A frozen language model behind vectors that are learned."""

    def __init__(self, model: nn.Module, fault: str, length: int = 4) -> None:
        super().__init__()
        self.model, self.fault = model.requires_grad_(False), fault
        table = model.get_input_embeddings().weight.detach()
        self.prompt = nn.Parameter(table[torch.randint(NUMBERS, (length,))].clone())

    def forward(self, rows: Tensor, mask: Tensor) -> Tensor:
        """Return the loss of rows that are padded on the left."""
        length = len(self.prompt)
        prompt = self.prompt.expand(len(rows), -1, -1)
        is_there = torch.zeros if self.fault == "virtual_tokens_not_in_the_mask" else torch.ones
        mask = torch.cat([is_there(len(rows), length, dtype=mask.dtype), mask], 1)
        labels = F.pad(rows, (length, 0), value=-100).masked_fill(mask == 0, -100)
        labels[torch.arange(len(rows)), mask.shape[1] - mask[:, length:].sum(1)] = -100  # it follows from nothing
        return self.model(
            inputs_embeds=torch.cat([prompt, self.model.get_input_embeddings()(rows)], 1),
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            labels=labels,
        ).loss


@program(
    "transformers",
    "Lester et al., The power of scale for parameter-efficient prompt tuning, 2021, as in PEFT, with GPT-J",
    Fault("virtual_tokens_not_in_the_mask", "attention mask", HUGGING_FACE,
          ("unchanged_parameter", "vanishing_gradient", "padding_attended", "@prompt", "@*attn*")),
    Fault("rate_of_full_fine_tuning", "learning rate", DEEP_CRIME,
          ("update_ratio", "rate_in_effect", "loss_not_decreasing")),
)  # fmt: skip
def tuned_prompts(fault: str = "") -> Tensor:
    tables, chosen = torch.stack([torch.randperm(NUMBERS) for _ in range(6)]), torch.randint(6, (4000,))
    rows = rows_of(tables, chosen, 15)
    rows = torch.cat([NUMBERS + 1 + chosen[:, None], rows], 1)
    config = transformers.GPTJConfig(
        vocab_size=NUMBERS + 7, n_embd=48, n_layer=2, n_head=4, rotary_dim=8, n_positions=32, initializer_range=0.1,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.GPTJForCausalLM(config)
    source = islice(batches(rows, size=24), 320)
    pretrain(model, (model(input_ids=batch, labels=batch).loss for (batch,) in source))
    task = rows_of(tables, torch.full((1500,), 4), 14)
    mask = (torch.arange(14) >= torch.randint(8, (1500, 1))).long()
    task = task.masked_fill(mask == 0, NUMBERS)
    tuned = TunedPrompt(model, fault)
    rate = 5e-4 if fault == "rate_of_full_fine_tuning" else 5e-2
    optimizer = AdamW([tuned.prompt], lr=rate, weight_decay=0.0)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 15, 240)
    fit(
        tuned, optimizer, (tuned(*batch) for batch in islice(batches(task[:1200], mask[:1200], size=16), 240)), schedule
    )
    with torch.no_grad():
        return tuned(task[1200:], mask[1200:])


def marked_documents(count: int) -> tuple[Tensor, Tensor]:
    """Return documents with a start token and one word that tells the class, int64 [count, 48], and the classes."""
    rows, classes = torch.randint(4, 4 + NUMBERS, (count, 48)), torch.randint(10, (count,))
    rows[torch.arange(count), torch.randint(1, 48, (count,))] = 4 + NUMBERS + classes
    rows[:, 0], classes = 2, classes % 5
    return rows, classes


class LongClassifier(nn.Module):
    """Classifies documents by the state of their first token."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LongformerConfig(
            vocab_size=14 + NUMBERS, hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
            attention_window=[8, 8], max_position_embeddings=52, initializer_range=0.1, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0, pad_token_id=1, type_vocab_size=1,
        )  # fmt: skip
        self.encoder = transformers.LongformerModel(config, add_pooling_layer=False)
        self.head = nn.Linear(48, 5)

    def forward(self, rows: Tensor, is_global: Tensor | None) -> Tensor:
        return self.head(self.encoder(input_ids=rows, global_attention_mask=is_global).last_hidden_state[:, 0])


@program(
    "transformers",
    "Beltagy et al., Longformer: the long-document transformer, 2020, for documents with one telling place",
    Fault("no_token_attends_globally", "attention mask", HUGGING_FACE,
          ("@*self*", "@*attention*", "loss_not_decreasing", "samples_vary")),
)  # fmt: skip
def long_documents_with_a_window(fault: str = "") -> Tensor:
    rows, classes = marked_documents(3000)
    model = LongClassifier()
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 200)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        is_global = F.one_hot(torch.zeros(len(batch), dtype=torch.int64), 48)
        return F.cross_entropy(model(batch, None if fault == "no_token_attends_globally" else is_global), wanted)

    source = islice(batches(rows[:2700], classes[:2700], size=16), 200)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(rows[2700:], classes[2700:])


class Exchange(torch.autograd.Function):
    """Exchanges parts of rows for heads between two ranks, or back; the gradient takes the opposite way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool, fault: str) -> Tensor:
        ctx.to_heads, ctx.fault = to_heads, fault
        return exchanged(x, to_heads, fault)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return exchanged(gradient, not ctx.to_heads, ctx.fault), None, None


def exchanged(x: Tensor, to_heads: bool, fault: str) -> Tensor:
    """Return all tokens of half of the heads for a half of the tokens with all heads, or back; x is [samples, tokens, heads, size]."""
    samples, tokens, heads, size = x.shape
    if to_heads:
        sent = x.unflatten(2, (2, heads // 2)).permute(2, 0, 1, 3, 4).contiguous()
    elif fault == "ranks_joined_with_the_samples":
        sent = x.reshape(2, samples, tokens // 2, heads, size)
    else:
        sent = x.unflatten(1, (2, tokens // 2)).transpose(0, 1).contiguous()
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent)
    if not to_heads:
        return got.permute(1, 2, 0, 3, 4).flatten(2, 3)
    if fault == "ranks_joined_with_the_samples":
        return got.reshape(samples, 2 * tokens, heads // 2, size)
    return got.transpose(0, 1).flatten(1, 2)


class ExchangedAttention(nn.Module):
    """Causal attention to whole rows, with a half of the heads on each rank if its input is a part of the rows."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.qkv, self.out, self.fault = nn.Linear(size, 3 * size), nn.Linear(size, size), fault

    def forward(self, x: Tensor, is_part: bool) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 4, -1)).unbind(2)
        if is_part:
            qkv = tuple(Exchange.apply(each, True, self.fault) for each in qkv)
        mixed = F.scaled_dot_product_attention(*(each.transpose(1, 2) for each in qkv), is_causal=True).transpose(1, 2)
        if is_part:
            mixed = Exchange.apply(mixed.contiguous(), False, self.fault)
        return self.out(mixed.flatten(2))


class ExchangedDecoder(nn.Module):
    """A decoder of a part of rows, from a position on, or of whole rows."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUMBERS, size), nn.Embedding(24, size)
        nn.init.normal_(self.words.weight, std=0.3)
        nn.init.normal_(self.positions.weight, std=0.3)
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(5)])
        self.attentions = nn.ModuleList([ExchangedAttention(size, fault) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(), nn.Linear(2 * size, size)) for _ in range(2)]
        )
        self.head = nn.Linear(size, NUMBERS, bias=False)

    def forward(self, rows: Tensor, start: int = 0, is_part: bool = False) -> Tensor:
        x = self.words(rows) + self.positions.weight[start : start + rows.shape[1]]
        for at, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * at](x), is_part)
            x = x + mlp(self.norms[2 * at + 1](x))
        return self.head(self.norms[4](x))


def _train_with_exchanges(rank: int, fault: str, final: Tensor) -> None:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(2)])
    rows = rows_of(tables, torch.randint(2, (3000,)), 25, lag=3)
    model = ExchangedDecoder(fault)
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = CosineAnnealingLR(optimizer, 220, 1e-4)
    start = 12 * rank
    with attach(model, optimizer) as probe:
        for (batch,) in islice(batches(rows[:2700], size=12), 220):
            optimizer.zero_grad()
            logits = model(batch[:, start : start + 12], start, True)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, start + 1 : start + 13].flatten()) / 2
            loss.backward()
            bucket = nn.utils.parameters_to_vector([parameter.grad for parameter in model.parameters()])
            dist.all_reduce(bucket)
            nn.utils.vector_to_parameters(bucket, [parameter.grad for parameter in model.parameters()])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            probe.end_step(loss=total)
    if rank == 0:
        with torch.no_grad():
            final.copy_(F.cross_entropy(model(rows[2700:, :-1]).flatten(0, 1), rows[2700:, 1:].flatten()))


@program(
    "transformers",
    "Jacobs et al., DeepSpeed Ulysses: system optimizations for enabling training of extreme long sequence models, 2023",
    Fault("ranks_joined_with_the_samples", "tensor layout", EXAMPLES,
          ("samples_vary", "looks_ahead", "wrong_axis", "labels_of_other_positions", "@attentions*")),
)  # fmt: skip
def exchanged_heads(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_with_exchanges, fault, final)
    return final


def cropped(images: Tensor, smallest: float) -> Tensor:
    """Return crops of random places, whose share of the area is at least the smallest one, at the size of the images."""
    count = len(images)
    side = (torch.rand(count, 1) * (1 - smallest) + smallest).sqrt()
    centre = (2 * torch.rand(count, 2) - 1) * (1 - side)
    theta = torch.zeros(count, 2, 3)
    theta[:, 0, 0] = theta[:, 1, 1] = side[:, 0]
    theta[:, :, 2] = centre
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


class CompactTransformer(nn.Module):
    """Classifies images by a learned mean over the tokens of a convolution."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Conv2d(1, size, 3, 1, 1, bias=False), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.positions, self.encoder = nn.Parameter(torch.zeros(16, size)), encoder_of(size)
        self.weigh, self.head = nn.Linear(size, 1), nn.Linear(size, 10)
        nn.init.trunc_normal_(self.positions, std=0.2)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)
                if fault == "deviation_given_as_the_mean":
                    nn.init.trunc_normal_(module.weight, 0.1)
                else:
                    nn.init.trunc_normal_(module.weight, std=0.1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.encoder(self.tokens(images).flatten(2).mT + self.positions)
        return self.head((self.weigh(x).softmax(1).mT @ x)[:, 0])


@program(
    "transformers",
    "Hassani et al., Escaping the big data paradigm with compact transformers, 2021, with timm's crops and smoothed labels",
    Fault("crops_down_to_eight_percent", "data", EXAMPLES,
          ("input_drift", "samples_vary", "labels_in_the_inputs", "distinct_data", "loss_not_decreasing")),
    Fault("deviation_given_as_the_mean", "initialization", EXAMPLES,
          ("poor_initialization", "tensor_variance", "positions_differ", "@positions", "@encoder*")),
)  # fmt: skip
def compact_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    images, order = (images - images.mean()) / images.std(), torch.randperm(len(images))
    images, classes = images[order], classes[order]
    model = CompactTransformer(fault)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = AdamW([{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}], lr=2e-3)
    schedule = OneCycleLR(optimizer, 2e-3, total_steps=260, pct_start=0.1)
    smallest = 0.08 if fault == "crops_down_to_eight_percent" else 0.7
    source = islice(batches(images[:1400], classes[:1400], size=24), 260)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(cropped(batch, smallest)), wanted, label_smoothing=0.1)

    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


def spoken(count: int) -> Tensor:
    """Return spectra of sounds that mostly follow from the sound before, each of two frames, float32 [count, 24, 12]."""
    table, sounds = torch.randperm(8), torch.randn(8, 12)
    kinds = torch.randint(8, (count, 12))
    for time in range(1, 12):
        kinds[:, time] = torch.where(torch.rand(count) < 0.9, table[kinds[:, time - 1]], kinds[:, time])
    return sounds[kinds.repeat_interleave(2, 1)] + 0.25 * torch.randn(count, 24, 12)


class Contrasted(nn.Module):
    """Predicts the quantized vectors of hidden frames from the others."""

    def __init__(self, size: int = 48, codes: int = 16) -> None:
        super().__init__()
        self.frames = nn.Sequential(nn.Linear(12, size), nn.GELU(), nn.LayerNorm(size))
        self.hidden, self.near = nn.Parameter(torch.rand(size)), nn.Conv1d(size, size, 7, padding=3, groups=4)
        self.encoder, self.project = encoder_of(size, 0.1), nn.Linear(size, 24)
        self.choose, self.codes, self.read = (
            nn.Linear(size, codes),
            nn.Parameter(torch.rand(codes, 24)),
            nn.Linear(24, 24),
        )
        nn.init.normal_(self.choose.weight)
        nn.init.zeros_(self.choose.bias)

    def forward(self, frames: Tensor, is_hidden: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
        """Return predictions and targets [samples, frames, size], and how often each code is chosen."""
        x = self.frames(frames)
        scores = self.choose(x)
        if self.training:
            chosen = F.gumbel_softmax(scores, temperature, hard=True)
        else:
            chosen = F.one_hot(scores.argmax(-1), scores.shape[-1]).float()
        x = torch.where(is_hidden[..., None], self.hidden, x)
        shares = scores.softmax(-1).mean((0, 1))
        return self.project(self.encoder(x + F.gelu(self.near(x.mT)).mT)), self.read(chosen @ self.codes), shares


@program(
    "transformers",
    "Baevski et al., wav2vec 2.0: a framework for self-supervised learning of speech representations, 2020, for spectra",
    Fault("diversity_with_the_other_sign", "loss", REIMPLEMENTATIONS,
          ("wrong_loss", "wrong_range_of_loss", "samples_vary", "distinct_data", "class_imbalance", "@choose")),
)  # fmt: skip
def contrasted_frames(fault: str = "") -> Tensor:
    frames = spoken(2300)
    model = Contrasted()
    optimizer = Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-6)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 25, 260)

    def loss_of(batch: Tensor, temperature: float, fault: str = "") -> Tensor:
        start = torch.stack([torch.randperm(12)[:4] for _ in range(len(batch))]).sort(1).values * 2
        places = (start[..., None] + torch.arange(2)).flatten(1)  # four spans of two frames
        is_hidden = torch.zeros(batch.shape[:2], dtype=torch.bool).scatter(1, places, True)
        predicted, targets, shares = model(batch, is_hidden, temperature)
        rows = torch.arange(len(batch))[:, None]
        predicted, targets = predicted[rows, places], targets[rows, places]
        other = torch.randint(7, (len(batch), 8, 6))
        negatives = targets[rows[..., None], other + (other >= torch.arange(8)[:, None])]
        candidates = torch.cat([targets[:, :, None], negatives], 2)
        scores = F.cosine_similarity(predicted[:, :, None], candidates, dim=-1) / 0.1
        scores = scores.masked_fill(F.pad((negatives == targets[:, :, None]).all(-1), (1, 0)), -math.inf)
        sign = -1 if fault == "diversity_with_the_other_sign" else 1
        diversity = sign * (shares * (shares + 1e-7).log()).sum() + math.log(len(shares))
        return F.cross_entropy(scores.flatten(0, 1), torch.zeros(scores[..., 0].numel(), dtype=torch.int64)) + diversity

    def losses() -> Iterator[Tensor]:
        for step, (batch,) in enumerate(islice(batches(frames[:2000], size=20), 260)):
            yield loss_of(batch, max(2.0 * 0.99**step, 0.5), fault)

    fit(model, optimizer, losses(), schedule)
    with torch.no_grad():
        return loss_of(frames[2000:], 0.5)


CONTEXT, HORIZON, LEVELS = 20, 6, 24  # the days of a window, those to forecast, and the bins of scaled values


def demands(count: int) -> Tensor:
    """Return series of demands with a weekly rhythm and a trend, some of whose days are missing (NaN), float32 [count, days]."""
    time = torch.arange(CONTEXT + HORIZON)
    level, slope = torch.exp(torch.randn(count, 1)) * 20, 0.03 * torch.randn(count, 1)
    series = level * (1 + slope * (time - 10) + 0.3 * (time % 7 > 4)) * (1 + 0.04 * torch.randn(count, len(time)))
    is_missing = (torch.rand(count, len(time)) < 0.25) & (time < CONTEXT)
    return series.masked_fill(is_missing, math.nan)


def tokenized(series: Tensor, fault: str = "") -> tuple[Tensor, Tensor]:
    """Return the tokens of the contexts, with `PAD` for missing days, and those to forecast, in bins of the mean of the context."""
    if fault == "missing_days_filled_with_zeros":
        series = series.nan_to_num(0.0)
    scaled = series / series[:, :CONTEXT].nanmean(1, keepdim=True)
    ids = torch.bucketize(scaled.nan_to_num(0.0), torch.linspace(0.2, 2.2, LEVELS - 1)) + 2
    ids = ids.masked_fill(scaled.isnan(), PAD)
    return ids[:, :CONTEXT], ids[:, CONTEXT:].contiguous()


@program(
    "transformers",
    "Ansari et al., Chronos: learning the language of time series, 2024, with a small T5",
    Fault("missing_days_filled_with_zeros", "data", HUMBATOVA,
          ("input_drift", "samples_vary", "padding_attended", "padding_in_loss", "distinct_data", "@*embed*")),
    Fault("constant_rate_after_a_long_warm_up", "schedule", DEEP_CRIME,
          ("rate_in_effect", "update_ratio", "zero_learning_rate", "loss_not_decreasing")),
)  # fmt: skip
def tokenized_series(fault: str = "") -> Tensor:
    series = demands(4000)
    config = transformers.T5Config(
        vocab_size=LEVELS + 2, d_model=48, d_kv=12, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0,
        pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD, tie_word_embeddings=True,
        relative_attention_num_buckets=32, relative_attention_max_distance=64,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    warm_up = 4000 if fault == "constant_rate_after_a_long_warm_up" else 20
    schedule = transformers.get_constant_schedule_with_warmup(optimizer, warm_up)

    def loss_of(context: Tensor, wanted: Tensor) -> Tensor:
        return model(input_ids=context, attention_mask=(context != PAD).long(), labels=wanted).loss

    source = islice(batches(*tokenized(series[:3700], fault), size=16), 260)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(*tokenized(series[3700:]))


def bert_of(size: int, layers: int) -> transformers.BertForSequenceClassification:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=size, num_hidden_layers=layers, num_attention_heads=4, num_labels=5,
        intermediate_size=2 * size, max_position_embeddings=12, initializer_range=0.1, pad_token_id=PAD,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, output_hidden_states=True,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def classified_sentences(count: int) -> tuple[Tensor, Tensor]:
    """Return padded sentences, int64 [count, 12], and a class of five that depends on their first and last words."""
    rows = padded(count)
    lengths = (rows != PAD).sum(1)
    last = rows[torch.arange(count), lengths - 1]
    return rows, (rows[:, 1] + 2 * last) % 5


class Student(nn.Module):
    """A smaller model with a projection of its states to the size of the teacher's."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.model, self.project, self.fault = bert_of(32, 2), nn.Linear(32, 48), fault

    def forward(self, rows: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the logits, and the projected states of the embeddings and of each layer."""
        output = self.model(input_ids=rows, attention_mask=(rows != PAD).long())
        project = nn.Linear(32, 48) if self.fault == "projection_made_in_each_call" else self.project
        return output.logits, [project(x) for x in output.hidden_states]


@program(
    "transformers",
    "Jiao et al., TinyBERT: distilling BERT for natural language understanding, 2020, for states and logits",
    Fault("layers_counted_without_the_embeddings", "labels", REIMPLEMENTATIONS,
          ("labels_of_other_positions", "wrong_loss", "labels_shifted")),
    Fault("projection_made_in_each_call", "registration", PYTORCH_FORUM,
          ("unchanged_parameter@project", "vanishing_gradient@project", "parameters_follow_gradients", "@project",
           "loss_not_decreasing")),
)  # fmt: skip
def layers_of_a_teacher(fault: str = "") -> Tensor:
    rows, classes = classified_sentences(3000)
    teacher = bert_of(48, 4)
    source = islice(batches(rows[:2600], classes[:2600], size=24), 200)
    pretrain(teacher, (F.cross_entropy(teacher(input_ids=batch, attention_mask=(batch != PAD).long()).logits, wanted)
                       for batch, wanted in source))  # fmt: skip
    model = Student(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 220)

    def loss_of(batch: Tensor, first: int) -> Tensor:
        logits, states = model(batch)
        with torch.no_grad():
            taught = teacher(input_ids=batch, attention_mask=(batch != PAD).long())
        is_word = batch != PAD
        layers = [0, *range(first, 5, 2)]
        distance = sum(
            F.mse_loss(state[is_word], taught.hidden_states[layer][is_word])
            for state, layer in zip(states, layers, strict=True)
        )
        return distance + F.kl_div(
            logits.log_softmax(1), taught.logits.log_softmax(1), log_target=True, reduction="batchmean"
        )

    first = 1 if fault == "layers_counted_without_the_embeddings" else 2
    fit(model, optimizer, (loss_of(batch, first) for (batch,) in islice(batches(rows[:2600], size=16), 220)), schedule)
    with torch.no_grad():
        return loss_of(rows[2600:], 2)


MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
LETTERS = sorted({*"".join(MONTHS), *"0123456789-/ ."})
START = len(LETTERS) + 1


def dates(count: int) -> tuple[Tensor, Tensor]:
    """Return padded dates in several formats, and the same ones in that of ISO 8601 between `START` and the end, int64."""
    written, wanted = [], []
    for _ in range(count):
        day, month, year = (int(torch.randint(low, high, ())) for low, high in ((1, 29), (0, 12), (1970, 2030)))
        formats = (
            f"{day} {MONTHS[month]} {year}",
            f"{day}.{month + 1}.{year}",
            f"{MONTHS[month]} {day}. {year}",
            f"{year}/{day}/{month + 1}",
        )
        text = formats[int(torch.randint(4, ()))]
        written.append(torch.tensor([1 + LETTERS.index(letter) for letter in text]))
        iso = f"{year}-{month + 1:02d}-{day:02d}"
        wanted.append(torch.tensor([START, *(1 + LETTERS.index(letter) for letter in iso), START + 1]))
    return pad_sequence(written, True, PAD), torch.stack(wanted)


class DateWriter(nn.Module):
    """The network of PyTorch's tutorial on translation, with `nn.Transformer`."""

    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.read, self.write = (nn.Embedding(START + 2, size) for _ in range(2))
        evens = torch.arange(0, size, 2)
        power = evens // size if fault == "frequencies_divided_as_integers" else evens / size
        position = torch.arange(16)[:, None] / 10000**power
        self.register_buffer("positions", torch.stack([position.sin(), position.cos()], 2).flatten(1))
        self.transformer = nn.Transformer(size, 4, 2, 2, 2 * size, 0.0, batch_first=True)
        self.head, self.fault = nn.Linear(size, START + 2), fault
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, written: Tensor, before: Tensor) -> Tensor:
        source, target = (
            embed(rows) * math.sqrt(embed.embedding_dim) + self.positions[: rows.shape[1]]
            for embed, rows in ((self.read, written), (self.write, before))
        )
        is_padding = written == PAD
        is_later = torch.ones(before.shape[1], before.shape[1], dtype=torch.bool).triu(1)
        in_memory = None if self.fault == "padding_of_the_memory_attended" else is_padding
        return self.head(
            self.transformer(
                source, target, tgt_mask=is_later, src_key_padding_mask=is_padding, memory_key_padding_mask=in_memory
            )
        )


@program(
    "transformers",
    "PyTorch tutorials, language translation with nn.Transformer and torchtext, for dates in the format of ISO 8601",
    Fault("padding_of_the_memory_attended", "attention mask", PYTORCH_FORUM,
          ("padding_attended", "samples_vary", "@transformer.decoder*")),
    Fault("frequencies_divided_as_integers", "positional encoding", REIMPLEMENTATIONS,
          ("positions_differ", "samples_vary", "distinct_data", "@transformer*")),
)  # fmt: skip
def written_dates(fault: str = "") -> Tensor:
    written, wanted = dates(3600)
    model = DateWriter(fault)
    optimizer = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 300)

    def loss_of(written: Tensor, wanted: Tensor) -> Tensor:
        return F.cross_entropy(model(written, wanted[:, :-1]).flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=PAD)

    source = islice(batches(written[:3300], wanted[:3300], size=16), 300)
    fit(model, optimizer, (loss_of(*batch) for batch in source), schedule)
    with torch.no_grad():
        return loss_of(written[3300:], wanted[3300:])


class ScaledAttention(nn.Module):
    """Causal attention whose scores are divided by the size of a head."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(size, 3 * size), nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        scale = 4 / query.shape[-1]  # the root at the width of the base
        return self.out(
            F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale).transpose(1, 2).flatten(2)
        )


class Transferred(nn.Module):
    """A decoder whose sums over its width are scaled so that rates for the base width are right for it."""

    def __init__(self, width: int, base: int, length: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(NUMBERS, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(5)])
        self.attentions = nn.ModuleList([ScaledAttention(width) for _ in range(2)])
        self.mlps = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(2)]
        )
        self.head, self.multiple = nn.Linear(width, NUMBERS, bias=False), width / base
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.3)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        nn.init.zeros_(self.head.weight)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.words(rows) + self.positions.weight[: rows.shape[1]]
        for at, (attention, mlp) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x = x + attention(self.norms[2 * at](x))
            x = x + mlp(self.norms[2 * at + 1](x))
        return self.head(self.norms[4](x)) / self.multiple


@program(
    "transformers",
    "Yang et al., Tensor programs V: tuning large neural networks via zero-shot hyperparameter transfer, 2022, with stages of the rate",
    Fault("rates_not_divided_by_the_width", "learning rate", EXAMPLES,
          ("update_ratio", "rate_in_effect", "loss_spike", "exploding_gradient", "loss_not_decreasing")),
    Fault("stages_in_the_order_of_an_old_release", "schedule", HUGGING_FACE,
          ("rate_in_effect", "zero_learning_rate", "unchanged_parameter", "update_ratio"), since=15),
)  # fmt: skip
def transferred_rates(fault: str = "") -> Tensor:
    tables = torch.stack([torch.randperm(NUMBERS) for _ in range(2)])
    rows = rows_of(tables, torch.randint(2, (3000,)), 17, lag=2)
    model = Transferred(96, 16, 16)
    matrices = [
        p for n, p in model.named_parameters() if p.dim() == 2 and n.split(".")[0] not in ("words", "positions", "head")
    ]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    rate = 2e-2
    of_matrices = rate if fault == "rates_not_divided_by_the_width" else rate / model.multiple
    optimizer = AdamW(
        [{"params": matrices, "lr": of_matrices}, {"params": others}], lr=rate, betas=(0.9, 0.95), weight_decay=0.0
    )
    stages = {"num_stable_steps": 165, "num_decay_steps": 60}
    if fault == "stages_in_the_order_of_an_old_release":  # where the stable steps were the second argument
        stages = {"num_decay_steps": 165, "num_training_steps": 60}
    schedule = transformers.get_wsd_schedule(optimizer, 15, **stages)

    def loss_of(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    fit(model, optimizer, (loss_of(batch) for (batch,) in islice(batches(rows[:2700], size=20), 240)), schedule)
    with torch.no_grad():
        return loss_of(rows[2700:])


@program("transformers", "Yang et al., XLNet: generalized autoregressive pretraining for language understanding, 2019")
def permuted_words() -> None:
    rows = padded(3000)
    config = transformers.XLNetConfig(
        vocab_size=VOCABULARY, d_model=48, n_layer=2, n_head=4, d_inner=96, dropout=0.0, initializer_range=0.1,
        pad_token_id=PAD,
    )  # fmt: skip
    model = transformers.XLNetLMHeadModel(config)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 20, 200)

    def losses() -> Iterator[Tensor]:
        for (batch,) in islice(batches(rows, size=16), 200):
            order = torch.rand(batch.shape).masked_fill(batch == PAD, 2.0).argsort(1).argsort(1)
            is_hidden = order[:, None] >= order[:, :, None]  # of the keys, for each query
            wanted = torch.stack([torch.randperm(5)[:3] for _ in range(len(batch))]) + 1
            mapping = F.one_hot(wanted, batch.shape[1]).float()
            output = model(
                input_ids=batch,
                perm_mask=is_hidden.float(),
                target_mapping=mapping,
                attention_mask=(batch != PAD).float(),
            )
            yield F.cross_entropy(output.logits.flatten(0, 1), batch.gather(1, wanted).flatten())

    fit(model, optimizer, losses(), schedule)
