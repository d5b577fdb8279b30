"""The seeded faults and the healthy trainings of `benchmarks/rules.py`.

The seed decides the weights, the order of the data, and also how large a fault is and in which layer it is. Each fault states which
findings count as its detection. These lists follow from the fault, not from the results.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW
from trainings import (
    CLASSES,
    LENGTH,
    MOMENTUM,
    PIXELS,
    Adversarial,
    ResidualBlock,
    Training,
    Transformer,
    cnn,
    digits,
    gan,
    gpt_init,
    mlp,
    next_token_loss,
    rnn,
    tokens,
    warmup,
)

STEPS = 300


@dataclass(frozen=True)
class Case:
    """A kind of training.

    Attributes:
        architecture: MLP, CNN, RNN, transformer or GAN.
        name: What is special.
        make: Function of a random number generator that creates the training.
        accepts: The findings that name the fault: `rule` for one without a layer, `rule@layer` for one at a layer; `*` matches
            anything. Empty for a healthy training. `{layer}` is the layer of the fault.
        since: The step at which the fault begins. Earlier findings do not count.
    """

    architecture: str
    name: str
    make: Callable[[Random], Training | tuple[Training, str]]
    accepts: tuple[str, ...] = ()
    since: int = 0


FAULTS: list[Case] = []
HEALTHY: list[Case] = []
Make = Callable[[Random], "Training | tuple[Training, str]"]


def fault(architecture: str, name: str, *accepts: str, since: int = 0) -> Callable[[Make], Make]:
    """Add the decorated function to the faults."""

    def add(make: Make) -> Make:
        FAULTS.append(Case(architecture, name, make, accepts, since))
        return make

    return add


def healthy(architecture: str, name: str, make: Make) -> None:
    """Add a healthy training."""
    HEALTHY.append(Case(architecture, name, make))


def log_uniform(random: Random, low: float, high: float) -> float:
    """Return a number whose logarithm is uniformly distributed."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def weights_of(model: nn.Module) -> list[Tensor]:
    """Return the weight matrices of a model."""
    return [parameter for parameter in model.parameters() if parameter.dim() > 1]


def init(training: Training, fill: Callable[[Tensor], object]) -> Training:
    """Initialize all weight matrices."""
    for weight in weights_of(training.model):
        fill(weight)
    return training


def without(*names: str) -> Callable[[nn.Module], list[nn.Parameter]]:
    """Return a function that returns all parameters of a model outside of some submodules."""
    return lambda model: [
        parameter for name, parameter in model.named_parameters() if not name.startswith(tuple(f"{n}." for n in names))
    ]


class Detached(nn.Module):
    """Cuts the graph, as `.detach()`, `.item()` or a conversion to NumPy does."""

    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


class Function(nn.Module):
    """A function as a module.

    Args:
        function: The function of a tensor.
    """

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def binary(random: Random) -> Training:  # noqa: ARG001
    training = digits(mlp(outputs=1), optimizer=partial(Adam, lr=1e-3), loss=F.binary_cross_entropy)
    training.model.sigmoid = nn.Sigmoid()
    inputs, targets = training.held_out or (training.inputs, training.targets)
    return replace(
        training, targets=(training.targets > 4).float()[:, None], held_out=(inputs, (targets > 4).float()[:, None])
    )


# The rules whose advice is another learning rate, or that see what a divergence does.
DIVERGES = (
    "update_ratio@*", "exploding_gradient@*", "exploding_activation@*", "dead_units@*", "loss_spike", "non_finite", "non_finite@*",
)  # fmt: skip
LEARNS_NOTHING = ("loss_not_decreasing",)
BAD_SCALE = ("poor_initialization@*", "tensor_variance@*")


# ------------------------------------------------------------------------------------------------------ initialization


@fault("MLP", "weights too large", *BAD_SCALE, "exploding_activation@*", "exploding_gradient@*")
def _(random: Random) -> Training:
    std = log_uniform(random, 1.0, 4.0)
    return init(digits(mlp(hidden=random.randint(3, 6))), partial(nn.init.normal_, std=std))


@fault("MLP", "weights too small", *BAD_SCALE, "vanishing_gradient@*")
def _(random: Random) -> Training:
    std = log_uniform(random, 3e-4, 3e-3)
    return init(digits(mlp(hidden=random.randint(3, 6))), partial(nn.init.normal_, std=std))


@fault("CNN", "weights too small", *BAD_SCALE, "vanishing_gradient@*")
def _(random: Random) -> Training:
    std = log_uniform(random, 3e-4, 3e-3)
    return init(digits(cnn(), (1, 8, 8)), partial(nn.init.normal_, std=std))


@fault("transformer", "weights too large", *BAD_SCALE, "exploding_activation@*", "exploding_gradient@*")
def _(random: Random) -> Training:
    return tokens(gpt_init(Transformer(random.randint(2, 4)), std=log_uniform(random, 1.0, 4.0)))


@fault("MLP", "all weights zero", *BAD_SCALE, "all_zero@*", "unchanged_parameter@*")
def _(random: Random) -> Training:
    return init(digits(mlp(hidden=random.randint(2, 5))), nn.init.zeros_)


@fault("MLP", "all weights equal", "poor_initialization@*")
def _(random: Random) -> Training:
    value = log_uniform(random, 0.003, 0.03)
    return init(digits(mlp(hidden=random.randint(2, 4))), partial(nn.init.constant_, val=value))


@fault("CNN", "all weights equal", "poor_initialization@*")
def _(random: Random) -> Training:
    value = log_uniform(random, 0.003, 0.03)
    return init(digits(cnn(), (1, 8, 8)), partial(nn.init.constant_, val=value))


@fault(
    "RNN", "recurrent weights too large", "exploding_gradient@rnn", "exploding_activation@rnn", "non_finite@rnn",
    "saturated_activation@rnn", "poor_initialization@rnn", "tensor_variance@rnn",
)  # fmt: skip
def _(random: Random) -> Training:
    training = digits(rnn(nn.RNN, inputs=2, nonlinearity="relu"), (32, 2))
    training.model.rnn.weight_hh_l0.data *= random.uniform(4, 8)  # the spectral radius is 0.6 by default
    return training


# ----------------------------------------------------------------------------------------------------- learning rate


@fault("MLP", "learning rate too high (SGD)", *DIVERGES)
def _(random: Random) -> Training:
    return digits(mlp(), optimizer=partial(SGD, lr=log_uniform(random, 2, 30)))


@fault("MLP", "learning rate too high (Adam)", *DIVERGES)
def _(random: Random) -> Training:
    return digits(mlp(), optimizer=partial(Adam, lr=log_uniform(random, 0.1, 1)))


@fault("CNN", "learning rate too high", *DIVERGES)
def _(random: Random) -> Training:
    return digits(cnn(), (1, 8, 8), optimizer=partial(SGD, lr=log_uniform(random, 1, 10), momentum=0.9))


@fault("RNN", "learning rate too high", *DIVERGES)
def _(random: Random) -> Training:
    return digits(rnn(), (8, 8), optimizer=partial(Adam, lr=log_uniform(random, 0.1, 1)))


@fault("transformer", "learning rate too high, no warm-up", *DIVERGES)
def _(random: Random) -> Training:
    model = gpt_init(Transformer(4, norm_first=False))
    return tokens(model, optimizer=partial(Adam, lr=log_uniform(random, 0.03, 0.3)), schedule=None)


@fault("GAN", "learning rate too high", *DIVERGES)
def _(random: Random) -> Training:
    rate = log_uniform(random, 0.1, 1)
    optimizer = partial(Adam, lr=rate, betas=(0.5, 0.999))
    return gan(optimizer=optimizer, discriminator_optimizer=optimizer)


@fault("MLP", "learning rate too low", "update_ratio@*", *LEARNS_NOTHING)
def _(random: Random) -> Training:
    return digits(mlp(), optimizer=partial(SGD, lr=log_uniform(random, 1e-8, 1e-5)))


@fault("transformer", "learning rate too low", "update_ratio@*", *LEARNS_NOTHING)
def _(random: Random) -> Training:
    return tokens(gpt_init(Transformer()), optimizer=partial(AdamW, lr=log_uniform(random, 1e-9, 1e-6)))


@fault("MLP", "schedule jumps up", *DIVERGES, since=150)
def _(random: Random) -> Training:
    factor = log_uniform(random, 100, 1000)
    return digits(mlp(), schedule=lambda step: factor if step >= 150 else 1.0)


@fault("transformer", "schedule jumps up", *DIVERGES, since=150)
def _(random: Random) -> Training:
    factor = log_uniform(random, 30, 300)
    return tokens(gpt_init(Transformer()), schedule=lambda step: factor if step >= 150 else 1.0)


@fault("MLP", "momentum is 1", *DIVERGES)
def _(random: Random) -> Training:
    return digits(mlp(), optimizer=partial(SGD, lr=log_uniform(random, 0.05, 0.5), momentum=1.0))


@fault("MLP", "weight decay too large", *BAD_SCALE, "vanishing_gradient@*", "update_ratio@*", "all_zero@*")
def _(random: Random) -> Training:
    return digits(mlp(), optimizer=partial(SGD, lr=0.1, weight_decay=log_uniform(random, 1, 5)))


@fault("MLP", "loss is a sum, learning rate for a mean", *DIVERGES)
def _(random: Random) -> Training:
    return digits(
        mlp(),
        loss=partial(F.cross_entropy, reduction="sum"),
        optimizer=partial(SGD, lr=random.uniform(0.05, 0.2), momentum=0.9),
        batch_size=64,
    )


@fault("CNN", "loss is a sum, learning rate for a mean", *DIVERGES)
def _(random: Random) -> Training:
    return digits(
        cnn(),
        (1, 8, 8),
        loss=partial(F.cross_entropy, reduction="sum"),
        optimizer=partial(SGD, lr=random.uniform(0.05, 0.2), momentum=0.9),
        batch_size=64,
    )


# --------------------------------------------------------------------------------------------------------- activations


@fault("MLP", "dead ReLU layer", "dead_units@{layer}", "all_zero@{layer}")
def _(random: Random) -> tuple[Training, str]:
    training, layer = digits(mlp(hidden=4)), random.randint(0, 3)
    getattr(training.model, f"linear{layer}").bias.data -= log_uniform(random, 10, 100)
    return training, f"act{layer}"


@fault("CNN", "dead ReLU layer", "dead_units@{layer}", "all_zero@{layer}")
def _(random: Random) -> tuple[Training, str]:
    training, layer = digits(cnn(), (1, 8, 8)), random.randint(0, 2)
    getattr(training.model, f"conv{layer}").bias.data -= log_uniform(random, 10, 100)
    return training, f"act{layer}"


@fault("MLP", "saturated tanh", "saturated_activation@act*")
def _(random: Random) -> Training:
    std = log_uniform(random, 0.7, 3)
    return init(digits(mlp(activation=nn.Tanh)), partial(nn.init.normal_, std=std))


@fault("MLP", "saturated sigmoid", "saturated_activation@act*")
def _(random: Random) -> Training:
    std = log_uniform(random, 2, 8)
    return init(digits(mlp(activation=nn.Sigmoid)), partial(nn.init.normal_, std=std))


@fault("MLP", "vanishing gradient in a deep sigmoid network", "vanishing_gradient@linear*", "poor_initialization@*")
def _(random: Random) -> Training:
    return digits(mlp(hidden=random.randint(10, 16), activation=nn.Sigmoid))


@fault("MLP", "dropout of 1", "all_zero@dropout1", "dropout_keeps_units@dropout1")
def _(random: Random) -> Training:  # noqa: ARG001
    return digits(mlp(dropout1=nn.Dropout(1.0)))


@fault("transformer", "no residual connections, no normalization", *BAD_SCALE, "vanishing_gradient@*")
def _(random: Random) -> Training:
    model = Transformer(random.randint(4, 8), residual=False)
    for block in model.blocks:
        block.norm1 = block.norm2 = nn.Identity()
    return tokens(gpt_init(model))


# ------------------------------------------------------------------------------------------- parameters without update


@fault("MLP", "frozen layer (learning rate of its group is 0)", "unchanged_parameter@{layer}")
def _(random: Random) -> tuple[Training, str]:
    layer = f"linear{random.randint(0, 2)}"

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": without(layer)(model)}, {"params": [*getattr(model, layer).parameters()], "lr": 0.0}]

    return digits(mlp(), trained=groups), layer


@fault("CNN", "detached features", "unchanged_parameter@conv*", "all_zero@conv*")
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(cnn(), (1, 8, 8))
    training.model.flat = nn.Sequential(nn.Flatten(), Detached())
    return training


class TwoBranches(nn.Module):
    """Adds a branch to the hidden features of a perceptron. The branch is detached."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.branch, self.head = mlp(outputs=64), mlp(outputs=64), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x) + self.branch(x).detach())  # type: ignore[no-any-return]


@fault("MLP", "detached branch", "unchanged_parameter@branch*", "all_zero@branch*")
def _(random: Random) -> Training:  # noqa: ARG001
    return digits(TwoBranches())


@fault("RNN", "optimizer without the recurrent layer", "unchanged_parameter@rnn")
def _(random: Random) -> Training:  # noqa: ARG001
    return digits(rnn(), (8, 8), trained=without("rnn"), optimizer=partial(Adam, lr=3e-3))


@fault("transformer", "optimizer without the head", "unchanged_parameter@head")
def _(random: Random) -> Training:  # noqa: ARG001
    return tokens(gpt_init(Transformer()), trained=without("head"))


@fault(
    "transformer", "dead embedding (all tokens are padding)", "all_zero@embedding", "unchanged_parameter@embedding",
    "dead_units@embedding",
)  # fmt: skip
def _(random: Random) -> Training:
    model = gpt_init(Transformer())
    training, padding = tokens(model), random.randrange(8)
    model.embedding = nn.Embedding(model.embedding.num_embeddings, model.embedding.embedding_dim, padding_idx=padding)
    training.inputs = torch.full_like(training.inputs, padding)
    return training


@fault("GAN", "detached generator", "unchanged_parameter@generator*", "all_zero@generator*")
def _(random: Random) -> Training:  # noqa: ARG001
    return gan(detached=True)


@fault(
    "MLP", "gradients clipped to zero", "all_zero@*", "vanishing_gradient@*", "unchanged_parameter@*", "update_ratio@*"
)
def _(random: Random) -> Training:
    return digits(mlp(), clip=random.choice([0.0, 1e-9, 1e-8]))


# ---------------------------------------------------------------------------------------------------------------- data


@fault("MLP", "input not normalized (0 to 255)", "input_not_normalized@linear0")
def _(random: Random) -> Training:
    training, largest = digits(mlp()), random.choice([255, 1023, 65535])
    training.inputs = (
        (training.inputs - training.inputs.min()) / (training.inputs.max() - training.inputs.min()) * largest
    )
    return training


@fault("CNN", "input not normalized (0 to 255)", "input_not_normalized@conv0")
def _(random: Random) -> Training:
    training, largest = digits(cnn(), (1, 8, 8)), random.choice([255, 1023, 65535])
    training.inputs = (
        (training.inputs - training.inputs.min()) / (training.inputs.max() - training.inputs.min()) * largest
    )
    return training


@fault("RNN", "input not normalized (0 to 255)", "input_not_normalized@rnn")
def _(random: Random) -> Training:
    training, largest = digits(rnn(), (8, 8)), random.choice([255, 1023])
    training.inputs = (
        (training.inputs - training.inputs.min()) / (training.inputs.max() - training.inputs.min()) * largest
    )
    return training


@fault("MLP", "input with a large mean", "input_not_normalized@linear0")
def _(random: Random) -> Training:
    training = digits(mlp())
    training.inputs = training.inputs + random.choice([-1, 1]) * log_uniform(random, 10, 300)
    return training


@fault("MLP", "one feature not scaled", "input_not_normalized@linear0")
def _(random: Random) -> Training:
    training = digits(mlp())
    training.inputs[:, 20] *= log_uniform(random, 1e3, 1e5)
    return training


@fault("GAN", "real data outside the range of the generator", "saturated_activation@generator.tanh")
def _(random: Random) -> Training:
    return gan(scale=random.uniform(6, 16))


@fault("MLP", "shuffled labels", *LEARNS_NOTHING, "overfit", "overtraining")
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(mlp())
    training.targets = training.targets[torch.randperm(len(training.targets))]
    return training


@fault("CNN", "shuffled labels", *LEARNS_NOTHING, "overfit", "overtraining")
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(cnn(torch.nn.BatchNorm2d), (1, 8, 8), optimizer=partial(Adam, lr=1e-3))
    training.targets = training.targets[torch.randperm(len(training.targets))]
    return training


@fault("transformer", "random targets", *LEARNS_NOTHING)
def _(random: Random) -> Training:  # noqa: ARG001
    training = tokens(gpt_init(Transformer()))
    training.targets = training.targets[torch.randperm(len(training.targets))][:, torch.randperm(LENGTH)]
    return training


@fault("MLP", "one class only", "class_imbalance")
def _(random: Random) -> Training:
    training = digits(mlp())
    chosen = (training.targets == random.randrange(CLASSES)).nonzero()[:, 0]
    training.inputs, training.targets = training.inputs[chosen], training.targets[chosen]
    return training


@fault("CNN", "class imbalance", "class_imbalance")
def _(random: Random) -> Training:
    training, rare = digits(cnn(), (1, 8, 8)), random.randrange(CLASSES)
    others = (training.targets != rare).nonzero()[:, 0]
    few = (training.targets == rare).nonzero()[: random.randint(2, 6), 0]
    chosen = torch.cat([others, few])
    training.inputs, training.targets = training.inputs[chosen], training.targets[chosen]
    return training


@fault("MLP", "data sorted by class", "loss_spike", "class_imbalance")
def _(random: Random) -> Training:
    training, batches = digits(mlp()), random.randint(10, 20)  # batches of a class
    groups = [(training.targets == digit).nonzero()[:, 0] for digit in range(CLASSES)]

    def batch(number: int) -> Tensor:
        group = groups[number // batches % CLASSES]
        return group[torch.randint(len(group), (64,))]

    return replace(training, batch=batch)


@fault(
    "MLP", "all samples of a batch are identical", "tensor_variance@*", "class_imbalance", "loss_spike", "dead_units@*"
)
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(mlp())
    return replace(training, batch=lambda number: torch.randint(len(training.inputs), (1,)).expand(64))


@fault("CNN", "the same sample in every batch", "class_imbalance", "overfit", "overtraining")
def _(random: Random) -> Training:
    training, sample = digits(cnn(), (1, 8, 8)), random.randrange(1000)
    return replace(training, batch=lambda number: torch.full((64,), sample))


@fault("MLP", "too little data", "overfit", "overtraining")
def _(random: Random) -> Training:
    training, count = digits(mlp(), optimizer=partial(Adam, lr=3e-3)), random.randint(20, 50)
    training.inputs, training.targets = training.inputs[:count], training.targets[:count]
    return training


# ---------------------------------------------------------------------------------------------------------------- loss


@fault("MLP", "softmax twice", "double_softmax@*", *LEARNS_NOTHING)
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(mlp())
    training.model.softmax = nn.Softmax(dim=1)
    return training


@fault("CNN", "softmax twice", "double_softmax@*", *LEARNS_NOTHING)
def _(random: Random) -> Training:  # noqa: ARG001
    training = digits(cnn(), (1, 8, 8), optimizer=partial(Adam, lr=1e-3))
    training.model.softmax = nn.Softmax(dim=1)
    return training


@fault("MLP", "sigmoid, then BCEWithLogitsLoss", "double_softmax@*", *LEARNS_NOTHING)
def _(random: Random) -> Training:
    return replace(binary(random), loss=F.binary_cross_entropy_with_logits)


@fault("MLP", "gradients are never zeroed", *DIVERGES)
def _(random: Random) -> Training:
    return digits(mlp(), zeroes_gradients=False, optimizer=partial(SGD, lr=log_uniform(random, 0.03, 0.3)))


@fault("RNN", "gradients are never zeroed", *DIVERGES)
def _(random: Random) -> Training:
    return digits(rnn(), (8, 8), zeroes_gradients=False, optimizer=partial(SGD, lr=log_uniform(random, 0.1, 1.0)))


@fault("MLP", "sign of the loss flipped", *LEARNS_NOTHING)
def _(random: Random) -> Training:
    return digits(mlp(), gradient_sign=-1.0, optimizer=partial(SGD, lr=log_uniform(random, 0.003, 0.1)))


@fault("RNN", "sign of the loss flipped", *LEARNS_NOTHING)
def _(random: Random) -> Training:
    return digits(rnn(nn.GRU), (8, 8), gradient_sign=-1.0, optimizer=partial(Adam, lr=log_uniform(random, 1e-4, 1e-2)))


@fault(
    "GAN",
    "discriminator wins",
    "vanishing_gradient@generator*",
    "update_ratio@generator*",
    "saturated_activation@generator*",
)
def _(random: Random) -> Training:
    return gan(
        saturating=True,
        optimizer=partial(SGD, lr=0.01),
        discriminator_optimizer=partial(Adam, lr=log_uniform(random, 3e-3, 1e-2)),
    )


# ---------------------------------------------------------------------------------------------------- values not finite


@fault("MLP", "NaN in the data", "non_finite@linear0")
def _(random: Random) -> Training:
    training = digits(mlp())
    training.inputs[random.randrange(1000), random.randrange(PIXELS)] = math.nan
    return training


@fault("MLP", "division by zero", "non_finite@standardize{layer}")
def _(random: Random) -> tuple[Training, str]:
    layer = random.randint(0, 2)
    standardize = Function(lambda x: (x - x.mean(0)) / x.std(0))
    training = digits(mlp(**{f"standardize{layer}": standardize}))
    getattr(training.model, f"linear{layer}").bias.data[:3] = -30.0  # units without variance
    return training, str(layer)


@fault("CNN", "logarithm of zero", "non_finite@log")
def _(random: Random) -> Training:
    training = digits(cnn(), (1, 8, 8), loss=F.nll_loss)
    training.model.head.weight.data *= log_uniform(random, 1e3, 1e4)
    training.model.softmax, training.model.log = nn.Softmax(dim=1), Function(torch.log)
    return training


@fault("transformer", "a row of the attention mask is -inf", "non_finite@blocks.{layer}.attention*")
def _(random: Random) -> tuple[Training, str]:
    model, layer = gpt_init(Transformer(3)), random.randint(0, 2)
    model.blocks[layer].attention.mask[random.randrange(LENGTH)] = -math.inf
    return tokens(model), str(layer)


@fault("MLP", "overflow of float16", "non_finite@{layer}", "exploding_activation@{layer}")
def _(random: Random) -> tuple[Training, str]:
    layer = random.randint(0, 2)
    narrow = Function(lambda x: (x.half() * factor).float())
    factor = log_uniform(random, 1e5, 1e6)
    return digits(mlp(**{f"narrow{layer}": narrow})), f"narrow{layer}"


# ------------------------------------------------------------------------------------------------------------- healthy


def kaiming(training: Training) -> Training:
    return init(training, partial(nn.init.kaiming_normal_, nonlinearity="relu"))


def xavier(training: Training) -> Training:
    return init(training, nn.init.xavier_uniform_)


def autoencoder(random: Random) -> Training:  # noqa: ARG001
    training = digits(
        nn.Sequential(mlp(outputs=16), nn.Linear(16, PIXELS)), optimizer=partial(Adam, lr=1e-3), loss=F.mse_loss
    )
    inputs = training.inputs[:-200]
    return replace(training, inputs=inputs, targets=inputs, held_out=(training.inputs[-200:],) * 2)


def regression(random: Random) -> Training:  # noqa: ARG001
    training = digits(mlp(hidden=2, outputs=1), optimizer=partial(Adam, lr=1e-3), loss=F.huber_loss)
    direction = torch.randn(PIXELS)
    inputs, _ = training.held_out or (training.inputs, None)
    values = torch.tanh(training.inputs @ direction / 8)[:, None]
    return replace(training, targets=values, held_out=(inputs, torch.tanh(inputs @ direction / 8)[:, None]))


def brier(random: Random) -> Training:  # noqa: ARG001
    model = mlp()
    model.softmax = nn.Softmax(dim=1)
    return digits(
        model, optimizer=partial(Adam, lr=1e-3), loss=lambda p, y: (p - F.one_hot(y, CLASSES)).square().mean()
    )


def pixels(random: Random) -> Training:  # noqa: ARG001
    training = digits(nn.Sequential(mlp(outputs=16), nn.Linear(16, PIXELS), nn.Sigmoid()), loss=F.mse_loss)
    inputs = (training.inputs - training.inputs.min()) / (training.inputs.max() - training.inputs.min())
    return replace(training, inputs=inputs, targets=inputs, held_out=None, optimizer=partial(Adam, lr=3e-3))


def nll(random: Random) -> Training:  # noqa: ARG001
    training = digits(cnn(), (1, 8, 8), loss=F.nll_loss, optimizer=partial(Adam, lr=1e-3))
    training.model.log_softmax = nn.LogSoftmax(dim=1)
    return training


def fine_tuning(random: Random) -> Training:  # noqa: ARG001
    training = digits(cnn(), (1, 8, 8), optimizer=partial(Adam, lr=3e-3))
    for layer in (training.model.conv0, training.model.conv1):
        layer.requires_grad_(False)
    return training


def resnet(random: Random) -> Training:  # noqa: ARG001
    blocks = [nn.Conv2d(1, 16, 3, padding=1), ResidualBlock(16), ResidualBlock(16)]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES))
    return digits(model, (1, 8, 8), optimizer=MOMENTUM, schedule=lambda step: 0.1 ** (step // 100))


def wasserstein(random: Random) -> Training:  # noqa: ARG001
    training = gan(optimizer=partial(Adam, lr=3e-4, betas=(0.0, 0.9)))
    assert isinstance(training, Adversarial)
    return replace(
        training,
        loss=lambda score, real: ((1 - 2 * real) * score).mean() + 0.05 * score.square().mean(),
        discriminator_optimizer=partial(Adam, lr=3e-4, betas=(0.0, 0.9)),
    )


healthy(
    "MLP",
    "SGD, default initialization",
    lambda random: digits(mlp(), optimizer=partial(SGD, lr=random.uniform(0.05, 0.15))),
)
healthy(
    "MLP",
    "SGD with momentum, cosine schedule",
    lambda random: digits(mlp(), optimizer=MOMENTUM, schedule=warmup(1, STEPS)),
)
healthy("MLP", "Adam", lambda random: digits(mlp(), optimizer=partial(Adam, lr=log_uniform(random, 3e-4, 3e-3))))
healthy(
    "MLP",
    "AdamW, warm-up, linear decay to zero",
    lambda random: digits(
        mlp(), optimizer=partial(AdamW, lr=5e-3), schedule=lambda step: min((step + 1) / 30, 1 - step / STEPS)
    ),
)
healthy("MLP", "Tanh, Xavier", lambda random: xavier(digits(mlp(activation=nn.Tanh), optimizer=partial(Adam, lr=1e-3))))
healthy(
    "MLP",
    "Sigmoid, two hidden layers, Xavier",
    lambda random: xavier(digits(mlp(hidden=2, activation=nn.Sigmoid), optimizer=partial(Adam, lr=3e-3))),
)
healthy(
    "MLP",
    "LeakyReLU, Kaiming, RMSprop",
    lambda random: kaiming(digits(mlp(activation=nn.LeakyReLU), optimizer=partial(torch.optim.RMSprop, lr=1e-3))),
)
healthy("MLP", "batch normalization", lambda random: digits(mlp(norm=nn.BatchNorm1d), optimizer=MOMENTUM))
healthy(
    "MLP",
    "GELU, layer normalization, eight layers",
    lambda random: digits(mlp(hidden=8, activation=nn.GELU, norm=nn.LayerNorm), optimizer=partial(AdamW, lr=2e-3)),
)
healthy(
    "MLP",
    "dropout, wide",
    lambda random: kaiming(
        digits(mlp(width=256, dropout0=nn.Dropout(0.5), dropout1=nn.Dropout(0.5)), optimizer=partial(Adam, lr=1e-3))
    ),
)
healthy(
    "MLP",
    "batches of 8, small learning rate",
    lambda random: digits(mlp(), optimizer=partial(SGD, lr=0.02), batch_size=8),
)
healthy(
    "MLP", "gradient accumulation", lambda random: digits(mlp(), optimizer=MOMENTUM, batch_size=16, micro_batches=4)
)
healthy("MLP", "bfloat16 autocast", lambda random: digits(mlp(), optimizer=MOMENTUM, autocast=torch.bfloat16))
healthy("MLP", "autoencoder", autoencoder)
healthy("MLP", "regression", regression)
healthy("MLP", "binary, sigmoid with BCELoss", binary)
healthy("MLP", "softmax with a squared error", brier)
healthy("MLP", "autoencoder of pixels, sigmoid with MSELoss", pixels)
healthy("CNN", "SGD with momentum", lambda random: digits(cnn(), (1, 8, 8), optimizer=MOMENTUM))
healthy(
    "CNN",
    "batch normalization, Adam, Kaiming",
    lambda random: kaiming(digits(cnn(nn.BatchNorm2d), (1, 8, 8), optimizer=partial(Adam, lr=3e-3))),
)
healthy(
    "CNN",
    "group normalization, Adagrad",
    lambda random: digits(
        cnn(partial(nn.GroupNorm, 4), nn.SiLU), (1, 8, 8), optimizer=partial(torch.optim.Adagrad, lr=0.01)
    ),
)
healthy("CNN", "residual, step schedule", resnet)
healthy("CNN", "log-softmax with NLLLoss", nll)
healthy("CNN", "fine-tuning with frozen layers", fine_tuning)
healthy("RNN", "LSTM, Adam, clipped", lambda random: digits(rnn(), (8, 8), optimizer=partial(Adam, lr=3e-3), clip=1.0))
healthy(
    "RNN",
    "GRU, 32 steps, two layers",
    lambda random: digits(rnn(nn.GRU, inputs=2, num_layers=2), (32, 2), optimizer=partial(Adam, lr=3e-3)),
)
healthy(
    "RNN", "tanh, SGD with momentum, clipped", lambda random: digits(rnn(nn.RNN), (8, 8), optimizer=MOMENTUM, clip=1.0)
)
healthy("transformer", "pre-LN, warm-up", lambda random: tokens(gpt_init(Transformer(random.randint(2, 4)))))
healthy(
    "transformer",
    "post-LN, warm-up, label smoothing",
    lambda random: tokens(
        gpt_init(Transformer(2, norm_first=False)),
        optimizer=partial(Adam, lr=1e-3),
        loss=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=0.1),
    ),
)
healthy(
    "transformer",
    "tied embeddings, clipped",
    lambda random: tokens(gpt_init(Transformer(2, tied=True)), clip=1.0, loss=next_token_loss),
)
healthy("GAN", "non-saturating, Adam", lambda random: gan())
healthy("GAN", "Wasserstein with a drift penalty", wasserstein)
