"""Architectures for parametrized tests: a small model of each family of torchvision, and small models of timm.

The models of a family consist of modules of the same classes: a larger one has more of them, or wider ones. MaxViT is
that of timm, which takes smaller images.

Each library is imported when its first model is created.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CLASSES = 10
_TORCHVISION = """
    alexnet convnext_tiny densenet121 efficientnet_b0 efficientnet_v2_s googlenet inception_v3 mnasnet0_5 mobilenet_v2
    mobilenet_v3_small regnet_x_400mf regnet_y_400mf resnet18 resnext50_32x4d shufflenet_v2_x0_5 squeezenet1_1 swin_t
    swin_v2_t vgg11_bn vit_b_16
"""
TORCHVISION = _TORCHVISION.split()
_TIMM = """
    convnextv2_atto dla46_c dpn48b edgenext_xx_small fastvit_t8 ghostnet_050 hgnetv2_b0
    inception_next_atto lcnet_050 levit_128s mambaout_femto mixer_s32_224 mobilenetv4_conv_small_050 mobilevit_xxs
    poolformer_s12 repvgg_a0 resnest14d resnetv2_18 rexnet_100 skresnet18 starnet_s050
    test_efficientnet test_maxvit test_nfnet test_resnet test_vit tinynet_e xcit_nano_12_p16_224
"""
TIMM = _TIMM.split()


@dataclass(frozen=True)
class Architecture:
    """A model of a library, with a small input size that it supports.

    Attributes:
        library: `torchvision` or `timm`.
        name: Name of the model in the library.
        size: Height and width of the input images, in pixels. Default: 64.
        arguments: Additional arguments of the model builder. Default: none.
    """

    library: str
    name: str
    size: int = 64
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.library} {self.name}"

    def make(self) -> nn.Module:
        """Create the model in training mode, always with the same weights."""
        torch.manual_seed(0)
        if self.library == "timm":
            import timm

            return timm.create_model(self.name, num_classes=CLASSES, **self.arguments).train()
        import torchvision

        builder = torchvision.models.get_model_builder(self.name)
        return builder(weights=None, num_classes=CLASSES, **self.arguments).train()

    def images(self, count: int = 2) -> torch.Tensor:
        """Return images of Gaussian noise, always the same: [count, 3, size, size]."""
        return torch.randn(count, 3, self.size, self.size, generator=torch.Generator().manual_seed(1))


def small_network() -> nn.Module:
    """Create a small network for images: convolutions, batch normalization, chunks, sums and activations in place."""
    from torchvision.models.resnet import BasicBlock
    from torchvision.models.shufflenetv2 import InvertedResidual

    stem = (nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.SiLU(inplace=True))
    blocks = (BasicBlock(8, 8), InvertedResidual(8, 8, 1), nn.Hardswish(inplace=True), BasicBlock(8, 8))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))


def of_torchvision(name: str) -> Architecture:
    """Return a classification model of torchvision by name."""
    if name == "vit_b_16":
        return Architecture("torchvision", name, 32, {"image_size": 32})
    if name == "inception_v3":  # The auxiliary classifier needs the original input size.
        return Architecture("torchvision", name, 299, {"init_weights": False})
    if name == "googlenet":
        return Architecture("torchvision", name, arguments={"init_weights": False})
    return Architecture("torchvision", name)


def of_timm(name: str) -> Architecture:
    """Return a model of timm by name, with the input size that its architecture needs."""
    if name == "mixer_s32_224":
        return Architecture("timm", name, 64, {"img_size": 64})
    sizes = {"levit_128s": 224, "test_maxvit": 160, "test_vit": 160}
    return Architecture("timm", name, sizes.get(name, 64))
