"""Training with timm's loader, and its CheckpointSaver and resume_checkpoint as its train.py uses them.

It saves at the end of each epoch, and begins with the next epoch: `--resume last.pth.tar`. With --recovery it also
saves within the epoch, as train.py does with --recovery-interval, and goes on from the newest of both.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import observed
import torch
from PIL import Image
from timm.data import create_loader
from timm.models import resume_checkpoint
from timm.optim import create_optimizer_v2
from timm.utils import CheckpointSaver, init_distributed_device, random_seed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class Images(Dataset[tuple[object, int]]):
    """Pillow images, which timm's loader turns into tensors; the loader sets `transform`."""

    def __init__(self) -> None:
        self.pixels, self.labels = observed.images_and_labels()
        self.transform: Callable[[object], object] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[object, int]:
        image = Image.fromarray(self.pixels[number, 0].numpy())
        return (self.transform(image) if self.transform else image), int(self.labels[number])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--recovery", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    device = init_distributed_device(options)  # sets rank, world_size and distributed
    random_seed(observed.SEED, options.rank)
    dataset = Images()
    size = dataset.pixels.shape[-1]
    loader = create_loader(
        dataset,
        input_size=(1, size, size),
        batch_size=observed.BATCH // options.world_size,
        is_training=True,
        no_aug=True,
        mean=(observed.MEAN,),
        std=(observed.STD,),
        num_workers=0,
        persistent_workers=False,
        distributed=options.distributed,
        device=device,
    )
    model: nn.Module = observed.net()
    optimizer = create_optimizer_v2(model, opt="momentum", lr=observed.LEARNING_RATE, momentum=observed.MOMENTUM)

    first_epoch = 0
    saved = [file for file in (options.folder / "last.pth.tar", *options.folder.glob("recovery-*")) if file.exists()]
    if saved:
        first_epoch = resume_checkpoint(model, str(max(saved, key=os.path.getmtime)), optimizer) or 0
    saver = None
    if options.rank == 0:
        folder = str(options.folder)
        saver = CheckpointSaver(model=model, optimizer=optimizer, checkpoint_dir=folder, recovery_dir=folder)
    if options.distributed:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(first_epoch, observed.EPOCHS):
        model.train()
        observed.epoch = epoch
        if options.distributed:
            loader.sampler.set_epoch(epoch)
        for number, (images, labels) in enumerate(loader):
            loss = criterion(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if saver is not None and options.recovery and (number + 1) % observed.SAVE_EVERY == 0:
                saver.save_recovery(epoch, batch_idx=number)
        if saver is not None:
            saver.save_checkpoint(epoch)
    if options.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
