"""From an image to a model's input, as in the run's evaluation."""

from __future__ import annotations

import torch
from torch import Tensor

from accel_train.config.schema import Augment, check_resize
from accel_train.data.transforms.batch import BatchTransform
from accel_train.data.transforms.image import ImageTransform
from accel_train.records.model_info import ModelInfo


class Preprocessing:
    """The resizing, cropping and normalisation of a run's evaluation."""

    def __init__(self, info: ModelInfo, augment: Augment, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        augment = augment.in_evaluation(info.image_size)
        check_resize(augment, info.image_size)
        native = info.native_size
        if native is None:
            self._image = ImageTransform(augment, info.image_size, training=False)
        else:  # images of the dataset's size stay as they are here; `to_input` treats them as in evaluation
            unchanged = Augment(resize=native, interpolation=augment.interpolation)
            self._image = ImageTransform(unchanged, native, training=False)
        self._batch = BatchTransform(
            augment,
            size=info.image_size,
            mean=info.mean,
            std=info.std,
            full_scale=info.full_scale,
            num_classes=len(info.classes),
            training=False,
            per_image=native is None,
            device=self.device,
        )

    def resize(self, image: Tensor) -> Tensor:
        """`image` [C, H, W] of any size as [1, C, h, w], where h and w are the same for all images."""
        resized: Tensor = self._image([image], torch.zeros(1))
        return resized

    def to_input(self, images: Tensor) -> Tensor:
        """The model's input, float32 [b, C, size, size] on the device, from images [b, C, h, w] of `resize`."""
        pixels = images.to(self.device)
        unused = torch.zeros(len(pixels), dtype=torch.int64, device=self.device)
        inputs, _ = self._batch({"images": pixels, "labels": unused, "keys": unused, "weights": unused})
        return inputs
