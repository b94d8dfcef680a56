"""Training as tutorials on DistributedDataParallel write it: torchvision's transforms on PIL images, a DataLoader, a
DistributedSampler, `loss.item()` at each step. Their epochs end with a second pass over the training data for the
accuracy: --second-pass repeats only that pass; --evaluate measures on the test images instead. Under torchrun it runs
on several processes.

    python benchmarks/tutorial.py mnist_cnn
    python benchmarks/tutorial.py mnist_cnn --second-pass
    torchrun --nproc-per-node 2 benchmarks/tutorial.py mnist_cnn
"""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

import tasks
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    parser = tasks.arguments(__doc__ or "")
    parser.add_argument("--second-pass", action="store_true", help="only evaluate on the training data, do not train")
    options, task = tasks.parse(parser)
    if options.second_pass and options.evaluate:
        parser.error("--second-pass does not train, so --evaluate has nothing to test")
    if options.seed is not None:
        torch.manual_seed(options.seed)
    device = tasks.best_device()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group()
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    batch_size = task.batch_size // world_size
    dataset = task.dataset(options.data_root, task.transform(), images=options.images)
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=world_size, rank=int(os.environ.get("RANK", "0")), seed=options.seed or 0
    )
    loader = DataLoader(
        dataset,
        batch_size,
        sampler=None if options.second_pass else sampler,
        num_workers=options.workers,
        pin_memory=device.type == "cuda",
    )
    model: nn.Module = tasks.net(options.task).to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = tasks.torch_optimizer(options.task, model)
    criterion = nn.CrossEntropyLoss()
    schedule = tasks.decay(options.task, optimizer)
    progress = tasks.Progress(task, options.every) if sampler.rank == 0 else None
    test_loader = None
    if options.evaluate and sampler.rank == 0:
        test_set = task.dataset(options.data_root, task.transform(), train=False)
        test_loader = DataLoader(test_set, tasks.TEST_BATCH, num_workers=options.workers)

    running_loss, correct = 0.0, 0.0
    for epoch, left in tasks.epochs(len(loader), options.updates):
        sampler.set_epoch(epoch)
        model.train(not options.second_pass)
        for images, labels in islice(loader, left):
            images, labels = images.to(device), labels.to(device)
            if options.second_pass:
                with torch.no_grad():
                    correct += (model(images).argmax(1) == labels).sum().item()
            else:
                optimizer.zero_grad()
                loss = criterion(model(images), labels)
                loss.backward()
                optimizer.step()
                running_loss += loss.item()
            if progress is not None:
                progress.advance()
        schedule.step()
        if test_loader is not None:
            tasks.tell_accuracy(epoch + 1, test_accuracy(model, test_loader, device))
    if world_size > 1:
        dist.destroy_process_group()


def test_accuracy(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Return the share of the loader's images that the model gets right, as PyTorch's example counts them."""
    model.eval()
    correct, count = 0.0, 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
            count += len(labels)
    return correct / count


if __name__ == "__main__":
    main()
