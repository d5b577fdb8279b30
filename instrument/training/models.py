"""Small example models. Any other `torch.nn.Module` is selected by its `_target_`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn


def conv_block(in_channels: int, out_channels: int) -> nn.Sequential:
    """Return a 3x3 convolution, batch norm, ReLU and a 2x2 max pooling, which halves height and width."""
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def dense(sizes: Sequence[int | None]) -> nn.Sequential:
    """Return dense blocks, each a linear layer and ReLU, and a last linear layer.

    Args:
        sizes: The numbers of features before, between and after the layers. None for the first: inferred from the first input.
    """
    pairs: Any = pairwise(sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch may warn that lazy modules are experimental.
        layers = [nn.LazyLinear(after) if before is None else nn.Linear(before, after) for before, after in pairs]
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers[:-1]), layers[-1])


class MnistCNN(nn.Module):
    """A convolutional encoder and a dense decoder, built from lists of layer sizes.

    `encoder.0` is the first convolutional block, and `decoder.0` is the first dense block. The last module of the
    decoder is a linear classifier.

    Args:
        encoder: The output channels of each convolutional block. Default: (16, 32).
        decoder: The output features of each dense block. Default: (64,).
        in_channels: The number of channels of the image. Default: 1.
        image_size: Height and width of the image, in pixels. Default: 28.
        classes: The number of classes. Default: 10.
        global_pooling: Whether the decoder gets the mean of each feature map instead of all values. Default: False.

    Raises:
        ValueError: The image is too small for the number of convolutional blocks.
    """

    def __init__(
        self,
        encoder: Sequence[int] = (16, 32),
        decoder: Sequence[int] = (64,),
        in_channels: int = 1,
        image_size: int = 28,
        classes: int = 10,
        global_pooling: bool = False,
    ) -> None:
        super().__init__()
        if image_size >> len(encoder) < 1:
            raise ValueError(
                f"an image of {image_size} pixels is too small for {len(encoder)} blocks, each of which halves it"
            )
        channels = [in_channels, *encoder]
        pixels = 1 if global_pooling else (image_size >> len(encoder)) ** 2
        self.encoder = nn.Sequential(*map(conv_block, channels, channels[1:]))
        self.decoder = dense([channels[-1] * pixels, *decoder, classes])
        self.global_pooling = global_pooling

    def forward(self, images: Tensor) -> Tensor:
        """Map images [N, C, H, W] to logits [N, classes]."""
        maps = self.encoder(images)  # [N, channels, H / 2^blocks, W / 2^blocks]
        if self.global_pooling:
            maps = maps.mean((2, 3))
        return self.decoder(torch.flatten(maps, 1))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """A multilayer perceptron: dense blocks and a linear classifier on the flattened input.

    Args:
        sizes: The number of features of the input, of each hidden layer, and of the output. None for the input:
            inferred from the first batch. Default: (None, 128, 64, 10).

    Raises:
        ValueError: A size other than the first is None, or there are fewer than two.
    """

    def __init__(self, sizes: Sequence[int | None] = (None, 128, 64, 10)) -> None:
        super().__init__()
        if not isinstance(sizes, Sequence) or len(sizes) < 2:
            raise ValueError(f"sizes must be a list of at least two numbers, such as [64, 32, 10], got {sizes}")
        if None in sizes[1:]:
            raise ValueError(f"only the first size, that of the input, may be null, got {list(sizes)}")
        self.layers = dense(sizes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [N, ...] with sizes[0] elements per sample to logits [N, sizes[-1]]."""
        return self.layers(torch.flatten(inputs, 1))  # type: ignore[no-any-return]


class RNN(nn.Module):
    """A recurrent network with tanh and a linear classifier of its last hidden state.

    `cell` is called once for each time step, so that hooks on it see each step: the column `call` is the time.

    Args:
        inputs: The number of features of a time step. Default: 8, a row of an image of 8x8 pixels.
        hidden: The number of features of the hidden state. Default: 64.
        classes: The number of classes. Default: 10.
    """

    def __init__(self, inputs: int = 8, hidden: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.inputs = inputs
        self.cell = nn.RNNCell(inputs, hidden)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, sequences: Tensor) -> Tensor:
        """Map sequences [N, ...], read as [N, T, inputs], to logits [N, classes]."""
        steps = sequences.flatten(1).unflatten(1, (-1, self.inputs)).unbind(1)  # T tensors [N, inputs]
        hidden = self.cell(steps[0])  # the first state is zero
        for step in steps[1:]:
            hidden = self.cell(step, hidden)
        return self.classifier(hidden)  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """A dense encoder and a dense decoder with mirrored sizes. The output has the shape of the input.

    Args:
        sizes: The number of features of the input, of each hidden layer of the encoder, and of the code. Default: (64,
            32, 8).
    """

    def __init__(self, sizes: Sequence[int] = (64, 32, 8)) -> None:
        super().__init__()
        self.encoder = dense(sizes)
        self.decoder = dense(sizes[::-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Map inputs [N, ...] with sizes[0] elements per sample to outputs of the same shape."""
        code = self.encoder(torch.flatten(inputs, 1))  # [N, sizes[-1]]
        return self.decoder(code).view_as(inputs)  # type: ignore[no-any-return]


class TinyGPT(nn.Module):
    """A small transformer with a causal attention mask.

    Args:
        vocabulary: The number of different tokens. Default: 128.
        length: The maximum number of tokens per sequence. Default: 64.
        width: The number of features per token. Default: 32.
        layers: The number of transformer layers. Default: 2.
        heads: The number of attention heads per layer. Default: 2.
    """

    def __init__(
        self, vocabulary: int = 128, length: int = 64, width: int = 32, layers: int = 2, heads: int = 2
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to logits [N, T, vocabulary]."""
        count = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places(torch.arange(count, device=tokens.device))  # [N, T, width]
        mask = nn.Transformer.generate_square_subsequent_mask(count, device=tokens.device)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return self.head(self.norm(hidden))  # type: ignore[no-any-return]


class AttentionBlock(nn.Module):
    """Causal self-attention whose output is added to the residual stream, without normalization and biases.

    The position is only known to the queries and the keys: an embedding of it is added to their inputs, and not to the
    residual stream (Press et al. 2021, "Shortformer").
    """

    def __init__(self, length: int, width: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads = heads
        self.places = nn.Embedding(length, width)
        self.query, self.key, self.value = (nn.Linear(width, heads * head_size, bias=False) for _ in range(3))
        self.output = nn.Linear(heads * head_size, width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map the residual stream [N, T, width] to that after the block [N, T, width]."""
        count = hidden.shape[1]
        placed = hidden + self.places(torch.arange(count, device=hidden.device))
        inputs = (self.query(placed), self.key(placed), self.value(hidden))
        query, key, value = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in inputs)
        scores = query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1])  # [N, heads, T, T]
        later = torch.ones(count, count, dtype=torch.bool, device=hidden.device).triu(1)
        attention = scores.masked_fill(later, -math.inf).softmax(-1)
        return hidden + self.output((attention @ value).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class AttentionOnly(nn.Module):
    """A transformer of attention layers only, without MLPs and normalization, so that its circuits are easy to read.

    The output of `tokens` and of each block is the residual stream. The input of `blocks.N.output` has the results of the
    heads side by side.

    Source: Elhage et al. 2021, "A mathematical framework for transformer circuits".

    Args:
        vocabulary: The number of different tokens. Default: 16.
        length: The maximum number of tokens per sequence. Default: 16.
        width: The number of features per token. Default: 64.
        layers: The number of attention layers. Default: 2.
        heads: The number of attention heads per layer. Default: 4.
        head_size: The number of features of a head. Default: None, which is `width` divided by `heads`.
    """

    def __init__(
        self,
        vocabulary: int = 16,
        length: int = 16,
        width: int = 64,
        layers: int = 2,
        heads: int = 4,
        head_size: int | None = None,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        size = width // heads if head_size is None else head_size
        self.blocks = nn.Sequential(*(AttentionBlock(length, width, heads, size) for _ in range(layers)))
        self.unembed = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [N, T] to logits [N, T, vocabulary]."""
        return self.unembed(self.blocks(self.tokens(tokens)))  # type: ignore[no-any-return]


class DenseGAN(nn.Module):
    """A dense generator and a dense critic.

    Args:
        latent: The number of features of the noise. Default: 16.
        image: The shape of an image. Default: (1, 8, 8).
        width: The number of features of the hidden layers. Default: 64.
    """

    def __init__(self, latent: int = 16, image: Sequence[int] = (1, 8, 8), width: int = 64) -> None:
        super().__init__()
        size = math.prod(image)
        self.generator = nn.Sequential(*dense([latent, width, width, size]), nn.Unflatten(1, tuple(image)))
        self.critic = nn.Sequential(nn.Flatten(), *dense([size, width, width, 1]))

    def forward(self, noise: Tensor) -> Tensor:
        """Map noise [N, latent] to images [N, *image]."""
        return self.generator(noise)  # type: ignore[no-any-return]


class TopK(nn.Module):
    """ReLU that also sets all but the `k` largest features [..., F] of each token to zero (Gao et al. 2024, section 2.3)."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, features: Tensor) -> Tensor:
        """Return the features, of the same shape."""
        largest = features.relu().topk(self.k, dim=-1)
        return torch.zeros_like(features).scatter(-1, largest.indices, largest.values)


class SparseAutoencoder(nn.Module):
    """Features = activation(encoder(x - bias)), and reconstruction = decoder(features) + bias: a sparse sum of directions.

    The activation is ReLU (Bricken et al. 2023, "Towards monosemanticity") or `TopK` (Gao et al. 2024, "Scaling and evaluating
    sparse autoencoders"). At first, the directions have length 1, and the encoder is the transpose of the decoder (section 2.4).

    Args:
        width: The number of values of an activation.
        features: The number of features. Default: None, 8 times the width.
        k: The maximum number of features per token that are not zero. Default: None, no maximum: train with an L1 penalty.
    """

    def __init__(self, width: int, features: int | None = None, k: int | None = None) -> None:
        super().__init__()
        features = 8 * width if features is None else features
        self.bias = nn.Parameter(torch.zeros(width))
        self.encoder = nn.Linear(width, features)
        self.activation = nn.ReLU() if k is None else TopK(k)
        self.decoder = nn.Linear(features, width, bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(unit_directions(self.decoder.weight))
            self.encoder.weight.copy_(self.decoder.weight.T)
            self.encoder.bias.zero_()

    def forward(self, activations: Tensor) -> tuple[Tensor, Tensor]:
        """Map activations [..., width] to reconstructions [..., width] and features [..., features]."""
        features = self.activation(self.encoder(activations - self.bias))
        return self.decoder(features) + self.bias, features


def unit_directions(weight: Tensor, context: Any = None) -> Tensor:  # noqa: ARG001
    """Return the weight [width, features] of a decoder with directions of length 1, as a function of `modify` after each step.

    Otherwise, an L1 penalty of the features is avoided by small features and long directions (Bricken et al. 2023).
    """
    lengths: Tensor = weight.norm(dim=0, keepdim=True)
    return weight / lengths.clamp(min=torch.finfo(weight.dtype).tiny)
