"""The same training with timm's loader, optimizer factory and the loop of its train.py (no augmentation, because the
tasks have none). Worker processes load images as uint8; timm's PrefetchLoader normalises them on the device.

    python benchmarks/timm_loader.py mnist_cnn --workers 2
"""

from __future__ import annotations

from functools import partial
from itertools import islice
from typing import Any

import tasks
import torch
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter, accuracy, random_seed
from torch import nn


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
    if options.seed is not None:
        random_seed(options.seed)
    device = tasks.best_device()
    make_loader = partial(
        create_loader,  # it sets the transform of its dataset
        input_size=(task.channels, task.size, task.size),
        mean=task.mean,
        std=task.std,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        device=device,
    )
    train_set = task.dataset(options.data_root, None, images=options.images)
    loader = make_loader(train_set, batch_size=task.batch_size, is_training=True, no_aug=True)
    test_loader = None
    if options.evaluate:
        test_set = task.dataset(options.data_root, None, train=False)
        test_loader = make_loader(test_set, batch_size=tasks.TEST_BATCH, is_training=False, crop_pct=1.0)
    model = tasks.net(options.task).to(device)
    if options.task == "mnist_cnn":
        optimizer = create_optimizer_v2(model, opt="adadelta", lr=1.0)
    else:
        optimizer = create_optimizer_v2(model, opt="momentum", lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    schedule = tasks.decay(options.task, optimizer)
    progress, losses = tasks.Progress(task, options.every), AverageMeter()
    for epoch, left in tasks.epochs(len(loader), options.updates):
        model.train()
        for images, labels in islice(loader, left):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.update(loss.item(), images.size(0))
            progress.advance()
        schedule.step()
        if test_loader is not None:
            tasks.tell_accuracy(epoch + 1, test_accuracy(model, test_loader))


def test_accuracy(model: nn.Module, loader: Any) -> float:
    """Return the accuracy on the loader's images, as the `validate` of timm's train.py finds it."""
    model.eval()
    top1 = AverageMeter()
    with torch.inference_mode():
        for images, labels in loader:
            top1.update(accuracy(model(images), labels)[0].item(), images.size(0))
    return top1.avg / 100


if __name__ == "__main__":
    main()
