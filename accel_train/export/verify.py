"""Is an export the run's model? It is loaded again and compared with the run before it is called done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accel_train.analysis.loaded_run import LoadedRun
from accel_train.export.formats import Loaded
from accel_train.export.images import Images
from accel_train.export.preprocess import prepare

LARGEST_DIFFERENCE = 1e-3  # of logits, from equal inputs
TIE = 0.01
"""Two classes to which `predict` gives probabilities that differ by less are a tie: Pillow and torchvision round
differently, so pixels may differ by 1 of 255."""
BATCH = 16


@dataclass(frozen=True)
class Comparison:
    """What the comparison has found: lines for the user, and failures among them."""

    lines: tuple[str, ...]
    failures: tuple[str, ...]


def check(run: LoadedRun, exported: Loaded, rules: dict[str, Any], images: Images) -> Comparison:
    """Compare an export with the run's model, both on the CPU, on the same images."""
    info = run.info
    lines, failures = [], []
    expected = _logits(run.model, images.inputs)
    difference = max(
        float((expected - _logits(exported, images.inputs)).abs().max()),
        float((expected[:1] - _logits(exported, images.inputs[:1])).abs().max()),  # a batch of 1
    )
    lines.append(f"equal inputs: logits differ by at most {difference:.1e}, for {images.described}")
    if not difference <= LARGEST_DIFFERENCE:  # also if it is NaN
        failures.append(
            f"from equal inputs the logits differ by up to {difference:.3g}, more than {LARGEST_DIFFERENCE}"
        )
    if not images.files:
        lines.append("from files: not compared, because there are no image files of the run's data here")
        return Comparison(tuple(lines), tuple(failures))

    threshold = 0.0 if info.multi_label else None  # all classes
    same, ties, different = 0, 0, []
    pixels = 0.0
    for prediction, wanted in zip(run.classify(images.files, None, threshold), images.inputs, strict=True):
        if prediction.error:
            continue
        inputs = torch.from_numpy(prepare(prediction.image, rules).copy())
        deviation = (inputs - wanted).abs() * torch.tensor(info.std)[:, None, None] * info.full_scale
        pixels = max(pixels, float(deviation.max()))
        said = info.classes[int(_logits(exported, inputs[None]).argmax())]
        chances = dict(zip(prediction.classes, prediction.probabilities, strict=True))
        if said == prediction.classes[0]:
            same += 1
        elif prediction.probabilities[0] - chances[said] < TIE:
            ties += 1
        else:
            different.append(f"{prediction.image} ({prediction.classes[0]} by predict, {said} here)")
    count = same + ties + len(different)
    tied = f", and {ties} where predict's two best classes are within {TIE:.0%}" if ties else ""
    lines.append(
        f"from files by preprocess.json: the same class as predict for {same} of {count} images{tied}; "
        f"pixels differ by at most {pixels:.1f} of 255"
    )
    if different:
        shown = ", ".join(different[:3]) + (" …" if len(different) > 3 else "")
        failures.append(f"from files {len(different)} of {count} images get another class than by predict: {shown}")
    return Comparison(tuple(lines), tuple(failures))


def _logits(model: Loaded | nn.Module, inputs: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.cat([model(batch).float() for batch in torch.split(inputs, BATCH)])
