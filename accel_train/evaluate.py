"""Exact evaluation: every sample of a split counted exactly once, whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.data.loading import InputPipeline
from accel_train.records.metrics import Evaluation

Batch = dict[str, Tensor]


@torch.inference_mode()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    pipeline: InputPipeline,
    through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> Evaluation:
    """Run `model` in evaluation mode over every sample of a split; `pipeline` is one over an EvaluationSampler, and
    `through` may look at its batches on their way.

    The precision is the accelerator's, whether or not the model was prepared (the running mean of the weights is not).
    The results of single samples are gathered with their numbers, the padding is dropped by its weight, and then each
    number must be there exactly once: a figure of fewer, doubled or one process's samples cannot come out of here.
    All processes get the same Evaluation.
    """
    model.eval()
    ids, labels, predictions, top5, losses = [], [], [], [], []
    for batch in through(pipeline.batches):
        inputs, label = pipeline.transform(batch)
        with accelerator.autocast():
            logits = model(inputs).float()
        real = batch["weights"] > 0
        # A padded sample gets the number -1. To leave it out here would need its place known on the host.
        ids.append(torch.where(real, batch["ids"], -1))
        labels.append(label)
        highest = logits.topk(min(5, logits.shape[1])).indices
        predictions.append(highest[:, 0])
        top5.append((highest == label[:, None]).any(1))
        losses.append(F.cross_entropy(logits, label, reduction="none"))

    everywhere = [accelerator.gather(torch.cat(part)).cpu() for part in (ids, labels, predictions, top5, losses)]
    # In the samples' own order, so that the sums do not depend on who computed what.
    order = everywhere[0].argsort()
    number, label, prediction, in_top5, loss = (part[order][everywhere[0][order] >= 0] for part in everywhere)
    if not torch.equal(number, torch.arange(pipeline.samples)):
        raise RuntimeError(
            f"evaluation counted {len(number)} results of {len(number.unique())} samples, "
            f"but there are {pipeline.samples}"
        )
    classes = pipeline.transform.num_classes
    confusion = torch.bincount(label * classes + prediction, minlength=classes * classes).view(classes, classes)
    return Evaluation(
        loss=loss.double().mean().item(),
        accuracy=int(confusion.trace()) / pipeline.samples,
        top5_accuracy=int(in_top5.sum()) / pipeline.samples,
        count=pipeline.samples,
        confusion=confusion.tolist(),
    )


def evaluation_batch_size(config: Config, processes: int, micro_batch: int = 1) -> int:
    """Samples of one step of the evaluation, over all processes. No gradients, so more than in training fit."""
    return processes * (config.eval_batch_size or max(256, micro_batch))
