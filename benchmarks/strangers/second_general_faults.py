"""General faults of programs of the collection `second`, after taxonomies and collections of faults of Keras and PyTorch programs."""

from __future__ import annotations

import math

import torch
from data import VOCABULARY, batches, digits, normalized_digits, sentences, shapes, tokens
from registry import Fault, attach, program
from sklearn.datasets import load_wine, make_moons
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, RMSprop, SparseAdam
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, MultiStepLR

AUTOTRAINER = "Zhang et al., AutoTrainer: an automatic DNN training problem detection and repair system, 2021"
DEEPLOCALIZE = "Wardat et al., DeepLocalize: fault localization for deep neural networks, 2021"
TAXONOMY = "Humbatova et al., Taxonomy of real faults in deep learning systems, 2020"
UMLAUT = "Schoop et al., UMLAUT: debugging deep learning programs using program structure and model behavior, 2021"
NEURALINT = "Nikanjam et al., Automatic fault detection for deep learning programs using graph transformations, 2021"


class Forecaster(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.linear = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.lstm(x)[0])


@program(
    "general",
    "Tutorials that forecast the number of airline passengers with an LSTM",
    Fault("series_not_scaled", "data", UMLAUT, ("input_not_normalized", "saturated_activation", "loss_not_decreasing")),
    Fault("targets_are_the_inputs", "labels", TAXONOMY, ("labels_shifted",)),
)
def passenger_forecast(fault: str = "") -> Tensor:
    month = torch.arange(240.0)
    passengers = (110 + 2.2 * month) * (1 + 0.25 * torch.sin(month * math.pi / 6)) + 8 * torch.randn(240)
    mean, deviation = passengers[:180].mean(), passengers[:180].std()
    scaled = (passengers - mean) / deviation
    series = passengers if fault == "series_not_scaled" else scaled
    windows = series.unfold(0, 13, 1)[..., None]
    train, test = windows[:168], windows[168:]
    shift = 0 if fault == "targets_are_the_inputs" else 1
    model = Forecaster()
    optimizer = Adam(model.parameters(), lr=1e-2)
    with attach(model, optimizer) as probe:
        for _, (window,) in zip(range(150), batches(train, size=8), strict=False):
            loss = F.mse_loss(model(window[:, :-1]), window[:, shift : 12 + shift])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        error = F.mse_loss(model(test[:, :-1]), test[:, 1:])
    return error / deviation**2 if fault == "series_not_scaled" else error


class SkipGram(nn.Module):
    def __init__(self, start: float) -> None:
        super().__init__()
        self.centre = nn.Embedding(VOCABULARY, 16, sparse=True)
        self.context = nn.Embedding(VOCABULARY, 16, sparse=True)
        nn.init.uniform_(self.centre.weight, -start, start)
        nn.init.zeros_(self.context.weight)

    def forward(self, centre: Tensor, context: Tensor) -> Tensor:
        return (self.centre(centre)[:, None] * self.context(context)).sum(-1)


@program(
    "general",
    "Mikolov et al., Distributed representations of words and phrases, 2013, with sparse gradients",
    Fault("sign_of_negative_samples_missing", "loss", TAXONOMY, ("wrong_loss",)),
    Fault(
        "all_vectors_start_at_zero",
        "initialization",
        NEURALINT,
        ("poor_initialization", "all_zero", "unchanged_parameter", "vanishing_gradient", "loss_not_decreasing"),
    ),
)
def skip_gram(fault: str = "") -> Tensor:
    pairs = [(words[i], words[j]) for words in map(tokens, sentences(900)) for i in range(len(words))
             for j in range(max(0, i - 2), min(len(words), i + 3)) if i != j]  # fmt: skip
    rows = torch.tensor(pairs)
    model = SkipGram(0.0 if fault == "all_vectors_start_at_zero" else 0.5)
    optimizer = SparseAdam(list(model.parameters()), lr=2e-2)

    def loss_of(batch: Tensor, sign: float) -> Tensor:
        negative = torch.randint(2, VOCABULARY, (len(batch), 5))
        scores = model(batch[:, 0], torch.cat([batch[:, 1:], negative], 1))
        return -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(sign * scores[:, 1:]).sum(1)).mean()

    sign = 1.0 if fault == "sign_of_negative_samples_missing" else -1.0
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(200), batches(rows[:-1000], size=64), strict=False):
            loss = loss_of(batch, sign)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(rows[-1000:], -1.0)


@program(
    "general",
    "Ng, CS294A lecture notes: sparse autoencoder, 2011, with an L1 penalty",
    Fault(
        "sigmoid_for_standardized_pixels",
        "activation",
        DEEPLOCALIZE,
        ("wrong_range_of_loss", "saturated_activation@decoder*", "@decoder*"),
    ),
    Fault("penalty_too_large", "regularization", TAXONOMY, ("dead_units", "all_zero", "loss_not_decreasing")),
)
def sparse_autoencoder(fault: str = "") -> Tensor:
    images = normalized_digits()[0].tensors[0].flatten(1)
    encoder = nn.Sequential(nn.Linear(64, 128), nn.ReLU())
    decoder = nn.Sequential(nn.Linear(128, 64))
    if fault == "sigmoid_for_standardized_pixels":
        decoder.append(nn.Sigmoid())
    model = nn.Sequential()
    model.add_module("encoder", encoder)
    model.add_module("decoder", decoder)
    optimizer = Adam(model.parameters(), lr=2e-3)
    weight = 10.0 if fault == "penalty_too_large" else 0.05
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(200), batches(images[:1200], size=64), strict=False):
            code = encoder(batch)
            loss = F.mse_loss(decoder(code), batch) + weight * code.abs().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(images[1200:]), images[1200:])


class Coupling(nn.Module):
    def __init__(self, first: bool) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([1.0, 0.0] if first else [0.0, 1.0]))
        self.net = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = ((1 - self.mask) * part for part in self.net(x * self.mask).chunk(2, 1))
        scale = torch.tanh(scale)
        return x * scale.exp() + shift, scale.sum(1)


@program(
    "general",
    "Dinh et al., Density estimation using Real NVP, 2017",
    Fault("log_determinant_left_out", "loss", TAXONOMY, ("wrong_loss",)),
)
def normalizing_flow(fault: str = "") -> Tensor:
    points = torch.tensor(make_moons(1500, noise=0.06, random_state=1)[0], dtype=torch.float32)
    points = (points - points.mean(0)) / points.std(0)
    couplings = nn.ModuleList([Coupling(index % 2 == 0) for index in range(4)])
    optimizer = AdamW(couplings.parameters(), lr=4e-3)

    def loss_of(x: Tensor, complete: bool) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in couplings:
            x, log_determinant = coupling(x)
            total = total + log_determinant
        density = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return -(density + total if complete else density).mean()

    with attach(couplings, optimizer) as probe:
        for _, (batch,) in zip(range(150), batches(points[:1200], size=128), strict=False):
            loss = loss_of(batch, fault != "log_determinant_left_out")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(points[1200:], True)


class Sine(nn.Module):
    def __init__(self, inputs: int, outputs: int, first: bool, default: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        if not default:
            bound = 1 / inputs if first else math.sqrt(6 / inputs) / 20
            nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(20 * self.linear(x))


@program(
    "general",
    "Sitzmann et al., Implicit neural representations with periodic activation functions, 2020",
    Fault(
        "normal_weights_for_sines",
        "initialization",
        NEURALINT,
        ("poor_initialization", "tensor_variance", "exploding_activation", "exploding_gradient"),
    ),
    Fault(
        "rate_for_plain_gradients",
        "learning rate",
        AUTOTRAINER,
        ("update_ratio", "loss_not_decreasing", "loss_spike", "exploding_activation", "exploding_gradient"),
    ),
)
def coordinate_network(fault: str = "") -> Tensor:
    picture = shapes(1, 32)[0][0].mean(0)
    grid = torch.linspace(-1, 1, 32)
    coordinates, values = torch.cartesian_prod(grid, grid), (picture.flatten()[:, None] - 0.5) * 2
    default = fault == "normal_weights_for_sines"
    model = nn.Sequential(Sine(2, 48, True, default), Sine(48, 48, False, default), nn.Linear(48, 1))
    if default:
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight)
    optimizer = Adam(model.parameters(), lr=0.1 if fault == "rate_for_plain_gradients" else 1e-3)
    with attach(model, optimizer) as probe:
        for _ in range(150):
            loss = F.mse_loss(model(coordinates), values)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(coordinates), values)


@program(
    "general",
    "TensorFlow's tutorial on classification of imbalanced data, in PyTorch",
    Fault("rows_sorted_by_label", "data", TAXONOMY, ("class_imbalance", "samples_vary", "distinct_data")),
    Fault("columns_of_labels_swapped", "labels", TAXONOMY, ("labels_shifted", "loss_not_decreasing")),
)
def fraud_detection(fault: str = "") -> Tensor:
    table, rare = torch.randn(3000, 12), (torch.rand(3000) < 0.08).float()
    table += rare[:, None] * torch.randn(12) * 0.8
    train, labels = table[:2400], rare[:2400]
    wanted_columns = F.one_hot(labels.long()).float()
    if fault == "columns_of_labels_swapped":  # the files have the classes in different orders
        wanted_columns[600:] = wanted_columns[600:].flip(1)
    order = labels.argsort(stable=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 2))
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([0.3, 3.0]))
    optimizer = Adamax(model.parameters(), lr=4e-3)
    model.train()
    with attach(model, optimizer, ids="all") as probe:
        for step in range(200):
            rows = torch.randperm(len(train))[:48]
            if fault == "rows_sorted_by_label":
                rows = order[torch.arange(step * 48, step * 48 + 48) % len(train)]
            probe.batch(ids=rows, targets=wanted_columns[rows].argmax(1))
            loss = criterion(model(train[rows]), wanted_columns[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return criterion(model(table[2400:]), F.one_hot(rare[2400:].long()).float())


@program(
    "general",
    "Srivastava et al., Highway networks, 2015, with a schedule of cycles",
    Fault(
        "initial_weights_too_small",
        "initialization",
        AUTOTRAINER,
        ("vanishing_gradient", "tensor_variance", "poor_initialization", "loss_not_decreasing"),
    ),
    Fault("relu_at_the_logits", "activation", DEEPLOCALIZE, ("@relu", "dead_units", "all_zero")),
)
def deep_perceptron(fault: str = "") -> Tensor:
    train_data, test_data = normalized_digits()
    model = nn.Sequential()
    model.add_module("flatten", nn.Flatten())
    for index in range(8):
        model.add_module(f"dense{index}", nn.Linear(64 if index == 0 else 40, 40))
        model.add_module(f"tanh{index}", nn.Tanh())
    model.add_module("logits", nn.Linear(40, 10))
    for module in model:
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if fault == "initial_weights_too_small":
                nn.init.normal_(module.weight, std=0.01)
    if fault == "relu_at_the_logits":
        model.add_module("relu", nn.ReLU())
    optimizer = SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = CyclicLR(optimizer, 0.01, 0.05, step_size_up=40)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(160), batches(*train_data.tensors, size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    images, target = test_data.tensors
    with torch.no_grad():
        return F.cross_entropy(model(images), target)


@program(
    "general",
    "Schroff et al., FaceNet: a unified embedding for face recognition and clustering, 2015",
    Fault("negatives_of_the_same_class", "labels", TAXONOMY, ("labels_shifted", "loss_not_decreasing")),
    Fault("pixels_up_to_255", "data", UMLAUT, ("input_not_normalized",)),
)
def triplets(fault: str = "") -> Tensor:
    images, classes = digits()
    if fault == "pixels_up_to_255":
        images = images * 255
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(384, 24)
    )  # fmt: skip
    optimizer = Adadelta(model.parameters(), lr=0.5)
    scheduler = MultiStepLR(optimizer, [80, 120], gamma=0.3)
    members = [torch.nonzero(classes[:1400] == number).flatten() for number in range(10)]

    def choose(numbers: Tensor) -> Tensor:
        return torch.stack([members[n][torch.randint(len(members[n]), ())] for n in numbers.tolist()])

    with attach(model, optimizer) as probe:
        for _ in range(120):
            numbers = torch.randint(10, (32,))
            others = numbers if fault == "negatives_of_the_same_class" else (numbers + torch.randint(1, 10, (32,))) % 10
            rows = torch.cat([choose(numbers), choose(numbers), choose(others)])
            anchor, positive, negative = model(images[rows]).chunk(3)
            loss = F.triplet_margin_loss(anchor, positive, negative, margin=1.0)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        features = F.normalize(model(images), dim=1)
        centres = torch.stack([features[row].mean(0) for row in members])
        return F.cross_entropy(-10 * torch.cdist(features[1400:], centres), classes[1400:])


@program(
    "general",
    "Keras's tutorials on small tables: the classes of wines",
    Fault("initial_weights_constant", "initialization", NEURALINT, ("poor_initialization", "all_zero")),
    Fault("sum_instead_of_mean", "loss", TAXONOMY, ("update_ratio", "loss_spike", "exploding_gradient", "wrong_loss")),
)
def wine_classifier(fault: str = "") -> Tensor:
    table, classes = (torch.tensor(array) for array in load_wine(return_X_y=True))
    table = ((table - table.mean(0)) / table.std(0)).float()
    order = torch.randperm(len(table))
    table, classes = table[order], classes[order]
    model = nn.Sequential(nn.Linear(13, 24), nn.Softplus(), nn.Linear(24, 16), nn.Softplus(), nn.Linear(16, 3))
    if fault == "initial_weights_constant":
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.1)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    reduction = "sum" if fault == "sum_instead_of_mean" else "mean"
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(table[:128], classes[:128], size=16), strict=False):
            loss = F.cross_entropy(model(data), wanted, reduction=reduction)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(table[128:]), classes[128:])


@program(
    "general",
    "scikit-learn's example of Poisson regression, with a network",
    Fault("exponential_missing", "activation", DEEPLOCALIZE, ("wrong_range_of_loss", "non_finite", "wrong_loss")),
    Fault("batch_of_one_row", "batch size", AUTOTRAINER, ("batch_too_small", "loss_not_decreasing", "loss_spike")),
)
def count_regression(fault: str = "") -> Tensor:
    table = torch.randn(900, 4)
    counts = torch.poisson(torch.exp(0.5 * table[:, 0] - 0.8 * table[:, 1] + 0.5))
    model = nn.Sequential(nn.Linear(4, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 1))
    optimizer = RMSprop(model.parameters(), lr=2e-3)
    scheduler = CosineAnnealingWarmRestarts(optimizer, 60)
    size = 1 if fault == "batch_of_one_row" else 32
    logarithmic = fault != "exponential_missing"

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(180), batches(table[:720], counts[:720], size=size), strict=False):
            loss = F.poisson_nll_loss(model(data)[:, 0], wanted, log_input=logarithmic)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        output = model(table[720:])[:, 0]
        return F.poisson_nll_loss(output.exp() if logarithmic else output, counts[720:], log_input=False)
