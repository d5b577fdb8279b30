"""Where attention heads lie: the table in the documentation against ablations by hand, and refusals that name the right location."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

import instrument
from instrument import ConfigError, HookError

DOCS = Path(__file__).parents[2] / "docs" / "concepts.md"
WIDE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
HEADS = {"of": 4, "take": [1]}
ZERO = {"action": "modify", "fn": "zero", "heads": HEADS}


def language_model(name: str, **config: Any) -> tuple[nn.Module, Tensor]:
    import transformers

    model = getattr(transformers, name)(
        getattr(transformers, re.sub("LMHead|Model|ForCausalLM", "", name) + "Config")(**config)
    )
    return model, torch.arange(10).view(2, 5)


def vision_transformer() -> tuple[nn.Module, Tensor]:
    import transformers

    return transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **WIDE)), torch.randn(2, 3, 8, 8)


def timm_transformer() -> tuple[nn.Module, Tensor]:
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=16, depth=2, num_heads=4, num_classes=3)
    return model, torch.randn(2, 3, 8, 8)


def torchvision_transformer() -> tuple[nn.Module, Tensor]:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(8, 4, num_layers=2, num_heads=4, hidden_dim=16, mlp_dim=16, num_classes=3)
    nn.init.normal_(model.heads.head.weight)  # initialized with zeros, which would make every output equal
    return model, torch.randn(2, 3, 8, 8)


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], str, str]] = {
    "GPT-2": (
        lambda: language_model("GPT2LMHeadModel", vocab_size=16, n_positions=8, n_embd=16, n_layer=2, n_head=4),
        "transformer.h.{}.attn",
        "c_proj",
    ),
    "BERT": (lambda: language_model("BertModel", vocab_size=16, **WIDE), "encoder.layer.{}.attention", "output.dense"),
    "Llama": (
        lambda: language_model("LlamaForCausalLM", vocab_size=16, num_key_value_heads=2, **WIDE),
        "model.layers.{}.self_attn",
        "o_proj",
    ),
    "ViT of transformers": (vision_transformer, "layers.{}.attention", "o_proj"),
    "ViT of timm": (timm_transformer, "blocks.{}.attn", "proj"),
    "ViT of torchvision": (torchvision_transformer, "encoder.layers.encoder_layer_{}.self_attention", ""),
}
"""Each model with its inputs, the attention module of a block, and the projection in it, if its hooks fire."""


def documented() -> dict[str, dict[str, Any]]:
    """Return the hook of each model in the table of the documentation."""
    rows = re.findall(r"^\| (.+?) \| `(\{layers: .+?\})` \|", DOCS.read_text(), re.MULTILINE)
    return {model: yaml.safe_load(hook) for model, hook in rows}


def output_of(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        found = model(inputs)
    return found if isinstance(found, Tensor) else found[0]  # type: ignore[no-any-return]


def ablated_by_hand(name: str, model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the output without head 1 of each block, by plain PyTorch."""

    def ablate(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = args[0].clone()
        changed[..., 4:8] = 0
        return (changed, *args[1:])

    for block in range(2):
        attention = model.get_submodule(MODELS[name][1].format(block))
        if isinstance(attention, nn.MultiheadAttention):  # it calls no hook of its projection
            attention.out_proj.weight.data[:, 4:8] = 0
        else:
            attention.get_submodule(MODELS[name][2]).register_forward_pre_hook(ablate)
    return output_of(model, inputs)


@pytest.fixture
def no_fast_path() -> Iterator[None]:
    """Turn off the fast path of `nn.MultiheadAttention`, in which functions are not seen."""
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.spread(1)
@pytest.mark.usefixtures("no_fast_path")
@pytest.mark.parametrize("name", MODELS)
def test_documented_location_of_heads_is_that_of_an_ablation_by_hand(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]()
    model.eval()
    plain = output_of(model, inputs)
    with instrument.attach(model, {"ablate": {**documented()[name], **ZERO}}, rules=None) as probe:
        found = output_of(model, inputs)
        probe.end_step()
    expected = ablated_by_hand(name, model, inputs)
    torch.testing.assert_close(found, expected)
    assert (expected - plain).abs().max() > 1e-3


def test_documentation_names_the_heads_of_each_model() -> None:
    assert [*documented()] == [*MODELS]


@pytest.mark.parametrize("name", MODELS)
def test_heads_of_an_attention_module_are_refused_with_their_location(name: str) -> None:
    create, attentions, projection = MODELS[name]
    model, attention = create()[0], attentions.format(1)
    location = re.escape(f"{attention}.{projection}, kind: forward_pre")
    if not projection:
        function = f"{attention}, kind: function, functions: multi_head_attention_forward, role: input, "
        path = r"path: multi_head_attention_forward\.0\.11;.*set_fastpath_enabled\(False\)"
        location = re.escape(function) + path
    message = rf"hooks\.h\.heads: features in the \w+ of '{attention}'(.|\n)*fix +layers: {location}"
    for kind in ("forward", "forward_pre"):
        with pytest.raises(ConfigError, match=message):
            instrument.attach(model, {"h": {"layers": attention, "kind": kind, **ZERO}}).__enter__()


@pytest.mark.parametrize(
    ("layers", "fields", "fix"),
    [
        (".", {"kind": "forward"}, "transformer.h.0.attn.c_proj, transformer.h.1.attn.c_proj, kind: forward_pre"),
        ("transformer.h.1", {"kind": "forward"}, "transformer.h.1.attn.c_proj, kind: forward_pre"),
        ("transformer.h.1", {"kind": "forward_pre"}, "transformer.h.1.attn.c_proj, kind: forward_pre"),
        ("**.attn", {"kind": "forward", "role": "input"}, "transformer.h.0.attn.c_proj, transformer.h.1.attn.c_proj"),
        ("**.attn", {"kind": "full_backward"}, "transformer.h.1.attn.c_proj, kind: full_backward"),
        ("**.attn", {"kind": "tensor"}, "transformer.h.1.attn.c_proj, kind: full_backward"),
        ("**.0.attn.c_proj", {"kind": "forward"}, "transformer.h.0.attn.c_proj, kind: forward_pre"),
        ("**.0.attn.c_proj", {"kind": "full_backward_pre"}, "transformer.h.0.attn.c_proj, kind: full_backward"),
        ("**.0.attn.c_proj", {"kind": "function", "functions": "addmm"}, "transformer.h.0.attn.c_proj, kind: forward_pre"),
    ],
)  # fmt: skip
def test_heads_before_and_after_the_attention_are_refused(layers: str, fields: dict[str, Any], fix: str) -> None:
    model, _ = MODELS["GPT-2"][0]()
    with pytest.raises(ConfigError, match=rf"belong to no head(.|\n)*fix +layers: .*{re.escape(fix)}"):
        instrument.attach(model, {"h": {"layers": layers, "action": "record", "heads": HEADS, **fields}}).__enter__()


class CustomAttention(nn.Module):
    """Attention that returns the heads side by side or projected: inputs [N, T, 12]."""

    def __init__(self, projection: nn.Module | None = None) -> None:
        super().__init__()
        self.qkv, self.mixed, self.to_out = nn.Linear(12, 36), nn.Identity(), projection

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, 3)).permute(2, 0, 3, 1, 4)
        mixed = self.mixed(nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(-2))
        return mixed if self.to_out is None else self.to_out(mixed)  # type: ignore[no-any-return]


def test_heads_side_by_side_are_accepted() -> None:
    projected = CustomAttention(nn.Sequential(nn.Linear(12, 12), nn.Dropout(0.0)))
    hooks = [(CustomAttention(), "."), (CustomAttention(), "mixed"), (projected, "mixed")]
    for model, layer in hooks:
        with instrument.attach(model, {"h": {"layers": layer, "kind": "forward", **ZERO}}, rules=None) as probe:
            kept: list[Tensor] = []
            handle = model.get_submodule(layer if layer != "." else "").register_forward_hook(
                lambda module, args, output, kept=kept: kept.append(output)
            )
            model(torch.randn(2, 5, 12))
            handle.remove()
            probe.end_step()
        assert (kept[0].unflatten(-1, (4, 3)) == 0).all(-1).sum((0, 1)).tolist() == [0, 10, 0, 0]
    with pytest.raises(ConfigError, match=r"fix +layers: to_out\.0, kind: forward_pre"):
        instrument.attach(projected, {"h": {"layers": ".", "kind": "forward", **ZERO}}).__enter__()
    with instrument.attach(projected, {"h": {"layers": "to_out", "kind": "forward_pre", **ZERO}}, rules=None):
        projected(torch.randn(2, 5, 12))


@pytest.mark.parametrize(
    ("shape", "of", "module", "message"),
    [
        ((2, 5, 4, 8), 4, nn.Identity(), "dimension 2 contains the 4 heads(.|\n)*'unit_dim: 2'"),
        ((2, 4, 5, 8), 4, nn.Identity(), "dimension 1 contains the 4 heads(.|\n)*'unit_dim: 1'"),
        ((2, 4, 4, 8), 4, nn.Identity(), "dimension 1 or 2 contains the 4 heads(.|\n)*'unit_dim: 1 or 2'"),
        ((2, 5, 4, 8), 4, nn.LayerNorm(8), "dimension 2 contains the 4 heads"),
        ((2, 5, 2, 8), 4, nn.Identity(), "the heads are not side by side there in the output"),  # 2 key heads, 4 heads
        ((2, 2, 8, 8), 4, nn.Softmax(-1), "the heads are not side by side there"),
        ((2, 3, 5, 4, 8), 4, nn.Identity(), "dimension 3 contains the 4 heads"),
        ((2, 12, 8), 4, nn.Conv1d(12, 12, 1), "the heads are not side by side there"),
    ],
)
def test_heads_in_a_dimension_of_their_own_are_refused(
    shape: tuple[int, ...], of: int, module: nn.Module, message: str
) -> None:
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "heads": {"of": of, "take": [1]}}
    refused = pytest.raises(ConfigError, match=rf"hooks\.h\.heads: (.|\n)*{message}")
    with refused, instrument.attach(module, {"h": hook}):
        module(torch.randn(shape))


def test_proposed_selection_of_a_dimension_of_heads_is_the_head() -> None:
    x = torch.randn(2, 5, 4, 8)
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": "zero", "units": [1], "unit_dim": 2}
    expected = x.clone()
    expected[:, :, 1] = 0
    model = nn.Identity()
    with instrument.attach(model, {"h": hook}, rules=None):
        assert torch.equal(model(x), expected)


def test_later_tensor_with_heads_in_dimension_2_is_reported() -> None:
    model = nn.Identity()
    with instrument.attach(model, {"h": {"layers": ".", "kind": "forward", **ZERO}}):
        model(torch.ones(2, 3, 8))
        with pytest.raises(HookError, match=r"dimension 2 contains the 4 heads of the tensor of shape \[2, 3, 4, 8\]"):
            model(torch.ones(2, 3, 4, 8))
