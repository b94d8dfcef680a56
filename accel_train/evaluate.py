"""Exact evaluation: every sample of a split is counted exactly once, on any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_train.config.schema import Config
from accel_train.data.loading import InputPipeline
from accel_train.data.sources.splits import Splits
from accel_train.records.metrics import (
    Evaluation,
    OwnMetrics,
    SplitMetric,
    average_precision_of_classes,
    create_own_metrics,
    f1_of_classes,
    mean_metrics,
    metrics_for,
    same,
    top5,
)

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
    not the model was prepared (the EMA is not). `own`: the metrics of --metrics. Raises MetricError, on all processes,
    if one of them fails, and RuntimeError unless each sample was evaluated exactly once.
    """
    model.eval()
    multi_label, keep_logits = pipeline.multi_label, keep_logits or own is not None
    means = mean_metrics(multi_label=multi_label)
    # What the figures of a whole split need of each sample: its prediction, or the logits of all its labels.
    outcome = same if multi_label else top5
    needed = {outcome, *(metric.predict for metric in means)}
    batches: list[tuple[Tensor, ...]] = []
    kept: list[Tensor] = []
    for batch in through(pipeline.batches):
        inputs, labels = pipeline.transform(batch)
        with accelerator.autocast():
            # A copy: the CUDA graphs of torch.compile write the output of each call to the same memory.
            logits = model(inputs).to(torch.float32, copy=True)
        # Padding gets the id -1. To select the real samples here, the host would have to wait for their number.
        ids = torch.where(batch["weights"] > 0, batch["ids"], -1)
        # What several metrics need of the logits is computed once.
        predicted = {predict: predict(logits) for predict in needed}
        scores = [metric.score(predicted[metric.predict], labels) for metric in means]
        of_all = logits if multi_label else predicted[outcome][:, 0]
        # In the last batch of a loader that Accelerate prepared this also drops the padding.
        batches.append(accelerator.gather_for_metrics((ids, labels, of_all, *scores)))
        if keep_logits and not multi_label:  # with several labels they are in `of_all`
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
    of_samples = {metric.name: score.double() for metric, score in zip(means, scores, strict=True)}
    figures = {name: score.sum().item() / pipeline.samples for name, score in of_samples.items()}
    table = metrics_for(multi_label=multi_label)
    all_logits = torch.cat(kept)[order] if kept else None
    if multi_label and keep_logits and accelerator.is_main_process:
        all_logits = predictions
    no_numbers = ~predictions.isfinite().all(1) if multi_label else of_samples["loss"].isnan()
    broken = int(no_numbers.sum())
    own_figures = {} if own is None else own.figures(all_logits, labels, broken=broken > 0)
    if broken:
        # The highest of such logits is their first: its accuracy could be the best of the run, and mean nothing.
        names = [*(metric.name for metric in table), *own_figures]
        return Evaluation.without_metrics(names, labels, pipeline.transform.num_classes, broken, all_logits)
    figures |= {metric.name: metric.compute(predictions, labels) for metric in table if isinstance(metric, SplitMetric)}
    figures = {metric.name: figures[metric.name] for metric in table} | own_figures
    of_kind = _of_several_labels if multi_label else _of_one_label
    return of_kind(figures, labels, predictions, pipeline.transform.num_classes, all_logits)


def _of_one_label(
    figures: dict[str, float], labels: Tensor, predictions: Tensor, classes: int, logits: Tensor | None
) -> Evaluation:
    """The result for images with one label each: `labels` and `predictions` int64 [n]."""
    confusion = torch.bincount(labels * classes + predictions, minlength=classes * classes).view(classes, classes)
    images, right = confusion.sum(1).tolist(), confusion.diagonal().tolist()
    accuracy = [hits / count if count else None for hits, count in zip(right, images, strict=True)]
    return Evaluation(figures, len(labels), {"accuracy": accuracy}, images, confusion.tolist(), labels, logits)


def _of_several_labels(
    figures: dict[str, float], labels: Tensor, predictions: Tensor, classes: int, logits: Tensor | None
) -> Evaluation:
    """The result for images with several labels: `labels` bool [n, classes], `predictions` the logits."""
    of_classes = {
        "average_precision": average_precision_of_classes(predictions, labels),
        "f1": f1_of_classes(predictions, labels),
    }
    return Evaluation(figures, len(labels), of_classes, labels.sum(0).tolist(), labels=labels, logits=logits)


def create_metrics(config: Config, accelerator: Accelerator, splits: Splits) -> OwnMetrics | None:
    """The metrics of --metrics for training; None if there are none beside those of every evaluation. Collective.

    Raises UserError if one cannot be used.
    """
    if not config.metrics:
        return None
    return create_own_metrics(config.metrics, accelerator, splits)
