"""An image that a person can try a trained model on: a file of the test data, or one that is written into the run."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError

FOLDER = "examples"
COUNT = 5


def example_image(splits: Splits, run: Path) -> Path | None:
    """The path of an image that the model was not trained on, if there is one.

    Data that is not in image files of its own has its first test images written to RUN/examples, named by their class:
    test-0-is-cat.png.
    """
    source = splits.test or splits.validation
    if source is None:
        return None
    if (file := Path(source.name(0))).is_file():
        return file
    from PIL import Image

    split = "test" if splits.test else "validation"
    written: list[Path] = []
    try:
        (run / FOLDER).mkdir(exist_ok=True)
        for id in range(min(COUNT, len(source))):
            name = re.sub(r"[^\w.-]+", "_", splits.classes[int(source.labels[id])])
            path = run / FOLDER / f"{split}-{id}-is-{name[:100]}.png"
            pixels = torch.as_tensor(source.fetch([id])[0]).cpu().permute(1, 2, 0)
            Image.fromarray(pixels.squeeze(-1).contiguous().numpy()).save(path)
            written.append(path)
    except (OSError, UserError):  # no room, an image that cannot be read: the run is finished without
        pass
    return written[0] if written else None
