"""Architectures for parametrized tests: all classification models of torchvision and small models of timm.

Each library is imported when its first model is created.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

CLASSES = 10
_TORCHVISION = """
    alexnet convnext_base convnext_large convnext_small convnext_tiny densenet121 densenet161 densenet169
    densenet201 efficientnet_b0 efficientnet_b1 efficientnet_b2 efficientnet_b3 efficientnet_b4
    efficientnet_b5 efficientnet_b6 efficientnet_b7 efficientnet_v2_l efficientnet_v2_m efficientnet_v2_s
    googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet0_75 mnasnet1_0 mnasnet1_3 mobilenet_v2
    mobilenet_v3_large mobilenet_v3_small regnet_x_16gf regnet_x_1_6gf regnet_x_32gf regnet_x_3_2gf
    regnet_x_400mf regnet_x_800mf regnet_x_8gf regnet_y_128gf regnet_y_16gf regnet_y_1_6gf regnet_y_32gf
    regnet_y_3_2gf regnet_y_400mf regnet_y_800mf regnet_y_8gf resnet101 resnet152 resnet18 resnet34 resnet50
    resnext101_32x8d resnext101_64x4d resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 shufflenet_v2_x1_5
    shufflenet_v2_x2_0 squeezenet1_0 squeezenet1_1 swin_b swin_s swin_t swin_v2_b swin_v2_s swin_v2_t vgg11
    vgg11_bn vgg13 vgg13_bn vgg16 vgg16_bn vgg19 vgg19_bn vit_b_16 vit_b_32 vit_h_14 vit_l_16 vit_l_32
    wide_resnet101_2 wide_resnet50_2
"""
TORCHVISION = _TORCHVISION.split()
_TIMM = """
    cait_xxs24_224 coat_lite_tiny convnext_atto convnextv2_atto cspresnet50 deit_tiny_distilled_patch16_224
    dla46_c dpn48b edgenext_xx_small efficientformer_l1 fastvit_t8 fbnetc_100 gernet_s ghostnet_050
    hardcorenas_a hgnetv2_b0 inception_next_atto lcnet_050 levit_128s mambaout_femto mixer_s32_224 mnasnet_050
    mobilenetv2_050 mobilenetv3_small_050 mobilenetv4_conv_small_050 mobileone_s0 mobilevit_xxs nf_regnet_b0
    pit_ti_224 poolformer_s12 regnetx_002 regnety_002 repvgg_a0 res2net50_14w_8s resnest14d resnet10t
    resnetv2_18 rexnet_100 selecsls42b semnasnet_050 skresnet18 starnet_s050 test_efficientnet test_maxvit
    test_nfnet test_resnet test_vit tf_efficientnet_lite0 tinynet_e tiny_vit_5m_224 vgg11_bn
    vit_tiny_patch16_224 xception41 xcit_nano_12_p16_224
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
    if name.startswith("vit_"):
        patch = int(name.rpartition("_")[2])
        return Architecture("torchvision", name, 2 * patch, {"image_size": 2 * patch})
    if name == "inception_v3":  # The auxiliary classifier needs the original input size.
        return Architecture("torchvision", name, 299, {"init_weights": False})
    if name == "googlenet":
        return Architecture("torchvision", name, 64, {"init_weights": False})
    return Architecture("torchvision", name, 224 if name == "maxvit_t" else 64)


def of_timm(name: str) -> Architecture:
    """Return a model of timm by name, with the input size that its architecture needs."""
    sized = {"cait_xxs24_224", "deit_tiny_distilled_patch16_224", "mixer_s32_224", "vit_tiny_patch16_224"}
    if name in sized:
        return Architecture("timm", name, 64, {"img_size": 64})
    fixed = {"coat_lite_tiny", "levit_128s", "pit_ti_224", "tiny_vit_5m_224", "efficientformer_l1"}
    if name in fixed:
        return Architecture("timm", name, 224)
    own = {"test_maxvit": 160, "test_vit": 160}
    return Architecture("timm", name, own.get(name, 64))
