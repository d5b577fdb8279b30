"""Faults of collections of Keras programs, in PyTorch: AutoTrainer, DeepLocalize, UMLAUT and NeuraLint."""

from __future__ import annotations

import torch
from data import FIRST_WORD, VOCABULARY, batches, digits, padded, shapes, tokens
from registry import Fault, attach, program
from sklearn.datasets import load_diabetes, make_blobs, make_circles
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop

AUTOTRAINER = "Zhang et al., AutoTrainer: an automatic DNN training problem detection and repair system, 2021"
DEEPLOCALIZE = "Wardat et al., DeepLocalize: fault localization for deep neural networks, 2021"
UMLAUT = "Schoop et al., UMLAUT: debugging deep learning programs using program structure and model behavior, 2021"
NEURALINT = "Nikanjam et al., Automatic fault detection for deep learning programs using graph transformations, 2021"


@program(
    "keras",
    "AutoTrainer's perceptron for blobs",
    Fault(
        "deep_sigmoids", "activation", AUTOTRAINER, ("vanishing_gradient", "saturated_activation", "tensor_variance")
    ),
    Fault("weights_all_zero", "initialization", AUTOTRAINER, ("poor_initialization", "all_zero")),
    Fault("batches_of_two", "batch size", AUTOTRAINER, ("batch_too_small", "loss_not_decreasing")),
)
def blobs_perceptron(fault: str = "") -> Tensor:
    x, y = make_blobs(1200, n_features=4, centers=5, cluster_std=2.0, random_state=2)
    points, classes = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    points = (points - points.mean(0)) / points.std(0)
    layers: list[nn.Module] = [nn.Linear(4, 32)]
    for _ in range(6):
        layers += [nn.Sigmoid() if fault == "deep_sigmoids" else nn.ReLU(), nn.Linear(32, 32)]
    model = nn.Sequential(*layers, nn.ReLU(), nn.Linear(32, 5))
    for module in model:
        if isinstance(module, nn.Linear):
            (nn.init.zeros_ if fault == "weights_all_zero" else nn.init.kaiming_uniform_)(module.weight)
            nn.init.zeros_(module.bias)
    optimizer = SGD(model.parameters(), lr=0.03, momentum=0.9)
    size = 2 if fault == "batches_of_two" else 32
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(points[:1000], classes[:1000], size=size), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(points[1000:]), classes[1000:])


@program(
    "keras",
    "AutoTrainer's perceptron for circles, with two classes",
    Fault("hidden_layers_without_activation", "activation", NEURALINT, ("missing_activation", "loss_not_decreasing")),
    Fault("softmax_on_one_unit", "activation", DEEPLOCALIZE, ("@softmax", "loss_not_decreasing")),
    Fault("tanh_before_binary_loss", "activation", NEURALINT, ("wrong_range_of_loss", "@output")),
)
def circle_classifier(fault: str = "") -> Tensor:
    x, y = make_circles(1000, noise=0.1, factor=0.4, random_state=0)
    points, inside = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    model = nn.Sequential()
    for index, inputs in enumerate((2, 32, 32)):
        model.add_module(f"dense{index}", nn.Linear(inputs, 32))
        if fault != "hidden_layers_without_activation":
            model.add_module(f"relu{index}", nn.ReLU())
    model.add_module("dense", nn.Linear(32, 1))
    if fault == "softmax_on_one_unit":
        model.add_module("softmax", nn.Softmax(dim=1))
    else:
        model.add_module("output", nn.Tanh() if fault == "tanh_before_binary_loss" else nn.Sigmoid())
    optimizer = Adam(model.parameters(), lr=3e-3)

    def loss_of(data: Tensor, wanted: Tensor) -> Tensor:
        probabilities = model(data).squeeze(1).clamp(1e-7, 1 - 1e-7)  # Keras clips probabilities in this way
        return F.binary_cross_entropy(probabilities, wanted)

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(250), batches(points[:800], inside[:800], size=32), strict=False):
            loss = loss_of(data, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return loss_of(points[800:], inside[800:])


@program(
    "keras",
    "Keras's example mnist_convnet",
    Fault("biases_far_below_zero", "initialization", AUTOTRAINER, ("dead_units", "all_zero")),
    Fault(
        "missing_softmax",
        "activation",
        DEEPLOCALIZE,
        ("wrong_range_of_loss", "missing_softmax", "non_finite", "loss_not_decreasing"),
    ),
    Fault(
        "squared_error_of_classes", "loss", DEEPLOCALIZE, ("wrong_range_of_loss", "wrong_loss", "loss_not_decreasing")
    ),
)
def digits_convnet(fault: str = "") -> Tensor:
    images, classes = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)
    )  # fmt: skip
    if fault == "biases_far_below_zero":
        for layer in (model[3], model[7]):
            nn.init.constant_(layer.bias, -2.0)
    if fault != "missing_softmax":
        model.append(nn.Softmax(dim=1))
    optimizer = RMSprop(model.parameters(), lr=2e-3)

    def cross_entropy(output: Tensor, wanted: Tensor) -> Tensor:
        """Keras's loss of probabilities, which it scales to a sum of 1."""
        probabilities = (output / output.sum(1, keepdim=True)).clamp(1e-7, 1 - 1e-7)
        return F.nll_loss(probabilities.log(), wanted)

    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(200), batches(images[:1400], classes[:1400], size=32), strict=False):
            output = model(data)
            if fault == "squared_error_of_classes":
                loss = F.mse_loss(output, wanted[:, None].float().expand(-1, 10))
            else:
                loss = cross_entropy(output, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return cross_entropy(model(images[1400:]), classes[1400:])


@program(
    "keras",
    "UMLAUT's classifiers of colour images",
    Fault("pixels_not_scaled", "data", UMLAUT, ("input_not_normalized",)),
    Fault(
        "rate_too_high", "learning rate", UMLAUT, ("update_ratio", "loss_not_decreasing", "loss_spike", "dead_units")
    ),
    Fault("rate_too_low", "learning rate", UMLAUT, ("update_ratio", "loss_not_decreasing")),
    Fault("dropout_of_nearly_all", "regularization", UMLAUT, ("@*dropout*", "loss_not_decreasing")),
)
def image_classifier(fault: str = "") -> Tensor:
    images, kinds = shapes(1000, 16)
    images = images * 255 if fault == "pixels_not_scaled" else (images - 0.5) / 0.25
    share = 0.97 if fault == "dropout_of_nearly_all" else 0.2
    model = nn.Sequential()
    for name, module in {
        "conv1": nn.Conv2d(3, 16, 3, padding=1),
        "relu1": nn.ReLU(),
        "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(16, 32, 3, padding=1),
        "relu2": nn.ReLU(),
        "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "dropout": nn.Dropout(share),
        "dense": nn.Linear(512, 64),
        "relu3": nn.ReLU(),
        "output": nn.Linear(64, 4),
    }.items():
        model.add_module(name, module)
    rate = {"rate_too_high": 0.3, "rate_too_low": 1e-8}.get(fault, 2e-3)
    optimizer = Adam(model.parameters(), lr=rate)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(images[:800], kinds[:800], size=32), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    model.eval()
    with torch.no_grad():
        return F.cross_entropy(model(images[800:]), kinds[800:])


@program(
    "keras",
    "Keras's example reuters_mlp: topics of texts",
    Fault("sigmoid_then_softmax", "activation", NEURALINT, ("double_softmax", "@sigmoid", "saturated_activation")),
    Fault("labels_divided_by_two", "labels", UMLAUT, ("class_imbalance",)),
    Fault("hidden_layer_of_one_unit", "architecture", NEURALINT, ("@hidden", "narrow_layer", "loss_not_decreasing")),
)
def topic_classifier(fault: str = "") -> Tensor:
    ids = padded(1200)
    counts = torch.stack([torch.bincount(row, minlength=VOCABULARY) for row in ids]).float()[:, FIRST_WORD:]
    topics = sum(
        counts[:, tokens([word])[0] - FIRST_WORD].sign() * 2**bit for bit, word in enumerate(("it", "a", "near"))
    )
    topics = topics.long()
    width = 1 if fault == "hidden_layer_of_one_unit" else 48
    model = nn.Sequential()
    model.add_module("hidden", nn.Linear(counts.shape[1], width))
    model.add_module("relu", nn.ReLU())
    model.add_module("output", nn.Linear(width, 8))
    if fault == "sigmoid_then_softmax":  # the loss has the softmax
        model.add_module("sigmoid", nn.Sigmoid())
    labels = topics // 2 if fault == "labels_divided_by_two" else topics
    optimizer = Adam(model.parameters(), lr=5e-3)
    with attach(model, optimizer, ids="all") as probe:
        for _ in range(240):
            indices = torch.randperm(1000)[:32]
            wanted = labels[indices]
            probe.batch(ids=indices, targets=wanted)
            loss = F.cross_entropy(model(counts[indices]), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.cross_entropy(model(counts[1000:]), topics[1000:])


@program(
    "keras",
    "Keras's tutorial on regression",
    Fault(
        "relu_at_the_output",
        "activation",
        DEEPLOCALIZE,
        ("wrong_range_of_loss", "dead_units@output", "all_zero@output", "@output"),
    ),
    Fault(
        "target_not_scaled_for_tanh",
        "activation",
        UMLAUT,
        ("wrong_range_of_loss", "saturated_activation@output", "@output"),
    ),
    Fault("features_not_scaled", "data", DEEPLOCALIZE, ("input_not_normalized",)),
)
def housing_regression(fault: str = "") -> Tensor:
    features, target = (
        torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True, scaled=False)
    )
    if fault != "features_not_scaled":
        features = (features - features.mean(0)) / features.std(0)
    mean, deviation = target.mean(), target.std()
    target = (target - mean) / deviation
    scale = 1.0
    model = nn.Sequential()
    model.add_module("dense1", nn.Linear(10, 64))
    model.add_module("relu1", nn.ReLU())
    model.add_module("dense2", nn.Linear(64, 64))
    model.add_module("relu2", nn.ReLU())
    model.add_module("dense3", nn.Linear(64, 1))
    if fault == "relu_at_the_output":
        model.add_module("output", nn.ReLU())
    if fault == "target_not_scaled_for_tanh":
        model.add_module("output", nn.Tanh())
        scale, target = float(deviation), target * deviation + mean
    optimizer = RMSprop(model.parameters(), lr=1e-3)
    with attach(model, optimizer) as probe:
        for _, (data, wanted) in zip(range(240), batches(features, target, size=32), strict=False):
            loss = F.mse_loss(model(data).squeeze(1), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    with torch.no_grad():
        return F.mse_loss(model(features).squeeze(1) / scale, target / scale)
