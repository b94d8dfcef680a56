"""A transform for --augment.own, as a user writes it: see feed_worker.py."""

from torchvision.transforms import v2

augment = v2.Compose([
    v2.RandomRotation(15, v2.InterpolationMode.BILINEAR),
    v2.RandomApply([v2.GaussianBlur(3, (0.1, 2.0))], p=0.5),
])  # fmt: skip
