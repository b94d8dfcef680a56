"""Training with Accelerate, saved and resumed as its no_trainer examples do: save_state, and skip_first_batches.

With --seedable, DataLoaderConfiguration(use_seedable_sampler=True) and set_epoch: the order of an epoch depends on its
number. The examples do not do that.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import observed
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--seedable", action="store_true")
    options = parser.parse_args()
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=options.seedable)
    )
    set_seed(observed.SEED)
    pixels, labels = observed.images_and_labels()
    dataset = TensorDataset(observed.normalised(pixels), labels)
    loader = DataLoader(dataset, shuffle=True, batch_size=observed.BATCH // accelerator.num_processes)
    model = observed.net()
    optimizer = torch.optim.SGD(model.parameters(), lr=observed.LEARNING_RATE, momentum=observed.MOMENTUM)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    criterion = nn.CrossEntropyLoss()
    done = 0
    saved = sorted(options.folder.glob("step_*"), key=os.path.getctime)
    if saved:
        accelerator.load_state(str(saved[-1]))
        done = int(saved[-1].name.removeprefix("step_"))
    first_epoch, skipped = divmod(done, len(loader))
    for epoch in range(first_epoch, observed.EPOCHS):
        model.train()
        observed.epoch = epoch
        if options.seedable:
            loader.set_epoch(epoch)
        resumed = epoch == first_epoch and skipped > 0
        for images, targets in accelerator.skip_first_batches(loader, skipped) if resumed else loader:
            loss = criterion(model(images), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            if done % observed.SAVE_EVERY == 0:
                accelerator.save_state(str(options.folder / f"step_{done}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
