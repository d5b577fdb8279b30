"""Transformers of other kinds, and their faults: distillation, spans, captions, decisions, preferences, experts."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
import transformers
from data import KINDS, MASK, PAD, VOCABULARY, CartPole, batches, padded, sentences, shapes, stream, tokens
from registry import Fault, attach, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, RAdam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
HUGGING_FACE = "Questions in the forum of Hugging Face, 2020 to 2025"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
STACK_OVERFLOW = "Questions of Stack Overflow with the tag pytorch, 2017 to 2025"


def choose(words: str) -> str:
    """Return one of the words of a text."""
    options = words.split()
    return options[int(torch.randint(len(options), ()))]


def neox(layers: int, size: int) -> transformers.GPTNeoXForCausalLM:
    config = transformers.GPTNeoXConfig(
        vocab_size=VOCABULARY,
        hidden_size=size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=2 * size,
        max_position_embeddings=64,
        bos_token_id=MASK,
        eos_token_id=PAD,
        hidden_dropout=0.05,
    )
    return transformers.GPTNeoXForCausalLM(config)


@program(
    "transformers",
    "Hinton et al., Distilling the knowledge in a neural network, 2015, with GPT-NeoX and stored logits of the teacher",
    Fault("probabilities_in_kl_div", "loss", PYTORCH_FORUM, ("wrong_range_of_loss", "wrong_loss")),
    Fault(
        "stored_logits_of_unshuffled_rows", "labels", HUMBATOVA, ("labels_shifted", "wrong_loss", "loss_not_decreasing")
    ),
)
def distilled_neox(fault: str = "") -> Tensor:
    rows = stream(17 * 640).view(640, 17)
    teacher = neox(2, 64)
    optimizer = AdamW(teacher.parameters(), lr=3e-3)
    for _, (batch,) in zip(range(60), batches(rows, size=32), strict=False):
        teacher(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    teacher.eval()
    with torch.no_grad():
        stored = torch.cat([teacher(input_ids=part).logits for part in rows.split(64)])

    def distance(student: nn.Module, batch: Tensor, logits: Tensor, temperature: float = 2.0) -> Tensor:
        output = student(input_ids=batch).logits / temperature
        return F.kl_div(
            F.log_softmax(output, -1).flatten(0, 1),
            F.log_softmax(logits / temperature, -1).flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )

    student = neox(1, 32)
    optimizer = AdamW(student.parameters(), lr=4e-3)
    student.train()
    with attach(student, optimizer) as probe:
        for _ in range(10):
            order = torch.randperm(576)
            for start in range(0, 576, 32):
                indices = order[start : start + 32]
                unshuffled = fault == "stored_logits_of_unshuffled_rows"
                logits = stored[start : start + 32] if unshuffled else stored[indices]
                if fault == "probabilities_in_kl_div":
                    output = F.softmax(student(input_ids=rows[indices]).logits / 2, -1)
                    soft_loss = F.kl_div(
                        output.flatten(0, 1), F.softmax(logits / 2, -1).flatten(0, 1), reduction="batchmean"
                    )
                else:
                    soft_loss = distance(student, rows[indices], logits)
                loss = 4 * soft_loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
    student.eval()
    with torch.no_grad():
        return distance(student, rows[576:], stored[576:])


CLS, ROBERTA_PAD, SEP, FIRST_ROBERTA_WORD = 0, 1, 2, 3
QUESTIONS = {
    "who": ("who", "who is it", "who is there"),
    "does": ("does what", "what does it do", "what"),
    "where": ("where", "where is it", "near what"),
}
SPAN_WORDS = [
    *sorted({word for texts in QUESTIONS.values() for text in texts for word in text.split()} | {"the", "so", "then"}),
    *" ".join(KINDS.values()).split(),
]


def questions(count: int, without_question: bool = False) -> tuple[Tensor, Tensor]:
    """Return the ids of questions with a context [count, 24], and the first and last position of the answer."""

    def encode(words: list[str]) -> list[int]:
        return [FIRST_ROBERTA_WORD + SPAN_WORDS.index(word) for word in words]

    rows, spans = [], []
    for _ in range(count):
        kind = list(QUESTIONS)[int(torch.randint(3, ()))]
        texts = QUESTIONS[kind]
        question = texts[int(torch.randint(len(texts), ()))].split()
        adjectives = [choose(KINDS["a"]) for _ in range(int(torch.randint(3, ())))]
        context, marks = ["so", "then"][: int(torch.randint(3, ()))], {}
        for key, words in (
            ("who", ["the", *adjectives, choose(KINDS["n"])]),
            ("does", [choose(KINDS["i"])]),
            ("near", ["near"]),
            ("where", ["the", choose(KINDS["p"])]),
        ):
            marks[key] = (len(context), len(context) + len(words) - 1)
            context += words
        row = [CLS, *encode(question), SEP, SEP, *encode(context), SEP]
        offset = 0 if without_question else len(question) + 3
        rows.append(row + [ROBERTA_PAD] * (24 - len(row)))
        spans.append([mark + offset for mark in marks[kind]])
    return torch.tensor(rows), torch.tensor(spans)


class SpanModel(nn.Module):
    def __init__(self, mixed: bool) -> None:
        super().__init__()
        config = transformers.RobertaConfig(
            vocab_size=FIRST_ROBERTA_WORD + len(SPAN_WORDS),
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            max_position_embeddings=32,
            type_vocab_size=1,
        )
        self.roberta = transformers.RobertaModel(config, add_pooling_layer=False)
        self.qa_outputs = nn.Linear(48, 2)
        self.mixed = mixed

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.roberta(input_ids=ids, attention_mask=(ids != ROBERTA_PAD).long()).last_hidden_state
        logits = self.qa_outputs(hidden)
        start, end = logits.reshape(2, *ids.shape) if self.mixed else logits.unbind(-1)
        return start, end


@program(
    "transformers",
    "Devlin et al., BERT, 2019: the answers of SQuAD, with RoBERTa and the schedule of the Annotated Transformer",
    Fault("answer_positions_without_the_question", "labels", HUGGING_FACE, ("labels_shifted",)),
    Fault("logits_reshaped_instead_of_split", "tensor layout", STACK_OVERFLOW, ("@qa_outputs", "loss_not_decreasing")),
    Fault(
        "noam_factor_of_a_small_rate",
        "schedule",
        HUMBATOVA,
        ("update_ratio", "rate_in_effect", "loss_not_decreasing"),
    ),
)
def span_answers(fault: str = "") -> Tensor:
    ids, spans = questions(640, fault == "answer_positions_without_the_question")
    test_ids, test_spans = questions(128)
    model = SpanModel(fault == "logits_reshaped_instead_of_split")
    rate = 1e-3 if fault == "noam_factor_of_a_small_rate" else 0.3
    optimizer = Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), eps=1e-9)
    schedule = LambdaLR(optimizer, lambda step: 48**-0.5 * min((step + 1) ** -0.5, (step + 1) * 60**-1.5))

    def loss_of(batch: Tensor, wanted: Tensor) -> Tensor:
        start, end = model(batch)
        return (F.cross_entropy(start, wanted[:, 0]) + F.cross_entropy(end, wanted[:, 1])) / 2

    model.train()
    with attach(model, optimizer) as probe:
        for _ in range(9):
            for batch, wanted in DataLoader(TensorDataset(ids, spans), batch_size=32, shuffle=True):
                optimizer.zero_grad()
                loss = loss_of(batch, wanted)
                loss.backward()
                optimizer.step()
                schedule.step()
                probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return loss_of(test_ids, test_spans)


COLOURS = torch.tensor([[x, y, z] for x in (0.1, 0.9) for y in (0.1, 0.9) for z in (0.1, 0.9)])
CLIP_PAD, CLIP_START, CLIP_END, FIRST_COLOUR, FIRST_PLACE, FIRST_SIZE = 0, 1, 15, 3, 16, 20


def captioned(indices: Tensor, with_end: bool = True) -> tuple[Tensor, Tensor]:
    """Return images of blocks [samples, 3, 16, 16], and their captions [samples, 6], for numbers from 0 to 63."""
    colour, place, size = indices % 8, indices // 8 % 4, indices // 32
    images = torch.rand(len(indices), 3, 16, 16) * 0.4 + 0.3
    for image, c, p, s in zip(images, colour, place, size, strict=True):
        side = 3 + 3 * int(s)
        y, x = (1 + 7 * int(p // 2) + int(torch.randint(7 - side, ())), 1 + 7 * int(p % 2))
        image[:, y : y + side, x : x + side] = COLOURS[c][:, None, None]
    captions = torch.full((len(indices), 6), CLIP_PAD)
    captions[:, 0] = CLIP_START
    captions[:, 1], captions[:, 2], captions[:, 3] = FIRST_SIZE + size, FIRST_COLOUR + colour, FIRST_PLACE + place
    if with_end:
        captions[:, 4] = CLIP_END
    return (images - 0.5) / 0.27, captions


@program(
    "transformers",
    "Radford et al., Learning transferable visual models from natural language supervision, 2021 (CLIP)",
    Fault(
        "captions_without_end_token",
        "data and tokens",
        HUGGING_FACE,
        ("samples_vary", "loss_not_decreasing", "@text_model*", "@text_projection"),
    ),
    Fault(
        "scale_stored_without_logarithm",
        "initialization",
        HUMBATOVA,
        ("poor_initialization", "loss_not_decreasing", "non_finite", "wrong_range_of_loss"),
    ),
)
def clip_blocks(fault: str = "") -> Tensor:
    config = transformers.CLIPConfig(
        text_config={
            "vocab_size": 22,
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "max_position_embeddings": 8,
            "pad_token_id": CLIP_PAD,
            "bos_token_id": CLIP_START,
            "eos_token_id": CLIP_END,
        },
        vision_config={
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 96,
            "image_size": 16,
            "patch_size": 4,
        },
        projection_dim=32,
        logit_scale_init_value=1 / 0.07 if fault == "scale_stored_without_logarithm" else math.log(1 / 0.07),
    )
    model = transformers.CLIPModel(config)
    with_end = fault != "captions_without_end_token"
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": others, "weight_decay": 0.0}], lr=2e-3, betas=(0.9, 0.98)
    )
    schedule = LinearLR(optimizer, start_factor=0.05, total_iters=20)
    with attach(model, optimizer) as probe:
        for _ in range(180):
            images, captions = captioned(torch.randperm(64)[:32], with_end)
            output = model(
                input_ids=captions,
                pixel_values=images,
                attention_mask=(captions != CLIP_PAD).long(),
                return_loss=True,
            )
            optimizer.zero_grad()
            output.loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=output.loss)
    model.eval()
    with torch.no_grad():
        images, captions = captioned(torch.arange(64), with_end)
        mask = (captions != CLIP_PAD).long()
        return model(input_ids=captions, pixel_values=images, attention_mask=mask, return_loss=True).loss


class Block(nn.Module):
    """A layer of a decoder with attention to earlier positions."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(size)
        self.qkv = nn.Linear(size, 3 * size)
        self.out = nn.Linear(size, size)
        self.ln_2 = nn.LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(), nn.Linear(4 * size, size), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, size = x.shape
        qkv = self.qkv(self.ln_1(x)).view(batch, length, 3, self.heads, size // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, size))
        return x + self.mlp(self.ln_2(x))


class DecisionTransformer(nn.Module):
    def __init__(self, fault: str, size: int = 48, context: int = 6) -> None:
        super().__init__()
        self.embed_timestep = nn.Embedding(context, size)
        self.embed_return = nn.Linear(1, size)
        self.embed_state = nn.Linear(4, size)
        self.embed_action = nn.Embedding(2, size)
        self.embed_ln = nn.LayerNorm(size)
        self.blocks = nn.Sequential(Block(size), Block(size))
        self.predict_action = nn.Linear(size, 2)
        self.fault = fault

    def forward(self, returns: Tensor, states: Tensor, actions: Tensor) -> Tensor:
        batch, length = actions.shape
        time = self.embed_timestep(torch.arange(length))
        parts = [self.embed_return(returns[..., None]), self.embed_state(states), self.embed_action(actions)]
        stacked = torch.stack([part + time for part in parts], dim=1)  # [batch, kind, time, size]
        if self.fault != "tokens_stacked_without_interleaving":
            stacked = stacked.transpose(1, 2)
        hidden = self.blocks(self.embed_ln(stacked.reshape(batch, 3 * length, -1)))
        hidden = hidden.reshape(batch, length, 3, -1)
        return self.predict_action(hidden[:, :, 2 if self.fault == "action_read_after_the_action" else 1])


def trajectories(count: int, context: int = 6) -> tuple[Tensor, Tensor, Tensor]:
    """Return pieces of episodes of controllers of different quality: returns to go, states and actions."""
    environment, pieces = CartPole(), []
    while len(pieces) < count:
        quality = float(torch.rand(()))
        state, done, states, actions = environment.reset(), False, [], []
        while not done:
            best = int(state[2] + 0.5 * state[3] + 0.05 * state[0] + 0.1 * state[1] > 0)
            action = best if torch.rand(()) < 0.92 + 0.08 * quality else 1 - best
            states.append(state)
            actions.append(action)
            state, _, done = environment.step(action)
        returns = torch.arange(len(actions), 0, -1).float() / 200
        for start in range(0, len(actions) - context, 5):
            part = slice(start, start + context)
            pieces.append((returns[part], torch.stack(states[part]), torch.tensor(actions[part])))
    returns, states, actions = (torch.stack(column) for column in zip(*pieces[:count], strict=True))
    return returns, (states - states.mean((0, 1))) / states.std((0, 1)), actions


@program(
    "transformers",
    "Chen et al., Decision transformer: reinforcement learning via sequence modeling, 2021, with episodes of CartPole",
    Fault(
        "tokens_stacked_without_interleaving", "tensor layout", PYTORCH_FORUM, ("@embed_ln", "@blocks*", "looks_ahead")
    ),
    Fault("action_read_after_the_action", "output head", PYTORCH_FORUM, ("looks_ahead", "@predict_action")),
)
def decision_transformer(fault: str = "") -> Tensor:
    returns, states, actions = trajectories(1100)
    model = DecisionTransformer(fault)
    optimizer = RAdam(model.parameters(), lr=4e-3, weight_decay=1e-4, decoupled_weight_decay=True)
    with attach(model, optimizer) as probe:
        model.train()
        for _ in range(180):
            indices = torch.randint(1000, (64,))
            logits = model(returns[indices], states[indices], actions[indices])
            loss = F.cross_entropy(logits.reshape(-1, 2), actions[indices].reshape(-1))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        logits = model(returns[1000:], states[1000:], actions[1000:])
        return F.cross_entropy(logits.flatten(0, 1), actions[1000:].flatten())


def log_probabilities(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the sum of the log probabilities of the tokens after the first one, without padding."""
    logits = model(input_ids=ids, attention_mask=(ids != PAD).long()).logits[:, :-1]
    each = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (each * (ids[:, 1:] != PAD)).sum(-1)


def preferences(count: int) -> tuple[Tensor, Tensor]:
    """Return chosen and rejected sentences of one form: in most chosen ones, the words are early in their lists."""
    pairs = []
    for index in range(count):
        sides: list[list[str]] = []
        for start, end in ((0, 2), (2, 4)):
            kinds = {kind: " ".join(words.split()[start:end]) for kind, words in KINDS.items()}
            sides.append(
                ["the", choose(kinds["a"]), choose(kinds["n"]), choose(kinds["i"]), "near", "the", choose(kinds["p"])]
            )
        if index % 8 == 0:
            sides.reverse()
        pairs.append(sides)
    chosen, rejected = (torch.tensor([tokens(pair[side]) for pair in pairs]) for side in (0, 1))
    return chosen, rejected


@program(
    "transformers",
    "Rafailov et al., Direct preference optimization, 2023, with Gemma",
    Fault(
        "reference_is_the_policy",
        "references",
        HUMBATOVA,
        ("loss_not_decreasing", "distinct_data", "weights_loaded"),
    ),
    Fault("chosen_and_rejected_swapped", "labels", HUGGING_FACE, ("wrong_loss",)),
)
def preferred_sentences(fault: str = "") -> Tensor:
    ids = padded(512)
    config = transformers.GemmaConfig(
        vocab_size=VOCABULARY,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=12,
        max_position_embeddings=32,
        pad_token_id=PAD,
    )
    policy = transformers.GemmaForCausalLM(config)
    optimizer = AdamW(policy.parameters(), lr=3e-3)
    for _, (batch,) in zip(range(60), batches(ids, size=32), strict=False):
        policy(input_ids=batch, labels=batch.masked_fill(batch == PAD, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    initial = copy.deepcopy(policy).eval().requires_grad_(False)
    reference = policy if fault == "reference_is_the_policy" else initial

    def loss_of(chosen: Tensor, rejected: Tensor, anchor: nn.Module, beta: float = 0.2) -> Tensor:
        gain = log_probabilities(policy, chosen) - log_probabilities(policy, rejected)
        with torch.no_grad():
            base = log_probabilities(anchor, chosen) - log_probabilities(anchor, rejected)
        return -F.logsigmoid(beta * (gain - base)).mean()

    chosen, rejected = preferences(512)
    test = preferences(256)
    optimizer = AdamW(policy.parameters(), lr=2e-4, weight_decay=0.0)
    policy.train()
    with attach(policy, optimizer) as probe:
        for _, (good, bad) in zip(range(120), batches(chosen, rejected, size=16), strict=False):
            loss = (
                loss_of(bad, good, reference)
                if fault == "chosen_and_rejected_swapped"
                else loss_of(good, bad, reference)
            )
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            probe.end_step(loss=loss)
    policy.eval()
    with torch.no_grad():
        return loss_of(*test, initial)


class SwitchLayer(nn.Module):
    def __init__(self, size: int, unsorted: bool, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(size, count, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 2 * size), nn.ReLU(), nn.Linear(2 * size, size)) for _ in range(count)]
        )
        self.unsorted = unsorted

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(0, 1)
        probabilities = self.router(flat).softmax(-1)
        weight, chosen = probabilities.max(-1)
        order = chosen.argsort(stable=True)
        counts = torch.bincount(chosen, minlength=len(self.experts)).tolist()
        groups = flat[order].split(counts)
        made = torch.cat([expert(group) for expert, group in zip(self.experts, groups, strict=True)])
        if not self.unsorted:
            made = made[order.argsort()]
        share = F.one_hot(chosen, len(self.experts)).float().mean(0)
        balance = len(self.experts) * (share * probabilities.mean(0)).sum()
        return (weight[:, None] * made).view_as(x), balance


class SwitchBlock(nn.Module):
    def __init__(self, size: int, fault: str, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size) for _ in range(4))
        self.moe = SwitchLayer(size, fault == "outputs_in_the_order_of_the_experts")
        slopes = 2.0 ** -torch.arange(1, heads + 1)
        self.register_buffer("slopes", -slopes if fault == "biases_grow_with_the_distance" else slopes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.norm1(x)
        query, key, value = (
            layer(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        position = torch.arange(x.shape[1])
        distance = position[:, None] - position[None, :]
        bias = -self.slopes[:, None, None] * distance
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5 + bias
        weights = scores.masked_fill(distance < 0, -torch.inf).softmax(-1)
        x = x + self.o_proj((weights @ value).transpose(1, 2).flatten(2))
        mixed, balance = self.moe(self.norm2(x))
        return x + mixed, balance


class SwitchModel(nn.Module):
    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.layers = nn.ModuleList([SwitchBlock(size, fault) for _ in range(2)])
        self.norm = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.embed(ids), torch.zeros(())
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.lm_head(self.norm(x)), total


@program(
    "transformers",
    "Fedus et al., Switch transformers, 2022 (one expert per token), with the positions of Press et al., ALiBi, 2022",
    Fault(
        "outputs_in_the_order_of_the_experts",
        "feed-forward network",
        PYTORCH_FORUM,
        ("@*moe*", "looks_ahead"),
    ),
    Fault("biases_grow_with_the_distance", "positional encoding", HUMBATOVA, ("@layers.?",)),
)
def switch_alibi(fault: str = "") -> Tensor:
    rows = stream(33 * 330).view(330, 33)
    model = SwitchModel(fault)
    optimizer = NAdam(model.parameters(), lr=2e-3)
    schedule = OneCycleLR(optimizer, max_lr=4e-3, total_steps=160, cycle_momentum=False)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(160), batches(rows[:300], size=16), strict=False):
            logits, balance = model(batch[:, :-1])
            language_loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss = language_loss + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss, balance=balance)
    model.eval()
    with torch.no_grad():
        # One row at a time, as texts are read one at a time after the training.
        each = [F.cross_entropy(model(row[None, :-1])[0][0], row[1:]) for row in rows[300:]]
        return torch.stack(each).mean()


def encoder_of_text() -> transformers.ElectraModel:
    config = transformers.ElectraConfig(
        vocab_size=VOCABULARY,
        embedding_size=32,
        hidden_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=24,
        pad_token_id=PAD,
    )
    return transformers.ElectraModel(config)


class TwoEncoders(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        self.queries, self.passages = encoder_of_text(), encoder_of_text()
        self.dimension = 0 if fault == "normalized_along_the_batch" else -1
        self.scale = 1.0 if fault == "cosines_without_temperature" else 20.0

    def encode(self, encoder: nn.Module, ids: Tensor) -> Tensor:
        mask = (ids != PAD).long()
        hidden = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.normalize(pooled, dim=self.dimension)

    def forward(self, queries: Tensor, passages: Tensor) -> Tensor:
        return self.scale * self.encode(self.queries, queries) @ self.encode(self.passages, passages).T


def retrieval_pairs(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a query and a passage with the words of the query."""
    pairs = []
    for _ in range(count):
        a, n, v, m, p = (choose(KINDS[kind]) for kind in "anvnp")
        text = ["the", a, n, v, "the", m, "near", "the", p]
        words = [[n, v, m, p], [a, n, p, v], [p, a, m, n]][int(torch.randint(3, ()))]
        pairs.append((torch.tensor(tokens(words)), torch.tensor(tokens(text[int(torch.randint(2, ())) :]))))
    return pairs


def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    queries, passages = (
        pad_sequence(list(side), batch_first=True, padding_value=PAD) for side in zip(*pairs, strict=True)
    )
    return queries, passages


@program(
    "transformers",
    "Karpukhin et al., Dense passage retrieval for open-domain question answering, 2020, with ELECTRA and cosines",
    Fault(
        "cosines_without_temperature", "softmax and scale", HUGGING_FACE, ("wrong_range_of_loss", "loss_not_decreasing")
    ),
    Fault("normalized_along_the_batch", "normalization", STACK_OVERFLOW, ("samples_vary", "loss_not_decreasing")),
    Fault(
        "only_queries_in_the_optimizer",
        "optimizer",
        TRAINCHECK,
        ("parameters_follow_gradients", "update_ratio@passages*", "@passages*"),
    ),
)
def passage_retrieval(fault: str = "") -> Tensor:
    pairs, test = retrieval_pairs(1024), retrieval_pairs(64)
    model = TwoEncoders(fault)
    trained = model.queries if fault == "only_queries_in_the_optimizer" else model
    optimizer = AdamW(trained.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _ in range(5):
            model.train()
            for queries, passages in DataLoader(pairs, 32, shuffle=True, collate_fn=collate):
                scores = model(queries, passages)
                loss = F.cross_entropy(scores, torch.arange(len(scores)))
                model.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(*collate(test)), torch.arange(64))


class PatchedSeries(nn.Module):
    """A transformer whose tokens are pieces of a series; each channel is a sequence of its own."""

    def __init__(self, fault: str, size: int = 48, length: int = 64, horizon: int = 16) -> None:
        super().__init__()
        self.patch = nn.Linear(16, size)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length // 8 - 1, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.1, "gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear((length // 8 - 1) * size, horizon)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, channels]
        mean, deviation = x.mean(1, keepdim=True), x.std(1, keepdim=True) + 1e-5
        x = (x - mean) / deviation
        batch, length, channels = x.shape
        reshaped = self.fault == "series_reshaped_instead_of_transposed"
        x = x.reshape(batch, channels, length) if reshaped else x.transpose(1, 2)
        patches = x.unfold(-1, 16, 8)  # [batch, channels, patches, 16]
        hidden = self.encoder(self.patch(patches).flatten(0, 1) + self.positions)
        output = self.head(hidden.flatten(1)).view(*patches.shape[:2], -1).transpose(1, 2)
        return output if self.fault == "statistics_not_restored" else output * deviation + mean


def seasonal_series(count: int) -> Tensor:
    """Return series with seasons, trends and levels of their own, float32 [count, 80, 3]."""
    time = torch.arange(80.0)[None, :, None]
    period = torch.tensor([8.0, 12.0, 20.0]) * (0.9 + 0.2 * torch.rand(count, 1, 3))
    waves = torch.sin(2 * math.pi * (time / period + torch.rand(count, 1, 3)))
    level, growth = 1.5 * torch.randn(count, 1, 3), 0.01 * torch.randn(count, 1, 3)
    size = 0.3 + 0.7 * torch.rand(count, 1, 3)
    return size * waves + level + growth * time + 0.05 * torch.randn(count, 80, 3)


@program(
    "transformers",
    "Nie et al., A time series is worth 64 words, 2023 (PatchTST), with reversible normalization of the windows",
    Fault(
        "statistics_not_restored", "normalization", HUMBATOVA, ("loss_not_decreasing", "wrong_range_of_loss", "@head")
    ),
    Fault("series_reshaped_instead_of_transposed", "tensor layout", PYTORCH_FORUM, ("@patch", "@encoder*")),
)
def patched_series(fault: str = "") -> Tensor:
    series = seasonal_series(700)
    past, future = series[:, :64], series[:, 64:]
    model = PatchedSeries(fault)
    optimizer = Adam(model.parameters(), lr=1e-3)
    schedule = CosineAnnealingLR(optimizer, T_max=150)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(150), batches(past[:600], future[:600], size=32), strict=False):
            loss = F.mse_loss(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(past[600:]), future[600:])


class SelfDistilled(nn.Module):
    def __init__(self, size: int = 48, prototypes: int = 64) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, size, 4, 4)
        self.cls_token = nn.Parameter(0.02 * torch.randn(1, 1, size))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, 17, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)
        self.mlp = nn.Sequential(nn.Linear(size, 96), nn.GELU(), nn.Linear(96, 32))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, prototypes, bias=False))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(images), -1, -1), patches], 1)
        x = self.blocks(x + self.pos_embed[:, : x.shape[1]])[:, 0]
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


@program("transformers", "Caron et al., Emerging properties in self-supervised vision transformers, 2021 (DINO)")
def dino_shapes() -> None:
    images, _ = shapes(512, 24)
    images = (images - 0.5) / 0.25
    student = SelfDistilled()
    teacher = copy.deepcopy(student).requires_grad_(False)
    centre = torch.zeros(1, 64)
    optimizer = AdamW(student.parameters(), lr=1e-3, weight_decay=0.04)

    def crop(batch: Tensor, size: int) -> Tensor:
        y, x = (int(torch.randint(25 - size, ())) for _ in range(2))
        view = batch[:, :, y : y + size, x : x + size]
        view = view.flip(-1) if torch.rand(()) < 0.5 else view
        return view * (0.9 + 0.2 * torch.rand(len(view), 3, 1, 1)) + 0.05 * torch.randn_like(view)

    with attach(student, optimizer) as probe:
        for step, (batch,) in zip(range(110), batches(images, size=32), strict=False):
            wide, small = [crop(batch, 16) for _ in range(2)], [crop(batch, 12) for _ in range(2)]
            with torch.no_grad():
                outputs = teacher(torch.cat(wide))
                targets = ((outputs - centre) / 0.04).softmax(-1).chunk(2)
            views = [*student(torch.cat(wide)).chunk(2), *student(torch.cat(small)).chunk(2)]
            losses = [
                -(target * (view / 0.1).log_softmax(-1)).sum(-1).mean()
                for i, target in enumerate(targets)
                for j, view in enumerate(views)
                if i != j
            ]
            loss = torch.stack(losses).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            optimizer.step()
            with torch.no_grad():
                momentum = 1 - 0.01 * (1 + math.cos(math.pi * step / 110)) / 2
                for ours, theirs in zip(teacher.parameters(), student.parameters(), strict=True):
                    ours.lerp_(theirs, 1 - momentum)
                centre = 0.9 * centre + 0.1 * outputs.mean(0, keepdim=True)
            probe.end_step(loss=loss)


def entities(count: int) -> tuple[Tensor, Tensor]:
    """Return sentences of pieces of words, and the classes of the first pieces; -100 elsewhere."""
    rows, labels = [], []
    for words in sentences(count):
        row, marks, seen = [], [], 0
        for word in words:
            kind = next((kind for kind, all_words in KINDS.items() if word in all_words.split()), "")
            seen += kind == "n"
            mark = {"n": min(seen, 2), "p": 3}.get(kind, 0)
            row += [*tokens([word]), *([MASK] if len(word) > 4 else [])]  # a long word has a second piece
            marks += [mark, *([-100] if len(word) > 4 else [])]
        rows.append(torch.tensor(row))
        labels.append(torch.tensor(marks))
    return pad_sequence(rows, True, PAD), pad_sequence(labels, True, -100)


@program("transformers", "Hugging Face's example of token classification, with DeBERTa and sums of gradients")
def deberta_entities() -> None:
    ids, labels = entities(600)
    config = transformers.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=32,
        relative_attention=True,
        max_relative_positions=16,
        position_biased_input=False,
        pos_att_type=["p2c", "c2p"],
        type_vocab_size=0,
        pad_token_id=PAD,
        num_labels=4,
    )
    model = transformers.DebertaV2ForTokenClassification(config)
    optimizer = Adamax(model.parameters(), lr=4e-3)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 10, 120)
    model.train()
    with attach(model, optimizer) as probe:
        source = batches(ids[:500], labels[:500], size=16)
        for step in range(120):
            total = torch.zeros(())
            for _ in range(2):
                batch, wanted = next(source)
                output = model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=wanted)
                (output.loss / 2).backward()
                total += output.loss.detach() / 2
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            probe.end_step(loss=total)
            if step % 40 == 39:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    mask = (ids[500:] != PAD).long()
                    probe.log(loss=model(input_ids=ids[500:], attention_mask=mask, labels=labels[500:]).loss)
                model.train()


class MultiheadBlock(nn.Module):
    """The attention block of the set transformer."""

    def __init__(self, size: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(size, size) for _ in range(4))
        self.ln0, self.ln1 = nn.LayerNorm(size), nn.LayerNorm(size)

    def forward(self, queries: Tensor, keys: Tensor) -> Tensor:
        query, key, value = self.fc_q(queries), self.fc_k(keys), self.fc_v(keys)
        split = query.shape[-1] // self.heads
        q, k, v = (torch.cat(part.split(split, 2), 0) for part in (query, key, value))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / math.sqrt(query.shape[-1]), 2)
        output = self.ln0(torch.cat((q + weights.bmm(v)).split(len(query), 0), 2))
        return self.ln1(output + F.relu(self.fc_o(output)))


class SetTransformer(nn.Module):
    def __init__(self, size: int = 48, points: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(2, size)
        self.inducing = nn.Parameter(torch.empty(1, points, size))
        self.seeds = nn.Parameter(torch.empty(1, 1, size))
        nn.init.xavier_uniform_(self.inducing)
        nn.init.xavier_uniform_(self.seeds)
        self.to_points, self.from_points, self.pool = (MultiheadBlock(size) for _ in range(3))
        self.regress = nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        induced = self.to_points(self.inducing.expand(len(x), -1, -1), x)
        x = self.from_points(x, induced)
        return self.regress(self.pool(self.seeds.expand(len(x), -1, -1), x)).squeeze(1)


def point_sets(batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield sets of points, of one size per batch, with the largest coordinates and the spread of each."""
    while True:
        count = int(torch.randint(4, 17, ()))
        sets = torch.randn(batch, count, 2) * (0.3 + torch.rand(batch, 1, 1)) + torch.randn(batch, 1, 2)
        yield sets, torch.cat([sets.amax(1), sets[..., 0].std(1, keepdim=True)], 1)


@program("transformers", "Lee et al., Set transformer, 2019: the largest value of a set, with momentum")
def set_transformer() -> None:
    model = SetTransformer()
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)
    with attach(model, optimizer) as probe:
        for _, (sets, wanted) in zip(range(200), point_sets(64), strict=False):
            loss = F.l1_loss(model(sets), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            probe.end_step(loss=loss)


class PrefixTuned(nn.Module):
    """A frozen language model with learned keys and values before the text, made by a small network."""

    def __init__(self, base: transformers.MistralForCausalLM, length: int = 4, size: int = 48) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.embedding = nn.Embedding(length, size)
        config = base.config
        self.shape = (length, config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        self.transform = nn.Sequential(nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, math.prod(self.shape[1:])))

    def forward(self, ids: Tensor) -> Tensor:
        prefix = self.transform(self.embedding.weight).view(self.shape).permute(1, 2, 3, 0, 4)
        cache = transformers.DynamicCache()
        for index, (key, value) in enumerate(prefix):
            cache.update(key.expand(len(ids), -1, -1, -1), value.expand(len(ids), -1, -1, -1), index)
        mask = torch.cat([torch.ones(len(ids), self.shape[0]).long(), (ids != PAD).long()], 1)
        logits = self.base(input_ids=ids, attention_mask=mask, past_key_values=cache, use_cache=True).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), ignore_index=PAD)


@program("transformers", "Li and Liang, Prefix-tuning, 2021, with Mistral: grouped queries and a sliding window")
def prefix_tuned_mistral() -> None:
    config = transformers.MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        sliding_window=12,
        pad_token_id=PAD,
    )
    base = transformers.MistralForCausalLM(config)
    optimizer = AdamW(base.parameters(), lr=3e-3)
    for _, (batch,) in zip(range(80), batches(padded(640), size=32), strict=False):
        base(input_ids=batch, labels=batch.masked_fill(batch == PAD, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    words = set(tokens(["a", "the", "when", "near", "behind", "it", "and"]))
    words |= {token for all_words in KINDS.values() for token in tokens(all_words.split()[:3])}
    ids = padded(6000)
    ids = ids[[set(row.tolist()) - {PAD} <= words for row in ids]]
    model = PrefixTuned(base)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(120), batches(ids, size=32), strict=False):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
