"""The labels of a user's Dataset: its `targets`, or read once item by item and recorded."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Subset

from accel_train.data.sources.user.dataset import OPTION, Label, read_item, restored_generators, seed_generators
from accel_train.errors import LOGGER, UserError, print_line
from accel_train.files import atomic_write
from accel_train.untrusted import MAX_LOG_BYTES, require_regular_file
from accel_train.user_code.objects import known_labels
from accel_train.user_code.reference import Reference, code_file, file_hash


def labels_of(dataset: Any, reference: Reference, split: str, record: Path | None) -> Tensor:
    """The labels of all items, int64 [n], or bool [n, classes] if they are rows of 0 and 1.

    Its `targets`, else those recorded before, else read item by item.

    `record`: folder in which the main process keeps labels that had to be read. Collective. Raises UserError.
    """
    where = f"--{OPTION} {reference.short}: {split}"
    try:
        targets = known_labels(dataset)
        # A copy: a tensor that the Dataset keeps is moved to shared memory when the Dataset is sent to workers, and
        # labels in its old memory would be lost.
        labels = None if targets is None else torch.tensor(targets)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where} has `targets` that are not whole numbers ({error}).") from error
    if labels is not None:
        if labels.ndim == 2 and len(labels) == len(dataset) and bool(((labels == 0) | (labels == 1)).all()):
            return labels.bool()
        if labels.is_floating_point() or labels.ndim != 1 or len(labels) != len(dataset):
            raise UserError(
                f"{where} has {len(dataset)} items, and `targets` of {str(labels.dtype).removeprefix('torch.')} "
                f"{list(labels.shape)}; expected a whole number for each item, or a row of 0 and 1 for several labels."
            )
        return labels.long()
    path = code_file(reference)
    kept = None if record is None or path is None else record / f"labels-{split}-{file_hash(path)[:12]}.npy"
    if kept is not None and kept.is_file() and (recorded := _recorded(kept, len(dataset))) is not None:
        return recorded
    labels = _read_labels(dataset, reference, split)
    if kept is not None and _rank() == 0 and kept.parent.is_dir():
        content = BytesIO()
        np.save(content, labels.numpy())
        try:
            atomic_write(kept, content.getvalue())
        except OSError as error:  # the next start will read them again
            LOGGER.warning(f"{kept} cannot be written ({error.strerror}).")
    return labels


def _recorded(path: Path, count: int) -> Tensor | None:
    """The labels in the file, or None if it is not one of `count` labels."""
    try:
        require_regular_file(path, follow=True)
        labels = np.load(path, mmap_mode="r", allow_pickle=False)  # reads nothing before its shape is known to be right
    except (OSError, ValueError, EOFError, OverflowError):
        return None
    kind = {1: np.dtype(np.int64), 2: np.dtype(np.bool_)}.get(labels.ndim)
    if labels.dtype != kind or len(labels) != count or labels.nbytes > MAX_LOG_BYTES or labels.min(initial=0) < 0:
        return None
    return torch.from_numpy(np.array(labels))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _read_labels(dataset: Any, reference: Reference, split: str) -> Tensor:
    """Read all items for their labels. The processes share the work. Collective."""
    rank, processes = _rank(), dist.get_world_size() if dist.is_initialized() else 1
    if rank == 0:
        text = f"reading the labels of {len(dataset)} {split} samples: {reference.short} gives no `targets`"
        print_line(text, sys.stderr)
    own: list[Label] | str
    try:
        with restored_generators():
            own = []
            for id in range(rank, len(dataset), processes):
                seed_generators(id)
                own.append(read_item(dataset, id, reference, f"{split} sample {id}")[1])
    except UserError as error:
        own = str(error)
    everyone: list[list[Label] | str | None] = [own]
    if processes > 1:
        everyone = [None] * processes
        dist.all_gather_object(everyone, own)
    for found in everyone:
        if isinstance(found, str):
            raise UserError(found)
    labels: list[Label] = [0] * len(dataset)
    for number, found in enumerate(everyone):
        labels[number::processes] = cast("list[Label]", found)
    if all(isinstance(label, int) for label in labels):
        return torch.tensor(labels, dtype=torch.int64)
    lengths = [len(label) if isinstance(label, list) else 0 for label in labels]
    other = next((id for id, length in enumerate(lengths) if length != lengths[0]), None)
    if other is not None:
        words = [f"a row of {length} numbers" if length else "one number" for length in (lengths[0], lengths[other])]
        raise UserError(
            f"--{OPTION} {reference.short}: {split} sample {other} has {words[1]} as its label, but sample 0 has "
            f"{words[0]}; expected the same of all."
        )
    return torch.tensor(labels, dtype=torch.bool)


def weights_of(dataset: Any, reference: Reference) -> Tensor | None:
    """The `weights` of the training items, float64 [n]; None if the dataset has none. Raises UserError."""
    if isinstance(dataset, Subset) and not hasattr(dataset, "weights"):
        inner = weights_of(dataset.dataset, reference)
        return None if inner is None else inner[torch.as_tensor(dataset.indices, dtype=torch.int64)]
    found = getattr(dataset, "weights", None)
    try:
        return None if found is None else torch.tensor(np.asarray(found, dtype=np.float64))
    except (TypeError, ValueError) as error:
        raise UserError(f"--{OPTION} {reference.short}: train has `weights` that are not numbers ({error}).") from error
