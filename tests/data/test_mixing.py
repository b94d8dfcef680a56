"""Mixup and CutMix in timm's three modes give what timm's own class does with the same random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import timm.data.mixup
import torch

from accel_train.config.schema import Augment
from accel_train.data.batch_transform import AugmentParameters, BatchTransform, Column
from accel_train.keyed import hashed, key

COUNT, SIZE, CLASSES = 48, 12, 5
KEYS = hashed(key(5, 0, "augment"), torch.arange(COUNT))
IMAGES = torch.randint(256, (COUNT, 3, SIZE, SIZE), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.arange(COUNT) % CLASSES
BOTH: dict[str, Any] = {"mixup": 0.8, "cutmix": 1.0, "mix_probability": 0.8}


def mixed(
    which: slice = slice(None), *, virtual_batch: int = COUNT, **augment: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images, targets and parameters of some samples."""
    transform = BatchTransform(
        Augment(**augment), size=SIZE, mean=(0.5,) * 3, std=(0.25,) * 3, num_classes=CLASSES, training=True,
        per_image=False, device=torch.device("cpu"), virtual_batch=virtual_batch,
    )  # fmt: skip
    batch = {"images": IMAGES[which], "labels": LABELS[which]}
    if transform.draw_parameters is None:
        return (*transform(batch), torch.empty(0))
    keys = KEYS[which]
    parameters = transform.draw_parameters(keys, torch.ones(len(keys)))
    return (*transform({**batch, "parameters": parameters}), parameters)


class Given(timm.data.mixup.Mixup):  # type: ignore[misc]
    """timm's Mixup with the numbers that were drawn here: the rows of `parameters`, in timm's order."""

    def __init__(self, parameters: torch.Tensor, mode: str) -> None:
        super().__init__(mode=mode, label_smoothing=0.0, num_classes=CLASSES)
        self.parameters, self.boxes = parameters, list[Any]()

    def _params_per_elem(self, batch_size: int) -> Any:
        rows = self.parameters[:batch_size]
        self.boxes = [box for box, share in zip(boxes(rows), shares(rows), strict=True) if share != 1]
        self.boxes = [box for box, row in zip(self.boxes, rows[shares(rows) != 1], strict=True) if row[Column.CUT]]
        return shares(rows), rows[:, Column.CUT].bool().numpy()

    def _params_per_batch(self) -> Any:
        share, cuts = self._params_per_elem(1)
        return float(share[0]), bool(cuts[0])


def shares(parameters: torch.Tensor) -> Any:
    return parameters[:, Column.SHARE].contiguous().view(torch.float32).numpy().copy()


def boxes(parameters: torch.Tensor) -> list[tuple[int, ...]]:
    """Of each row: the first row and the one after the last, and the same of columns."""
    first, last = (parameters[:, at + 2 : at + 4] for at in (int(Column.FIRST), int(Column.LAST)))
    return [(a[0], b[0] + 1, a[1], b[1] + 1) for a, b in zip(first.tolist(), last.tolist(), strict=True)]


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
@pytest.mark.parametrize(
    "augment", [BOTH, {"mixup": 0.4}, {"cutmix": 0.7}], ids=["both", "mixup", "cutmix"],
)  # fmt: skip
def test_it_is_timms_with_the_same_numbers(mode: str, augment: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    size = 8  # of a virtual batch
    plain = mixed()[0]
    images, targets, parameters = mixed(mix_mode=mode, virtual_batch=size, **augment)
    assert not torch.equal(images, plain)
    # timm mixes the first with the last, the second with the last but one, …
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2).flip(0)])
    for start in range(0, COUNT, size):
        rows = parameters[start : start + size][order]
        theirs = Given(rows, mode)

        def box_and_share(_shape: Any, _share: Any, theirs: Given = theirs, **_: Any) -> Any:
            box = theirs.boxes.pop(0)
            return box, 1.0 - (box[1] - box[0]) * (box[3] - box[2]) / SIZE**2

        monkeypatch.setattr(timm.data.mixup, "cutmix_bbox_and_lam", box_and_share)
        expected, expected_targets = theirs(plain[start : start + size][order].clone(), LABELS[start:][order])
        assert not theirs.boxes
        torch.testing.assert_close(images[start : start + size][order], expected)
        torch.testing.assert_close(targets[start : start + size][order], expected_targets)


def test_a_virtual_batch_is_mixed_in_one_way_and_the_next_in_another() -> None:
    _, _, parameters = mixed(mix_mode="batch", virtual_batch=8, **BOTH)
    assert torch.equal(parameters, parameters[::8].repeat_interleave(8, 0))
    assert len(set(shares(parameters))) >= 4
    pairs = mixed(virtual_batch=8, **BOTH)[2]
    assert torch.equal(pairs, pairs[::2].repeat_interleave(2, 0)) and len(set(shares(pairs))) > 15
    assert len(set(shares(mixed(virtual_batch=8, mix_mode="elem", **BOTH)[2]))) > 30


@pytest.mark.parametrize(("mode", "step"), [("batch", 8), ("pair", 2), ("elem", 2)])
def test_a_part_of_an_update_looks_as_in_the_whole(mode: str, step: int) -> None:
    whole = mixed(mix_mode=mode, virtual_batch=8, **BOTH)
    parts = [mixed(slice(i, i + step), mix_mode=mode, virtual_batch=8, **BOTH) for i in range(0, COUNT, step)]
    for number in range(3):
        assert torch.equal(torch.cat([part[number] for part in parts]), whole[number])


@pytest.mark.parametrize("mode", ["batch", "pair", "elem"])
def test_padding_is_mixed_with_nothing(mode: str) -> None:
    weights = (torch.arange(COUNT) < 21).float()  # number 20 has padding beside it
    draw = AugmentParameters(Augment(mixup=1.0, mix_mode=mode), SIZE, per_image=False, virtual_batch=8)  # type: ignore[arg-type]
    found = shares(draw(KEYS, weights))
    assert (found[:20] < 1).all() and (found[20:] == 1).all()
