"""Exact evaluation: every sample of a split is counted exactly once, on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.data.loading import InputPipeline
from accel_train.data.memory import MemoryLoader
from accel_train.data.sources.splits import count_classes
from accel_train.errors import EvaluationError, UserError
from accel_train.launch.agreement import fail_together
from accel_train.records.metrics import Evaluation, OwnMetrics
from accel_train.task import MeanMetric, SplitMetric, top5

Batch = dict[str, Any]


@torch.inference_mode()
def evaluate(
    accelerator: Accelerator,
    model: nn.Module,
    pipeline: InputPipeline,
    through: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
    *,
    keep_logits: bool = False,
    own: OwnMetrics | None = None,
) -> Evaluation:
    """Return the metrics of `model` over every sample of a split, the same on all processes.

    `pipeline`: one with an EvaluationSampler. `through`: wraps the iterator over its batches and must not read ahead.
    `keep_logits`: return labels and logits, too, on the main process. The precision is the accelerator's, whether or
    not the model was prepared (the EMA is not). `own`: the metrics of --metrics. Raises EvaluationError, on all
    processes, if a metric fails or an image cannot be read, and RuntimeError unless each sample was evaluated exactly
    once.
    """
    model.eval()
    task, keep_logits = pipeline.task, keep_logits or own is not None
    means = [metric for metric in task.metrics if isinstance(metric, MeanMetric)]
    needed = {metric.predict for metric in means}
    batches: list[tuple[Tensor, ...]] = []
    kept: list[Tensor] = []
    read = through(pipeline.batches)
    if not isinstance(pipeline.loader, MemoryLoader):  # in memory there is no image that cannot be read
        read = read_together(accelerator, read)
    for batch in read:
        inputs, labels = pipeline.transform(batch)
        with accelerator.autocast():
            # A copy: the CUDA graphs of torch.compile write the output of each call to the same memory.
            logits = model(inputs).to(torch.float32, copy=True)
        # Padding gets the id -1. To select the real samples here, the host would have to wait for their number.
        ids = torch.where(batch["weights"] > 0, batch["ids"], -1)
        # What several metrics need of the logits is computed once.
        predicted = {predict: predict(logits) for predict in needed}
        scores = [metric.score(predicted[metric.predict], labels) for metric in means]
        predictions = logits if task.keeps_logits else predicted[top5][:, 0]
        # In the last batch of a loader that Accelerate prepared this also drops the padding.
        batches.append(accelerator.gather_for_metrics((ids, labels, predictions, *scores)))
        if keep_logits and not task.keeps_logits:
            of_everyone = accelerator.gather_for_metrics(logits)
            if accelerator.is_main_process:
                kept.append(of_everyone.cpu())

    ids, *results = (torch.cat(parts).cpu() for parts in zip(*batches, strict=True))
    # In the order of the ids, so that a sum does not depend on which process computed what.
    order = ids.argsort()
    order = order[ids[order] >= 0]
    ids, labels, predictions, *scores = (result[order] for result in (ids, *results))
    if not torch.equal(ids, torch.arange(pipeline.samples)):
        raise RuntimeError(
            f"evaluation counted {len(ids)} results of {len(torch.unique(ids))} samples, but the split has "
            f"{pipeline.samples} samples"
        )
    all_logits = torch.cat(kept)[order] if kept else None
    if task.keeps_logits and keep_logits and accelerator.is_main_process:
        all_logits = predictions
    of_samples = {metric.name: score.double() for metric, score in zip(means, scores, strict=True)}
    # With several labels also an infinite logit is none, whatever the loss is. With one it may exclude a class.
    no_numbers = of_samples["loss"].isnan() | ~predictions.isfinite().view(len(ids), -1).all(1)
    broken = int(no_numbers.sum())
    own_values = {} if own is None else own.compute(all_logits, labels, broken=broken > 0)
    names = [*(metric.name for metric in task.metrics), *own_values]
    classes, confusion = pipeline.transform.num_classes, None
    class_metrics: dict[str, list[float | None]]
    if broken:
        # The highest of such logits is their first: its accuracy could be the best of the run, and mean nothing.
        metrics = dict.fromkeys(names, math.nan)
        class_metrics = {name: [None] * classes for name in task.class_metrics}
    else:
        values = {name: score.sum().item() / pipeline.samples for name, score in of_samples.items()}
        for metric in task.metrics:
            if isinstance(metric, SplitMetric):
                values[metric.name] = metric.compute(predictions, labels)
        metrics = {name: (values | own_values)[name] for name in names}
        # They end with the last class that occurs.
        class_metrics = {name: compute(predictions, labels) for name, compute in task.class_metrics.items()}
        class_metrics = {name: values + [None] * (classes - len(values)) for name, values in class_metrics.items()}
        if not task.keeps_logits:
            counts = torch.bincount(labels * classes + predictions, minlength=classes * classes)
            confusion = counts.view(classes, classes).tolist()
    images = count_classes(labels, classes)
    return Evaluation(metrics, len(ids), class_metrics, images, confusion, labels, all_logits, broken)


def read_together(accelerator: Accelerator, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches; if a process cannot read an image of its next one, all raise EvaluationError. Collective."""
    try:
        while (batch := fail_together(accelerator, lambda: next(batches, None))) is not None:
            yield batch
    except UserError as error:
        raise EvaluationError(*error.messages) from error
