"""Training as tutorials on DistributedDataParallel write it: torchvision's transforms on PIL images, a DataLoader, a
DistributedSampler, `loss.item()` at each step. Their epochs end with a second pass over the training data for the
accuracy: --second-pass repeats only that pass. Under torchrun it runs on several processes.

    python benchmarks/tutorial.py mnist_cnn
    python benchmarks/tutorial.py mnist_cnn --second-pass
    torchrun --nproc-per-node 2 benchmarks/tutorial.py mnist_cnn
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice

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
    device = tasks.best_device()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group()
        if device.type != "cpu":
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    batch_size = task.batch_size // world_size
    dataset = task.dataset(options.data_root, task.transform())
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=int(os.environ.get("RANK", "0")))
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
    progress = tasks.Progress(task, options.every) if sampler.rank == 0 else None

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    model.train(not options.second_pass)
    running_loss, correct = 0.0, 0.0
    for images, labels in islice(batches(), options.updates):
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
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
