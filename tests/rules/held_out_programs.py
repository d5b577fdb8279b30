"""Healthy trainings that were written after the defaults of the rules were fixed, in the form of public examples.

They measure how often the default rules warn without a fault. Do not choose a threshold with them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from hook_runs import Calls
from public_programs import CartPole, Program, Step, batches, digits, returns_of, text, update
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

Training = tuple[nn.Module, Sequence[Optimizer], Step]


def policy_and_value() -> nn.Module:
    """Return a policy and a value with common features."""

    def forward(common: nn.Module, action: nn.Module, value: nn.Module, state: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.relu(common(state))
        return F.softmax(action(hidden), dim=-1), value(hidden)

    return Calls(forward, common=nn.Linear(4, 128), action=nn.Linear(128, 2), value=nn.Linear(128, 1))


def actor_critic() -> Training:
    """Return an actor and a critic (pytorch/examples, reinforcement_learning/actor_critic)."""
    model = policy_and_value()
    optimizer, pole = Adam(model.parameters(), lr=3e-2), CartPole()

    def step(_: int) -> Tensor:
        state, done, chances, values = pole.reset(), False, [], []
        while not done and len(chances) < 200:
            probabilities, value = model(state)
            policy = torch.distributions.Categorical(probabilities)
            action = policy.sample()
            chances.append(policy.log_prob(action))
            values.append(value.squeeze())
            state, done = pole.step(int(action))
        returns = returns_of([1.0] * len(chances))
        advantage = returns - torch.stack(values).detach()
        policy_loss = -(torch.stack(chances) * advantage).sum()
        return update(policy_loss + F.smooth_l1_loss(torch.stack(values), returns, reduction="sum"), optimizer)

    return model, [optimizer], step


def deep_q() -> Training:
    """Return Q-learning with a replay memory and a target network (PyTorch's tutorial on DQN)."""
    model = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    target = copy.deepcopy(model)
    optimizer, pole = AdamW(model.parameters(), lr=1e-4, amsgrad=True), CartPole()
    memory: list[tuple[Tensor, int, Tensor, bool]] = []
    current = [pole.reset()]

    def step(number: int) -> Tensor:
        while True:
            explores = torch.rand(()) < 0.05 + 0.85 * math.exp(-number / 200)
            action = int(torch.randint(2, ())) if explores else int(target(current[0]).argmax())
            state, done = pole.step(action)
            memory.append((current[0], action, state, done))
            current[0] = pole.reset() if done else state
            if len(memory) >= 128:
                break
        chosen = [memory[i] for i in torch.randint(len(memory), (128,)).tolist()]
        states, actions, following, ended = (list(column) for column in zip(*chosen, strict=True))
        values = model(torch.stack(states)).gather(1, torch.tensor(actions)[:, None]).squeeze(1)
        with torch.no_grad():
            best = target(torch.stack(following)).max(1).values * ~torch.tensor(ended)
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.005)
        loss = F.smooth_l1_loss(values, 1.0 + 0.99 * best)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 100)
        optimizer.step()
        return loss.detach()

    return model, [optimizer], step


def wasserstein_critic() -> Training:
    """Return a Wasserstein GAN with clipped weights; its loss is that of the critic (Arjovsky et al. 2017)."""
    generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
    critic = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    of_critic, of_generator = RMSprop(critic.parameters(), lr=5e-4), RMSprop(generator.parameters(), lr=5e-4)
    data = batches(*digits(), size=64)

    def step(number: int) -> Tensor:
        real, made = next(data)[0].flatten(1), generator(torch.randn(64, 8))
        loss = update(critic(made.detach()).mean() - critic(real).mean(), of_critic)
        with torch.no_grad():
            for parameter in critic.parameters():
                parameter.clamp_(-0.05, 0.05)
        if number % 5 == 4:
            update(-critic(generator(torch.randn(64, 8))).mean(), of_generator)
        return loss

    return model, [of_critic, of_generator], step


class Translation(nn.Module):
    """A transformer with padding and causal masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(24, 32, padding_idx=0), nn.Embedding(16, 32)
        self.transformer = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)
        self.head = nn.Linear(32, 24)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        hidden = self.transformer(
            self._embedded(source),
            self._embedded(target),
            tgt_mask=mask,
            src_key_padding_mask=torch.zeros(source.shape).masked_fill(source == 0, float("-inf")),
            tgt_key_padding_mask=torch.zeros(target.shape).masked_fill(target == 0, float("-inf")),
            memory_key_padding_mask=torch.zeros(source.shape).masked_fill(source == 0, float("-inf")),
        )
        return self.head(hidden)  # type: ignore[no-any-return]

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) * math.sqrt(32) + self.place(torch.arange(tokens.shape[1]))


def translation() -> Training:
    """Return a translation by nn.Transformer of sequences of several lengths to their reverse (PyTorch's tutorial)."""
    model = Translation()
    optimizer = Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9)

    def step(_: int) -> Tensor:
        source, target = torch.zeros(32, 10, dtype=torch.long), torch.zeros(32, 12, dtype=torch.long)
        for row in range(32):
            words = torch.randint(3, 24, (int(torch.randint(4, 11, ())),))
            source[row, : len(words)] = words
            target[row, : len(words) + 2] = torch.cat([torch.tensor([1]), words.flip(0), torch.tensor([2])])
        predicted = model(source, target[:, :-1])
        return update(F.cross_entropy(predicted.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0), optimizer)

    return model, [optimizer], step


class VisionTransformer(nn.Module):
    """A transformer on patches of 2x2 pixels, with a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, 32, 2, 2)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, 32)), nn.Parameter(torch.randn(1, 17, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.places
        return self.head(self.norm(self.encoder(tokens)[:, 0]))  # type: ignore[no-any-return]


def vision_transformer() -> Training:
    """Return a vision transformer with warm-up and label smoothing (pytorch/examples, vision_transformer)."""
    model = VisionTransformer()
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = LambdaLR(optimizer, lambda step: min(1.0, step / 20))
    data = batches(*digits(), size=64)

    def step(_: int) -> Tensor:
        images, classes = next(data)
        loss = update(F.cross_entropy(model(images), classes, label_smoothing=0.1), optimizer, model)
        schedule.step()
        return loss

    return model, [optimizer], step


def contrastive() -> Training:
    """Return contrastive learning of two views of each image (SimCLR, Chen et al. 2020)."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32),
        nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16),
    )  # fmt: skip
    optimizer, data = Adam(model.parameters(), lr=1e-3, weight_decay=1e-6), batches(*digits(), size=64)

    def step(_: int) -> Tensor:
        (images, _classes) = next(data)
        views = torch.cat([images.roll(1, 3), images]) + 0.1 * torch.randn(128, 1, 8, 8)
        code = F.normalize(model(views), dim=1)
        scores = (code @ code.T / 0.1).masked_fill(torch.eye(128, dtype=torch.bool), float("-inf"))
        return update(F.cross_entropy(scores, torch.arange(128).roll(64)), optimizer)

    return model, [optimizer], step


def graph_network() -> Training:
    """Return the classification of the nodes of a graph by a graph convolutional network (pytorch/examples, gcn)."""

    def forward(first: nn.Module, second: nn.Module, features: Tensor, adjacency: Tensor) -> Tensor:
        hidden = F.dropout(F.relu(torch.sparse.mm(adjacency, first(features))), 0.5, model.training)
        return F.log_softmax(torch.sparse.mm(adjacency, second(hidden)), dim=1)

    model = Calls(forward, first=nn.Linear(16, 16, bias=False), second=nn.Linear(16, 4, bias=False))
    optimizer = Adam(model.parameters(), lr=1e-2, weight_decay=5e-4)
    classes = torch.arange(120) % 4
    edges = torch.rand(120, 120) < torch.where(classes[:, None] == classes, 0.2, 0.02)
    dense = (edges | edges.T | torch.eye(120, dtype=torch.bool)).float()
    scale = dense.sum(1).rsqrt()
    adjacency = (scale[:, None] * dense * scale).to_sparse()
    features = torch.randn(120, 16) + F.one_hot(classes, 16)

    return model, [optimizer], lambda _: update(F.nll_loss(model(features, adjacency)[:40], classes[:40]), optimizer)


def super_resolution() -> Training:
    """Return super resolution with sub-pixel convolution (pytorch/examples, super_resolution)."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 4, 3, padding=1), nn.PixelShuffle(2),
    )  # fmt: skip
    for layer in (model[0], model[2]):
        nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
    nn.init.orthogonal_(model[4].weight)
    optimizer, data = Adam(model.parameters(), lr=1e-2), batches(*digits(), size=64)

    def step(_: int) -> Tensor:
        (images, _classes) = next(data)
        return update(F.mse_loss(model(F.avg_pool2d(images, 2)), images), optimizer)

    return model, [optimizer], step


class Residual(nn.Module):
    """A residual block whose last normalization starts with zero (Goyal et al. 2017)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.second(F.relu(self.norm1(self.first(x))))))


def residual_network() -> Training:
    """Return a residual network with momentum and a cosine schedule (pytorch/vision, references/classification)."""
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), Residual(16), Residual(16),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    schedule, data = CosineAnnealingLR(optimizer, 200), batches(*digits(), size=64)

    def step(_: int) -> Tensor:
        images, classes = next(data)
        loss = update(F.cross_entropy(model(images), classes), optimizer)
        schedule.step()
        return loss

    return model, [optimizer], step


def clipped_policy() -> Training:
    """Return proximal policy optimization, whose loss is zero at first and has both signs (Schulman et al. 2017)."""
    model = policy_and_value()
    optimizer, pole = Adam(model.parameters(), lr=3e-3), CartPole()
    collected: list[tuple[Tensor, ...]] = []

    def collect() -> tuple[Tensor, ...]:
        states, actions, chances, returns = [], [], [], []
        for _ in range(4):
            state, done, rewards = pole.reset(), False, []
            while not done and len(rewards) < 100:
                with torch.no_grad():
                    policy = torch.distributions.Categorical(model(state)[0])
                action = policy.sample()
                states.append(state)
                actions.append(action)
                chances.append(policy.log_prob(action))
                rewards.append(1.0)
                state, done = pole.step(int(action))
            returns.append(returns_of(rewards))
        return torch.stack(states), torch.stack(actions), torch.stack(chances), torch.cat(returns)

    def step(number: int) -> Tensor:
        if number % 4 == 0:
            collected[:] = [collect()]
        states, actions, chances, returns = collected[0]
        probabilities, values = model(states)
        policy = torch.distributions.Categorical(probabilities)
        ratio = (policy.log_prob(actions) - chances).exp()
        gain = torch.min(ratio * returns, ratio.clamp(0.8, 1.2) * returns).mean()
        error = F.mse_loss(values.squeeze(1), returns)
        return update(-gain + 0.5 * error - 0.01 * policy.entropy().mean(), optimizer, model, 0.5)

    return model, [optimizer], step


def recommender() -> Training:
    """Return a recommender of items (matrix factorization with biases, Koren et al. 2009)."""

    def forward(user: nn.Module, item: nn.Module, user_bias: nn.Module, item_bias: nn.Module, *ids: Tensor) -> Tensor:
        match = (user(ids[0]) * item(ids[1])).sum(1)
        return match + user_bias(ids[0]).squeeze(1) + item_bias(ids[1]).squeeze(1)

    sizes = {"users": (200, 8), "items": (100, 8), "user_bias": (200, 1), "item_bias": (100, 1)}
    model = Calls(forward, **{name: nn.Embedding(*size) for name, size in sizes.items()})
    optimizer = Adam(model.parameters(), lr=1e-2)
    taste, kind = torch.randn(200, 3), torch.randn(100, 3)

    def step(_: int) -> Tensor:
        users, items = torch.randint(200, (128,)), torch.randint(100, (128,))
        rating = 3 + (taste[users] * kind[items]).sum(1) + 0.1 * torch.randn(128)
        return update(F.mse_loss(model(users, items), rating), optimizer)

    return model, [optimizer], step


class Gpt(nn.Module):
    """A causal transformer with tied embeddings, and a mask of the lowest number as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(40, 32), nn.Embedding(32, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(32)
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
        hidden = self.blocks(self.embed(tokens) + self.place(torch.arange(length)), mask=mask)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


def gpt() -> Training:
    """Return a language model with warm-up from 0 and a cosine decay to 0 (nanoGPT, transformers)."""
    model = Gpt()
    optimizer, words = AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1), text().view(16, -1)
    schedule = LambdaLR(optimizer, lambda step: min(step / 20, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / 200))))

    def step(number: int) -> Tensor:
        start = number * 24 % (words.shape[1] - 25)
        predicted = model(words[:, start : start + 24])
        loss = update(
            F.cross_entropy(predicted.flatten(0, 1), words[:, start + 1 : start + 25].flatten()), optimizer, model
        )
        schedule.step()
        return loss

    return model, [optimizer], step


def mixture_density() -> Training:
    """Return a mixture density network, whose negative log-likelihood becomes negative (Bishop 1994)."""
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12))
    optimizer = Adam(model.parameters(), lr=3e-3)

    def step(_: int) -> Tensor:
        y = torch.rand(256, 1) * 2 - 1
        x = y + 0.3 * torch.sin(2 * math.pi * y)
        weight, mean, scale = model(x).chunk(3, dim=1)
        density = torch.distributions.Normal(mean, F.softplus(scale) + 1e-3).log_prob(0.2 * y)
        return update(-torch.logsumexp(F.log_softmax(weight, 1) + density, 1).mean(), optimizer)

    return model, [optimizer], step


def distillation() -> Training:
    """Return a student of a larger network (Hinton et al. 2015; PyTorch's tutorial on distillation)."""
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    images, classes = digits()
    of_teacher = Adam(teacher.parameters(), lr=1e-2)
    for _ in range(60):
        update(F.cross_entropy(teacher(images), classes), of_teacher)
    optimizer, data = Adam(model.parameters(), lr=1e-3), batches(images, classes, size=64)

    def step(_: int) -> Tensor:
        chosen, labels = next(data)
        with torch.no_grad():
            goal = F.log_softmax(teacher(chosen) / 2, 1)
        made = model(chosen)
        soft = F.kl_div(F.log_softmax(made / 2, 1), goal, reduction="batchmean", log_target=True) * 4
        return update(0.25 * soft + 0.75 * F.cross_entropy(made, labels), optimizer)

    return model, [optimizer], step


def self_distillation() -> Training:
    """Return the prediction of a slowly moving copy; the loss is a negative cosine (BYOL, Grill et al. 2020)."""
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    predictor = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16))
    model, target = nn.ModuleDict({"encoder": encoder, "predictor": predictor}), copy.deepcopy(encoder)
    optimizer, data = Adam(model.parameters(), lr=1e-3), batches(*digits(), size=64)

    def step(_: int) -> Tensor:
        (images, _classes) = next(data)
        left, right = (images + 0.2 * torch.randn(64, 1, 8, 8) for _ in range(2))
        with torch.no_grad():
            goal = target(right)
        loss = update(-F.cosine_similarity(predictor(encoder(left)), goal).mean(), optimizer)
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
        return loss

    return model, [optimizer], step


class Tagger(nn.Module):
    """A bidirectional LSTM over sequences of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(40, 16, padding_idx=0),
            nn.LSTM(16, 32, bidirectional=True, batch_first=True),
        )
        self.drop, self.head = nn.Dropout(0.3), nn.Linear(64, 3)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(
            self.drop(self.embed(tokens)), lengths, batch_first=True, enforce_sorted=False
        )
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(self.drop(hidden))  # type: ignore[no-any-return]


def tagger() -> Training:
    """Return a tagger of padded sentences with ignored targets (PyTorch's tutorial on sequence models)."""
    model = Tagger()
    optimizer = SGD(model.parameters(), lr=0.5)

    def step(_: int) -> Tensor:
        lengths = torch.randint(3, 12, (32,))
        tokens = torch.randint(1, 40, (32, int(lengths.max()))) * (torch.arange(int(lengths.max())) < lengths[:, None])
        tags = torch.where(tokens > 0, tokens % 3, -100)
        return update(F.cross_entropy(model(tokens, lengths).flatten(0, 1), tags.flatten()), optimizer, model)

    return model, [optimizer], step


HELD_OUT: dict[str, Program] = {
    program.__name__: program
    for program in (
        *(actor_critic, deep_q, wasserstein_critic, translation, vision_transformer, contrastive, graph_network),
        *(super_resolution, residual_network, clipped_policy, recommender, gpt, mixture_density, distillation),
        *(self_distillation, tagger),
    )
}
