"""A user's Dataset of many tensors on its way to data workers."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset
from torch.utils.data import Dataset as TorchDataset
from torchvision.tv_tensors import Image

from accel_train.data.sources.user import Packed, UserDataset
from accel_train.user_code import Reference

COUNT = 960


class Pairs(TorchDataset[Any]):
    """Keeps its images as a list, or by their numbers."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, id: int) -> Any:
        return self.images[id], id % 2


def images() -> list[Tensor]:
    return [torch.full((1, 4, 4), number % 251, dtype=torch.uint8) for number in range(COUNT)]


@pytest.mark.parametrize(
    "keep", [list, lambda images: dict(enumerate(images)), lambda images: list(torch.stack(images))]
)
def test_many_tensors_need_few_file_descriptors(keep: Any) -> None:
    dataset: Any = ConcatDataset([Subset(Subset(Pairs(keep(images())), range(COUNT)), range(COUNT))])
    sent = Packed(dataset)
    assert len(sent.pickled) < 500 * COUNT and sum(isinstance(value, Tensor) for value in vars(sent).values()) == 1
    received = sent.unpack()
    assert all(received[id][0].equal(image) for id, image in enumerate(images()))


def test_tensors_and_arrays_of_every_kind_arrive_as_they_were() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    with torch.inference_mode():
        inferred = torch.arange(3)
    sent: list[Any] = [base.T[1:], base[::2], torch.tensor(True), torch.zeros(0), torch.nn.Parameter(base),
            base.to_sparse(), torch.complex(base, base), torch.complex(base, base).conj(), base.bfloat16(),
            Image(torch.ones(3, 4, 4)), inferred, np.arange(3), np.arange(6).reshape(2, 3).T, np.zeros(0)]  # fmt: skip
    received = Packed(sent).unpack()
    for one, other in zip(received, sent, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype
        if isinstance(one, Tensor):
            assert one.to_dense().equal(other.to_dense())
        else:
            assert np.array_equal(one, other)


def test_tensors_and_arrays_are_in_memory_once() -> None:
    dataset = Pairs([torch.ones(1, 4, 4), np.ones((1, 4, 4))])
    source = UserDataset(dataset, Reference("", "json", "loads"), "train", torch.arange(2), 1, torch.Size([1, 4, 4]))
    pickle.dumps(source)
    assert source.packed is not None and source.dataset is not dataset
    first, size = source.packed.block.data_ptr(), len(source.packed.block)
    for own in (source.dataset.images, source.packed.unpack().images):
        assert all(first <= place < first + size for place in (own[0].data_ptr(), own[1].ctypes.data))
