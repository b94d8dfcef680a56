"""Equal images, and images that look alike.

Two images look alike if their perceptual hashes differ in at most DISTANCE of 64 bits, and their thumbnails correlate.
The first is quickly found, the second rules out chance. In 4,000 photographs of cats and dogs these limits find two
pairs, each one photograph in two files; no other pair comes near (with 12 bits and a correlation of 0.9 they are the
same two). A copy that is compressed again (JPEG quality 10), resized to any size, or brighter by a fifth is found; one
that has lost a border of 2 % is found in three of four cases.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from accel_train.audit.look import Records

DISTANCE = 4  # bits
ALIKE = 0.98
SMALL, ALIKE_SMALL = 48, 0.998
"""Images with a side below SMALL pixels must correlate more: in few pixels, different things look alike. With 0.98,
19,956 pairs of MNIST's digits are alike, all of them different ones; with 0.998 one pair of ones."""
FLAT = 0.01  # of the largest value: the hash of an image with less contrast says nothing
BLOCK = 2048  # images that are compared with as many others at a time: 32 MB
PAIRS = 1 << 13  # whose thumbnails are compared at a time
MOST_PAIRS = 1 << 20  # that are kept before they become groups

Groups = list[npt.NDArray[np.int64]]
"""The numbers of the images of each group, sorted; groups by their first image."""


def equal_images(records: Records) -> Groups:
    """The groups of two or more readable images with the same pixels."""
    ids = np.flatnonzero(records["readable"])
    _, numbers = np.unique(records["pixels"][ids], axis=0, return_inverse=True)
    return _grouped(ids, numbers.reshape(-1))


def similar_images(records: Records, white: float = 255.0) -> Groups:
    """The groups of two or more images that look alike, of which equal ones count once: the first one stands for all.

    `white`: the largest value. Of n images not all pairs are compared: hashes that differ in 4 bits have one of 5 parts
    in common, so only images with a common part are.
    """
    usable = np.flatnonzero((records["readable"] == 1) & (records["spread"] > FLAT * white))
    _, first = np.unique(records["pixels"][usable], axis=0, return_index=True)
    ids = np.sort(usable[first])
    hashes = records["look"][ids]
    small = np.minimum(records["height"], records["width"])[ids] < SMALL
    thumbnails = records["thumbnail"][ids]
    members = np.arange(len(ids))  # the number of its group, of each image
    pairs: list[npt.NDArray[np.int64]] = []
    waiting = 0
    for part in range(DISTANCE + 1):
        mask = np.uint64(sum(1 << bit for bit in range(part, 64, DISTANCE + 1)))
        order = np.argsort(hashes & mask, kind="stable")
        changes = 1 + np.flatnonzero(np.diff(hashes[order] & mask))
        for together in np.split(order, changes):
            if len(together) < 2:
                continue
            for left, right in _near(hashes, together):
                keep = _alike(thumbnails, small, left, right) & (members[left] != members[right])
                if keep.any():
                    pairs.append(np.stack([left[keep], right[keep]]))
                    waiting += int(keep.sum())
                if waiting > MOST_PAIRS:
                    members, pairs, waiting = _joined(members, pairs), [], 0
    return _grouped(ids, _joined(members, pairs))


def _grouped(ids: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> Groups:
    """The groups of two or more of the images `ids`, which are sorted, whose `numbers` are the same."""
    order = np.argsort(numbers, kind="stable")
    groups = np.split(ids[order], 1 + np.flatnonzero(np.diff(numbers[order])))
    return sorted((group for group in groups if len(group) > 1), key=lambda group: int(group[0]))


def _near(
    hashes: npt.NDArray[np.uint64], together: npt.NDArray[np.int64]
) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Yield the pairs of the images `together` whose hashes are near, some of them at a time."""
    for start in range(0, len(together), BLOCK):
        rows = together[start : start + BLOCK]
        for begin in range(start, len(together), BLOCK):
            columns = together[begin : begin + BLOCK]
            near = _bits(hashes[rows][:, None] ^ hashes[columns][None]) <= DISTANCE
            if begin == start:
                near = np.triu(near, 1)
            left, right = np.nonzero(near)
            for at in range(0, len(left), PAIRS):
                yield rows[left[at : at + PAIRS]], columns[right[at : at + PAIRS]]


_COUNTS = np.array([number.bit_count() for number in range(1 << 16)], dtype=np.uint8)


def _bits(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """How many bits of each value are 1. NumPy has a function for that since version 2."""
    if hasattr(np, "bitwise_count"):
        counts: npt.NDArray[np.uint8] = np.bitwise_count(values)
        return counts
    parts: npt.NDArray[np.uint8] = _COUNTS[values.view(np.uint16).reshape(*values.shape, 4)].sum(-1, dtype=np.uint8)
    return parts


def _alike(
    thumbnails: npt.NDArray[np.int8],
    small: npt.NDArray[np.bool_],
    left: npt.NDArray[np.int64],
    right: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """bool [n]: whether the thumbnails of each pair correlate enough."""
    one, other = thumbnails[left].astype(np.float32), thumbnails[right].astype(np.float32)
    lengths = np.sqrt(np.square(one).sum(1) * np.square(other).sum(1))
    limit = np.where(small[left] | small[right], ALIKE_SMALL, ALIKE)
    alike: npt.NDArray[np.bool_] = (one * other).sum(1) >= limit * lengths
    return alike


def _joined(members: npt.NDArray[np.int64], pairs: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """The groups after all pairs are joined."""
    if not pairs:
        return members
    left, right = members[np.concatenate(pairs, axis=1)]
    count = len(members)
    graph = coo_array((np.ones(len(left), dtype=np.int8), (left, right)), shape=(count, count))
    joined: npt.NDArray[np.int64] = connected_components(graph, directed=False)[1].astype(np.int64)
    return joined[members]
