"""--augment.own: a user's own transform of one image, of torchvision, of albumentations, or a function."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from accel_train.data.sources.user.dataset import as_pixels, kind_of, restored_generators, seed_generators
from accel_train.errors import UserError
from accel_train.user_code.loading import load, showing_user_lines
from accel_train.user_code.reference import parse_reference

OPTION = "augment.own"


class OwnTransform(torch.nn.Module):
    """Calls the user's transform with a tensor uint8 [C, H, W]; one of albumentations with an array [H, W, C].

    It draws from torch's, NumPy's and Python's global generators, which are seeded for each image; one with
    `set_random_seed` (albumentations) has generators of its own, which are seeded here. Sent to a data worker, it
    imports the user's file there.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        reference = parse_reference(OPTION, text)
        assert reference is not None, text
        self.reference = reference
        self.function: Any = load(OPTION, reference)

    def __getstate__(self) -> str:
        return str(self.reference)

    def __setstate__(self, text: str) -> None:
        self.__init__(text)  # type: ignore[misc]

    def forward(self, image: Tensor) -> Tensor:
        """Returns uint8 of the same shape. Raises UserError if the user's transform returns something else."""
        with showing_user_lines(OPTION, self.reference):
            if hasattr(self.function, "set_random_seed"):
                self.function.set_random_seed(int(torch.randint(2**32, ())))
            if type(self.function).__module__.startswith("albumentations"):
                found = self.function(image=image.permute(1, 2, 0).contiguous().numpy())["image"]
            else:
                found = self.function(image)
            pixels = found
            if isinstance(found, np.ndarray):
                pixels = torch.from_numpy(np.ascontiguousarray(found)).permute(2, 0, 1)
            pixels = as_pixels(pixels, len(image))
        if pixels is None or pixels.dtype != torch.uint8 or pixels.shape != image.shape:
            kind = kind_of(found).replace("of type", "a value of type")
            raise UserError(
                f"--{OPTION} {self.reference.short}: returned {kind} for a uint8 tensor {list(image.shape)}; expected "
                "uint8 of that shape.",
                every_process=False,
            )
        return pixels


def check_own(text: str, channels: int, size: int) -> None:
    """Load the user's transform and try it with an image. Raises UserError if it cannot be trained with.

    With the same random numbers it must return the same pixels, whatever it was called with before: else a sample would
    be another one on another number of processes, or after a restart.
    """
    transform = OwnTransform(text)
    image = torch.randint(256, (channels, size, size), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    found = []
    with restored_generators():
        for key in (1, 2, 3, 1):
            seed_generators(key)
            found.append(transform(image.clone()))
    if not torch.equal(found[0], found[3]):
        raise UserError(
            f"--{OPTION} {transform.reference.short}: returned two images for the same image and the same random "
            "numbers, so that a run could not be repeated. Draw only from torch, random or numpy.random (not from a "
            "generator of its own), and keep nothing from one call to the next."
        )
