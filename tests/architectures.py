"""Architectures for parametrized tests: a small model of each family of torchvision, and small models of timm.

The models of a family consist of modules of the same classes: a larger one has more of them, or wider ones. Most models have fewer
blocks here than in their library. MaxViT is that of timm, which takes smaller images.

Each library is imported when its first model is created.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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
FEW_BLOCKS: dict[str, dict[str, Any]] = {
    **{name: {"depths": [1, 1, 1, 1]} for name in ("convnextv2_atto", "inception_next_atto", "mambaout_femto")},
    "dpn48b": {"k_sec": [2, 1, 1, 1]},
    "edgenext_xx_small": {"depths": [1, 1, 2, 1]},
    "fastvit_t8": {"layers": [1, 1, 2, 1]},
    "rexnet_100": {"depth_mult": 0.5},
    "xcit_nano_12_p16_224": {"depth": 2},
}


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
        return create(self.library, self.name, **self.arguments).train()

    def images(self, count: int = 2) -> torch.Tensor:
        """Return images of Gaussian noise, always the same: [count, 3, size, size]."""
        return torch.randn(count, 3, self.size, self.size, generator=torch.Generator().manual_seed(1))


def create(library: str, name: str, **arguments: Any) -> nn.Module:
    """Create a model of a library: `torchvision` or `timm`."""
    if library == "timm":
        import timm

        return timm.create_model(name, num_classes=CLASSES, **arguments)
    import torchvision

    builder = _few_blocks().get(name) or partial(torchvision.models.get_model_builder(name), weights=None)
    return builder(num_classes=CLASSES, **arguments)


def _few_blocks() -> dict[str, Callable[..., nn.Module]]:
    """Return builders of models of torchvision with the classes of modules of those of these names, but fewer modules."""
    from torchvision.models import convnext, densenet, mobilenetv2, regnet, resnet, shufflenetv2, vision_transformer
    from torchvision.models import efficientnet as efficient
    from torchvision.models import swin_transformer as swin

    stages = (convnext.CNBlockConfig(16, 32, 1), convnext.CNBlockConfig(32, None, 2))
    fused = (efficient.FusedMBConvConfig(1, 3, 1, 24, 24, 1), efficient.FusedMBConvConfig(4, 3, 2, 24, 32, 2))
    expanded = (efficient.MBConvConfig(1, 3, 1, 32, 16, 1), efficient.MBConvConfig(6, 5, 2, 16, 24, 2))
    widths = ([1, 2], [32, 64], [16, 16], [1.0, 1.0], [2, 2])
    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return {
        "alexnet": partial(small_vgg, batch_norm=False),
        "convnext_tiny": partial(convnext.ConvNeXt, stages, stochastic_depth_prob=0.1),
        "densenet121": partial(densenet.DenseNet, 8, (2, 2), 16),
        "efficientnet_b0": partial(efficient.EfficientNet, expanded, dropout=0.2),
        "efficientnet_v2_s": partial(
            efficient.EfficientNet, (*fused, efficient.MBConvConfig(4, 3, 2, 32, 48, 2)), 0.2, last_channel=128
        ),
        "inception_v3": small_inception,
        "mobilenet_v2": partial(
            mobilenetv2.MobileNetV2, inverted_residual_setting=[[1, 16, 1, 1], [6, 24, 2, 2]], dropout=0.2
        ),
        "regnet_x_400mf": partial(regnet.RegNet, regnet.BlockParams(*widths)),
        "regnet_y_400mf": partial(regnet.RegNet, regnet.BlockParams(*widths, se_ratio=0.25)),
        "resnext50_32x4d": partial(resnet.ResNet, resnet.Bottleneck, [2, 1, 1, 1], groups=32, width_per_group=4),
        "shufflenet_v2_x0_5": partial(shufflenetv2.ShuffleNetV2, [2, 2, 2], [24, 48, 96, 192, 256]),
        "swin_t": partial(swin.SwinTransformer, [4, 4], 16, [2, 2], [2, 4], [7, 7], stochastic_depth_prob=0.2),
        "swin_v2_t": partial(
            swin.SwinTransformer, [4, 4], 16, [2, 2], [2, 4], [8, 8], stochastic_depth_prob=0.2, **second
        ),
        "vgg11_bn": small_vgg,
        "vit_b_16": partial(vision_transformer.VisionTransformer, 32, 16, 2, 2, 32, 64),
    }


def small_inception(num_classes: int = CLASSES) -> nn.Module:
    """Create Inception-v3 with an auxiliary classifier for images of 128 pixels; that of torchvision needs 299."""
    from torchvision.models.inception import BasicConv2d, Inception3

    model = Inception3(num_classes, init_weights=False)
    model.AuxLogits.conv1 = BasicConv2d(128, 768, kernel_size=1)
    return model


def small_vgg(batch_norm: bool = True, num_classes: int = CLASSES) -> nn.Module:
    """Create a small VGG of torchvision with in-place ReLU and dropout. Without batch norm, AlexNet has modules of the same classes."""
    from torchvision.models.vgg import VGG, make_layers

    with torch.device("meta"):  # the default classifier has 100 million weights
        model = VGG(nn.Identity())
    model.features = make_layers([8, "M", 16, "M"], batch_norm)
    model.avgpool = nn.AdaptiveAvgPool2d(2)
    model.classifier = nn.Sequential(nn.Linear(64, 32), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(32, num_classes))
    return model


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
        return Architecture("torchvision", name, 32)
    if name == "inception_v3":
        return Architecture("torchvision", name, 128)
    if name == "googlenet":
        return Architecture("torchvision", name, arguments={"init_weights": False})
    return Architecture("torchvision", name)


def of_timm(name: str) -> Architecture:
    """Return a model of timm by name, with the input size that its architecture needs."""
    if name == "mixer_s32_224":
        return Architecture("timm", name, 64, {"img_size": 64})
    sizes = {"levit_128s": 224, "test_maxvit": 160, "test_vit": 160}
    return Architecture("timm", name, sizes.get(name, 64), FEW_BLOCKS.get(name, {}))
