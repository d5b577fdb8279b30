"""Healthy programs after published examples and tutorials, in small."""

from __future__ import annotations

import copy
from collections import deque
from random import Random

import torch
import transformers
from data import (
    PAD,
    VOCABULARY,
    CartPole,
    batches,
    digits,
    normalized_digits,
    padded,
    sentences,
    shapes,
    stream,
    tokens,
)
from registry import attach, in_two_processes, program
from sklearn.datasets import load_diabetes
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adadelta, Adam, AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EXAMPLES = "pytorch/examples, "
TUTORIALS = "PyTorch tutorials, "


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(512, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


@program("healthy", EXAMPLES + "mnist")
def mnist_cnn() -> None:
    train_data, test_data = normalized_digits()
    train_loader, test_loader = DataLoader(train_data, 64, shuffle=True), DataLoader(test_data, 200)
    model = Net()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    with attach(model, optimizer) as probe:
        for _ in range(10):
            model.train()
            for data, target in train_loader:
                optimizer.zero_grad()
                loss = F.nll_loss(model(data), target)
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
            model.eval()
            with probe.evaluating(), torch.no_grad():
                test_loss = sum(F.nll_loss(model(data), target, reduction="sum").item() for data, target in test_loader)
                probe.log(loss=test_loss / len(test_data))
            scheduler.step()


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


def small_resnet(width: int = 8, classes: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(inplace=True),
        BasicBlock(width, width, 1),
        BasicBlock(width, 2 * width, 2),
        BasicBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


@program("healthy", EXAMPLES + "imagenet")
def imagenet_resnet() -> None:
    images, kinds = shapes(960, 24)
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    dataset = TensorDataset((images - mean) / std, kinds)
    model = small_resnet()
    criterion = nn.CrossEntropyLoss()
    optimizer = SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=3, gamma=0.1)
    with attach(model, optimizer) as probe:
        for _ in range(7):
            model.train()
            for batch, target in DataLoader(dataset, 32, shuffle=True):
                loss = criterion(model(batch), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)
            scheduler.step()


class RNNModel(nn.Module):
    def __init__(self, size: int = 64, tied: bool = False) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(VOCABULARY, size)
        self.rnn = nn.LSTM(size, size, 2, dropout=0.2)
        self.decoder = nn.Linear(size, VOCABULARY)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor, hidden: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, VOCABULARY), dim=1), hidden


@program("healthy", EXAMPLES + "word_language_model")
def word_language_model() -> None:
    ids = stream(20 * 1501)[: 20 * 1500].view(20, -1).t().contiguous()  # [positions, batch]
    model = RNNModel()
    optimizer = SGD(model.parameters(), lr=20.0)
    with attach(model, optimizer) as probe:
        hidden = None
        for start in range(0, 250 * 5, 5):
            source, target = ids[start : start + 20], ids[start + 1 : start + 21].reshape(-1)
            optimizer.zero_grad()
            if hidden is not None:
                hidden = (hidden[0].detach(), hidden[1].detach())
            output, hidden = model(source, hidden)
            loss = F.nll_loss(output, target)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", "Press and Wolf, Using the output embedding to improve language models, 2017")
def weight_tied_model() -> None:
    ids = padded(1024)
    model = RNNModel(tied=True)
    optimizer = Adam(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(250), batches(ids, size=32), strict=False):
            source, target = batch[:, :-1].t(), batch[:, 1:].t().reshape(-1)
            output, _ = model(source, None)
            loss = F.nll_loss(output, target, ignore_index=PAD)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


def weights_init(module: nn.Module) -> None:
    name = type(module).__name__
    if "Conv" in name:
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif "BatchNorm" in name:
        nn.init.normal_(module.weight, 1.0, 0.02)
        nn.init.zeros_(module.bias)


@program("healthy", EXAMPLES + "dcgan")
def dcgan() -> None:
    images, _ = digits()
    images = F.interpolate(images, 16) * 2 - 1
    generator = nn.Sequential(
        nn.ConvTranspose2d(32, 32, 4, 1, 0, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(True),
        nn.ConvTranspose2d(32, 16, 4, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0, bias=False),
        nn.Sigmoid(),
    )
    generator.apply(weights_init)
    discriminator.apply(weights_init)
    criterion = nn.BCELoss()
    optimizer_d = Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_g = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    networks = nn.ModuleDict({"generator": generator, "discriminator": discriminator})
    with attach(networks, [optimizer_d, optimizer_g]) as probe:
        for _, (real,) in zip(range(250), batches(images, size=32), strict=False):
            discriminator.zero_grad()
            loss_real = criterion(discriminator(real).view(-1), torch.ones(32))
            loss_real.backward()
            fake = generator(torch.randn(32, 32, 1, 1))
            loss_fake = criterion(discriminator(fake.detach()).view(-1), torch.zeros(32))
            loss_fake.backward()
            optimizer_d.step()
            generator.zero_grad()
            loss_g = criterion(discriminator(fake).view(-1), torch.ones(32))
            loss_g.backward()
            optimizer_g.step()
            probe.end_step(loss=loss_real + loss_fake, generator_loss=loss_g)


class VAE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 100)
        self.fc21 = nn.Linear(100, 8)
        self.fc22 = nn.Linear(100, 8)
        self.fc3 = nn.Linear(8, 100)
        self.fc4 = nn.Linear(100, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = F.relu(self.fc1(x))
        mu, logvar = self.fc21(hidden), self.fc22(hidden)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


@program("healthy", EXAMPLES + "vae")
def variational_autoencoder() -> None:
    images, _ = digits()
    model = VAE()
    optimizer = Adam(model.parameters(), lr=1e-3)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(300), batches(images.flatten(1), size=128), strict=False):
            optimizer.zero_grad()
            reconstruction, mu, logvar = model(batch)
            bce = F.binary_cross_entropy(reconstruction, batch, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = bce + kld
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss / len(batch))


class SiameseNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU()
        )
        self.fc = nn.Sequential(nn.Linear(1024, 64), nn.ReLU(inplace=True), nn.Linear(64, 1))
        self.sigmoid = nn.Sigmoid()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        features = torch.cat([self.features(first).flatten(1), self.features(second).flatten(1)], 1)
        return self.sigmoid(self.fc(features))


@program("healthy", EXAMPLES + "siamese_network")
def siamese_network() -> None:
    images, classes = digits()
    model = SiameseNetwork()
    optimizer = Adadelta(model.parameters(), lr=1.0)
    criterion = nn.BCELoss()
    members = [torch.nonzero(classes == number).flatten() for number in range(10)]
    with attach(model, optimizer) as probe:
        for step in range(200):
            first = torch.randint(len(images), (64,))
            same = torch.arange(64) % 2
            second = torch.stack(
                [
                    members[(int(classes[i]) + (0 if s else 1 + step % 9)) % 10][int(torch.randint(150, ()))]
                    for i, s in zip(first, same, strict=True)
                ]
            )
            optimizer.zero_grad()
            loss = criterion(model(images[first], images[second]).squeeze(), same.float())
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class TimeSequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm1 = nn.LSTMCell(1, 24)
        self.lstm2 = nn.LSTMCell(24, 24)
        self.linear = nn.Linear(24, 1)

    def forward(self, waves: Tensor) -> Tensor:
        h1 = c1 = h2 = c2 = torch.zeros(len(waves), 24, dtype=waves.dtype)
        outputs = []
        for value in waves.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


@program("healthy", EXAMPLES + "time_sequence_prediction, with Adam")
def time_sequence_prediction() -> None:
    phase = torch.randint(-40, 40, (24, 1))
    waves = torch.sin((torch.arange(26) + phase) / 4.0).double()
    model = TimeSequence().double()
    optimizer = Adam(model.parameters(), lr=5e-3)
    with attach(model, optimizer) as probe:
        for _ in range(150):
            optimizer.zero_grad()
            loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", EXAMPLES + "time_sequence_prediction, with LBFGS")
def sequence_with_lbfgs() -> None:
    phase = torch.randint(-40, 40, (12, 1))
    waves = torch.sin((torch.arange(17) + phase) / 4.0).double()
    model = TimeSequence().double()
    optimizer = LBFGS(model.parameters(), lr=0.8, max_iter=1)
    with attach(model, optimizer, steps_by_loop=True) as probe:
        for _ in range(120):
            optimizer.zero_grad()
            loss = F.mse_loss(model(waves[:, :-1]), waves[:, 1:])
            loss.backward()
            probe.before_optimizer_step()
            value = loss.detach()
            optimizer.step(lambda loss=value: loss)
            probe.end_step(loss=loss)


@program("healthy", EXAMPLES + "super_resolution")
def super_resolution() -> None:
    images, _ = shapes(256, 32)
    luminance = images.mean(1, keepdim=True)
    small = F.interpolate(luminance, scale_factor=0.5, mode="bicubic")
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1),
        nn.PixelShuffle(2),
    )
    for layer in (0, 2, 4):
        nn.init.orthogonal_(model[layer].weight, nn.init.calculate_gain("relu"))
    nn.init.orthogonal_(model[6].weight)
    optimizer = Adam(model.parameters(), lr=1e-3)
    with attach(model, optimizer) as probe:
        for _, (low, high) in zip(range(200), batches(small, luminance, size=4), strict=False):
            optimizer.zero_grad()
            loss = F.mse_loss(model(low), high)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class TransformerNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 9, padding=4, padding_mode="reflect")
        self.in1 = nn.InstanceNorm2d(12, affine=True)
        self.conv2 = nn.Conv2d(12, 24, 3, 2, padding=1)
        self.in2 = nn.InstanceNorm2d(24, affine=True)
        self.res = nn.Conv2d(24, 24, 3, padding=1)
        self.in3 = nn.InstanceNorm2d(24, affine=True)
        self.deconv1 = nn.Conv2d(24, 12, 3, padding=1)
        self.in4 = nn.InstanceNorm2d(12, affine=True)
        self.deconv2 = nn.Conv2d(12, 3, 9, padding=4)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.in1(self.conv1(x)))
        y = self.relu(self.in2(self.conv2(y)))
        y = y + self.in3(self.res(y))
        y = self.relu(self.in4(self.deconv1(F.interpolate(y, scale_factor=2))))
        return self.deconv2(y)


def gram_matrix(features: Tensor) -> Tensor:
    flat = features.flatten(2)
    return flat @ flat.transpose(1, 2) / (flat.shape[1] * flat.shape[2])


@program("healthy", EXAMPLES + "fast_neural_style")
def style_transfer() -> None:
    images, _ = shapes(128, 24)
    images = images * 255
    features = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, padding=1), nn.ReLU())
    features.requires_grad_(False)
    style = gram_matrix(features(torch.rand(1, 3, 24, 24) * 2 - 1))
    model = TransformerNet()
    optimizer = Adam(model.parameters(), lr=1e-3)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(150), batches(images, size=4), strict=False):
            optimizer.zero_grad()
            output = model(batch)
            wanted, made = features(batch / 127.5 - 1), features(output / 127.5 - 1)
            content_loss = 1e2 * F.mse_loss(made, wanted)
            style_loss = 1e4 * F.mse_loss(gram_matrix(made), style.expand(4, -1, -1))
            loss = content_loss + style_loss
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", EXAMPLES + "mnist_forward_forward")
def forward_forward() -> None:
    images, classes = digits()
    images = images.flatten(1)
    layers = nn.ModuleList([nn.Linear(74, 100), nn.Linear(100, 100)])
    optimizers = [Adam(layer.parameters(), lr=0.02) for layer in layers]

    def activate(layer: nn.Module, x: Tensor) -> Tensor:
        return torch.relu(layer(x / (x.norm(2, 1, keepdim=True) + 1e-4)))

    with attach(layers, optimizers) as probe:
        for _, (batch, target) in zip(range(200), batches(images, classes, size=128), strict=False):
            wrong = (target + torch.randint(1, 10, target.shape)) % 10
            positive = torch.cat([F.one_hot(target, 10), batch], 1)
            negative = torch.cat([F.one_hot(wrong, 10), batch], 1)
            total = 0.0
            for layer, optimizer in zip(layers, optimizers, strict=True):
                x = activate(layer, torch.cat([positive, negative]))
                goodness = x.pow(2).mean(1)
                sign = torch.cat([-torch.ones(len(positive)), torch.ones(len(negative))])
                loss = F.softplus(sign * (goodness - 2.0)).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += loss.item()
                positive, negative = x.detach().chunk(2)
            probe.end_step(loss=total)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.dropout = nn.Dropout(0.6)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.affine2(F.relu(self.dropout(self.affine1(x)))), dim=1)


def returns_of(rewards: list[float], gamma: float = 0.99) -> Tensor:
    returns: deque[float] = deque()
    value = 0.0
    for reward in reversed(rewards):
        value = reward + gamma * value
        returns.appendleft(value)
    return torch.tensor(returns)


@program("healthy", EXAMPLES + "reinforcement_learning/reinforce.py")
def reinforce() -> None:
    policy, env = Policy(), CartPole()
    optimizer = Adam(policy.parameters(), lr=1e-2)
    with attach(policy, optimizer) as probe:
        for _ in range(100):
            state, log_probs, rewards, done = env.reset(), [], [], False
            while not done and len(rewards) < 100:
                choice = torch.distributions.Categorical(policy(state.unsqueeze(0)))
                action = choice.sample()
                log_probs.append(choice.log_prob(action))
                state, reward, done = env.step(int(action))
                rewards.append(reward)
            returns = returns_of(rewards)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            loss = -(torch.cat(log_probs) * returns).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss, episode_reward=sum(rewards))


class ActorCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head = nn.Linear(128, 2)
        self.value_head = nn.Linear(128, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


@program("healthy", EXAMPLES + "reinforcement_learning/actor_critic.py")
def actor_critic() -> None:
    model, env = ActorCritic(), CartPole()
    optimizer = Adam(model.parameters(), lr=3e-2)
    with attach(model, optimizer) as probe:
        for _ in range(100):
            state, done, saved, rewards = env.reset(), False, [], []
            while not done and len(rewards) < 100:
                probabilities, value = model(state)
                choice = torch.distributions.Categorical(probabilities)
                action = choice.sample()
                saved.append((choice.log_prob(action), value))
                state, reward, done = env.step(int(action))
                rewards.append(reward)
            returns = returns_of(rewards)
            returns = (returns - returns.mean()) / (returns.std() + 1e-6)
            log_probs, values = torch.stack([p for p, _ in saved]), torch.cat([v for _, v in saved])
            policy_loss = -(log_probs * (returns - values.detach())).sum()
            loss = policy_loss + F.smooth_l1_loss(values, returns, reduction="sum")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


def small_graph(nodes: int = 120) -> tuple[Tensor, Tensor, Tensor]:
    """Return features [nodes, 40], an adjacency matrix with self-loops, and the communities of the nodes."""
    communities = torch.arange(nodes) % 4
    same = communities[:, None] == communities
    edges = torch.rand(nodes, nodes) < torch.where(same, 0.15, 0.01)
    adjacency = ((edges | edges.t()) | torch.eye(nodes, dtype=torch.bool)).float()
    words = torch.rand(nodes, 40) < 0.05 + 0.15 * (torch.arange(40) % 4 == communities[:, None])
    return words.float(), adjacency, communities


class GraphConv(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.kernel = nn.Parameter(nn.init.xavier_normal_(torch.empty(inputs, outputs)))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return adjacency @ (x @ self.kernel) + self.bias


class GCN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gc1 = GraphConv(40, 16)
        self.gc2 = GraphConv(16, 4)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.gc1(x, adjacency)))
        return F.log_softmax(self.gc2(x, adjacency), dim=1)


@program("healthy", EXAMPLES + "gcn")
def graph_convolution() -> None:
    features, adjacency, communities = small_graph()
    degree = adjacency.sum(1)
    adjacency = adjacency / (degree[:, None] * degree).sqrt()
    model = GCN()
    optimizer = Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    train, validation = torch.arange(40), torch.arange(40, 80)
    with attach(model, optimizer) as probe:
        for epoch in range(200):
            model.train()
            optimizer.zero_grad()
            loss = F.nll_loss(model(features, adjacency)[train], communities[train])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if epoch % 20 == 19:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    output = model(features, adjacency)[validation]
                    probe.log(loss=F.nll_loss(output, communities[validation]))


class GraphAttention(nn.Module):
    def __init__(self, inputs: int, outputs: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.W = nn.Linear(inputs, outputs * heads, bias=False)
        self.a = nn.Parameter(nn.init.xavier_normal_(torch.empty(heads, 2 * outputs)))
        self.leakyrelu = nn.LeakyReLU(0.2)
        self.softmax = nn.Softmax(dim=1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        hidden = self.W(x).view(len(x), self.heads, -1)
        size = hidden.shape[-1]
        source, target = (hidden * self.a[:, :size]).sum(-1), (hidden * self.a[:, size:]).sum(-1)
        scores = self.leakyrelu(source[:, None] + target[None])
        scores = scores.masked_fill(adjacency[..., None] == 0, -9e15)
        attention = F.dropout(self.softmax(scores), 0.6, training=self.training)
        return torch.einsum("ijh,jhd->ihd", attention, hidden)


class GAT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gat1 = GraphAttention(40, 8, 4)
        self.elu = nn.ELU()
        self.gat2 = GraphAttention(32, 4, 1)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        x = self.elu(self.gat1(x, adjacency).flatten(1))
        return F.log_softmax(self.gat2(x, adjacency).mean(1), dim=1)


@program("healthy", EXAMPLES + "gat")
def graph_attention() -> None:
    features, adjacency, communities = small_graph()
    model = GAT()
    optimizer = Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    with attach(model, optimizer) as probe:
        for _ in range(200):
            model.train()
            optimizer.zero_grad()
            loss = F.nll_loss(model(features, adjacency)[:40], communities[:40])
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class VisionTransformer(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, size, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, size))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, size) * 0.02)
        layer = nn.TransformerEncoderLayer(size, 4, 96, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(size)
        self.head = nn.Linear(size, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embedding
        return self.head(self.norm(self.encoder(x))[:, 0])


@program("healthy", EXAMPLES + "vision_transformer")
def vision_transformer() -> None:
    train_data, _ = normalized_digits()
    model = VisionTransformer()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    scheduler = CosineAnnealingLR(optimizer, 200)
    with attach(model, optimizer) as probe:
        for _, (batch, target) in zip(range(200), batches(*train_data.tensors, size=32), strict=False):
            loss = F.cross_entropy(model(batch), target, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)


class Seq2SeqTransformer(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.size = size
        self.transformer = nn.Transformer(size, 4, 2, 2, 96, 0.1, batch_first=True)
        self.generator = nn.Linear(size, VOCABULARY)
        self.src_embedding = nn.Embedding(VOCABULARY, size)
        self.tgt_embedding = nn.Embedding(VOCABULARY, size)
        position = torch.arange(32)[:, None] / 10000 ** (torch.arange(0, size, 2) / size)
        self.register_buffer("positions", torch.stack([position.sin(), position.cos()], -1).flatten(1))
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        embedded = self.src_embedding(source) * self.size**0.5 + self.positions[: source.shape[1]]
        wanted = self.tgt_embedding(target) * self.size**0.5 + self.positions[: target.shape[1]]
        causal = torch.triu(torch.ones(target.shape[1], target.shape[1], dtype=torch.bool), 1)
        output = self.transformer(
            embedded,
            wanted,
            tgt_mask=causal,
            src_key_padding_mask=source == PAD,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generator(output)


@program("healthy", TUTORIALS + "language translation with nn.Transformer")
def translation_transformer() -> None:
    source = padded(1024)
    lengths = (source != PAD).sum(1)
    target = torch.full((len(source), 13), PAD)
    for row, (ids, length) in enumerate(zip(source, lengths, strict=True)):  # the translation is the reversed sentence
        target[row, 0] = 1
        target[row, 1 : length + 1] = ids[:length].flip(0)
    model = Seq2SeqTransformer()
    criterion = nn.CrossEntropyLoss(ignore_index=PAD)
    optimizer = Adam(model.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-9)
    with attach(model, optimizer) as probe:
        for _, (src, tgt) in zip(range(200), batches(source, target, size=32), strict=False):
            logits = model(src, tgt[:, :-1])
            optimizer.zero_grad()
            loss = criterion(logits.reshape(-1, VOCABULARY), tgt[:, 1:].reshape(-1))
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", "transformers, examples/pytorch/language-modeling/run_clm_no_trainer.py")
def gpt2_language_modelling() -> None:
    blocks = stream(32 * 800)[: 32 * 800].view(-1, 32)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=48, n_layer=3, n_head=4, bos_token_id=PAD, eos_token_id=PAD
    )
    model = transformers.GPT2LMHeadModel(config)
    decayed = [p for n, p in model.named_parameters() if "bias" not in n and "ln_" not in n]
    others = [p for n, p in model.named_parameters() if "bias" in n or "ln_" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = AdamW(groups, lr=1e-3)
    scheduler = transformers.get_linear_schedule_with_warmup(optimizer, 20, 200)
    model.train()
    with attach(model, optimizer) as probe:
        for step, (ids,) in zip(range(200), batches(blocks[:700], size=16), strict=False):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            probe.end_step(loss=loss)
            if step % 50 == 49:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=model(input_ids=blocks[700:], labels=blocks[700:]).loss)
                model.train()


@program("healthy", "transformers, examples/pytorch/summarization/run_summarization_no_trainer.py, with T5")
def t5_summarization() -> None:
    rows = [sentence for sentence in sentences(1600) if len(sentence) > 5][:640]
    source = torch.tensor([(tokens(words) + [PAD] * 10)[:10] for words in rows])
    labels = torch.tensor([[*tokens(words[1:3]), 1] for words in rows])
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=48,
        d_kv=12,
        d_ff=96,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=PAD,
        pad_token_id=PAD,
        eos_token_id=1,
    )
    model = transformers.T5ForConditionalGeneration(config)
    optimizer = AdamW(model.parameters(), lr=3e-3)
    model.train()
    with attach(model, optimizer) as probe:
        for _, (batch, target) in zip(range(160), batches(source, labels, size=16), strict=False):
            outputs = model(input_ids=batch, attention_mask=(batch != PAD).long(), labels=target)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            probe.end_step(loss=outputs.loss)


class MaskedAutoencoder(nn.Module):
    def __init__(self, size: int = 48) -> None:
        super().__init__()
        self.embed = nn.Linear(48, size)
        self.mask_token = nn.Parameter(torch.randn(1, 1, size) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, 36, size) * 0.02)
        layer = nn.TransformerEncoderLayer(size, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.predict = nn.Linear(size, 48)

    def forward(self, patches: Tensor) -> Tensor:
        order = torch.rand(patches.shape[:2]).argsort(1)
        kept, masked = order[:, :12], order[:, 12:]
        rows = torch.arange(len(patches))[:, None]
        encoded = self.encoder((self.embed(patches) + self.positions)[rows, kept])
        full = self.mask_token.repeat(len(patches), 36, 1)
        full[rows, kept] = encoded
        predicted = self.predict(self.decoder(full + self.positions))
        return F.mse_loss(predicted[rows, masked], patches[rows, masked])


@program("healthy", "He et al., Masked autoencoders are scalable vision learners, 2022")
def masked_autoencoder() -> None:
    images, _ = shapes(512, 24)
    patches = F.unfold((images - 0.5) / 0.25, 4, stride=4).transpose(1, 2)
    model = MaskedAutoencoder()
    optimizer = AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.05)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(180), batches(patches, size=32), strict=False):
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            probe.end_step(loss=loss)


def _replica(rank: int) -> None:
    torch.manual_seed(rank)
    train_data, _ = normalized_digits()
    sampler = DistributedSampler(train_data, 2, rank)
    loader = DataLoader(train_data, 32, sampler=sampler)
    model = DistributedDataParallel(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    )
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    with attach(model, optimizer) as probe:
        for epoch in range(6):
            sampler.set_epoch(epoch)
            for data, target in loader:
                loss = F.cross_entropy(model(data), target)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.end_step(loss=loss)


@program("healthy", EXAMPLES + "distributed/ddp")
def data_parallel() -> None:
    in_two_processes(_replica)


@program("healthy", TUTORIALS + "reinforcement learning (DQN)")
def deep_q_learning() -> None:
    policy_net = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target_net = copy.deepcopy(policy_net)
    optimizer = AdamW(policy_net.parameters(), lr=3e-4, amsgrad=True)
    env, memory, random = CartPole(), [], Random(0)
    state = env.reset()
    with attach(policy_net, optimizer) as probe:
        for step in range(64 + 350):
            if random.random() > max(0.05, 0.9 - step / 400):
                with torch.no_grad():
                    action = int(policy_net(state).argmax())
            else:
                action = random.randrange(2)
            following, reward, done = env.step(action)
            memory.append((state, action, reward, following, float(done)))
            state = env.reset() if done else following
            if len(memory) < 64:
                continue
            states, actions, rewards, nexts, ends = zip(*random.sample(memory, 64), strict=True)
            values = policy_net(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
            with torch.no_grad():
                best = target_net(torch.stack(nexts)).amax(1)
            loss = F.smooth_l1_loss(values, torch.tensor(rewards) + 0.99 * best * (1 - torch.tensor(ends)))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(policy_net.parameters(), 100)
            optimizer.step()
            with torch.no_grad():
                for target, source in zip(target_net.parameters(), policy_net.parameters(), strict=True):
                    target.lerp_(source, 0.005)
            probe.end_step(loss=loss)


@program("healthy", "Huang et al., The 37 implementation details of proximal policy optimization, 2022")
def clipped_policy() -> None:
    def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
        linear = nn.Linear(inputs, outputs)
        nn.init.orthogonal_(linear.weight, gain)
        nn.init.zeros_(linear.bias)
        return linear

    actor = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 2, 0.01))
    critic = nn.Sequential(layer(4, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, 1.0))
    agent = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = Adam(agent.parameters(), lr=2.5e-3, eps=1e-5)
    env = CartPole()
    state = env.reset()
    with attach(agent, optimizer) as probe:
        for iteration in range(10):
            optimizer.param_groups[0]["lr"] = (1 - iteration / 10) * 2.5e-3
            rows, returns = [], []
            with torch.no_grad():
                for _ in range(128):
                    choice = torch.distributions.Categorical(logits=actor(state))
                    action = choice.sample()
                    following, reward, done = env.step(int(action))
                    rows.append((state, action, choice.log_prob(action), critic(state)[0], reward, done))
                    state = env.reset() if done else following
                value = float(critic(state))
            for *_, reward, done in reversed(rows):
                value = reward + 0.99 * value * (not done)
                returns.append(value)
            states, actions, old, values = (torch.stack([row[i] for row in rows]) for i in range(4))
            wanted = torch.tensor(returns[::-1])
            advantages = wanted - values
            for _ in range(4):
                for indices in torch.randperm(128).split(32):
                    choice = torch.distributions.Categorical(logits=actor(states[indices]))
                    ratio = (choice.log_prob(actions[indices]) - old[indices]).exp()
                    gain = advantages[indices]
                    gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                    policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                    value_loss = 0.5 * F.mse_loss(critic(states[indices]).squeeze(1), wanted[indices])
                    loss = policy_loss + 0.5 * value_loss - 0.01 * choice.entropy().mean()
                    optimizer.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                    optimizer.step()
                    probe.end_step(loss=loss)


@program("healthy", "Chen et al., A simple framework for contrastive learning of visual representations, 2020")
def contrastive_images() -> None:
    images, _ = shapes(512, 24)
    encoder = nn.Sequential(*list(small_resnet())[:-1])
    model = nn.Sequential(encoder, nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))
    optimizer = Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)

    def augment(batch: Tensor) -> Tensor:
        batch = batch * (0.6 + 0.8 * torch.rand(len(batch), 3, 1, 1)) + 0.05 * torch.randn_like(batch)
        x, y = torch.randint(0, 5, (2,)).tolist()
        batch = F.interpolate(batch[:, :, x : x + 20, y : y + 20], 24)
        return batch.flip(3) if torch.rand(()) < 0.5 else batch

    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(100), batches(images - 0.5, size=32), strict=False):
            features = F.normalize(model(torch.cat([augment(batch), augment(batch)])), dim=1)
            similarity = (features @ features.t() / 0.2).fill_diagonal_(-1e9)
            loss = F.cross_entropy(similarity, torch.arange(64).roll(32))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Embedding(100, 32), nn.Linear(32, 32), nn.SiLU())
        self.down = nn.Conv2d(1, 32, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 32)
        self.middle = nn.Conv2d(32, 32, 3, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.up = nn.Conv2d(64, 32, 3, padding=1)
        self.out = nn.Conv2d(32, 1, 3, padding=1)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        first = self.act(self.norm1(self.down(x))) + self.time(time)[:, :, None, None]
        second = self.act(self.norm2(self.middle(first)))
        return self.out(self.act(self.up(torch.cat([first, second], 1))))


@program("healthy", "Ho et al., Denoising diffusion probabilistic models, 2020")
def diffusion() -> None:
    images, _ = digits()
    kept = torch.cumprod(1 - torch.linspace(1e-4, 0.08, 100), 0)
    model = Denoiser()
    optimizer = Adam(model.parameters(), lr=2e-3)
    average = copy.deepcopy(model)
    with attach(model, optimizer) as probe:
        for _, (batch,) in zip(range(200), batches(images * 2 - 1, size=32), strict=False):
            time = torch.randint(100, (len(batch),))
            noise, share = torch.randn_like(batch), kept[time][:, None, None, None]
            loss = F.mse_loss(model(share.sqrt() * batch + (1 - share).sqrt() * noise, time), noise)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.01)
            probe.end_step(loss=loss)


@program("healthy", TUTORIALS + "knowledge distillation")
def distillation() -> None:
    train_data, _ = normalized_digits()
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = Adam(teacher.parameters(), lr=3e-3)
    for _, (data, target) in zip(range(150), batches(*train_data.tensors, size=64), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(teacher(data), target).backward()
        optimizer.step()
    teacher.eval()
    student = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))
    optimizer = Adam(student.parameters(), lr=1e-3)
    with attach(student, optimizer) as probe:
        for _, (data, target) in zip(range(250), batches(*train_data.tensors, size=64), strict=False):
            optimizer.zero_grad()
            with torch.no_grad():
                soft = F.softmax(teacher(data) / 2, dim=-1)
            logits = student(data)
            soft_loss = (soft * (soft.log() - F.log_softmax(logits / 2, dim=-1))).sum() / len(data) * 4
            loss = 0.25 * soft_loss + 0.75 * F.cross_entropy(logits, target)
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


@program("healthy", "Hu et al., LoRA: low-rank adaptation of large language models, 2022")
def low_rank_adaptation() -> None:
    train_data, _ = normalized_digits()
    images, classes = train_data.tensors
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))
    optimizer = AdamW(model.parameters(), lr=2e-3)
    for _, (data, target) in zip(range(100), batches(images, classes, size=64), strict=False):
        optimizer.zero_grad()
        F.cross_entropy(model(data), target).backward()
        optimizer.step()
    for index in (1, 3, 5):
        model[index] = LoraLinear(model[index])
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (data, target) in zip(range(200), batches(images.flip(3), classes, size=64), strict=False):
            loss = F.cross_entropy(model(data), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", "scikit-learn's diabetes data, with a network on all samples in each step")
def full_batch_regression() -> None:
    features, target = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
    features, target = (features - features.mean(0)) / features.std(0), (target - target.mean()) / target.std()
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = SGD(model.parameters(), lr=0.05)
    with attach(model, optimizer) as probe:
        for _ in range(300):
            loss = F.mse_loss(model(features).squeeze(1), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class Experts(nn.Module):
    def __init__(self, size: int = 32, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(size, count, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(size, 64), nn.GELU(), nn.Linear(64, size)) for _ in range(count)]
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        weights, chosen = probabilities.topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, column = torch.where(chosen == index)
            output = output.index_add(0, rows, expert(x[rows]) * weights[rows, column, None])
        share = F.one_hot(chosen[:, 0], len(self.experts)).float().mean(0)
        return output, len(self.experts) * (share * probabilities.mean(0)).sum()


class ExpertClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs = nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.moe = Experts()
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.inputs(x.flatten(1))
        mixed, balance = self.moe(self.norm(hidden))
        return self.head(hidden + mixed), balance


@program("healthy", "Fedus et al., Switch transformers, 2022 (two experts per sample)")
def mixture_of_experts() -> None:
    train_data, _ = normalized_digits()
    model = ExpertClassifier()
    optimizer = AdamW(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (data, target) in zip(range(250), batches(*train_data.tensors, size=64), strict=False):
            logits, balance = model(data)
            loss = F.cross_entropy(logits, target) + 0.01 * balance
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


@program("healthy", TUTORIALS + "weight averaging with torch.optim.swa_utils.AveragedModel")
def averaged_weights() -> None:
    train_data, test_data = normalized_digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.98))
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=200)
    images, target = test_data.tensors
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(200), batches(*train_data.tensors, size=64), strict=False):
            loss = F.cross_entropy(model(data), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            probe.end_step(loss=loss)
            if step % 40 == 39:
                average.eval()
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=F.cross_entropy(average(images), target))


@program("healthy", "Gulrajani et al., Improved training of Wasserstein GANs, 2017")
def wasserstein_gan() -> None:
    images, _ = digits()
    real_images = images.flatten(1) * 2 - 1
    generator = nn.Sequential(
        nn.Linear(16, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 128), nn.LeakyReLU(0.2),
        nn.Linear(128, 64), nn.Tanh()
    )  # fmt: skip
    critic = nn.Sequential(
        nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1)
    )
    optimizer_g = Adam(generator.parameters(), lr=5e-4, betas=(0.5, 0.9))
    optimizer_c = Adam(critic.parameters(), lr=5e-4, betas=(0.5, 0.9))
    networks = nn.ModuleDict({"generator": generator, "critic": critic})
    with attach(networks, [optimizer_c, optimizer_g]) as probe:
        for step, (real,) in zip(range(300), batches(real_images, size=64), strict=False):
            fake = generator(torch.randn(64, 16)).detach()
            mixed = torch.lerp(fake, real, torch.rand(64, 1)).requires_grad_()
            (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
            loss = critic(fake).mean() - critic(real).mean() + 10 * ((slope.norm(2, 1) - 1) ** 2).mean()
            optimizer_c.zero_grad()
            loss.backward()
            optimizer_c.step()
            if step % 5 == 0:
                optimizer_g.zero_grad()
                (-critic(generator(torch.randn(64, 16))).mean()).backward()
                optimizer_g.step()
            probe.end_step(loss=loss)


@program("healthy", "Zhang et al., mixup: beyond empirical risk minimization, 2018")
def mixup() -> None:
    train_data, test_data = normalized_digits()
    images, target = test_data.tensors
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    mixing = torch.distributions.Beta(1.0, 1.0)
    with attach(model, optimizer) as probe:
        for step, (data, wanted) in zip(range(200), batches(*train_data.tensors, size=64), strict=False):
            share, order = mixing.sample(), torch.randperm(len(data))
            output = model(share * data + (1 - share) * data[order])
            loss = share * F.cross_entropy(output, wanted) + (1 - share) * F.cross_entropy(output, wanted[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
            if step % 40 == 39:
                model.eval()
                with probe.evaluating(), torch.no_grad():
                    probe.log(loss=F.cross_entropy(model(images), target))
                model.train()


@program("healthy", "Koenker and Bassett, Regression quantiles, 1978, with a network")
def quantile_regression() -> None:
    x = torch.rand(1000, 1) * 6 - 3
    y = torch.sin(x) + 0.3 * (1 + x.abs()) * torch.randn_like(x)
    levels = torch.tensor([0.1, 0.5, 0.9])
    model = nn.Sequential(nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    optimizer = Adam(model.parameters(), lr=3e-3)
    with attach(model, optimizer) as probe:
        for _, (batch, wanted) in zip(range(300), batches(x, y, size=64), strict=False):
            error = wanted - model(batch)
            loss = torch.maximum(levels * error, (levels - 1) * error).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())
        self.classes = nn.Linear(64, 10)
        self.ink = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))
        self.log_variances = nn.Parameter(torch.zeros(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.shared(x)
        return self.classes(hidden), self.ink(hidden).squeeze(1)


@program("healthy", "Kendall et al., Multi-task learning using uncertainty to weigh losses, 2018")
def multi_task() -> None:
    train_data, _ = normalized_digits()
    images, classes = train_data.tensors
    ink = images.mean((1, 2, 3))
    ink = (ink - ink.mean()) / ink.std()
    model = TwoHeads()
    optimizer = Adam(model.parameters(), lr=2e-3)
    with attach(model, optimizer) as probe:
        for _, (data, target, amount) in zip(range(250), batches(images, classes, ink, size=64), strict=False):
            logits, predicted = model(data)
            losses = torch.stack([F.cross_entropy(logits, target), F.mse_loss(predicted, amount)])
            loss = (torch.exp(-model.log_variances) * losses + model.log_variances).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
