"""Programs of more kinds, with faults that are known from collections, issue trackers and forums."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from functools import reduce
from itertools import pairwise

import torch
import torch.distributed as dist
from data import batches, digits, shapes
from registry import Fault, attach, in_two_processes, program
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
FORUM = "Questions at discuss.pytorch.org and Stack Overflow, 2018 to 2026"
ISSUES = "Issues of libraries for training and of examples at GitHub, 2018 to 2026"
JOINED = 120  # the step before which a new worker joins
SHARD = 64  # the steps with the batches of one shard


def _perceptron(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Standardized(nn.Module):
    """Standardize columns with the means and deviations of all rows, and return the scores of six classes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.deviation = nn.Buffer(torch.zeros(20)), nn.Buffer(torch.ones(20))
        self.net = _perceptron(20, 64, 64, 6)

    def adapt(self, x: Tensor) -> None:
        self.mean.copy_(x.mean(0))
        self.deviation.copy_(x.std(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.deviation)


def _average(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        dist.all_reduce(tensor)
        tensor.div_(2)


def _train_covers(rank: int, fault: str, final: Tensor) -> None:
    standard = torch.randn(3400, 20)
    first, second, shift = torch.randn(34, 20, generator=torch.Generator().manual_seed(0)).split((8, 6, 20))
    covers = ((standard @ first.t() / 3).tanh() @ second[:, :8].t()).argmax(1)
    columns = 3 * shift[0] + (0.3 + 2 * shift[1].abs()) * standard
    model = Standardized()
    optimizer = Adam(model.parameters(), lr=4e-3)
    new_worker = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    model.adapt(columns[:3000])
    rows = batches(columns[rank:3000:2], covers[rank:3000:2], size=32)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), rows, strict=False):
            if step == JOINED:  # rank 1 was lost, and a worker without a state takes its place
                if rank == 1:
                    model.load_state_dict(new_worker[0])
                    optimizer.load_state_dict(new_worker[1])
                is_without_buffers = fault == "buffers_not_sent_to_the_new_worker"
                tensors = dict(model.named_parameters()) if is_without_buffers else model.state_dict()
                sent = [tensors, optimizer.state_dict()]
                dist.broadcast_object_list(sent, 0)
                model.load_state_dict(sent[0], strict=False)
                optimizer.load_state_dict(sent[1])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            _average([parameter.grad for parameter in model.parameters()])
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        loss = F.cross_entropy(model(columns[3000 + rank :: 2]), covers[3000 + rank :: 2])
        _average([loss])
    if rank == 0:
        final.copy_(loss)


@program(
    "silent errors",
    "Horovod, elastic training: a state that is sent from rank 0 when a worker joins, for kinds of forest in a table",
    Fault(
        "buffers_not_sent_to_the_new_worker",
        "replicas",
        ISSUES,
        ("replicas_equal", "input_not_normalized", "input_drift", "loss_spike", "@net*"),
        since=JOINED,
    ),
)
def elastic_workers(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_covers, fault, final)
    return final


class Domains(nn.Module):
    """Return the scores of one of three domains, each with its head."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(_perceptron(24, 64, 64), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(64, 6) for _ in range(3))

    def forward(self, x: Tensor, domain: int) -> Tensor:
        return self.heads[domain](self.trunk(x))


def _train_domains(rank: int, fault: str, final: Tensor) -> None:
    x, factors = torch.randn(3, 1500, 24), torch.randn(24, 6) / 3
    labels = ((x @ factors).tanh() @ torch.randn(3, 6, 6)).argmax(2)
    model = Domains()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    rows = [batches(x[domain, rank:1200:2], labels[domain, rank:1200:2], size=32) for domain in range(3)]
    with attach(model, optimizer) as probe:
        for step in range(300):
            domain = (step + rank) % 3
            data, wanted = next(rows[domain])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data, domain), wanted)
            loss.backward()
            for parameter in model.parameters():
                if parameter.grad is None and fault != "missing_gradients_not_reduced":
                    parameter.grad = torch.zeros_like(parameter)
            _average([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
            optimizer.step()
            probe.end_step(loss=loss)
    if rank == 0:
        with torch.no_grad():
            losses = [F.cross_entropy(model(x[at, 1200:], at), labels[at, 1200:]) for at in range(3)]
        final.copy_(torch.stack(losses).mean())


@program(
    "silent errors",
    "PyTorch tutorials, writing distributed applications, with a head for each domain and other domains on each rank",
    Fault(
        "missing_gradients_not_reduced", "replicas", FORUM, ("replicas_equal", "parameters_follow_gradients", "@heads*")
    ),
)
def domains_of_ranks(fault: str = "") -> Tensor:
    final = torch.zeros(()).share_memory_()
    in_two_processes(_train_domains, fault, final)
    return final


@program(
    "silent errors",
    "PyTorch Ignite, handlers that keep the best weights and restore them when the rate is reduced, for noisy labels",
    Fault("best_weights_are_references", "references", FORUM, ("weights_loaded", "unchanged_parameter"), since=100),
    Fault(
        "loss_given_as_the_score", "loading", FORUM, ("weights_loaded", "loss_spike", "loss_not_decreasing"), since=100
    ),
)
def restored_classifier(fault: str = "") -> Tensor:
    images, classes = digits()
    labels = torch.where(torch.rand(300) < 0.3, torch.randint(10, (300,)), classes[:300])
    layers: list[nn.Module] = []
    for inputs, outputs, stride in ((1, 16, 1), (16, 16, 1), (16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 24, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    head = nn.Sequential(nn.Flatten(), nn.Linear(384, 64), nn.ReLU(), nn.Linear(64, 10))
    model = nn.Sequential(OrderedDict({"encoder": nn.Sequential(*layers), "head": head}))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)

    def loss_of(rows: slice) -> Tensor:
        model.eval()
        with torch.no_grad():
            loss = F.cross_entropy(model(images[rows]), classes[rows])
        model.train()
        return loss

    highest, best = -torch.inf, model.state_dict()
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(300), batches(images[:300], labels, size=30), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 20 == 19:
                with probe.evaluating():
                    loss = loss_of(slice(300, 700))
                    probe.log(loss=loss)
                score = loss if fault == "loss_given_as_the_score" else -loss
                if score > highest:
                    highest, best = score, model.state_dict()
                    if fault != "best_weights_are_references":
                        best = copy.deepcopy(best)
            if step in (99, 199):
                model.load_state_dict(best)
                optimizer.param_groups[0]["lr"] /= 4
    model.load_state_dict(best)
    return loss_of(slice(700, None))


def _shifted(images: Tensor) -> Tensor:
    """Move the images of a batch by up to one pixel."""
    row, column = torch.randint(3, (2,)).tolist()
    return F.pad(images, (1, 1, 1, 1))[..., row : row + 8, column : column + 8]


def _shards(images: Tensor, classes: Tensor, fault: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one shard after the other. A shard has a folder for each of its classes."""
    shares = torch.arange(len(images)) % 5
    missing = [(), (8,), (6,), (5,), (4,)]
    transforms = [_shifted]
    for shard in range(5):
        is_here = (shares == shard) & ~torch.isin(classes, torch.tensor(missing[shard]))
        labels = classes[is_here]
        if fault == "classes_listed_in_each_shard":
            labels = labels.unique(return_inverse=True)[1]
        if fault == "transforms_added_per_shard" and shard:
            transforms.append(_shifted)
        for _, (data, wanted) in zip(range(SHARD), batches(images[is_here], labels, size=40), strict=False):
            yield reduce(lambda moved, transform: transform(moved), transforms, data), wanted


@program(
    "silent errors",
    "torchvision's ImageFolder and PyTorch's TorchData: images in shards, which are read one after the other",
    Fault(
        "classes_listed_in_each_shard",
        "labels",
        FORUM,
        ("labels_shifted", "labels_of_other_positions", "loss_spike", "class_imbalance"),
        since=SHARD,
    ),
    Fault(
        "transforms_added_per_shard", "data", FORUM, ("input_drift", "data_changed_in_place", "loss_spike"), since=SHARD
    ),
)
def shards_of_folders(fault: str = "") -> Tensor:
    images, classes = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(), nn.Flatten(),
        nn.Linear(512, 10)
    )  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=4e-3, weight_decay=0.02)
    scheduler = CosineAnnealingLR(optimizer, 5 * SHARD)
    with attach(model, optimizer) as probe:
        for data, wanted in _shards(images[:1400], classes[:1400], fault):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(images[1400:]), classes[1400:])


class LastState(nn.Module):
    """Return the last state of a GRU over the embeddings of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.gru = nn.GRU(16, 32, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        return self.gru(self.words(words))[1][0]


def _as_keras(gru: nn.GRU) -> list[Tensor]:
    """Return the kernels [inputs, 96] and biases [96] of a GRU as Keras saves them: update, reset and new gates."""
    parts = [parameter.detach().chunk(3) for parameter in gru.parameters()]
    return [torch.cat([update, reset, new]).t() for reset, update, new in parts]


def _load_keras(gru: nn.GRU, arrays: list[Tensor], is_reordered: bool = True) -> None:
    for parameter, array in zip(gru.parameters(), arrays, strict=True):
        update, reset, new = array.t().chunk(3)
        parameter.data.copy_(torch.cat([reset, update, new] if is_reordered else [update, reset, new]))


@program(
    "keras",
    "Keras's guides on transfer learning and on working with RNNs, after the port of a GRU to PyTorch",
    Fault("gates_in_the_order_of_keras", "loading", ISSUES, ("weights_loaded", "loss_not_decreasing", "@encoder*")),
    Fault(
        "dropout_is_last", "regularization", TAXONOMY, ("mode_of_phase", "loss_not_decreasing", "@dropout", "@rating")
    ),
)
def ported_gru(fault: str = "") -> Tensor:
    words = torch.randint(20, (2600, 14))
    words[:, 0] %= 6
    places = torch.arange(14).where(words < 6, -1).argmax(1)
    last = words[torch.arange(2600), places]  # the last one of the six words that matter
    whole = nn.Sequential(LastState(), nn.Linear(32, 6))
    optimizer = Adam(whole.parameters(), lr=1e-2)
    for _, (data, wanted) in zip(range(220), batches(words[:2000], last[:2000], size=64), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(whole(data), wanted).backward()
        optimizer.step()

    encoder = LastState()
    encoder.words.load_state_dict(whole[0].words.state_dict())
    _load_keras(encoder.gru, _as_keras(whole[0].gru), is_reordered=fault != "gates_in_the_order_of_keras")
    encoder.requires_grad_(False)
    layers = {"hidden": nn.Linear(32, 32), "relu": nn.ReLU(), "dropout": nn.Dropout(0.3), "rating": nn.Linear(32, 1)}
    if fault == "dropout_is_last":
        layers["dropout"] = layers.pop("dropout")
    model = nn.Sequential(OrderedDict({"encoder": encoder, **layers}))
    optimizer = Adam(model[1:].parameters(), lr=3e-3)
    ratings = torch.tensor([1.0, -2.0, 2.0, 1.0, 0.5, -1.0])[last] + 0.3 * torch.randn(2600)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(words[:2000], ratings[:2000], size=32), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(data).squeeze(1), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.mse_loss(model(words[2000:]).squeeze(1), ratings[2000:])


def _beats(count: int) -> tuple[Tensor, Tensor]:
    """Return signals of heartbeats [count, 1, 64], and their kinds, from 0 to 4; kind 2 is the most frequent one."""
    kinds = torch.tensor([0.05, 0.12, 0.63, 0.07, 0.13]).multinomial(count, replacement=True)
    widths, delays = torch.tensor([1.6, 2.4, 2.0, 3.4, 2.6])[kinds], torch.tensor([14.0, 11.0, 13.0, 13.0, 17.0])[kinds]
    heights = torch.tensor([0.2, 0.5, 0.35, 0.3, 0.5])[kinds]
    time, start = torch.arange(64.0), 20 + 6 * torch.rand(count, 1)
    width, delay = (widths + 0.4 * torch.randn(count))[:, None], (delays + 1.5 * torch.randn(count))[:, None]
    peak = (-((time - start) ** 2) / (2 * width**2)).exp()
    wave = heights[:, None] * (-((time - start - delay) ** 2) / 18).exp()
    return (peak + wave + 0.12 * torch.randn(count, 64))[:, None], kinds


@program(
    "keras",
    "Keras's example timeseries_classification_from_scratch, for kinds of heartbeats with weights of the classes",
    Fault(
        "weights_in_the_order_of_the_counts",
        "loss",
        FORUM,
        ("wrong_loss", "class_imbalance", "loss_scale", "loss_not_decreasing"),
    ),
    Fault(
        "mode_set_only_at_the_root", "mode", FORUM, ("mode_of_phase", "samples_vary", "@*norm*", "@dropout"), since=39
    ),
)
def heartbeats(fault: str = "") -> Tensor:
    signals, kinds = _beats(4400)
    model = nn.Sequential(OrderedDict({
        "conv1": nn.Conv1d(1, 24, 7, 2, 3), "norm1": nn.BatchNorm1d(24), "relu1": nn.ReLU(),
        "conv2": nn.Conv1d(24, 32, 5, 2, 2), "norm2": nn.BatchNorm1d(32), "relu2": nn.ReLU(), "flatten": nn.Flatten(),
        "hidden": nn.Linear(512, 48), "relu3": nn.ReLU(), "dropout": nn.Dropout(0.6), "kinds": nn.Linear(48, 5),
    }))  # fmt: skip
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    counts = kinds[:2400].bincount(minlength=5)
    weights = 2400 / (5 * counts)
    used = weights
    if fault == "weights_in_the_order_of_the_counts":
        used = weights.sort()[0]  # value_counts() of pandas returns the largest count first

    def loss_of_others() -> Tensor:
        changed = [model] if fault == "mode_set_only_at_the_root" else list(model.modules())
        for module in changed:
            module.training = False
        with torch.no_grad():
            loss = F.cross_entropy(model(signals[2400:]), kinds[2400:], weight=weights)
        for module in changed:
            module.training = True
        return loss

    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), batches(signals[:2400], kinds[:2400], size=64), strict=False):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted, weight=used)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                with probe.evaluating():
                    probe.log(loss=loss_of_others())
    return loss_of_others()


class Rescaling(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images / 127.5 - 1


@program(
    "keras",
    "Keras's example image_classification_efficientnet_fine_tuning: a backbone that scales its inputs, for shapes",
    Fault(
        "images_scaled_before_the_backbone",
        "data",
        FORUM,
        ("input_not_normalized", "tensor_variance", "distinct_data", "samples_vary", "all_zero", "@backbone*"),
    ),
    Fault(
        "hooks_registered_in_each_step",
        "gradients",
        FORUM,
        ("vanishing_gradient", "unchanged_parameter@backbone*", "update_ratio@backbone*"),
        since=1,
    ),
)
def tuned_backbone(fault: str = "") -> Tensor:
    images, kinds = shapes(2600, size=16)
    images = (255 * images).round()
    is_light = (images[:, :, 4:12, 4:12].mean((1, 2, 3)) > images[:, :, ::15, ::15].mean((1, 2, 3))).long()
    backbone = nn.Sequential(
        Rescaling(), nn.Conv2d(3, 16, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, 1, 1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Flatten()
    )  # fmt: skip
    whole = nn.Sequential(backbone, nn.Linear(512, 4))
    optimizer: torch.optim.Optimizer = Adam(whole.parameters(), lr=2e-3)
    for _, (data, kind) in zip(range(200), batches(images[:900], kinds[:900], size=48), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(whole(data), kind).backward()
        optimizer.step()

    if fault == "images_scaled_before_the_backbone":
        images = images / 255
    model = nn.Sequential(OrderedDict({"backbone": backbone, "head": _perceptron(512, 48, 8)}))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    labels = 4 * is_light + kinds

    def train_slowly(part: nn.Module) -> None:
        for parameter in part.parameters():
            parameter.register_hook(lambda gradient: 0.5 * gradient)

    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(240), batches(images[900:2200], labels[900:2200], size=32), strict=False):
            if step == 0 or fault == "hooks_registered_in_each_step":
                train_slowly(model[0])
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), wanted)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(images[2200:]), labels[2200:])


class Lake:
    """Sixteen walkers on a frozen lake of 4 x 4 fields. A hole or the goal ends an episode."""

    holes, goal = (5, 7, 11, 12), 15

    def __init__(self) -> None:
        self.fields = torch.zeros(16, dtype=torch.long)

    @staticmethod
    def moves() -> Tensor:
        """Return the next fields [16, 4] of all fields, for a step to the left, down, right or up."""
        row, column = torch.arange(16) // 4, torch.arange(16) % 4
        rows = torch.stack([row, (row + 1).clamp(max=3), row, (row - 1).clamp(min=0)], 1)
        columns = torch.stack([(column - 1).clamp(min=0), column, (column + 1).clamp(max=3), column], 1)
        return 4 * rows + columns

    @classmethod
    def rewards(cls) -> tuple[Tensor, Tensor]:
        """Return the rewards of reaching the fields [16], and which of them end an episode."""
        reward = (
            torch.zeros(16).index_fill_(0, torch.tensor(cls.holes), -1.0).index_fill_(0, torch.tensor(cls.goal), 1.0)
        )
        return reward, reward != 0

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next fields, the rewards and the ends, and start the episodes that ended on any field."""
        slips = (torch.rand(16) < 0.2) * torch.randint(-1, 2, (16,))
        reached = self.moves()[self.fields, (actions + slips) % 4]
        reward, ends = (of_fields[reached] for of_fields in self.rewards())
        free = (~self.rewards()[1]).nonzero().squeeze(1)
        self.fields = torch.where(ends, free[torch.randint(len(free), (16,))], reached)
        return reached, reward, ends

    @classmethod
    def best_values(cls, discount: float) -> Tensor:
        """Return the values of the actions in all fields [16, 4]."""
        reward, ends = cls.rewards()
        values, moves = torch.zeros(16, 4), cls.moves()
        for _ in range(80):
            reached = (reward + discount * values.amax(1) * ~ends)[moves]
            slipped = (reached.roll(1, 1) + reached + reached.roll(-1, 1)) / 3
            values = 0.8 * reached + 0.2 * slipped
        return values


def _projected(shares: Tensor, rewards: Tensor, discounts: Tensor, atoms: Tensor, fault: str) -> Tensor:
    """Return the shares of returns [samples, atoms] after a step, on the same atoms."""
    places = (rewards[:, None] + discounts[:, None] * atoms).clamp(-1, 1)
    places = (places + 1) / (atoms[1] - atoms[0])
    lower, upper = places.floor().long(), places.ceil().long()
    lower_part, upper_part = upper - places, places - lower
    if fault != "shares_on_whole_atoms_lost":
        lower_part = lower_part + (lower == upper)
    projected = torch.zeros_like(shares).scatter_add_(1, lower, shares * lower_part)
    return projected.scatter_add_(1, upper, shares * upper_part)


@program(
    "general",
    "CleanRL, c51.py: distributions of returns on 33 atoms, for walkers on a frozen lake",
    Fault(
        "shares_on_whole_atoms_lost",
        "labels",
        ISSUES,
        ("wrong_range_of_loss", "wrong_loss", "missing_labels_in_loss", "all_zero", "loss_not_decreasing"),
    ),
)
def distributions_of_returns(fault: str = "") -> Tensor:
    lake, discount, atoms = Lake(), 0.9, torch.linspace(-1, 1, 33)
    net = nn.Sequential(OrderedDict({"hidden": nn.Linear(16, 96), "relu": nn.ReLU(), "atoms": nn.Linear(96, 4 * 33)}))
    target = copy.deepcopy(net).requires_grad_(False)
    optimizer = Adam(net.parameters(), lr=8e-3)
    every = torch.eye(16)
    memory = []

    def shares_of(model: nn.Module, fields: Tensor) -> Tensor:
        return model(every[fields]).view(-1, 4, 33).log_softmax(2)

    with attach(nn.ModuleDict({"net": net, "target": target}), optimizer) as probe:
        for step in range(340):
            fields, greedy = lake.fields, (shares_of(net, lake.fields).exp() @ atoms).argmax(1)
            actions = torch.where(torch.rand(16) < 0.4, torch.randint(4, (16,)), greedy)
            memory.append((fields, actions, *lake.step(actions)))
            rows = torch.randint(len(memory), (8,)).tolist()
            fields, actions, reached, reward, ends = map(torch.cat, zip(*(memory[row] for row in rows), strict=True))
            following = shares_of(target, reached).exp()
            best = (following @ atoms).argmax(1)
            following = following[torch.arange(128), best]
            wanted = _projected(following, reward, discount * ~ends, atoms, fault)
            loss = -(wanted * shares_of(net, fields)[torch.arange(128), actions]).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 5 == 4:
                target.load_state_dict(net.state_dict())
    free = ~lake.rewards()[1]
    with torch.no_grad():
        return F.mse_loss((shares_of(net, torch.arange(16)).exp() @ atoms)[free], lake.best_values(discount)[free])


class GraphEncoder(nn.Module):
    """Return vectors of nodes; each layer adds the mean over the neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.ModuleList([nn.Linear(16, 48), nn.Linear(48, 16)])
        self.neighbours = nn.ModuleList([nn.Linear(16, 48, bias=False), nn.Linear(48, 16, bias=False)])
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Return the vectors [nodes, 16] for features [nodes, 16] and edges [2, edges] from the first to the second."""
        adjacency = torch.zeros(len(x), len(x)).index_put_((edges[1], edges[0]), torch.ones(()))
        adjacency = adjacency / adjacency.sum(1, keepdim=True).clamp(min=1)
        hidden = F.relu(self.own[0](x) + self.neighbours[0](adjacency @ x))
        return self.own[1](hidden) + self.neighbours[1](adjacency @ hidden)


def _readings() -> tuple[Tensor, Tensor]:
    """Return features of 40 readers and 240 papers [280, 16], and which reader read which paper, bool [280, 280]."""
    tastes = torch.randn(280, 6)
    tastes[40:, 0] += 1.5  # papers and readers have different means
    x = tastes @ torch.randn(6, 16) / 2 + 0.5 * torch.randn(280, 16)
    is_read = torch.rand(280, 280) < (1.5 * tastes[:, 1:] @ tastes[:, 1:].t() - 1).sigmoid()
    is_read[40:] = is_read[:, :40] = False
    return x, is_read


@program(
    "general",
    "PyTorch Geometric, link_pred.py, with edges that are either for the messages or for the loss, for papers that are read",
    Fault(
        "negatives_among_all_nodes",
        "data",
        ISSUES,
        ("edges_of_other_graphs", "wrong_loss", "labels_of_other_positions", "distinct_data"),
    ),
)
def papers_of_readers(fault: str = "") -> Tensor:
    x, is_read = _readings()
    pairs = is_read.nonzero()[torch.randperm(int(is_read.sum()))].t()
    known, hidden = pairs.split([pairs.shape[1] - 400, 400], 1)
    is_possible = torch.zeros(280, 280, dtype=torch.bool)
    is_possible[:40, 40:] = True
    others = (is_possible & ~is_read).nonzero().t()
    model = GraphEncoder()
    optimizer = Adam(model.parameters(), lr=5e-3)

    def loss_of(kept: Tensor, asked: Tensor, unread: Tensor) -> Tensor:
        vectors = model(x, torch.cat([kept, kept.flip(0)], 1))
        first, second = torch.cat([asked, unread[:, torch.randint(unread.shape[1], (asked.shape[1],))]], 1)
        wanted = (torch.arange(len(first)) < asked.shape[1]).float()
        return F.binary_cross_entropy_with_logits((vectors[first] * vectors[second]).sum(1) + model.shift, wanted)

    used = (~is_read).nonzero().t() if fault == "negatives_among_all_nodes" else others
    with attach(model, optimizer) as probe:
        for _ in range(240):
            part = known[:, torch.randperm(known.shape[1])]
            loss = loss_of(part[:, 300:], part[:, :300], used)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(known, hidden, others)


def _discrepancy(first: Tensor, second: Tensor) -> Tensor:
    """Return the maximum mean discrepancy of two sets of points, with kernels of four widths."""
    points = torch.cat([first, second])
    squares = points.square().sum(1)
    distances = (squares[:, None] + squares - 2 * points @ points.t()).clamp(min=0)
    kernel = torch.stack([(-distances / (2 * width**2)).exp() for width in (0.3, 0.8, 2.0, 4.0)]).mean(0)
    signs = torch.cat([torch.full((len(first),), 1 / len(first)), torch.full((len(second),), -1 / len(second))])
    return signs @ kernel @ signs


@program(
    "general",
    "Li et al., Generative moment matching networks, 2015, in mixed precision, for places in a valley",
    Fault(
        "kernel_inside_the_autocast",
        "precision",
        FORUM,
        ("low_precision_inputs", "autocast_in_effect", "wrong_loss", "loss_not_decreasing"),
    ),
)
def matched_moments(fault: str = "") -> Tensor:
    angle = 5 * torch.rand(4400)
    places = torch.stack([angle.cos(), angle.sin()], 1) * (1 + 0.4 * angle[:, None]) + 0.1 * torch.randn(4400, 2)
    centre = torch.tensor([24.0, -18.0])
    places = places + centre
    model = _perceptron(6, 64, 64, 2)
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (wanted,) in zip(range(300), batches(places[:4000], size=160), strict=False):
            with torch.autocast("cpu", torch.bfloat16):
                made = model(torch.randn(160, 6)).float() + centre
            with torch.autocast("cpu", torch.bfloat16, enabled=fault == "kernel_inside_the_autocast"):
                loss = _discrepancy(made, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return _discrepancy(model(torch.randn(2000, 6)) + centre, places[4000:]).sqrt()


class LeakyNeurons(nn.Module):
    """Spike where the sum of past inputs exceeds 1; the gradient is that of a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def reset(self, is_kept: bool = False) -> None:
        self.membrane = self.membrane.detach() if is_kept else torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        membrane = 0.9 * self.membrane + x
        soft = (5 * (membrane - 1)).sigmoid()
        spikes = soft + ((membrane > 1).float() - soft).detach()
        self.membrane = membrane - spikes
        return spikes


class SpikingNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.neurons = nn.Linear(64, 96), LeakyNeurons()
        self.output, self.classes = nn.Linear(96, 10), LeakyNeurons()

    def forward(self, images: Tensor, steps: int = 8) -> Tensor:
        """Return the spikes and last membranes of the classes [samples, 10]; a pixel spikes as often as it is bright."""
        total = torch.zeros(())
        for _ in range(steps):
            spikes = self.neurons(2 * self.hidden(torch.bernoulli(images)))
            total = total + self.classes(2 * self.output(spikes))
        return total + self.classes.membrane


@program(
    "general",
    "snnTorch, tutorial 5: training spiking neural networks with surrogate gradients, for digits",
    Fault(
        "membranes_not_reset",
        "memory of states",
        ISSUES,
        ("edges_of_other_graphs", "samples_vary", "looks_ahead", "loss_not_decreasing", "@neurons", "@classes"),
        since=1,
    ),
)
def spiking_digits(fault: str = "") -> Tensor:
    images, classes = digits()
    pixels = images.flatten(1)
    model = SpikingNet()
    optimizer = Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(260), batches(pixels[:1400], classes[:1400], size=64), strict=False):
            for neurons in (model.neurons, model.classes):
                neurons.reset(is_kept=fault == "membranes_not_reset")
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.neurons.reset()
    model.classes.reset()
    with torch.no_grad():
        return F.cross_entropy(model(pixels[1400:]), classes[1400:])


def _sounds(count: int, length: int = 400) -> tuple[Tensor, Tensor]:
    """Return voices of three harmonics and noise of machines, as 16-bit integers [count, length]."""
    time = torch.arange(length) / 100
    pitch, beat = 3 + 5 * torch.rand(count, 1), 0.6 + torch.rand(count, 1)
    phases = 6.3 * torch.rand(4, count, 1)
    voice = sum((6.28 * k * pitch * time + phases[k]).sin() / k for k in range(1, 4))
    voice = voice * (0.55 + 0.45 * (6.28 * beat * time + phases[0]).sin())
    noise = F.conv1d(torch.randn(count, 1, length + 2), torch.tensor([[[1.0, -1.6, 1.0]]])).squeeze(1)
    peaks = [each.abs().amax(1, keepdim=True) for each in (voice, noise)]
    voice, noise = 0.9 * voice / peaks[0], (0.4 + 0.5 * torch.rand(count, 1)) * noise / peaks[1]
    return (32767 * voice).short(), (32767 * noise).short()


class MaskingNet(nn.Module):
    """Mask learned features of a sound, after Conv-TasNet."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Conv1d(1, 48, 16, 8, bias=False)
        self.blocks = nn.ModuleList(nn.Conv1d(48, 48, 3, padding=2**at, dilation=2**at) for at in range(3))
        self.mask = nn.Conv1d(48, 48, 1)
        self.decoder = nn.ConvTranspose1d(48, 1, 16, 8, bias=False)
        nn.init.orthogonal_(self.encoder.weight, gain=1.7)
        self.decoder.load_state_dict(self.encoder.state_dict())

    def forward(self, sounds: Tensor) -> Tensor:
        features = self.encoder(sounds[:, None])
        h = features
        for block in self.blocks:
            h = h + F.relu(block(h))
        return self.decoder(features * self.mask(h).sigmoid()).squeeze(1)


def _distortion(found: Tensor, wanted: Tensor) -> Tensor:
    """Return the negative ratio of signal to distortion in dB, whatever the scale."""
    found, wanted = (each - each.mean(1, keepdim=True) for each in (found, wanted))
    target = wanted * ((found * wanted).sum(1) / wanted.square().sum(1))[:, None]
    return -10 * (target.square().sum(1) / ((found - target).square().sum(1) + 1e-6)).log10().mean()


@program(
    "general",
    "Luo and Mesgarani, Conv-TasNet, 2019, for voices among machines, with sounds that are mixed in each batch",
    Fault("sounds_mixed_in_16_bits", "data", FORUM, ("heavy_tailed_input", "input_drift", "input_not_normalized")),
    Fault("schedule_stepped_in_the_validation", "schedule", FORUM, ("rate_in_effect", "update_ratio"), since=50),
)
def voices_among_machines(fault: str = "") -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        voices, noises = _sounds(1000)
    model = MaskingNet()
    optimizer = Adam(model.parameters(), lr=4e-3)
    scheduler = StepLR(optimizer, 100)

    def mixed(voice: Tensor, noise: Tensor) -> Tensor:
        return (voice.int() + noise.int()).clamp(-32768, 32767) / 32768

    with attach(model, optimizer) as probe:
        for step, (voice,) in zip(range(240), batches(voices[:800], size=24), strict=False):
            noise = noises[torch.randint(800, (24,))]
            data = (voice + noise) / 32768 if fault == "sounds_mixed_in_16_bits" else mixed(voice, noise)
            loss = _distortion(model(data), voice / 32768)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
            if step % 30 == 29:
                with probe.evaluating(), torch.no_grad():
                    for rows in torch.arange(800, 1000).split(4):
                        probe.log(loss=_distortion(model(mixed(voices[rows], noises[rows])), voices[rows] / 32768))
                        if fault == "schedule_stepped_in_the_validation":
                            scheduler.step()
    with torch.no_grad():
        return 10 ** (_distortion(model(mixed(voices[800:], noises[800:])), voices[800:] / 32768) / 10)


class Automaton(nn.Module):
    """Update the states of cells [samples, 8, rows, columns] from those of their neighbours, each cell half of the times."""

    def __init__(self) -> None:
        super().__init__()
        slope = torch.tensor([[-1.0, 0.0, 1.0], [-2.0, 0.0, 2.0], [-1.0, 0.0, 1.0]]) / 8
        centre = torch.zeros(3, 3).index_put_((torch.tensor(1), torch.tensor(1)), torch.ones(()))
        self.filters = nn.Buffer(torch.stack([centre, slope, slope.t()]).repeat(8, 1, 1)[:, None])
        self.hidden, self.update = nn.Conv2d(24, 48, 1), nn.Conv2d(48, 8, 1)
        nn.init.zeros_(self.update.weight)
        nn.init.zeros_(self.update.bias)

    def forward(self, cells: Tensor, steps: int) -> Tensor:
        for _ in range(steps):
            seen = F.conv2d(cells, self.filters, padding=1, groups=8)
            is_updated = torch.rand_like(cells[:, :1]) < 0.5
            cells = cells + self.update(F.relu(self.hidden(seen))) * is_updated
        return cells


@program(
    "general", "Mordvintsev et al., Growing neural cellular automata, 2020, with a pool of cells that grow to a ring"
)
def growing_cells() -> Tensor:
    grid = torch.linspace(-1, 1, 9)
    radius = (grid.square() + grid.square()[:, None]).sqrt()
    picture = torch.stack([(radius > 0.4) & (radius < 0.9), grid.expand(9, 9) > 0]).float()
    seed = torch.zeros(1, 8, 9, 9)
    seed[..., 4, 4] = 1
    pool = seed.repeat(24, 1, 1, 1)
    model = Automaton()
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _ in range(260):
            rows = torch.randperm(24)[:6]
            pool[rows[0]] = seed[0]
            cells = model(pool[rows], int(torch.randint(8, 13, ())))
            loss = F.mse_loss(cells[:, :2], picture.expand(6, -1, -1, -1))
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                parameter.grad /= parameter.grad.norm() + 1e-8
            optimizer.step()
            pool[rows] = cells.detach()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(seed.repeat(12, 1, 1, 1), 20)[:, :2], picture.expand(12, -1, -1, -1))
