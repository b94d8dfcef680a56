"""What the worker processes that load images do; worker_processes.py starts and ends them.

What a worker receives is pickled. Tensors are passed as shared memory, one copy for all. A user's Dataset, which may
keep any number of tensors, is packed first (sources/user.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset

from accel_train.data.batch_transform import AugmentParameters
from accel_train.data.image_transform import ImageTransform
from accel_train.data.order import IndexBatch
from accel_train.data.sources.images import EncodedImages, LazyImage
from accel_train.data.sources.splits import Source, unwrap_subset
from accel_train.data.sources.user import UserDataset
from accel_train.errors import UserError


class BatchDataset(Dataset[dict[str, Any]]):
    """Loads a whole batch at once. It has no state: each IndexBatch brings its epoch, so a worker process that
    outlives an epoch cannot use the previous one's."""

    def __init__(
        self,
        source: Source,
        transform: ImageTransform | None,
        seed: int,
        draw_parameters: AugmentParameters | None = None,
    ) -> None:
        self.source = source
        self.held, self.held_ids = unwrap_subset(source)
        self.transform = transform
        self.seed = seed
        self.draw_parameters = draw_parameters

    def __len__(self) -> int:
        return len(self.source)

    def __getitems__(self, indices: IndexBatch) -> dict[str, Any] | UserError:
        """A batch: images uint8 [b, C, H, W]; labels, ids and keys int64 [b]; weights float32 [b];
        and the result of `draw_parameters`, if there is one, as "parameters". host_ids are the `draw_ids` of the
        IndexBatch as an array of NumPy, which stays on the host: Accelerate moves all tensors to the device.

        The error of an unreadable image is returned in place of the batch: if a worker process raised it, torch would
        wrap it in a traceback.
        """
        try:
            return self._fetch(indices)
        except UserError as error:
            return error

    def _fetch(self, indices: IndexBatch) -> dict[str, Any]:
        keys = indices.keys(self.seed)
        images: Tensor | Sequence[Tensor | LazyImage]
        ids = indices.ids if self.held_ids is None else self.held_ids[indices.ids]
        if isinstance(self.held, UserDataset):
            images = self.held.fetch_seeded(ids.tolist(), keys)
        elif isinstance(self.held, EncodedImages) and self.transform is not None:
            images = [self.held.open(id) for id in ids.tolist()]  # the transform decodes only what it needs of each
        else:
            images = self.source.fetch(indices.ids.tolist())
        if self.transform is not None:
            images = self.transform(list(images), keys)
        assert isinstance(images, Tensor), "images of different sizes need an ImageTransform"
        batch: dict[str, Any] = {
            "images": images,
            "labels": self.source.labels[indices.ids],
            "ids": indices.ids,
            "keys": keys,
            "host_ids": indices.draw_ids(keys).numpy().copy(),  # a worker moves the tensor's memory when it sends it
            "weights": indices.weights,
        }
        if self.draw_parameters is not None:
            batch["parameters"] = self.draw_parameters(keys, indices.weights)
        return batch


def no_collate(batch: Any) -> Any:
    """A loader's collate_fn: the dataset returns whole batches."""
    return batch
