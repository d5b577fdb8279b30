"""Stand-ins for the models of Megatron-LM and torchtitan, and for torchtitan's trainer: their names, calls and outputs, in a small size.

They follow the public source code: `megatron/core/models/gpt/gpt_model.py`, and `torchtitan/models/common/` and `torchtitan/trainer.py` of
torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 16, 4, 2


class ColumnParallelLinear(nn.Module):
    """Returns the output and its bias, which the caller adds: Megatron's linear layers have no `in_features`."""

    def __init__(self, input_size: int, output_size: int, *, skip_bias_add: bool = False) -> None:
        super().__init__()
        self.input_size, self.output_size, self.skip_bias_add = input_size, output_size, skip_bias_add
        self.weight = nn.Parameter(torch.empty(output_size, input_size).normal_(0, 0.2))
        self.bias = nn.Parameter(torch.zeros(output_size))

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        weight = self.weight if weight is None else weight
        if self.skip_bias_add:
            return functional.linear(input_, weight), self.bias
        return functional.linear(input_, weight, self.bias), None


class RowParallelLinear(ColumnParallelLinear):
    pass


class VocabParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings: int, embedding_dim: int) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim).normal_(0, 0.2))

    def forward(self, input_: Tensor) -> Tensor:
        return functional.embedding(input_, self.weight)


class LanguageModelEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(64, WIDTH)
        self.embedding_dropout = nn.Dropout(0.0)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        embeddings = self.word_embeddings(input_ids) + self.position_embeddings(position_ids)
        return self.embedding_dropout(embeddings.transpose(0, 1).contiguous())  # type: ignore[no-any-return] # [s, b, h]


class IdentityOp(nn.Module):
    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Tensor:
        return x


class FusedScaleMaskSoftmax(nn.Module):
    def forward(self, input: Tensor, mask: Tensor) -> Tensor:
        return torch.nn.Softmax(dim=-1)(input.masked_fill(mask, -10000.0))  # type: ignore[no-any-return]


class DotProductAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale_mask_softmax = FusedScaleMaskSoftmax()
        self.attention_dropout = nn.Dropout(0.0)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor) -> Tensor:
        length, batch, heads, size = query.shape
        query, key, value = (part.reshape(length, batch * heads, size) for part in (query, key, value))
        buffer = torch.empty(batch * heads, length, length)
        scores = torch.baddbmm(buffer, query.transpose(0, 1), key.permute(1, 2, 0), beta=0.0, alpha=size**-0.5)
        probs = self.scale_mask_softmax(scores.view(batch, heads, length, length), attention_mask)
        probs = self.attention_dropout(probs).view(batch * heads, length, length)
        context = torch.bmm(probs, value.transpose(0, 1)).view(batch, heads, length, size)
        return context.permute(2, 0, 1, 3).reshape(length, batch, heads * size)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.core_attention = DotProductAttention()
        self.linear_proj = RowParallelLinear(WIDTH, WIDTH, skip_bias_add=True)
        self.linear_qkv = ColumnParallelLinear(WIDTH, 3 * WIDTH)
        self.q_layernorm, self.k_layernorm = IdentityOp(), IdentityOp()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor | None]:
        mixed, _ = self.linear_qkv(hidden_states)
        query, key, value = mixed.view(*mixed.shape[:2], HEADS, -1).chunk(3, -1)
        return self.linear_proj(  # type: ignore[no-any-return]
            self.core_attention(self.q_layernorm(query), self.k_layernorm(key), value, attention_mask)
        )


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = ColumnParallelLinear(WIDTH, 4 * WIDTH, skip_bias_add=True)
        self.linear_fc2 = RowParallelLinear(4 * WIDTH, WIDTH, skip_bias_add=True)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        hidden, bias = self.linear_fc1(hidden_states)
        return self.linear_fc2(functional.gelu(hidden + bias))  # type: ignore[no-any-return]


class TransformerLayer(nn.Module):
    """Called with keyword arguments; returns the hidden states and a context, which is None."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(WIDTH)
        self.self_attention = SelfAttention()
        self.pre_cross_attn_layernorm, self.cross_attention = IdentityOp(), IdentityOp()
        self.pre_mlp_layernorm = nn.LayerNorm(WIDTH)
        self.mlp = MLP()

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> tuple[Tensor, None]:
        output, bias = self.self_attention(self.input_layernorm(hidden_states), attention_mask=attention_mask)
        hidden_states = hidden_states + (output + bias)
        output, bias = self.mlp(self.pre_mlp_layernorm(hidden_states))
        return hidden_states + (output + bias), None


class TransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer() for _ in range(LAYERS))
        self.final_layernorm = nn.LayerNorm(WIDTH)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor) -> Tensor:
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states=hidden_states, attention_mask=attention_mask)
        return self.final_layernorm(hidden_states)  # type: ignore[no-any-return]


class GPTModel(nn.Module):
    """Megatron's GPT: `forward` returns the loss of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = LanguageModelEmbedding()
        self.decoder = TransformerBlock()
        self.output_layer = ColumnParallelLinear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, position_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden_states = self.decoder(self.embedding(input_ids, position_ids), attention_mask=attention_mask)
        logits, _ = self.output_layer(hidden_states, weight=None)
        return functional.cross_entropy(logits.flatten(0, 1), labels.t().flatten(), reduction="none")


class MegatronDDP(nn.Module):
    """Megatron's DistributedDataParallel: gradients are added to `main_grad`, and `grad` is None afterwards."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
            parameter.register_post_accumulate_grad_hook(self._add)

    @staticmethod
    def _add(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
        parameter.grad = None

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return self.module(*args, **kwargs)  # type: ignore[no-any-return]


class FP32Optimizer:
    """Megatron's optimizer: it is not a `torch.optim.Optimizer`, but has one."""

    def __init__(self, model: nn.Module) -> None:
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(self) -> tuple[bool, float, None]:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.main_grad
        self.optimizer.step()
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.main_grad.zero_()
                parameter.grad = None
        return True, 0.0, None


class ScaledDotProductAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class FusedQKVLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wqkv(x).unflatten(-1, (HEADS, -1)).chunk(3, -1)  # type: ignore[no-any-return]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_linear, self.wo = FusedQKVLinear(), nn.Linear(WIDTH, WIDTH, bias=False)
        self.inner_attention = ScaledDotProductAttention()

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(self.inner_attention(*self.qkv_linear(x)).flatten(2))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(WIDTH, 40, bias=False) for _ in range(2))
        self.w2 = nn.Linear(40, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(functional.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class TitanBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(), FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x))
        return h + self.feed_forward(self.ffn_norm(h))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """torchtitan's Llama: the blocks are the items of a ModuleDict."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleDict({str(number): TitanBlock() for number in range(LAYERS)})
        self.norm = nn.RMSNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h)
        return self.lm_head(self.norm(h))  # type: ignore[no-any-return]


class TitanTrainer:
    """torchtitan's Trainer: `train` calls `train_step`, which calls `forward_backward_step` for each of two micro-batches.

    Attributes:
        losses: The loss of each step, which torchtitan logs.
    """

    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[type[TitanTrainer]]
        model: nn.Module
        steps: int
        loaded: int = 0  # steps before the checkpoint
        training: SimpleNamespace = field(default_factory=SimpleNamespace)

    def __init_subclass__(cls) -> None:
        if "Config" in vars(cls):
            cls.Config.owner = cls

    def __init__(self, config: Config) -> None:
        self.config, self.step = config, 0
        self.model_parts = [config.model]
        self.optimizers = [torch.optim.AdamW(config.model.parameters(), lr=1e-2)]
        self.losses: list[float] = []

    def train(self) -> None:
        self.step = self.config.loaded
        batches = iter(range(2 * self.step, 2 * self.config.steps))
        while self.should_continue_training():
            self.step += 1
            self.train_step(batches)

    def should_continue_training(self) -> bool:
        return self.step < self.config.steps

    def train_step(self, data_iterator: Iterator[int]) -> None:
        self.optimizers[0].zero_grad()
        losses = []
        for _ in range(2):
            generator = torch.Generator().manual_seed(next(data_iterator))
            tokens, count = torch.randint(VOCABULARY, (3, 8), generator=generator), torch.tensor(48)
            labels = tokens.roll(-1, 1)
            losses.append(
                self.forward_backward_step(input_dict={"input": tokens}, labels=labels, global_valid_tokens=count)
            )
        self.optimizers[0].step()
        self.losses.append(sum(losses).item())

    def forward_backward_step(
        self, *, input_dict: dict[str, Tensor], labels: Tensor, global_valid_tokens: Tensor
    ) -> Any:
        logits = self.model_parts[0](input_dict["input"])
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / global_valid_tokens
        loss.backward()
        return loss
