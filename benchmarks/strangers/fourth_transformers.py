"""Sequence models after recent publications, and their faults: proteins, rewards, state spaces, segmentation, boxes, speech, diffusion."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
import transformers
from data import KINDS, PAD, VOCABULARY, batches, digits, padded, stream, tokens
from registry import Fault, attach, program
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, OneCycleLR, PolynomialLR
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

DEFAULT = "DEFault++: automated fault detection, categorization and diagnosis for transformer architectures, 2026"
HUMBATOVA = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
ISLAM = "Islam et al., A comprehensive study on deep learning bug characteristics, 2019"
HUGGING_FACE = "Issues of Hugging Face's libraries, 2020 to 2026"
PYTORCH_FORUM = "Questions in the forum of PyTorch, 2017 to 2025"
REIMPLEMENTATIONS = "Issues of repositories that implement publications again, 2019 to 2025"

SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 96, "pad_token_id": PAD}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32}


def fit(
    model: nn.Module, optimizer: Optimizer, losses: Iterable[Tensor], schedule: Any = None, clip: float = math.inf
) -> None:
    """Train with the losses of a generator, which computes one for each step."""
    with attach(model, optimizer) as probe:
        for loss in losses:
            optimizer.zero_grad()
            loss.backward()
            if clip < math.inf:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if schedule is not None:
                schedule.step()
            probe.end_step(loss=loss)


def pretrain(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], ids: Tensor, steps: int) -> None:
    """Train before the part that is measured."""
    optimizer = AdamW(model.parameters(), lr=3e-3)
    for (batch,) in islice(batches(ids, size=32), steps):
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def text_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a language model of the library transformers, without padding."""
    return model(input_ids=ids, attention_mask=(ids != PAD).long(), labels=ids.masked_fill(ids == PAD, -100)).loss


def next_token_loss(model: nn.Module, ids: Tensor, ignored: int = -100) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten(), ignore_index=ignored)


ESM_START, ESM_PAD, ESM_END, FIRST_RESIDUE, ESM_MASK = 0, 1, 2, 3, 23


def proteins(count: int) -> Tensor:
    """Return the tokens of members of four families with point mutations, int64 [count, 26], filled up with `ESM_PAD`."""
    ancestors = torch.randint(20, (4, 24)) + FIRST_RESIDUE
    rows = []
    for _ in range(count):
        first, last = int(torch.randint(3, ())), int(torch.randint(16, 25, ()))
        residues = ancestors[int(torch.randint(4, ())), first:last].clone()
        mutated = torch.rand(len(residues)) < 0.1
        residues[mutated] = torch.randint(20, (int(mutated.sum()),)) + FIRST_RESIDUE
        rows.append(torch.cat([torch.tensor([ESM_START]), residues, torch.tensor([ESM_END])]))
    return pad_sequence(rows, True, ESM_PAD)


def mask_residues(ids: Tensor, aliased: bool = False) -> tuple[Tensor, Tensor]:
    """Mask a part of the residues, and return the inputs and the labels."""
    masked = (torch.rand(ids.shape) < 0.2) & (ids >= FIRST_RESIDUE)
    inputs = ids if aliased else ids.clone()
    inputs[masked] = ESM_MASK
    return inputs, ids.masked_fill(~masked, -100)


@program(
    "transformers",
    "Lin et al., Evolutionary-scale prediction of atomic-level protein structure, 2023 (ESM-2): masked residues",
    Fault("inputs_masked_without_a_copy", "labels", HUMBATOVA, ("labels_in_the_inputs", "class_imbalance")),
)
def esm_proteins(fault: str = "") -> Tensor:
    ids = proteins(1100)
    special = {"vocab_size": 24, "mask_token_id": ESM_MASK, "pad_token_id": ESM_PAD, "max_position_embeddings": 40}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "token_dropout": True}
    config = transformers.EsmConfig(**{**SIZES, **special, **dropout, "position_embedding_type": "rotary"})
    model = transformers.EsmForMaskedLM(config)
    optimizer = AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = transformers.get_polynomial_decay_schedule_with_warmup(optimizer, 20, 200, lr_end=4e-4)

    def loss_of(batch: Tensor, aliased: bool = False) -> Tensor:
        inputs, labels = mask_residues(batch, aliased)
        return model(input_ids=inputs, attention_mask=(inputs != ESM_PAD).long(), labels=labels).loss

    model.train()
    source = islice(batches(ids[:1000], size=32), 200)
    losses = (loss_of(batch, fault == "inputs_masked_without_a_copy") for (batch,) in source)
    fit(model, optimizer, losses, schedule, clip=1.0)
    model.eval()
    with torch.no_grad():
        return loss_of(ids[1000:])


def in_new_words(ids: Tensor) -> Tensor:
    """Replace nouns, verbs and adjectives by tokens that the old vocabulary does not have."""
    known = tokens(" ".join(KINDS[kind] for kind in "nva").split())
    table = torch.arange(VOCABULARY)
    table[known] = VOCABULARY + torch.arange(len(known))
    return table[ids]


@program(
    "transformers",
    "Gal et al., An image is worth one word, 2023 (only new tokens are trained in the embedding), for words, with OPT",
    Fault("new_words_get_no_gradient", "gradients", HUGGING_FACE, ("parameters_follow_gradients", "@*embed_tokens")),
    Fault(
        "schedule_of_micro_batches",
        "schedule",
        HUGGING_FACE,
        ("rate_in_effect", "zero_learning_rate", "unchanged_parameter"),
        since=1,
    ),
)
def opt_with_new_words(fault: str = "") -> Tensor:
    config = transformers.OPTConfig(
        **SIZES, ffn_dim=96, word_embed_proj_dim=48, bos_token_id=PAD, eos_token_id=PAD, use_cache=False
    )
    model = transformers.OPTForCausalLM(config)
    pretrain(model, text_loss, padded(512), 60)
    ids = in_new_words(padded(900))
    model.resize_token_embeddings(int(ids.max()) + 1, mean_resizing=False)
    is_new = torch.arange(int(ids.max()) + 1) >= VOCABULARY
    trained = ~is_new if fault == "new_words_get_no_gradient" else is_new
    model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * trained[:, None])
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    updates, micro_batches = 120, 4
    schedule = LambdaLR(optimizer, lambda step: max(0.0, 1 - step / updates))
    model.train()
    source = batches(ids[:800], size=8)
    with attach(model, optimizer) as probe:
        for _ in range(updates):
            total = torch.zeros(())
            for _ in range(micro_batches):
                loss = text_loss(model, *next(source)) / micro_batches
                loss.backward()
                total += loss.detach()
                if fault == "schedule_of_micro_batches":
                    schedule.step()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if fault != "schedule_of_micro_batches":
                schedule.step()
            model.zero_grad()
            probe.end_step(loss=total)
    model.eval()
    with torch.no_grad():
        return text_loss(model, ids[800:])


class RewardModel(nn.Module):
    """A score of each text, at its last token. The rows are padded on the left, as for generation."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.backbone = transformers.Qwen2Model(
            transformers.Qwen2Config(**SIZES, num_key_value_heads=2, use_cache=False)
        )
        self.score = nn.Linear(48, 1, bias=False)
        nn.init.normal_(self.score.weight, std=1 / math.sqrt(49))
        self.fault = fault

    def forward(self, ids: Tensor) -> Tensor:
        mask = (ids != PAD).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self.backbone(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
        from_the_left = self.fault == "last_token_from_the_left"
        last = mask.sum(1) - 1 if from_the_left else torch.full((len(ids),), -1)
        return self.score(hidden[torch.arange(len(ids)), last]).squeeze(-1)


def judged_pairs(count: int) -> tuple[Tensor, Tensor]:
    """Return chosen and rejected texts of any two sentences; the choice depends on hidden values of the words."""
    ids = padded(2 * count)
    values = torch.linspace(-2.0, 2.0, VOCABULARY)[torch.randperm(VOCABULARY)]
    quality = values.index_fill(0, torch.tensor(PAD), 0.0)[ids].sum(1)
    ids = torch.stack([row.roll(int((row == PAD).sum())) for row in ids])
    first, second = ids.chunk(2)
    margin = torch.sub(*quality.chunk(2))
    prefers_first = (torch.rand(count) < margin.sigmoid())[:, None]
    return torch.where(prefers_first, first, second), torch.where(prefers_first, second, first)


@program(
    "transformers",
    "Stiennon et al., Learning to summarize with human feedback, 2020: the reward model, with Qwen2",
    Fault("last_token_from_the_left", "output head", HUGGING_FACE, ("@score", "padding_attended", "samples_vary")),
)
def reward_model(fault: str = "") -> Tensor:
    chosen, rejected = judged_pairs(1200)
    model = RewardModel(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = CosineAnnealingLR(optimizer, 200, eta_min=2e-4)

    def loss_of(better: Tensor, worse: Tensor) -> Tensor:
        first, second = model(torch.cat([better, worse])).chunk(2)
        return -F.logsigmoid(first - second).mean()

    source = islice(batches(chosen[:1000], rejected[:1000], size=32), 200)
    fit(model, optimizer, (loss_of(*pair) for pair in source), schedule, clip=1.0)
    model.eval()
    with torch.no_grad():
        return loss_of(chosen[1000:], rejected[1000:])


class StateSpace(nn.Module):
    """A diagonal linear state space for each channel, as a convolution with its impulse response."""

    def __init__(self, size: int, wraps: bool, states: int = 8) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.empty(size).uniform_(math.log(5e-3), math.log(0.2)))
        self.log_decay = nn.Parameter(torch.full((size, states), math.log(0.5)))
        self.frequency = nn.Parameter(math.pi * torch.arange(states).repeat(size, 1).float())
        self.output = nn.Parameter(torch.randn(size, states, 2) * 0.5**0.5)
        self.direct = nn.Parameter(torch.ones(size))
        self.wraps = wraps

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, size]
        length = x.shape[1]
        poles = torch.complex(-self.log_decay.exp(), self.frequency)
        scaled = poles * self.log_step.exp()[:, None]
        weights = torch.view_as_complex(self.output) * (scaled.exp() - 1) / poles
        response = (weights[..., None] * (scaled[..., None] * torch.arange(length)).exp()).sum(1)
        points = length if self.wraps else 2 * length
        spectrum = torch.fft.rfft(2 * response.real, points) * torch.fft.rfft(x.transpose(1, 2), points)
        mixed = torch.fft.irfft(spectrum, points)[..., :length].transpose(1, 2)
        return mixed + x * self.direct


class StateSpaceModel(nn.Module):
    def __init__(self, fault: str, levels: int = 8, size: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(levels, size)
        self.norms = nn.ModuleList([nn.LayerNorm(size) for _ in range(2)])
        self.spaces = nn.ModuleList([StateSpace(size, fault == "convolution_wraps_around") for _ in range(2)])
        self.gates = nn.ModuleList([nn.Linear(size, 2 * size) for _ in range(2)])
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, levels)
        for name, parameter in self.named_parameters():
            is_step = name.endswith("log_step") and fault == "step_sizes_initialized_as_biases"
            if is_step or (name.endswith("bias") and "norm" not in name):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for norm, space, gate in zip(self.norms, self.spaces, self.gates, strict=True):
            x = x + F.glu(gate(F.gelu(space(norm(x)))))
        return self.head(self.norm(x))


def loops(count: int, length: int, levels: int = 8) -> Tensor:
    """Return random loops of 16 or 20 values with noise, in quantized steps, int64 [count, length]."""
    values, period = torch.rand(count, 20), torch.randint(4, 6, (count, 1)) * 4
    signal = values.gather(1, torch.arange(length) % period) + 0.02 * torch.randn(count, length)
    return (signal.clamp(0, 0.999) * levels).long()


@program(
    "transformers",
    "Goel et al., It's raw! Audio generation with state-space models, 2022, with the diagonal states of S4D",
    Fault("convolution_wraps_around", "architecture", REIMPLEMENTATIONS, ("looks_ahead", "@spaces*")),
    Fault("step_sizes_initialized_as_biases", "initialization", HUGGING_FACE, ("poor_initialization", "@spaces*")),
)
def state_space_loops(fault: str = "") -> Tensor:
    ids = loops(700, 65)
    model = StateSpaceModel(fault)
    optimizer = AdamW(model.parameters(), lr=6e-3, weight_decay=0.01)
    schedule = LinearLR(optimizer, 0.1, total_iters=15)
    source = islice(batches(ids[:600], size=20), 240)
    fit(model, optimizer, (next_token_loss(model, batch) for (batch,) in source), schedule)
    model.eval()
    with torch.no_grad():  # the next value after prefixes, as in generation
        losses = [F.cross_entropy(model(ids[600:, :e])[:, -1], ids[600:, e]) for e in range(32, 65, 8)]
        return torch.stack(losses).mean()


class SegmentationTransformer(nn.Module):
    def __init__(self, scrambled: bool, size: int = 48, side: int = 8) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(1, size, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(1, side**2, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)
        self.decoder = nn.Sequential(
            nn.ConvTranspose2d(size, 32, 2, 2), nn.InstanceNorm2d(32, affine=True), nn.LeakyReLU(0.01),
            nn.ConvTranspose2d(32, 16, 2, 2), nn.InstanceNorm2d(16, affine=True), nn.LeakyReLU(0.01),
            nn.Conv2d(16, 3, 3, padding=1),
        )  # fmt: skip
        self.scrambled = scrambled

    def forward(self, images: Tensor) -> Tensor:
        features = self.patch_embed(images)
        hidden = self.encoder(features.flatten(2).transpose(1, 2) + self.positions)  # [batch, patches, size]
        grid = hidden.reshape(features.shape) if self.scrambled else hidden.transpose(1, 2).reshape(features.shape)
        return self.decoder(grid)


def slices(count: int, side: int = 32) -> tuple[Tensor, Tensor]:
    """Return grey images with a large organ and a small one in it [count, 1, side, side], and the classes of the pixels."""
    grid = torch.linspace(-1, 1, side)
    y, x = torch.meshgrid(grid, grid, indexing="ij")

    def ellipse(centre: Tensor, radius: Tensor) -> Tensor:
        dy, dx = (axis - centre[:, at, None, None] for at, axis in enumerate((y, x)))
        return (dy / radius[:, 0, None, None]) ** 2 + (dx / radius[:, 1, None, None]) ** 2 < 1

    centre, radius = 0.5 * torch.rand(count, 2) - 0.25, 0.45 + 0.2 * torch.rand(count, 2)
    large = ellipse(centre, radius)
    small = ellipse(centre + 0.4 * torch.rand(count, 2) - 0.2, 0.15 + 0.1 * torch.rand(count, 2)) & large
    classes = large.long() + small.long()
    images = torch.tensor([-0.8, 0.4, 1.0])[classes] + 0.4 * torch.randn(count, side, side)
    return images[:, None], classes


def dice_loss(scores: Tensor, classes: Tensor) -> Tensor:
    wanted = F.one_hot(classes, 3).permute(0, 3, 1, 2).float()
    common, total = (scores * wanted).sum((0, 2, 3)), (scores + wanted).sum((0, 2, 3))
    return 1 - ((2 * common + 1e-5) / (total + 1e-5)).mean()


@program(
    "transformers",
    "MONAI's tutorial on segmentation with UNETR, in two dimensions: the sum of Dice loss and cross-entropy",
    Fault("tokens_reshaped_without_transpose", "tensor layout", PYTORCH_FORUM, ("@decoder*", "loss_not_decreasing")),
    Fault("dice_of_the_logits", "loss", PYTORCH_FORUM, ("wrong_range_of_loss", "missing_softmax", "wrong_loss")),
)
def organ_segmentation(fault: str = "") -> Tensor:
    images, classes = slices(320)
    model = SegmentationTransformer(fault == "tokens_reshaped_without_transpose")
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=3e-5)
    schedule = PolynomialLR(optimizer, 150, 0.9)

    def loss_of(batch: Tensor, wanted: Tensor, logits_in_dice: bool = False) -> Tensor:
        logits = model(batch)
        scores = logits if logits_in_dice else logits.softmax(1)
        return dice_loss(scores, wanted) + F.cross_entropy(logits, wanted)

    source = islice(batches(images[:256], classes[:256], size=8), 150)
    fit(model, optimizer, (loss_of(*pair, fault == "dice_of_the_logits") for pair in source), schedule, clip=12.0)
    model.eval()
    with torch.no_grad():
        return loss_of(images[256:], classes[256:])


class SetPredictor(nn.Module):
    """Boxes and classes of learned queries; the last class stands for no object."""

    def __init__(self, size: int = 48, queries: int = 4) -> None:
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 24, 3, 2, 1), nn.GroupNorm(4, 24), nn.ReLU(), nn.Conv2d(24, size, 3, 2, 1), nn.GroupNorm(4, size)
        )  # fmt: skip
        self.positions = nn.Parameter(0.1 * torch.randn(1, 36, size))
        self.queries = nn.Parameter(torch.randn(1, queries, size))
        self.transformer = nn.Transformer(size, 4, 1, 2, 2 * size, 0.0, batch_first=True)
        self.class_embed = nn.Linear(size, 4)
        self.bbox_embed = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 4))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images).flatten(2).transpose(1, 2) + self.positions
        hidden = self.transformer(features, self.queries.expand(len(images), -1, -1))
        return self.class_embed(hidden), self.bbox_embed(hidden).sigmoid()


def scenes(count: int, side: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return images with two blocks, the corners of the blocks [count, 2, 4] from 0 to 1, and their colours."""
    images = 0.1 * torch.randn(count, 3, side, side)
    colours = torch.randint(3, (count, 2))
    corners = torch.zeros(count, 2, 4)
    for image, boxes, kinds in zip(images, corners, colours, strict=True):
        for half, (box, kind) in enumerate(zip(boxes, kinds, strict=True)):  # one on the left, one on the right
            width, height = (int(torch.randint(4, 9, ())) for _ in range(2))
            x, y = 12 * half + int(torch.randint(13 - width, ())), int(torch.randint(side + 1 - height, ()))
            image[int(kind), y : y + height, x : x + width] += 1.0
            box.copy_(torch.tensor([x, y, x + width, y + height]) / side)
    return images, corners, colours


def centred(corners: Tensor) -> Tensor:
    """Return boxes as centre, width and height."""
    low, high = corners[..., :2], corners[..., 2:]
    return torch.cat([(low + high) / 2, high - low], -1)


def set_loss(logits: Tensor, boxes: Tensor, wanted_boxes: Tensor, wanted_kinds: Tensor) -> Tensor:
    """Return the loss of the best assignment of queries to objects."""
    classes = torch.full(logits.shape[:2], 3)
    distance = torch.zeros(())
    for index in range(len(logits)):
        with torch.no_grad():
            likely = logits[index].softmax(-1)[:, wanted_kinds[index]]
            cost = 5 * torch.cdist(boxes[index], wanted_boxes[index], p=1) - likely
        rows, columns = map(torch.as_tensor, linear_sum_assignment(cost))
        classes[index, rows] = wanted_kinds[index, columns]
        distance = distance + (boxes[index, rows] - wanted_boxes[index, columns]).abs().sum(-1).mean()
    weight = torch.tensor([1.0, 1.0, 1.0, 0.3])
    return F.cross_entropy(logits.flatten(0, 1), classes.flatten(), weight) + 5 * distance / len(logits)


@program(
    "transformers",
    "Carion et al., End-to-end object detection with transformers, 2020 (DETR)",
    Fault("targets_are_corners", "labels", ISLAM, ("labels_shifted", "wrong_loss", "wrong_range_of_loss")),
)
def set_prediction(fault: str = "") -> Tensor:
    images, corners, colours = scenes(600)
    targets = corners if fault == "targets_are_corners" else centred(corners)
    model = SetPredictor()
    others = [p for name, p in model.named_parameters() if not name.startswith("backbone")]
    groups = [{"params": others}, {"params": model.backbone.parameters(), "lr": 5e-4}]
    optimizer = AdamW(groups, lr=1e-3, weight_decay=1e-4)
    source = islice(batches(images[:500], targets[:500], colours[:500], size=16), 180)
    fit(model, optimizer, (set_loss(*model(batch), boxes, kinds) for batch, boxes, kinds in source), clip=0.5)
    model.eval()
    with torch.no_grad():
        return set_loss(*model(images[500:]), centred(corners[500:]), colours[500:])


class SpeechEncoder(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(12, size, 3, 1, 1), nn.GELU(), nn.Conv1d(size, size, 3, 2, 1))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 24, size))
        layer = nn.TransformerEncoderLayer(size, 4, 2 * size, 0.05, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)
        self.head = nn.Linear(size, 12)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        hidden = self.subsample(frames.transpose(1, 2)).transpose(1, 2)
        hidden = hidden + self.positions[:, : hidden.shape[1]]
        padding = torch.arange(hidden.shape[1]) >= lengths[:, None]
        return self.head(self.encoder(hidden, src_key_padding_mask=padding)).log_softmax(-1)


BLANK, LETTER_PAD, FIRST_LETTER = 0, 1, 2


def utterances(count: int) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of the frames of an utterance [time, 12] and its letters, without two equal ones in a row."""
    sounds = torch.randn(10, 12)
    pairs = []
    for _ in range(count):
        letters = [int(torch.randint(10, ()))]
        while len(letters) < 2 + len(pairs) % 6:
            letters.append((letters[-1] + int(torch.randint(1, 10, ()))) % 10)
        frames = torch.cat([sounds[letter].expand(int(torch.randint(4, 7, ())), -1) for letter in letters])
        pairs.append((frames + 0.9 * torch.randn_like(frames), torch.tensor(letters) + FIRST_LETTER))
    return pairs


def collate_speech(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    frames, letters = zip(*pairs, strict=True)
    lengths = torch.tensor([(len(each) + 1) // 2 for each in frames])  # after the subsampling
    counts = torch.tensor([len(each) for each in letters])
    return pad_sequence(list(frames), True), lengths, pad_sequence(list(letters), True, LETTER_PAD), counts


@program(
    "transformers",
    "Hugging Face's example speech-recognition/run_speech_recognition_ctc.py, with convolutions before an encoder",
    Fault("padded_lengths_of_letters", "loss and labels", PYTORCH_FORUM, ("padding_in_loss", "missing_labels_in_loss")),
)
def speech_letters(fault: str = "") -> Tensor:
    pairs = utterances(700)
    model = SpeechEncoder()
    optimizer = AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98))
    schedule = OneCycleLR(optimizer, 4e-3, total_steps=6 * 37, pct_start=0.2)
    criterion = nn.CTCLoss(blank=BLANK, zero_infinity=True)

    def loss_of(frames: Tensor, lengths: Tensor, letters: Tensor, counts: Tensor, with_padding: bool = False) -> Tensor:
        counts = torch.full_like(counts, letters.shape[1]) if with_padding else counts
        return criterion(model(frames, lengths).transpose(0, 1), letters, lengths, counts)

    model.train()
    loader = DataLoader(pairs[:600], 16, shuffle=True, drop_last=True, collate_fn=collate_speech)
    is_faulty = fault == "padded_lengths_of_letters"
    fit(model, optimizer, (loss_of(*batch, is_faulty) for _ in range(6) for batch in loader), schedule)
    model.eval()
    with torch.no_grad():
        return loss_of(*collate_speech(pairs[600:]))


class ModulatedBlock(nn.Module):
    """A layer of a transformer whose normalizations are shifted, scaled and gated by a condition."""

    def __init__(self, size: int, fault: str) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(size, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(size, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(size, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.GELU(approximate="tanh"), nn.Linear(2 * size, size))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 6 * size))
        self.base = 0.0 if fault == "scale_without_one" else 1.0

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, -1)
        normed = self.norm1(x) * (self.base + scale1) + shift1
        x = x + gate1 * self.attn(normed, normed, normed, need_weights=False)[0]
        return x + gate2 * self.mlp(self.norm2(x) * (self.base + scale2) + shift2)


class DiffusionTransformer(nn.Module):
    def __init__(self, fault: str, size: int = 48) -> None:
        super().__init__()
        self.x_embedder = nn.Linear(4, size)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 16, size))
        self.t_embedder = nn.Sequential(nn.Linear(32, size), nn.SiLU(), nn.Linear(size, size))
        self.y_embedder = nn.Embedding(10, size)
        self.blocks = nn.ModuleList([ModulatedBlock(size, fault) for _ in range(2)])
        self.norm = nn.LayerNorm(size, elementwise_affine=False)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(size, 2 * size))
        self.final = nn.Linear(size, 4)
        self.base = 0.0 if fault == "scale_without_one" else 1.0
        for layer in (*(block.modulation[1] for block in self.blocks), self.modulation[1], self.final):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor, times: Tensor, classes: Tensor) -> Tensor:
        angles = times[:, None] * torch.exp(-math.log(10000) * torch.arange(16) / 16)
        condition = self.t_embedder(torch.cat([angles.cos(), angles.sin()], 1)) + self.y_embedder(classes)
        x = self.x_embedder(F.unfold(images, 2, stride=2).transpose(1, 2)) + self.positions
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition)[:, None].chunk(2, -1)
        patches = self.final(self.norm(x) * (self.base + scale) + shift)
        return F.fold(patches.transpose(1, 2), 8, 2, stride=2)


@program(
    "transformers",
    "Peebles and Xie, Scalable diffusion models with transformers, 2023 (DiT), for digits",
    Fault("noise_drawn_twice", "labels", HUMBATOVA, ("labels_shifted", "loss_not_decreasing")),
    Fault(
        "scale_without_one",
        "normalization",
        REIMPLEMENTATIONS,
        ("poor_initialization", "all_zero", "unchanged_parameter", "vanishing_gradient", "@*norm*", "@*modulation*"),
    ),
)
def diffusion_transformer(fault: str = "") -> Tensor:
    images, classes = digits()
    images = 2 * images - 1
    signal = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)
    model = DiffusionTransformer(fault)
    optimizer = AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))

    def loss_of(network: nn.Module, batch: Tensor, kinds: Tensor, drawn_twice: bool = False) -> Tensor:
        times = torch.randint(1000, (len(batch),))
        noise, level = torch.randn_like(batch), signal[times].view(-1, 1, 1, 1)
        noisy = level.sqrt() * batch + (1 - level).sqrt() * noise
        wanted = torch.randn_like(batch) if drawn_twice else noise
        return F.mse_loss(network(noisy, times, kinds), wanted)

    optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    source = islice(batches(images[:1500], classes[:1500], size=32), 250)
    fit(model, optimizer, (loss_of(model, *pair, fault == "noise_drawn_twice") for pair in source))
    average.eval()
    with torch.no_grad():
        test, kinds = images[1500:].repeat(4, 1, 1, 1), classes[1500:].repeat(4)
        return loss_of(average, test, kinds)


class Forecaster(nn.Module):
    """An encoder of the past and a decoder of known values and placeholders, with the hour of each."""

    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.value, self.hour = nn.Linear(2, size), nn.Embedding(24, size)
        self.positions = nn.Parameter(0.1 * torch.randn(1, 48, size))
        self.transformer = nn.Transformer(size, 4, 1, 1, 2 * size, 0.05, "gelu", batch_first=True, norm_first=True)
        self.projection = nn.Linear(size, 2)

    def embed(self, values: Tensor, hours: Tensor) -> Tensor:
        return self.value(values) + self.hour(hours) + self.positions[:, : values.shape[1]]

    def forward(self, past: Tensor, hours: Tensor, known: Tensor, later_hours: Tensor) -> Tensor:
        hidden = self.transformer(self.embed(past, hours), self.embed(known, later_hours))
        return self.projection(hidden)[:, -16:]


@program(
    "transformers",
    "Zhou et al., Informer: beyond efficient transformer for long sequence time-series forecasting, 2021",
    Fault("future_in_the_decoder_inputs", "data", REIMPLEMENTATIONS, ("labels_in_the_inputs", "looks_ahead")),
)
def transformer_forecast(fault: str = "") -> Tensor:
    time = torch.arange(2400)
    level = 0.7 * torch.randn(2400, 2).cumsum(0) / 10
    level = level - F.avg_pool1d(level.T, 201, 1, 100, count_include_pad=False).T
    daily = torch.sin(2 * math.pi * time[:, None] / 24 + torch.tensor([0.0, 1.0]))
    weekly = 1 + 0.5 * torch.sin(2 * math.pi * time[:, None] / 168)
    series = daily * weekly + 2 * level + 0.1 * torch.randn(2400, 2)
    series = (series - series[:2000].mean(0)) / series[:2000].std(0)
    model = Forecaster()
    optimizer = Adam(model.parameters(), lr=1e-3)
    schedule = LambdaLR(optimizer, lambda step: 0.5 ** (step // 80))

    def loss_of(starts: Tensor, future_is_given: bool = False) -> Tensor:
        past, later = (starts[:, None] + torch.arange(*span) for span in ((0, 48), (40, 64)))
        known = series[later]
        if not future_is_given:
            known[:, 8:] = 0
        return F.mse_loss(model(series[past], past % 24, known, later % 24), series[later[:, 8:]])

    model.train()
    is_given = fault == "future_in_the_decoder_inputs"
    fit(model, optimizer, (loss_of(torch.randint(1936, (16,)), is_given) for _ in range(220)), schedule)
    model.eval()
    with torch.no_grad():
        return loss_of(torch.arange(2000, 2336))


class GroupedAttention(nn.Module):
    """Attention with rotated positions, and two heads of queries for each head of keys and values."""

    def __init__(self, size: int, interleaved: bool, repeats: bool, heads: int = 4) -> None:
        super().__init__()
        self.width = size // heads
        self.q_proj, self.o_proj = nn.Linear(size, size, bias=False), nn.Linear(size, size, bias=False)
        self.k_proj, self.v_proj = nn.Linear(size, size // 2, bias=False), nn.Linear(size, size // 2, bias=False)
        self.interleaved, self.repeats = interleaved, repeats

    def rotate(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2]), 100.0 ** (-torch.arange(0, self.width, 2) / self.width))
        first, second = x.unflatten(-1, (-1, 2)).unbind(-1) if self.interleaved else x.chunk(2, -1)
        turned = first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()
        return torch.stack(turned, -1).flatten(-2) if self.interleaved else torch.cat(turned, -1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (x.repeat(1, 2, 1, 1) if self.repeats else x.repeat_interleave(2, 1) for x in (key, value))
        mixed = F.scaled_dot_product_attention(self.rotate(query), self.rotate(key), value, is_causal=True)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class GroupedBlock(nn.Module):
    def __init__(self, size: int, interleaved: bool, repeats: bool) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(size), nn.RMSNorm(size)
        self.attn = GroupedAttention(size, interleaved, repeats)
        self.mlp = nn.Sequential(nn.Linear(size, 2 * size), nn.SiLU(), nn.Linear(2 * size, size))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class GroupedDecoder(nn.Module):
    def __init__(self, interleaved: bool, repeats: bool = False, size: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, size)
        self.layers = nn.Sequential(*(GroupedBlock(size, interleaved, repeats) for _ in range(2)))
        self.norm = nn.RMSNorm(size)
        self.lm_head = nn.Linear(size, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lm_head(self.norm(self.layers(self.embed(ids))))


@program(
    "transformers",
    "Ainslie et al., GQA, 2023: a checkpoint with neighbours as pairs of a rotation is trained further with halves as pairs",
    Fault("rotation_of_the_other_layout", "positional encoding", HUGGING_FACE, ("weights_loaded", "@layers.?.attn*")),
    Fault("key_heads_repeated_as_a_block", "heads", DEFAULT, ("@layers.?.attn*",)),
)
def grouped_queries(fault: str = "") -> Tensor:
    rows = stream(25 * 600).view(600, 25)
    first = GroupedDecoder(interleaved=True)
    pretrain(first, next_token_loss, rows[:300], 150)
    weights = first.state_dict()
    if fault != "rotation_of_the_other_layout":
        for name, weight in weights.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                pairs = weight.unflatten(0, (-1, 8, 2))  # heads, pairs, sides of a pair
                weights[name] = pairs.transpose(1, 2).flatten(0, 2)
    model = GroupedDecoder(interleaved=False, repeats=fault == "key_heads_repeated_as_a_block")
    model.load_state_dict(weights)
    optimizer = AdamW(model.parameters(), lr=6e-5, weight_decay=0.1)
    schedule = CosineAnnealingLR(optimizer, 150)
    losses = (next_token_loss(model, batch) for (batch,) in islice(batches(rows[300:560], size=16), 150))
    fit(model, optimizer, losses, schedule, clip=1.0)
    model.eval()
    with torch.no_grad():
        return next_token_loss(model, rows[560:])


class LowRank(nn.Module):
    def __init__(self, base: nn.Module, inputs: int, outputs: int, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.lora_a, self.lora_b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.lora_b(self.lora_a(x))


class AdaptedClassifier(nn.Module):
    """A frozen decoder with adapters, whose activations are computed again in the backward pass."""

    def __init__(self, decoder: GroupedDecoder, inputs_have_gradient: bool, size: int = 64) -> None:
        super().__init__()
        self.decoder = decoder.requires_grad_(False)
        for layer in decoder.layers:
            layer.attn.q_proj = LowRank(layer.attn.q_proj, size, size)
            layer.attn.v_proj = LowRank(layer.attn.v_proj, size, size // 2)
        self.score = nn.Linear(size, 4)
        self.inputs_have_gradient = inputs_have_gradient

    def forward(self, ids: Tensor) -> Tensor:
        x = self.decoder.embed(ids).requires_grad_(self.inputs_have_gradient)
        for layer in self.decoder.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.score(self.decoder.norm(x)[torch.arange(len(ids)), (ids != PAD).sum(1) - 1])


@program(
    "transformers",
    "Dettmers et al., QLoRA, 2023: adapters and a new head on a frozen model with checkpointed activations",
    Fault("checkpoints_of_inputs_without_gradient", "graph", HUGGING_FACE, ("parameters_follow_gradients", "@*lora*")),
)
def checkpointed_adapters(fault: str = "") -> Tensor:
    ids = padded(1100)
    nouns = torch.isin(ids, torch.tensor(tokens(KINDS["n"].split()[:3]))).sum(1).clamp(max=1)
    labels = nouns + 2 * torch.isin(ids, torch.tensor(tokens(["old", "red", "sleeps", "sees"]))).any(1)
    decoder = GroupedDecoder(interleaved=True)
    pretrain(decoder, partial(next_token_loss, ignored=PAD), ids, 150)
    model = AdaptedClassifier(decoder, fault != "checkpoints_of_inputs_without_gradient")
    optimizer = NAdam([p for p in model.parameters() if p.requires_grad], lr=4e-3)
    source = islice(batches(ids[:1000], labels[:1000], size=32), 200)
    fit(model, optimizer, (F.cross_entropy(model(batch), wanted) for batch, wanted in source), clip=0.3)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(ids[1000:]), labels[1000:])


class SequentialRecommender(nn.Module):
    def __init__(self, fault: str, items: int, size: int = 48, length: int = 16) -> None:
        super().__init__()
        dropout = 0.8 if fault == "dropout_is_the_kept_part" else 0.2
        self.item_emb = nn.Embedding(items + 1, size, padding_idx=0)
        self.pos_emb = nn.Embedding(length, size)
        self.emb_dropout = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(size, 3, size, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(size), enable_nested_tensor=False)
        for embedding in (self.item_emb, self.pos_emb):
            nn.init.normal_(embedding.weight, std=0.1)
        allowed = torch.ones(length, length).tril()
        self.register_buffer("mask", allowed if fault == "mask_of_ones_is_added" else allowed == 0)

    def forward(self, history: Tensor) -> Tensor:
        length = history.shape[1]
        x = self.emb_dropout(self.item_emb(history) + self.pos_emb.weight[:length])
        return self.encoder(x, mask=self.mask[:length, :length])


def histories(count: int, items: int, length: int = 17) -> Tensor:
    """Return the items that users saw in order, from 1 to `items`: mostly one of three that follow the last one."""
    followers = torch.randint(1, items + 1, (items + 1, 3))
    rows = torch.randint(1, items + 1, (count, 1))
    while rows.shape[1] < length:
        likely = followers[rows[:, -1], torch.randint(3, (count,))]
        following = torch.where(torch.rand(count) < 0.85, likely, torch.randint(1, items + 1, (count,)))
        rows = torch.cat([rows, following[:, None]], 1)
    return rows


@program(
    "transformers",
    "Kang and McAuley, Self-attentive sequential recommendation, 2018 (SASRec), with one negative item per position",
    Fault("mask_of_ones_is_added", "attention mask", PYTORCH_FORUM, ("looks_ahead", "@encoder*self_attn*")),
    Fault("dropout_is_the_kept_part", "regularization", HUMBATOVA, ("@*drop*", "all_zero", "loss_not_decreasing")),
)
def sequential_recommendation(fault: str = "") -> Tensor:
    items = 60
    rows = histories(1100, items)
    model = SequentialRecommender(fault, items)
    optimizer = Adam(model.parameters(), lr=4e-3, betas=(0.9, 0.98))

    def loss_of(hidden: Tensor, wanted: Tensor) -> Tensor:
        choices = torch.stack([wanted, torch.randint(1, items + 1, wanted.shape)])
        positive, negative = (hidden * model.item_emb(choices)).sum(-1)
        return F.softplus(-positive).mean() + F.softplus(negative).mean()

    model.train()
    source = islice(batches(rows[:1000], size=32), 280)
    fit(model, optimizer, (loss_of(model(batch[:, :-1]), batch[:, 1:]) for (batch,) in source))
    model.eval()
    with torch.no_grad():  # the next item after prefixes
        return torch.stack([loss_of(model(rows[1000:, :e])[:, -1], rows[1000:, e]) for e in range(6, 17)]).mean()


@program("transformers", "Shao et al., DeepSeekMath, 2024: group relative policy optimization, with OLMo")
def group_relative_policy() -> Tensor:
    ids = padded(512)
    config = transformers.OlmoConfig(**{**SIZES, "num_hidden_layers": 1, "use_cache": False, "eos_token_id": None})
    policy = transformers.OlmoForCausalLM(config)
    pretrain(policy, text_loss, ids, 80)
    reference = copy.deepcopy(policy).eval().requires_grad_(False)
    rewarded = torch.tensor(tokens((KINDS["a"] + " " + KINDS["n"]).split()))

    def each(network: nn.Module, rows: Tensor) -> Tensor:
        return network(input_ids=rows).logits[:, 1:-1].log_softmax(-1).gather(-1, rows[:, 2:, None]).squeeze(-1)

    @torch.no_grad()
    def sample(rows: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(6):
            rows = torch.cat([rows, policy(input_ids=rows).logits[:, -1].softmax(-1).multinomial(1)], 1)
        return rows, torch.isin(rows[:, 2:], rewarded).float().mean(1)

    def loss_of(prompts: Tensor) -> Tensor:
        rows, rewards = sample(prompts.repeat_interleave(8, 0))
        grouped = rewards.view(-1, 8)
        advantages = (grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-4)
        now, anchor = each(policy, rows), each(reference, rows)
        distance = (anchor - now).exp() - (anchor - now) - 1
        return (0.04 * distance - advantages.view(-1, 1) * (now - now.detach()).exp()).mean()

    optimizer = AdamW(policy.parameters(), lr=1e-4, weight_decay=0.0)
    fit(policy, optimizer, (loss_of(ids[torch.randint(512, (6,)), :2]) for _ in range(90)), clip=1.0)
    return -sample(ids[:256, :2])[1].mean()
