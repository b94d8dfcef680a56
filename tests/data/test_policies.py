"""timm's policies, a user's own transform: by others' code, with the random numbers of each sample."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from timm.data import auto_augment, create_transform
from torchvision.transforms import v2

from accel_train.config.options import parse
from accel_train.config.schema import Augment
from accel_train.data.image_transform import ImageTransform, check_own
from accel_train.errors import UserError
from accel_train.keyed import hashed, restored_generators, seed_generators

SIZE, COUNT = 32, 16
MEAN = (0.485, 0.456, 0.406)
KEYS = hashed(7, torch.arange(COUNT))
IMAGES = list(
    (torch.rand(COUNT, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    .repeat_interleave(4, 2).repeat_interleave(4, 3)
)  # fmt: skip
TIMM = ["rand-m9-n2-mstd0.5-inc1", "augmix-m5-w4-d2", "original-mstd0.5", "v0", "3a", "rand-n2-tweights", "rand"]


def transformed(images: list[torch.Tensor] = IMAGES, keys: torch.Tensor = KEYS, **augment: Any) -> torch.Tensor:
    return ImageTransform(Augment(resize=SIZE, **augment), SIZE, training=True, mean=MEAN)(images, keys)


@pytest.mark.parametrize("policy", TIMM)
@pytest.mark.parametrize("interpolation", ["bicubic", "random"])
def test_a_policy_is_timms_own_with_the_samples_random_numbers(
    policy: str, interpolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are those of the transform that timm makes for a training."""

    def posterize(image: Image.Image, bits: int) -> Image.Image:  # as Pillow had it before 13, which refuses 0 bits
        return image.point([value & ~(2 ** (8 - bits) - 1) for value in range(256)] * len(image.getbands()))

    monkeypatch.setattr("PIL.ImageOps.posterize", posterize)
    theirs = create_transform(
        SIZE, is_training=True, auto_augment=policy, interpolation=interpolation, mean=MEAN, hflip=0.0, re_prob=0.0
    ).transforms
    step = next(each for each in theirs if type(each).__module__ == auto_augment.__name__)
    found = transformed(policy=policy, train_interpolation=interpolation)
    with restored_generators():
        for image, word, ours in zip(IMAGES, KEYS.tolist(), found, strict=True):
            seed_generators(word)
            expected = step(v2.functional.to_pil_image(image))
            assert torch.equal(ours, v2.functional.pil_to_tensor(expected))
    assert sum(not torch.equal(ours, image) for ours, image in zip(found, IMAGES, strict=True)) > COUNT // 3


def test_grey_images_have_timms_policies_too() -> None:
    grey = [image[:1] for image in IMAGES]
    for policy in TIMM:
        transform = ImageTransform(Augment(resize=SIZE, policy=policy), SIZE, training=True, mean=(0.5,))
        assert transform(grey, KEYS).shape == (COUNT, 1, SIZE, SIZE)


def test_rotation_and_blur_are_torchvisions_with_the_images_key_as_their_seed(mine: Path) -> None:
    """As augmentation.md shows them."""
    found = transformed(own=f"{mine}:turned")
    names: dict[str, Any] = {}
    exec(OWN, names)
    for image, word, ours in zip(IMAGES, KEYS.tolist(), found, strict=True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(word)
            assert torch.equal(ours, names["turned"](image))


def test_random_interpolation_is_one_of_both_for_each_image() -> None:
    images = list(torch.randint(256, (60, 3, 50, 70), generator=torch.Generator().manual_seed(0)).to(torch.uint8))
    keys = hashed(3, torch.arange(60))
    found, bilinear, bicubic = (
        transformed(images, keys, train_interpolation=mode) for mode in ("random", "bilinear", "bicubic")
    )
    is_bicubic = (found == bicubic).flatten(1).all(1)
    assert (is_bicubic | (found == bilinear).flatten(1).all(1)).all()
    assert 15 < is_bicubic.sum() < 45
    evaluation = ImageTransform(Augment(resize=SIZE, train_interpolation="random"), SIZE, training=False)
    assert torch.equal(
        evaluation(images, keys), ImageTransform(Augment(resize=SIZE), SIZE, training=False)(images, keys)
    )


OWN = """
import random
import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

torchvisions = v2.Compose([v2.RandomHorizontalFlip(), v2.ColorJitter(0.5), v2.RandomAdjustSharpness(3)])
turned = v2.Compose([
    v2.RandomAffine(20, translate=(0.1, 0.1), scale=(0.8, 1.2), shear=10, fill=9),
    v2.RandomPerspective(0.4),
    v2.RandomGrayscale(0.2),
    v2.RandomApply([v2.GaussianBlur(23, (0.1, 2.0))], p=0.5),
])

def function(image):
    if random.random() < 0.5:
        image = 255 - image
    return (image * np.random.uniform(0.5, 1.0)).to(torch.uint8)

def pil(image):
    return v2.functional.to_pil_image(image).rotate(random.uniform(0, 90))

class Albumentations:  # what albumentations has: an array by name, generators of its own
    def __init__(self):
        self.own = np.random.default_rng()
    def set_random_seed(self, seed):
        self.own = np.random.default_rng(seed)
    def __call__(self, *, image):
        return {"image": np.clip(image * self.own.uniform(0.2, 1), 0, 255).astype(np.uint8)}
Albumentations.__module__ = "albumentations.core.composition"
albumentations = Albumentations()

count = 0
def counts(image):
    global count
    count += 1
    return image + count

def smaller(image):
    return image[:, 1:]

def floats(image):
    return image / 255

def fails(image):
    raise ValueError("no image")

class Generator:
    own = np.random.default_rng(0)
    def __call__(self, image):
        return (image * self.own.uniform()).to(torch.uint8)
generator = Generator()
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    return tmp_path / "mine.py"


@pytest.mark.parametrize("name", ["torchvisions", "turned", "function", "pil", "albumentations"])
def test_a_users_own_transform_is_a_function_of_the_key(name: str, mine: Path) -> None:
    check_own(f"{mine}:{name}", 3, SIZE)
    whole = transformed(own=f"{mine}:{name}")
    assert sum(not torch.equal(ours, image) for ours, image in zip(whole, IMAGES, strict=True)) > COUNT // 2
    transform = ImageTransform(Augment(resize=SIZE, own=f"{mine}:{name}"), SIZE, training=True)
    transform = pickle.loads(pickle.dumps(transform))
    for number in (9, 2, 9, 15):
        assert torch.equal(transform([IMAGES[number]], KEYS[number : number + 1])[0], whole[number])
    evaluation = ImageTransform(Augment(resize=SIZE, own=f"{mine}:{name}"), SIZE, training=False)
    assert torch.equal(evaluation(IMAGES, KEYS), torch.stack(IMAGES))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("counts", "returned two images for the same image and the same random numbers"),
        ("generator", "returned two images for the same image"),
        ("smaller", r"returned a tensor uint8 \[3, 31, 32\] for a uint8 tensor \[3, 32, 32\]"),
        ("floats", "expected uint8 of that shape"),
        ("fails", r"ValueError: no image \(mine.py, line"),
    ],
)
def test_a_transform_that_cannot_be_trained_with_is_refused(name: str, message: str, mine: Path) -> None:
    with pytest.raises(UserError, match=message):
        check_own(f"{mine}:{name}", 3, SIZE)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--augment.policy rnd-m9", "with a number in each part, such as rand-m9"),
        ("--augment.policy rand-m9-", "with a number in each part"),
        ("--augment.policy rand-m9-inc", "with a number in each part"),
        ("--augment.policy rand-m9-tx5", "with a number in each part"),
        ("--augment.policy rand-m9-n0", "with a number in each part"),
        ("--augment.policy autoaugmentation", "Did you mean 'autoaugment'?"),
        ("--augment.own mine", "expected none or FILE.py:NAME"),
        ("--augment.own nowhere.py:augment", "nowhere.py: no such file"),
    ],
)
def test_a_mistake_names_the_nearest_part(words: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        parse(["digits", *words.split()])
    assert message in str(error.value) and len(error.value.messages) == 1


@pytest.mark.parametrize("policy", ["rand-m9-mstx0.5", "original-m9", "rand-m9.5", "augmix-a0", "rand-n20-tweights"])
def test_what_timm_does_not_take_is_refused_before_the_first_image(policy: str) -> None:
    config = parse(["digits", "--augment.policy", policy])
    with pytest.raises(UserError, match=rf"--augment\.policy: timm does not take {policy} \(.+\)\."):
        ImageTransform(config.augment, SIZE, training=True, mean=MEAN)


def test_what_timm_takes_is_taken() -> None:
    """Without an error of timm's at the first image."""
    image = Image.new("RGB", (SIZE, SIZE), (99, 9, 200))
    more = ("rand-m9-mstd101-n3-p0.3-mmax20-t3aw", "augmix-m3-w3-d0-a0.5-b1-mstd1", "originalr", "v0r-mstd1")
    for policy in (*TIMM, *more):
        config = parse(["digits", "--augment.policy", policy])
        step = ImageTransform(config.augment, SIZE, training=True, mean=MEAN)
        assert step([v2.functional.pil_to_tensor(image)], KEYS[:1]).shape == (1, 3, SIZE, SIZE)
