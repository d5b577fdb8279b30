"""Programs with errors that raise no exception, after the workloads of TrainCheck and other collections.

Each function is the healthy program, and with the name of a fault the program with that fault. The causes were written before any
measurement: they are the rules that would name what is wrong, also those that do not exist yet.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
from data import PAD, VOCABULARY, batches, normalized_digits, padded, shapes, stream
from healthy import small_resnet
from registry import Fault, attach, in_two_processes, program
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info

TRAINCHECK = "Jiang et al., Training with confidence: catching silent errors in deep learning training, 2025"
RECIPE = "Karpathy, A recipe for training neural networks, 2019"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
PYTORCH = "PyTorch documentation, FAQ and notes on randomness, distributed training and mixed precision, 2024"


@program(
    "silent errors",
    "PyTorch tutorials, training a classifier",
    Fault("missing_zero_grad", "gradients", TRAINCHECK, ("gradients_zeroed",), since=1),
    Fault("training_in_eval_mode", "mode", RECIPE, ("mode_of_phase",), since=40),
)
def classifier_with_dropout(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    images, target = test_data.tensors
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3), nn.Linear(512, 10)
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), batches(*train_data.tensors, size=32), strict=False):
            if fault != "missing_zero_grad":
                optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    test_loss = F.cross_entropy(model(images), target)
                    probe.log(loss=test_loss)
                if fault != "training_in_eval_mode":
                    model.train()
    return test_loss


@program(
    "silent errors",
    "PyTorch tutorials, quickstart",
    Fault("evaluation_in_train_mode", "mode", RECIPE, ("mode_of_phase",), since=40),
    Fault("softmax_before_cross_entropy", "loss", RECIPE, ("double_softmax",)),
)
def evaluated_classifier(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    images, target = test_data.tensors
    layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 128), nn.ReLU()]
    layers += [nn.Dropout(0.5), nn.Linear(128, 10)]
    if fault == "softmax_before_cross_entropy":
        layers.append(nn.Softmax(dim=1))
    model = nn.Sequential(*layers)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), batches(*train_data.tensors, size=64), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                if fault != "evaluation_in_train_mode":
                    model.eval()
                with probe.evaluating(), torch.no_grad():
                    output = model(images)
                    probe.log(loss=F.cross_entropy(output, target))
                model.train()
    return F.nll_loss(output.log() if fault == "softmax_before_cross_entropy" else output.log_softmax(1), target)


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
        self.stage2 = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.stage2(self.stage1(x)).flatten(1)


class FineTuned(nn.Module):
    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(128, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


@program(
    "silent errors",
    "PyTorch tutorials, transfer learning: first the head is trained, and then all layers",
    Fault(
        "frozen_stages_left",
        "frozen parameters",
        TRAINCHECK,
        ("unchanged_parameter@backbone*", "parameters_follow_gradients@backbone*"),
        since=60,
    ),
    Fault(
        "head_replaced_after_optimizer",
        "optimizer",
        TRAINCHECK,
        ("unchanged_parameter@head", "parameters_follow_gradients@head*"),
    ),
)
def fine_tuned_backbone(fault: str = "") -> None:
    images, classes = normalized_digits()[0].tensors
    model = FineTuned(Backbone(), 5)
    pretraining = Adam(model.parameters(), lr=3e-3)
    for _, (data, wanted) in zip(range(60), batches(images, classes % 5, size=32), strict=False):
        pretraining.zero_grad()
        F.cross_entropy(model(data), wanted).backward()
        pretraining.step()
    if fault != "head_replaced_after_optimizer":
        model.head = nn.Linear(128, 10)
    optimizer = Adam(model.parameters(), lr=2e-3)
    if fault == "head_replaced_after_optimizer":
        model.head = nn.Linear(128, 10)
    model.backbone.requires_grad_(False)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), batches(images.transpose(2, 3), classes, size=32), strict=False):
            if step == 60 and fault != "frozen_stages_left":
                model.backbone.requires_grad_(True)
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


def _wrapped_replica(rank: int, fault: str) -> None:
    torch.manual_seed(rank)
    train_data, _ = normalized_digits()
    sampler = DistributedSampler(train_data, 2, rank, seed=1)
    loader = DataLoader(train_data, 32, sampler=sampler)
    if fault == "replicas_see_equal_data":
        loader = DataLoader(train_data, 32, shuffle=True, generator=torch.Generator().manual_seed(1))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    replica = DistributedDataParallel(model)
    optimizer = SGD(replica.parameters(), lr=0.05, momentum=0.9)
    step = 0
    with attach(model, optimizer) as probe:
        for epoch in range(6):
            sampler.set_epoch(epoch)
            for data, target in loader:
                if step == 120:
                    return
                output = replica.module(data) if fault == "called_past_the_wrapper" else replica(data)
                loss = F.cross_entropy(output, target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
                step += 1


@program(
    "silent errors",
    "pytorch/examples, distributed/ddp",
    Fault("called_past_the_wrapper", "replicas", TRAINCHECK, ("replicas_equal",)),
    Fault("replicas_see_equal_data", "replicas", PYTORCH, ("distinct_data",)),
)
def wrapped_replicas(fault: str = "") -> None:
    in_two_processes(_wrapped_replica, fault)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 64)
        self.fc2 = nn.Linear(64, 64)
        self.fc3 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x.flatten(1))))))


def _reducing_replica(rank: int, fault: str) -> None:
    train_data, _ = normalized_digits()
    images, classes = (tensor[rank::2] for tensor in train_data.tensors)
    torch.manual_seed(rank)
    model = Perceptron()
    if fault != "replicas_start_differently":
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(160), batches(images, classes, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            for name, parameter in model.named_parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
                if step >= 40 and fault == "zeroed_gradient_messages" and name.startswith("fc2"):
                    parameter.grad.zero_()
                if step >= 60 and fault == "corrupted_gradient_messages" and rank == 1 and name == "fc2.weight":
                    parameter.grad[:4] *= 2.0**7  # a flipped bit of the exponent
            optimizer.step()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "PyTorch tutorials, distributed applications: the gradients are averaged by hand",
    Fault(
        "zeroed_gradient_messages",
        "replicas",
        TRAINCHECK,
        ("all_zero@fc2*", "vanishing_gradient@fc2*", "unchanged_parameter@fc2*", "update_ratio@fc2*"),
        since=40,
    ),
    Fault(
        "corrupted_gradient_messages",
        "replicas",
        TRAINCHECK,
        ("replicas_equal", "exploding_gradient@fc2*", "update_ratio@fc2*"),
        since=60,
    ),
    Fault("replicas_start_differently", "replicas", PYTORCH, ("replicas_equal",)),
)
def manual_all_reduce(fault: str = "") -> None:
    in_two_processes(_reducing_replica, fault)


@program(
    "silent errors",
    "Accelerate's guide on gradient accumulation, in plain PyTorch",
    Fault("accumulation_not_divided", "gradients", TRAINCHECK, ("accumulation_divides",)),
    Fault("zeroed_in_each_micro_batch", "gradients", TRAINCHECK, ("gradients_zeroed", "accumulation_divides")),
)
def accumulated_gradients(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    images, target = test_data.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 96), nn.Tanh(), nn.Linear(96, 10))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = batches(*train_data.tensors, size=16)
    with attach(model, optimizer) as probe:
        for _ in range(120):
            optimizer.zero_grad()
            total = 0.0
            for micro_step in range(4):
                data, wanted = next(loader)
                if fault == "zeroed_in_each_micro_batch":
                    optimizer.zero_grad()
                loss = F.cross_entropy(model(data), wanted)
                (loss if fault == "accumulation_not_divided" else loss / 4).backward()
                total += loss.item() / 4
                if micro_step < 3:
                    probe.end_micro_step()
            optimizer.step()
            probe.end_step(loss=total)
    with torch.no_grad():
        return F.cross_entropy(model(images), target)


@program(
    "silent errors",
    "PyTorch tutorials, automatic mixed precision",
    Fault("autocast_does_not_act", "precision", TRAINCHECK, ("autocast_in_effect",)),
    Fault("clipped_before_unscaling", "gradients", PYTORCH, ("loss_scale", "update_ratio")),
)
def scaled_mixed_precision(fault: str = "") -> None:
    images, kinds = shapes(640, 24)
    model = small_resnet()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    with attach(model, optimizer, scaler=scaler) as probe:
        for _, (batch, wanted) in zip(range(120), batches(images - 0.5, kinds, size=16), strict=False):
            # The device type of the fault is that of the machine for which the program was written.
            with torch.autocast("cuda" if fault == "autocast_does_not_act" else "cpu", torch.bfloat16):
                loss = F.cross_entropy(model(batch), wanted)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            if fault != "clipped_before_unscaling":
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "pytorch/examples, imagenet, with a step schedule",
    Fault("scheduler_of_stale_optimizer", "schedule", TRAINCHECK, ("rate_in_effect",), since=88),
    Fault(
        "scheduler_stepped_per_batch",
        "schedule",
        TAXONOMY,
        ("rate_in_effect", "zero_learning_rate", "update_ratio"),
        since=2,
    ),
)
def scheduled_rate(fault: str = "") -> None:
    train_data, _ = normalized_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.BatchNorm2d(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.1)
    if fault == "scheduler_of_stale_optimizer":
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attach(model, optimizer) as probe:
        for _ in range(5):
            for data, wanted in DataLoader(train_data, 32, shuffle=True):
                loss = F.cross_entropy(model(data), wanted)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
                if fault == "scheduler_stepped_per_batch":
                    scheduler.step()
            scheduler.step()


class Waves(IterableDataset):
    """Endless noisy waves of four shapes, made by the workers of a loader."""

    def __init__(self, equal_seeds: bool) -> None:
        self.equal_seeds = equal_seeds

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        random = np.random.default_rng(7 if worker is None or self.equal_seeds else [7, worker.id])
        time = np.linspace(0, 4 * math.pi, 48)
        while True:
            kind = int(random.integers(4))
            phase = time * random.uniform(0.7, 1.3) + random.uniform(0, 2 * math.pi)
            wave = [np.sin(phase), np.sign(np.sin(phase)), (phase % math.pi) - 1.5, np.sin(phase) * np.sin(2 * phase)]
            yield torch.tensor(wave[kind] + random.normal(0, 0.8, 48), dtype=torch.float32)[None], kind


@program(
    "silent errors",
    "PyTorch documentation of torch.utils.data, an iterable dataset with workers",
    Fault("workers_with_equal_seeds", "data", TRAINCHECK, ("distinct_data", "samples_vary"), since=1),
    Fault("same_batch_again", "data", RECIPE, ("samples_vary", "distinct_data"), since=1),
)
def augmenting_workers(fault: str = "") -> Tensor:
    model = nn.Sequential(
        nn.Conv1d(1, 16, 7, 2, 3), nn.BatchNorm1d(16), nn.ReLU(), nn.Conv1d(16, 32, 5, 2, 2), nn.BatchNorm1d(32),
        nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(32, 4)
    )  # fmt: skip
    optimizer = Adam(model.parameters(), lr=2e-3)
    again = fault == "same_batch_again"
    loader = DataLoader(Waves(fault == "workers_with_equal_seeds"), 32, num_workers=0 if again else 2)
    iterator = iter(loader)
    with attach(model, optimizer) as probe:
        for _ in range(200):
            data, wanted = next(iter(loader)) if again else next(iterator)
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    other = [sample for sample, _ in zip(Waves(True), range(700), strict=False)][500:]
    with torch.no_grad():
        model.eval()
        return F.cross_entropy(model(torch.stack([x for x, _ in other])), torch.tensor([y for _, y in other]))


class GruLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.gru = nn.GRU(48, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(ids))[0])


@program(
    "silent errors",
    "Keras's and PyTorch's tutorials on text generation, with sentences of different lengths",
    Fault("padding_in_the_loss", "loss", TRAINCHECK, ("padding_in_loss",)),
    Fault("targets_not_shifted", "labels", RECIPE, ("labels_shifted",)),
)
def padded_language_model(fault: str = "") -> Tensor:
    ids, held_out = padded(1200, 32).split([1000, 200])
    model = GruLanguageModel()
    optimizer = Adam(model.parameters(), lr=2e-3)
    ignored = -100 if fault == "padding_in_the_loss" else PAD
    shift = 0 if fault == "targets_not_shifted" else 1
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(160), batches(ids, size=32), strict=False):
            target = batch[:, shift : 31 + shift]
            logits = model(batch[:, :-1])
            loss = F.cross_entropy(logits.reshape(-1, VOCABULARY), target.reshape(-1), ignore_index=ignored)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        logits = model(held_out[:, :-1]).reshape(-1, VOCABULARY)
        return F.cross_entropy(logits, held_out[:, 1:].reshape(-1), ignore_index=PAD)


class Attention(nn.Module):
    def __init__(self, size: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)
        self.ln = nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.ln(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=self.causal)
        return x + self.proj(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, causal: bool, size: int = 48) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, size)
        self.wpe = nn.Embedding(32, size)
        self.blocks = nn.Sequential(Attention(size, causal), Attention(size, causal))
        self.mlp = nn.Sequential(nn.LayerNorm(size), nn.Linear(size, 96), nn.GELU(), nn.Linear(96, size))
        self.ln_f = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, VOCABULARY, bias=False)
        self.apply(self._init_weights)
        self.lm_head.weight = self.wte.weight

    @staticmethod
    def _init_weights(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.blocks(self.wte(ids) + self.wpe.weight[: ids.shape[1]])
        return self.lm_head(self.ln_f(x + self.mlp(x)))


@program(
    "silent errors",
    "Karpathy's minGPT",
    Fault("attention_looks_ahead", "attention mask", RECIPE, ("looks_ahead",)),
    Fault("tied_weights_separated", "tied weights", TRAINCHECK, ("tied_weights",)),
)
def causal_attention(fault: str = "") -> Tensor:
    blocks = stream(24 * 900)[: 24 * 900].view(-1, 24)
    model = Decoder(causal=fault != "attention_looks_ahead")
    if fault == "tied_weights_separated":
        model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    optimizer = AdamW(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (ids,) in zip(range(200), batches(blocks[:800], size=16), strict=False):
            loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():  # the next word after prefixes, as in generation
        losses = [F.cross_entropy(model(blocks[800:, :end])[:, -1], blocks[800:, end]) for end in (4, 8, 12, 16, 20)]
    return torch.stack(losses).mean()


class RowReader(nn.Module):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.gru = nn.GRU(8, 64, batch_first=True)
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, rows: Tensor) -> Tensor:
        state = self.gru(rows)[1][0]
        return self.head(state.detach() if self.detached else state)


@program(
    "silent errors",
    "Tutorials that read the rows of MNIST with a recurrent network",
    Fault(
        "clipped_to_zero",
        "gradients",
        TAXONOMY,
        ("all_zero", "unchanged_parameter", "vanishing_gradient", "update_ratio", "gradients_zeroed"),
    ),
    Fault(
        "encoder_detached",
        "graph",
        TRAINCHECK,
        ("unchanged_parameter@gru*", "parameters_follow_gradients@gru*", "all_zero@gru*"),
    ),
)
def clipped_recurrent(fault: str = "") -> None:
    images, classes = normalized_digits()[0].tensors
    model = RowReader(fault == "encoder_detached")
    optimizer = SGD(model.parameters(), lr=0.2, momentum=0.9)
    max_norm = 0.0 if fault == "clipped_to_zero" else 1.0  # in other trainers, 0 means that gradients are not clipped
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(images.squeeze(1), classes, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "PyTorch tutorials, saving and loading models",
    Fault(
        "optimizer_of_the_old_parameters",
        "optimizer",
        TRAINCHECK,
        ("unchanged_parameter@backbone*", "parameters_follow_gradients@backbone*"),
    ),
    Fault("pretrained_weights_not_loaded", "loading", TRAINCHECK, ("weights_loaded",)),
)
def loaded_backbone(fault: str = "") -> None:
    images, classes = normalized_digits()[0].tensors
    pretrained = FineTuned(Backbone(), 10)
    pretraining = Adam(pretrained.parameters(), lr=3e-3)
    for _, (data, wanted) in zip(range(60), batches(images, classes, size=32), strict=False):
        pretraining.zero_grad()
        F.cross_entropy(pretrained(data), wanted).backward()
        pretraining.step()
    state = {name: tensor.clone() for name, tensor in pretrained.backbone.state_dict().items()}
    if fault == "pretrained_weights_not_loaded":  # the names in the file have another prefix
        state = {f"module.{name}": tensor for name, tensor in state.items()}
    model = FineTuned(Backbone(), 10)
    if fault == "optimizer_of_the_old_parameters":
        optimizer = Adam(model.parameters(), lr=1e-3)
        model.backbone.load_state_dict(state, assign=True)
    else:
        model.backbone.load_state_dict(state, strict=False)
        optimizer = Adam(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(150), batches(images.flip(2), classes, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program(
    "silent errors",
    "Tutorials on custom datasets, with images and labels in two arrays",
    Fault("labels_of_other_samples", "labels", TAXONOMY, ("labels_shifted", "loss_not_decreasing")),
    Fault("images_all_from_one_class_in_a_batch", "data", TAXONOMY, ("class_imbalance", "samples_vary")),
)
def two_arrays(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    images, classes = train_data.tensors
    if fault == "labels_of_other_samples":
        classes = classes.roll(1)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 48), nn.ReLU(),
        nn.Linear(48, 10)
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = classes.argsort(stable=True)
    with attach(model, optimizer, ids="all") as probe:
        for step in range(200):
            indices = torch.randperm(len(images))[:32]
            if fault == "images_all_from_one_class_in_a_batch":  # the files are in one folder per class
                indices = order[torch.arange(step * 32, step * 32 + 32) % len(images)]
            probe.batch(ids=indices, targets=classes[indices])
            loss = F.cross_entropy(model(images[indices]), classes[indices])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        test_images, target = test_data.tensors
        return F.cross_entropy(model(test_images), target)


@program(
    "silent errors",
    "Tutorials on regression with scikit-learn's diabetes data",
    Fault("targets_broadcast", "loss", TAXONOMY, ("loss_broadcasts", "loss_not_decreasing")),
    Fault("warm_up_never_ends", "schedule", TRAINCHECK, ("rate_in_effect", "update_ratio", "zero_learning_rate")),
)
def regression_network(fault: str = "") -> Tensor:
    features, target = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
    features, target = (features - features.mean(0)) / features.std(0), (target - target.mean()) / target.std()
    model = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = Adam(model.parameters(), lr=3e-3)
    warm_up = 20_000 if fault == "warm_up_never_ends" else 20
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm_up))
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(features, target, size=32), strict=False):
            output = model(data)
            loss = F.mse_loss(output if fault == "targets_broadcast" else output.squeeze(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(features).squeeze(1), target)
