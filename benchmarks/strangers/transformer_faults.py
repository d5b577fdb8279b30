"""Mutations of small GPT-2, Llama and BERT models of the library transformers, with random weights.

The categories are those of DEFault++: attention mask, softmax and scale, positional encoding, normalization, residual connections,
embeddings, head and tied weights, initialization, optimizer and schedule, loss and labels, data and tokens, precision. A cause
`@pattern` accepts each rule at a matching layer: the fault is in that layer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import transformers
from data import FIRST_WORD, MASK, PAD, VOCABULARY, batches, padded, sentences, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUB = "transformers, examples/pytorch, "
LENGTH = 24  # tokens in a block of text
STEPS = 150

MASKING, SCALE, POSITIONS = "attention mask", "softmax and scale", "positional encoding"
NORMALIZATION, RESIDUAL, EMBEDDING = "normalization", "residual connections", "embeddings"
TYING, INITIALIZATION, OPTIMIZER = "head and tied weights", "initialization", "optimizer and schedule"
LABELS, DATA, PRECISION = "loss and labels", "data and tokens", "precision"


def gpt2(**changes: Any) -> transformers.GPT2LMHeadModel:
    fields = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
    special = {"bos_token_id": PAD, "eos_token_id": PAD, "pad_token_id": PAD}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**fields, **special, **changes}))


def llama(**changes: Any) -> transformers.LlamaForCausalLM:
    fields = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": PAD}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**fields, **heads, **special, **changes}))


def bert_config(**changes: Any) -> transformers.BertConfig:
    fields = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    fields |= {"num_attention_heads": 4, "max_position_embeddings": 32, "pad_token_id": PAD}
    return transformers.BertConfig(**{**fields, **changes})


@torch.no_grad()
def next_word_loss(model: nn.Module, blocks: Tensor, **arguments: Any) -> Tensor:
    """Return the loss of the next word after prefixes of several lengths, as in generation."""
    model.eval()
    losses = []
    for end in (4, 8, 12, 16, 20):
        given = {name: argument[..., :end, :end] if argument.dim() == 4 else argument[:, :end]
                 for name, argument in arguments.items()}  # fmt: skip
        losses.append(F.cross_entropy(model(input_ids=blocks[:, :end], **given).logits[:, -1], blocks[:, end]))
    return torch.stack(losses).float().mean()


@program(
    "transformers",
    HUB + "language-modeling, with GPT-2",
    Fault("gpt2_looks_ahead", MASKING, DEFAULT, ("looks_ahead",)),
    Fault("gpt2_scores_not_scaled", SCALE, DEFAULT, ("@*.attn*",)),
    Fault("gpt2_equal_positions", POSITIONS, DEFAULT, ("@*wpe*",)),
    Fault("gpt2_head_untied", TYING, DEFAULT, ("tied_weights",)),
    Fault("gpt2_labels_shifted_twice", LABELS, DEFAULT, ("labels_shifted",)),
)
def gpt2_text(fault: str = "") -> Tensor:
    blocks = stream(LENGTH * 900)[: LENGTH * 900].view(-1, LENGTH)
    model = gpt2(scale_attn_weights=fault != "gpt2_scores_not_scaled")
    if fault == "gpt2_head_untied":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    given: dict[str, Tensor] = {}
    if fault == "gpt2_looks_ahead":
        given["attention_mask"] = torch.zeros(1, 1, LENGTH, LENGTH)  # is added to the scores
    if fault == "gpt2_equal_positions":
        given["position_ids"] = torch.zeros(1, LENGTH, dtype=torch.int64)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(STEPS), batches(blocks[:800], size=16), strict=False):
            if fault == "gpt2_labels_shifted_twice":  # the model shifts the labels itself
                loss = model(input_ids=ids[:, :-1], labels=ids[:, 1:]).loss
            else:
                loss = model(input_ids=ids, labels=ids, **given).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    return next_word_loss(model, blocks[800:], **given)


class WithoutResidual(nn.Module):
    """A block whose output lacks its input."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return self.block(hidden_states, *arguments, **named) - hidden_states


class ResidualTwice(WithoutResidual):
    """A block whose output has its input twice."""

    def forward(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return self.block(hidden_states, *arguments, **named) + hidden_states


@program(
    "transformers",
    HUB + "language-modeling, with GPT-2 and a line of text in each row",
    Fault("gpt2_loss_on_padding", LABELS, DEFAULT, ("padding_in_loss",)),
    Fault(
        "gpt2_without_layer_norms",
        NORMALIZATION,
        DEFAULT,
        ("poor_initialization", "tensor_variance@*.h.*", "exploding_activation@*.h.*", "@*.ln_*"),
    ),
    Fault(
        "gpt2_without_residuals",
        RESIDUAL,
        DEFAULT,
        ("poor_initialization", "tensor_variance@*.h.*", "vanishing_gradient@*.h.*"),
    ),
    Fault(
        "gpt2_large_initial_weights",
        INITIALIZATION,
        DEFAULT,
        ("poor_initialization", "tensor_variance", "exploding_activation", "saturated_activation"),
    ),
    Fault("gpt2_rate_too_high", OPTIMIZER, DEFAULT, ("update_ratio", "loss_not_decreasing", "loss_spike")),
)
def gpt2_lines(fault: str = "") -> Tensor:
    ids = padded(1200, 20)
    model = gpt2(n_layer=3, **({"initializer_range": 0.8} if fault == "gpt2_large_initial_weights" else {}))
    for index, block in enumerate(model.transformer.h):
        if fault == "gpt2_without_layer_norms":
            block.ln_1, block.ln_2 = nn.Identity(), nn.Identity()
        if fault == "gpt2_without_residuals":
            model.transformer.h[index] = WithoutResidual(block)
    optimizer = AdamW(model.parameters(), lr=0.3 if fault == "gpt2_rate_too_high" else 2e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(STEPS), batches(ids[:1000], size=16), strict=False):
            labels = batch if fault == "gpt2_loss_on_padding" else batch.masked_fill(batch == PAD, -100)
            loss = model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    held_out = ids[1000:]
    with torch.no_grad():
        labels = held_out.masked_fill(held_out == PAD, -100)
        return model(input_ids=held_out, attention_mask=(held_out != PAD).long(), labels=labels).loss


class NoRotation(nn.Module):
    """A rotary embedding that does not rotate."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self.rotary(x, position_ids)
        return torch.ones_like(cosine), torch.zeros_like(sine)


@program(
    "transformers",
    HUB + "language-modeling, with Llama",
    Fault("llama_without_rotation", POSITIONS, DEFAULT, ("@*rotary_emb*",)),
    Fault("llama_mask_transposed", MASKING, DEFAULT, ("looks_ahead",)),
    Fault("llama_norm_weights_zero", NORMALIZATION, DEFAULT, ("all_zero@*norm*", "all_zero@*layers*")),
    Fault("llama_pure_bfloat16", PRECISION, DEFAULT, ("unchanged_parameter", "update_ratio")),
    Fault("llama_words_unknown", DATA, DEFAULT, ("@*embed_tokens*", "class_imbalance")),
)
def llama_text(fault: str = "") -> Tensor:
    blocks = stream(LENGTH * 900)[: LENGTH * 900].view(-1, LENGTH)
    model = llama()
    given: dict[str, Tensor] = {}
    if fault == "llama_without_rotation":
        model.model.rotary_emb = NoRotation(model.model.rotary_emb)
    if fault == "llama_mask_transposed":
        ones = torch.ones(LENGTH, LENGTH)
        given["attention_mask"] = torch.tril(ones, -1)[None, None] * torch.finfo(torch.float32).min
    if fault == "llama_norm_weights_zero":  # as for norms that multiply with 1 + weight
        for module in model.modules():
            if type(module).__name__ == "LlamaRMSNorm":
                nn.init.zeros_(module.weight)
    if fault == "llama_pure_bfloat16":
        model.to(torch.bfloat16)
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 10, STEPS)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(STEPS), batches(blocks[:800], size=16), strict=False):
            read = ids
            if fault == "llama_words_unknown":  # the vocabulary was made from a part of the text
                read = torch.where(ids < FIRST_WORD + 10, ids, MASK)
            loss = model(input_ids=read, labels=read, **given).loss
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    return next_word_loss(model, blocks[800:], **given)


def instructions(count: int) -> tuple[Tensor, Tensor]:
    """Return prompts with answers and padding, int64 [count, 24], and the labels of the answers.

    The answer is the prompt in reversed order.
    """
    rows, labels = [], []
    for sentence in sentences(count):
        prompt = tokens(sentence)
        answer = [*prompt[::-1], PAD]
        padding = 24 - len(prompt) - 1 - len(answer)
        rows.append([*prompt, MASK, *answer, *[PAD] * padding])
        labels.append([-100] * (len(prompt) + 1) + answer + [-100] * padding)
    return torch.tensor(rows), torch.tensor(labels)


@program(
    "transformers",
    "Taori et al., Alpaca: a strong, replicable instruction-following model, 2023, with a small Llama",
    Fault("llama_mask_inverted", MASKING, DEFAULT, ("padding_attended", "@*self_attn*")),
    Fault(
        "llama_residual_twice",
        RESIDUAL,
        DEFAULT,
        ("poor_initialization", "exploding_activation@*layers*", "tensor_variance@*layers*"),
    ),
    Fault(
        "llama_embeddings_not_trained",
        EMBEDDING,
        DEFAULT,
        ("unchanged_parameter@*embed_tokens*", "parameters_follow_gradients@*embed_tokens*"),
    ),
    Fault("llama_weight_decay_too_large", OPTIMIZER, DEFAULT, ("update_ratio", "loss_not_decreasing")),
    Fault("llama_answers_of_other_prompts", DATA, DEFAULT, ("labels_shifted", "loss_not_decreasing")),
)
def llama_instructions(fault: str = "") -> Tensor:
    ids, labels = instructions(1200)
    model = llama()
    if fault == "llama_residual_twice":
        for index, layer in enumerate(model.model.layers):
            model.model.layers[index] = ResidualTwice(layer)
    trained: Iterable[nn.Parameter] = model.parameters()
    if fault == "llama_embeddings_not_trained":
        trained = [*model.model.layers.parameters(), *model.model.norm.parameters(), *model.lm_head.parameters()]
    decay = 300.0 if fault == "llama_weight_decay_too_large" else 0.01
    optimizer = AdamW(trained, lr=3e-3, weight_decay=decay)

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        mask = (batch != PAD).long()
        if fault == "llama_mask_inverted":
            mask = 1 - mask
        return model(input_ids=batch, attention_mask=mask, labels=wanted).loss

    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(STEPS), batches(ids[:1000], labels[:1000], size=16), strict=False):
            answers = wanted.roll(1, 0) if fault == "llama_answers_of_other_prompts" else wanted
            loss = loss_of(batch, answers)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(ids[1000:], labels[1000:])


@program(
    "transformers",
    HUB + "language-modeling, masked words with BERT",
    Fault("bert_loss_on_all_tokens", LABELS, DEFAULT, ("padding_in_loss", "labels_shifted")),
    Fault("bert_most_words_masked", DATA, DEFAULT, ("samples_vary", "@*word_embeddings*")),
    Fault("bert_word_embeddings_zero", EMBEDDING, DEFAULT, ("@*word_embeddings*",)),
    Fault("bert_head_untied", TYING, DEFAULT, ("tied_weights",)),
    Fault("bert_attention_dropped", SCALE, DEFAULT, ("@*attention*",)),
)
def bert_masked_words(fault: str = "") -> Tensor:
    ids = padded(1200)
    dropped = {"attention_probs_dropout_prob": 0.95} if fault == "bert_attention_dropped" else {}
    model = transformers.BertForMaskedLM(bert_config(**dropped))
    if fault == "bert_word_embeddings_zero":
        nn.init.zeros_(model.bert.embeddings.word_embeddings.weight)
    if fault == "bert_head_untied":
        decoder = model.cls.predictions.decoder
        decoder.weight = nn.Parameter(decoder.weight.detach().clone())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    share = 0.85 if fault == "bert_most_words_masked" else 0.15

    def loss_of(batch: Tensor, share: float, everywhere: bool) -> Tensor:
        hidden = (torch.rand(batch.shape) < share) & (batch != PAD)
        labels = batch if everywhere else batch.masked_fill(~hidden, -100)
        attended = (batch != PAD).long()
        return model(input_ids=batch.masked_fill(hidden, MASK), attention_mask=attended, labels=labels).loss

    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(STEPS), batches(ids[:1000], size=32), strict=False):
            loss = loss_of(batch, share, fault == "bert_loss_on_all_tokens")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(ids[1000:].repeat(4, 1), 0.15, False)


@program(
    "transformers",
    HUB + "text-classification, with BERT",
    Fault("bert_padding_attended", MASKING, DEFAULT, ("padding_attended",)),
    Fault(
        "bert_large_epsilon",
        NORMALIZATION,
        DEFAULT,
        ("tensor_variance@*LayerNorm*", "poor_initialization", "vanishing_gradient"),
    ),
    Fault("bert_pooler_zero", INITIALIZATION, DEFAULT, ("poor_initialization", "@*pooler*", "@classifier")),
    Fault(
        "bert_schedule_in_epochs",
        OPTIMIZER,
        DEFAULT,
        ("zero_learning_rate", "rate_in_effect", "unchanged_parameter"),
        since=1,
    ),
    Fault("bert_unscaled_float16", PRECISION, DEFAULT, ("loss_scale", "all_zero", "vanishing_gradient")),
    Fault("bert_softmax_in_head", SCALE, DEFAULT, ("double_softmax",)),
)
def bert_classifier(fault: str = "") -> Tensor:
    ids = padded(1200, 16)
    labels = (ids == tokens(["it"])[0]).any(1).long() + (ids == tokens(["red"])[0]).any(1).long()
    epsilon = {"layer_norm_eps": 1e4} if fault == "bert_large_epsilon" else {}
    model = transformers.BertForSequenceClassification(bert_config(num_labels=3, **epsilon))
    if fault == "bert_pooler_zero":
        nn.init.zeros_(model.bert.pooler.dense.weight)
        nn.init.zeros_(model.classifier.weight)
    if fault == "bert_softmax_in_head":
        model.classifier = nn.Sequential(model.classifier, nn.Softmax(-1))
    optimizer = AdamW(model.parameters(), lr=5e-4)
    steps = 10 if fault == "bert_schedule_in_epochs" else STEPS
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 0, steps)

    def logits_of(batch: Tensor) -> Tensor:
        attended = torch.ones_like(batch) if fault == "bert_padding_attended" else (batch != PAD).long()
        return model(input_ids=batch, attention_mask=attended).logits

    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch, target) in zip(range(STEPS), batches(ids[:1000], labels[:1000], size=16), strict=False):
            with torch.autocast("cpu", torch.float16, enabled=fault == "bert_unscaled_float16"):
                loss = F.cross_entropy(logits_of(batch), target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        logits = logits_of(ids[1000:])
        return F.nll_loss(logits.log() if fault == "bert_softmax_in_head" else logits.log_softmax(1), labels[1000:])
