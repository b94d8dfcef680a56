"""A user's Dataset of many tensors on its way to data workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset
from torchvision.tv_tensors import Image

from accel_train.data.order.samplers import EvaluationSampler
from accel_train.data.sources import user
from accel_train.data.sources.user import Packed, UserDataset
from accel_train.data.worker_processes import WorkerContext, WorkerInit
from accel_train.data.workers import BatchDataset, no_collate
from accel_train.user_code.reference import Reference

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
    assert len(sent.memory) == 1
    received = sent.unpack()
    assert all(received[id][0].equal(image) for id, image in enumerate(images()))


def test_large_tensors_are_shared_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user, "LARGE", 2**10)
    monkeypatch.setattr(user, "MOST_LARGE", 2)
    large = [torch.arange(2**10 * (number + 1)) for number in range(3)]
    sent = Packed(TensorDataset(*large[:1]))
    assert sent.memory[1].data_ptr() == large[0].data_ptr()
    sent = Packed(large)
    assert len(sent.memory) == 3
    assert all(map(torch.equal, sent.unpack(), large))


def test_tensors_of_every_kind_arrive_as_they_were() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    sent: list[Any] = [base.T[1:], base[::2], torch.tensor(True), torch.zeros(0), torch.nn.Parameter(base),
            base.to_sparse(), torch.complex(base, base).conj(), np.arange(3), base.bfloat16()]  # fmt: skip
    received = Packed(sent).unpack()
    for one, other in zip(received, sent, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert one.to_dense().equal(other.to_dense())
    assert received[0].untyped_storage().data_ptr() == received[1].untyped_storage().data_ptr()


def test_the_users_tensors_are_not_kept_twice() -> None:
    whole = torch.arange(24).reshape(4, 6)
    with torch.inference_mode():
        inferred = torch.arange(3)
    images: list[Any] = [whole[1:], whole.T, torch.ones(2, 3).bool(), Image(torch.ones(3, 4, 4)), torch.tensor(2.5)]
    left = [inferred, torch.ones(4).detach()]
    before = [image.clone() for image in images + left]
    sent = Packed(images + left)
    block = sent.memory[0].untyped_storage().data_ptr()
    assert [image.untyped_storage().data_ptr() for image in images] == [block] * len(images)
    assert all(map(torch.equal, images + left, before)) and type(images[3]) is Image
    assert whole.equal(torch.arange(24).reshape(4, 6))
    again = Packed(images + left)  # after the first evaluation, say
    for received in (sent.unpack(), again.unpack()):
        assert all(map(torch.equal, received, before)) and received[1].stride() == (1, 6)


def test_workers_load_a_dataset_of_many_tensors() -> None:
    """The workers' server passes at most some 250 file descriptors to each."""
    dataset = Pairs(images())
    labels = torch.arange(COUNT) % 2
    source = UserDataset(dataset, Reference("", "json", "loads"), "train", labels, 1, torch.Size([1, 4, 4]))
    loader: Any = torch.utils.data.DataLoader(
        BatchDataset(source, None, 0),
        batch_sampler=EvaluationSampler(COUNT, 96),  # type: ignore[arg-type]
        collate_fn=no_collate,
        num_workers=2,
        worker_init_fn=WorkerInit(),
        multiprocessing_context=WorkerContext(BatchDataset.__module__),
    )
    loaded = torch.cat([batch["images"] for batch in loader])
    assert loaded.equal(torch.stack(images()))
