"""The policies, which change one image's geometry and colours after its crop.

They are torchvision's or timm's code. They draw from global generators: ImageTransform seeds them for each image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageOps
from torchvision.transforms import v2

from accel_train.config.schema import Augment
from accel_train.errors import UserError

AUTOAUGMENT = {
    "autoaugment": v2.AutoAugmentPolicy.IMAGENET,
    "autoaugment_cifar10": v2.AutoAugmentPolicy.CIFAR10,
    "autoaugment_svhn": v2.AutoAugmentPolicy.SVHN,
}
RESAMPLING = {"nearest": 0, "bilinear": 2, "bicubic": 3}  # PIL's numbers


def image_steps(augment: Augment, size: int, interpolation: str, mean: tuple[float, ...]) -> list[torch.nn.Module]:
    """The steps on a tensor uint8 [C, size, size], of which each returns such a tensor; [] if there are none.

    They turn and shift PIL images with `interpolation` (or random), as torchvision's training script does: its tensors
    cannot be turned bicubically. torchvision's AugMix computes with tensors in any case, and so bilinearly.
    `mean`: of each channel, 0 to 1. Raises UserError if Pillow cannot turn images with this interpolation.
    """
    if augment.policy not in ("none", "augmix") and interpolation not in (*RESAMPLING, "random"):
        raise UserError(
            f"--augment.interpolation {interpolation}: images can be resized with it, but not turned or sheared, as an "
            f"augment.policy needs. Use {', '.join(RESAMPLING)}, or no policy."
        )
    mode = v2.InterpolationMode("bilinear" if interpolation == "random" else interpolation)
    if augment.policy == "none":
        return []
    if augment.policy == "augmix":
        return [v2.AugMix()]
    if augment.timm_policy:
        return _of_pil(v2.Lambda(_timm_policy(augment, size, interpolation, mean)))
    if augment.policy == "randaugment":
        return _of_pil(v2.RandAugment(augment.randaugment_ops, augment.randaugment_magnitude, interpolation=mode))
    if augment.policy == "trivialaugment":
        return _of_pil(v2.TrivialAugmentWide(interpolation=mode))
    return _of_pil(v2.AutoAugment(AUTOAUGMENT[augment.policy], mode))


def _of_pil(step: torch.nn.Module) -> list[torch.nn.Module]:
    """The step, of PIL images, as steps of tensors."""
    return [v2.ToPILImage(), step, v2.PILToTensor()]


def _timm_policy(augment: Augment, size: int, interpolation: str, mean: tuple[float, ...]) -> Callable[[Any], Any]:
    """timm's transform of a PIL image, with the settings that timm's create_transform gives it."""
    from timm.data import auto_augment

    colour = tuple(min(255, round(255 * value)) for value in mean)
    settings: dict[str, Any] = {"translate_const": int(size * 0.45), "img_mean": colour if len(mean) > 1 else colour[0]}
    if interpolation != "random":  # else timm draws one for each operation
        settings["interpolation"] = RESAMPLING[interpolation]
    create: Callable[..., Callable[[Any], Any]] = auto_augment.auto_augment_transform
    name = augment.policy.partition("-")[0]
    if name == "rand":
        create = auto_augment.rand_augment_transform
    elif name == "augmix":
        create = auto_augment.augment_and_mix_transform
        settings["translate_pct"] = 0.3
    transform: Any = create(augment.policy, settings)
    groups = transform.policy if hasattr(transform, "policy") else [transform.ops]
    for operation in (operation for group in groups for operation in group):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return transform  # type: ignore[no-any-return]


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's, which keeps 0 bits at some strengths: Pillow before 13 made the image black, Pillow 13 refuses."""
    return ImageOps.posterize(image, bits) if bits in range(1, 8) else image.point(lambda value: value * (bits > 0))
