"""The same training with Lightning, with what its Trainer enables by default: logger, progress bar, checkpoint.

pip install 'accel-train[bench]'
python benchmarks/lightning_script.py mnist_cnn --workers 2
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import tasks
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

try:
    import lightning
except ImportError:
    sys.exit("Lightning is not installed: pip install 'accel-train[bench]'")


class Classifier(lightning.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.net = tasks.net(name)
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        images, labels = batch
        loss = self.criterion(self.net(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return tasks.torch_optimizer(self.name, self)


class Report(lightning.Callback):
    def __init__(self, progress: tasks.Progress) -> None:
        self.progress = progress

    def on_train_batch_end(self, *_: Any) -> None:
        self.progress.advance()


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
    report = Report(tasks.Progress(task, options.every))
    loader = DataLoader(
        task.dataset(options.data_root, task.transform()),
        task.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=-1, max_steps=options.updates or -1, devices=1, default_root_dir=folder, callbacks=[report]
        )
        trainer.fit(Classifier(options.task), loader)


if __name__ == "__main__":
    main()
