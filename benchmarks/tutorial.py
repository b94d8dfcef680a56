"""Training as tutorials on DistributedDataParallel write it: torchvision's transforms on PIL images, a DataLoader, a
DistributedSampler, `loss.item()` at each step, and at the end of the epoch a second pass over the training data for the
accuracy. Under torchrun it runs on several processes.

    python benchmarks/tutorial.py mnist_cnn
    torchrun --nproc-per-node 2 benchmarks/tutorial.py mnist_cnn

Prints {"images_per_second": without the second pass, "with_second_pass": with it as part of the epoch}.
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
from torch.utils.data import DataLoader, DistributedSampler, Subset

from accel_train.clock import Clock


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
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
        dataset, batch_size, sampler=sampler, num_workers=options.workers, pin_memory=device.type == "cuda"
    )
    model: nn.Module = tasks.net(options.task).to(device)
    if world_size > 1:
        model = DistributedDataParallel(model)
    optimizer = tasks.torch_optimizer(options.task, model)
    criterion = nn.CrossEntropyLoss()
    clock, updates, last = Clock(device), options.updates, options.warm_up + options.updates

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            yield from loader
            epoch += 1

    model.train()
    running_loss = 0.0
    for number, (images, labels) in enumerate(islice(batches(), last)):
        if number == options.warm_up:
            clock.start()
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = criterion(model(images), labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    seconds = clock.stop()

    # The second pass, over as many batches.
    seen = range(min(len(dataset), last * batch_size))  # type: ignore[arg-type]
    again = DataLoader(Subset(dataset, seen), batch_size, num_workers=options.workers)
    model.eval()
    correct = 0
    with torch.no_grad():
        for number, (images, labels) in enumerate(again):
            if number == options.warm_up:
                clock.start()
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(1) == labels).sum().item()
    measured = len(again) - options.warm_up
    second_pass = clock.stop() * updates / measured

    if sampler.rank == 0:
        images_done = updates * task.batch_size
        tasks.tell(images_per_second=images_done / seconds, with_second_pass=images_done / (seconds + second_pass))
    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
