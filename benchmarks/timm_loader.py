"""The same training with timm's loader, optimizer factory and the loop of its train.py (no augmentation, because the
tasks have none). Worker processes load images as uint8; timm's PrefetchLoader normalises them on the device.

    python benchmarks/timm_loader.py mnist_cnn --workers 2
"""

from __future__ import annotations

from itertools import chain, islice, repeat

import tasks
from timm.data import create_loader
from timm.optim import create_optimizer_v2
from timm.utils import AverageMeter
from torch import nn


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
    device = tasks.best_device()
    loader = create_loader(
        task.dataset(options.data_root, None),  # the loader sets its transform
        input_size=(task.channels, task.size, task.size),
        batch_size=task.batch_size,
        is_training=True,
        no_aug=True,
        mean=task.mean,
        std=task.std,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
        device=device,
    )
    model = tasks.net(options.task).to(device)
    if options.task == "mnist_cnn":
        optimizer = create_optimizer_v2(model, opt="adadelta", lr=1.0)
    else:
        optimizer = create_optimizer_v2(model, opt="momentum", lr=1e-3, momentum=0.9)
    criterion = nn.CrossEntropyLoss()
    progress, losses = tasks.Progress(task, options.every), AverageMeter()
    model.train()
    epochs = chain.from_iterable(repeat(loader))
    for images, labels in islice(epochs, options.updates):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.update(loss.item(), images.size(0))
        progress.advance()


if __name__ == "__main__":
    main()
