"""The small nets of the tutorials, and two that papers describe but no library has; first, layers for more speed.

The function of a net takes the number of classes, the channels and the height and width of the (square) input, and
returns a module that maps float images [batch, channels, image_size, image_size] to logits float [batch,
num_classes].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from accel_train.errors import UserError


class Layers(nn.Sequential):
    """A Sequential with a forward of its own: under DDP, torch.compile (2.15) compiles nothing of torch's."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self:
            values = layer(values)
        return values


class Flatten(nn.Module):
    """Images [b, C, H, W] to rows [b, H * W * C], in the order in which channels-last images are stored.

    nn.Flatten puts the channels first. It would copy them, and a pooling before it would copy its gradient back.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.permute(0, 2, 3, 1).flatten(1)


class PaddingAwareConv2d(nn.Conv2d):
    """An nn.Conv2d with the same parameters that crops its kernel to the taps that see a pixel.

    A network for 224x224 pixels halves the size five times: one pixel is left of CIFAR's 32x32, and only the centre of
    a 3x3 kernel with padding 1 sees it. The other eight taps are multiplied by zeros and have zero gradients, so
    skipping them gives the same function. On a CPU an update of torchvision's ResNet-18 on 32x32 is 1.15 times as fast.
    """

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """The same as nn.Conv2d's, for images [b, C, H, W]."""
        assert isinstance(self.padding, tuple)
        geometry = zip(images.shape[-2:], self.kernel_size, self.stride, self.padding, strict=True)
        (top, bottom, above), (left, right, beside) = (_taps(*side) for side in geometry)
        weight = self.weight
        if (bottom - top, right - left) != self.kernel_size:
            weight = weight[:, :, top:bottom, left:right].contiguous()
        return F.conv2d(images, weight, self.bias, self.stride, (above, beside), groups=self.groups)


def use_padding_aware_convolutions(model: nn.Module) -> None:
    """Make the plain convolutions of `model` padding-aware in place; weights and their names do not change.

    It assigns `__class__`, so that other references to a module, hooks and parameters stay valid. That works because
    PaddingAwareConv2d only overrides `forward` (see tests/optim/test_performance.py).
    """
    for module in model.modules():
        plain = type(module) is nn.Conv2d and isinstance(module.padding, tuple) and module.padding_mode == "zeros"
        if plain and module.dilation == (1, 1):
            module.__class__ = PaddingAwareConv2d


def _taps(length: int, kernel: int, stride: int, padding: int) -> tuple[int, int, int]:
    """(first tap, end, padding) along one side: the taps that see one of `length` pixels, and the remaining padding.

    Tap t of output o sees pixel o*stride - padding + t.
    """
    outputs = (length + 2 * padding - kernel) // stride + 1
    first, end = max(0, padding - (outputs - 1) * stride), min(kernel, length + padding)
    left = padding - first
    # No tap sees a pixel, or there would be another output.
    if first >= end or (length + 2 * left - (end - first)) // stride + 1 != outputs:
        return 0, kernel, padding
    return first, end, left


def digits_cnn(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """Two convolutions and two dense layers for 8x8 images.

    It has no dropout and no BatchNorm: nothing in it depends on how a batch is cut into micro-batches, so
    runs on different numbers of processes can be compared number by number.
    """
    return Layers(
        nn.Conv2d(channels, 32, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        Flatten(),
        nn.Linear(64 * (image_size // 2) ** 2, 128),
        nn.ReLU(inplace=True),
        nn.Linear(128, num_classes),
    )


def mnist_cnn(num_classes: int, channels: int, image_size: int, dropout: float = 0.5) -> nn.Module:
    """The net of PyTorch's basic MNIST example (github.com/pytorch/examples/tree/main/mnist).

    Its log-softmax is left out: the loss takes logits. The ReLU comes after the pooling: the same numbers, of a
    quarter of the values.
    """
    return Layers(
        nn.Conv2d(channels, 32, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(32, 64, 3),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        Flatten(),
        nn.Dropout(0.25),
        nn.Linear(64 * ((image_size - 4) // 2) ** 2, 128),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(128, num_classes),
    )


def lenet(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """LeNet-5 (LeCun et al. 1998) with 16 and 32 channels in place of 6 and 16, max-pooling and ReLU.

    Its images have 28 pixels, not 32 with an empty edge. The ReLU comes after the pooling: the same numbers, of a
    quarter of the values.
    """
    return Layers(
        nn.Conv2d(channels, 16, 5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 32, 5),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
        Flatten(),
        nn.Linear(32 * (((image_size - 4) // 2 - 4) // 2) ** 2, 120),
        nn.ReLU(inplace=True),
        nn.Linear(120, 84),
        nn.ReLU(inplace=True),
        nn.Linear(84, num_classes),
    )


def alexnet_bn(num_classes: int, channels: int, image_size: int, dropout: float = 0.5) -> nn.Module:
    """AlexNet (Krizhevsky et al. 2012; one tower) with BatchNorm in place of its response normalisation.

    As in torchvision's AlexNet an average pooling to 6x6 comes before the dense layers, so that they fit any
    input of at least 63x63.
    """

    def block(inputs: int, outputs: int, kernel: int, stride: int, padding: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)  # BatchNorm has the bias
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]

    return Layers(
        *block(channels, 96, 11, 4, 2),
        nn.MaxPool2d(3, 2),
        *block(96, 256, 5, 1, 2),
        nn.MaxPool2d(3, 2),
        *block(256, 384, 3, 1, 1),
        *block(384, 384, 3, 1, 1),
        *block(384, 256, 3, 1, 1),
        nn.MaxPool2d(3, 2),
        nn.AdaptiveAvgPool2d(6),
        Flatten(),
        nn.Dropout(dropout),
        nn.Linear(256 * 6 * 6, 4096),
        nn.ReLU(inplace=True),
        nn.Dropout(dropout),
        nn.Linear(4096, 4096),
        nn.ReLU(inplace=True),
        nn.Linear(4096, num_classes),
    )


def resnet18_cifar(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """ResNet-18 for 32x32 images: a 3x3 stem of stride 1, no max-pooling (DeVries and Taylor 2017).

    Its weights are drawn as their code (github.com/uoguelph-mlrg/Cutout) draws them, which leaves that to PyTorch:
    torchvision draws its convolutions' otherwise.
    """
    import torchvision

    model: nn.Module = torchvision.models.resnet18(num_classes=num_classes)
    model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
    model.maxpool = nn.Identity()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.reset_parameters()
    return model


class Residual(nn.Module):
    """Modules in a row, and their input added to their output."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.branch = nn.Sequential(*modules)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch: torch.Tensor = self.branch(images)
        return images + branch


class Scaled(nn.Module):
    """Values times a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.factor


def resnet9(num_classes: int, channels: int, image_size: int) -> nn.Module:
    """The net of nine layers with which Page 2018 won DAWNBench's race to 94 % on CIFAR-10.

    github.com/davidcpage/cifar10-fast; its logits are scaled by 1/8. The ReLU comes after the pooling: the same
    numbers, of a quarter of the values.
    """
    if image_size % 8 or image_size < 32:
        raise UserError(f"resnet9: model.image_size must be a multiple of 8 and at least 32, found {image_size}.")

    def block(inputs: int, outputs: int, pool: int = 1) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)  # BatchNorm has the bias
        pooling = [nn.MaxPool2d(pool)] if pool > 1 else []
        return [convolution, nn.BatchNorm2d(outputs), *pooling, nn.ReLU(inplace=True)]

    return Layers(
        *block(channels, 64),
        *block(64, 128, 2),
        Residual(*block(128, 128), *block(128, 128)),
        *block(128, 256, 2),
        *block(256, 512, 2),
        Residual(*block(512, 512), *block(512, 512)),
        nn.AdaptiveMaxPool2d(1),
        Flatten(),
        nn.Linear(512, num_classes, bias=False),
        Scaled(0.125),
    )


def vit_s16_plain(
    num_classes: int, channels: int, image_size: int, dropout: float = 0.0, drop_path: float = 0.0
) -> nn.Module:
    """ViT-S/16 of Beyer et al. 2022 (arxiv.org/abs/2205.01580), with the linear head.

    timm's VisionTransformer with average pooling after the last norm in place of a class token, and with
    fixed two-dimensional sine-cosine position embeddings.
    """
    from timm.layers import build_sincos2d_pos_embed
    from timm.models.vision_transformer import VisionTransformer

    if image_size % 16:
        raise UserError(
            f"vit_s16_plain cuts images into 16x16 patches: model.image_size {image_size} is not a multiple; "
            f"take {max(image_size // 16, 1) * 16}."
        )
    model: nn.Module = VisionTransformer(
        img_size=image_size,
        patch_size=16,
        in_chans=channels,
        num_classes=num_classes,
        embed_dim=384,
        depth=12,
        num_heads=6,
        class_token=False,
        global_pool="avg",
        fc_norm=False,
        drop_rate=dropout,
        drop_path_rate=drop_path,
        weight_init="jax",
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("qkv.weight"):  # three layers in big_vision, which are drawn as such
                for part in weight.chunk(3):
                    nn.init.xavier_uniform_(part)
    patches = image_size // 16
    positions = build_sincos2d_pos_embed([patches, patches], dim=384, interleave_sin_cos=False)
    model.pos_embed = nn.Parameter(positions.reshape(1, patches**2, 384).to(torch.float32), requires_grad=False)
    return model


def without_none(**arguments: Any) -> dict[str, Any]:
    """The arguments that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


TORCHVISION = "torchvision/"
"""How the names of torchvision's models begin; those of `NETS` and of timm's have no such beginning."""
NETS: dict[str, Callable[..., nn.Module]] = {
    net.__name__: net for net in (digits_cnn, mnist_cnn, lenet, alexnet_bn, resnet9, resnet18_cifar, vit_s16_plain)
}
