"""Training with Lightning: ModelCheckpoint every few updates, and fit(ckpt_path="last")."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import lightning
import observed
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.criterion = observed.net(), nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        images, labels = batch
        observed.epoch = self.current_epoch
        return self.criterion(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=observed.LEARNING_RATE, momentum=observed.MOMENTUM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--processes", type=int, help="default: those of torchrun, one on each node")
    options = parser.parse_args()
    nodes = int(os.environ.get("WORLD_SIZE", "1")) if options.processes is None else 1
    processes = options.processes or nodes
    lightning.seed_everything(observed.SEED)
    pixels, labels = observed.images_and_labels()
    dataset = TensorDataset(observed.normalised(pixels), labels)
    loader = DataLoader(dataset, shuffle=True, batch_size=observed.BATCH // processes)
    saves = ModelCheckpoint(options.folder, every_n_train_steps=observed.SAVE_EVERY, save_top_k=-1, save_last="link")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.processes or 1,
        num_nodes=nodes,
        strategy="ddp" if processes > 1 else "auto",
        max_epochs=observed.EPOCHS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
