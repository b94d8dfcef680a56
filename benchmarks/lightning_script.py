"""The same training under Lightning, with what its Trainer switches on by itself: logger, progress bar, checkpoint.

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

from accel_train.clock import Clock

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


class Stopwatch(lightning.Callback):
    def __init__(self, warm_up: int, last: int) -> None:
        self.warm_up, self.last = warm_up, last
        self.clock = Clock(tasks.best_device())
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.warm_up:
            self.clock.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.last:
            self.seconds = self.clock.stop()


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
    stopwatch = Stopwatch(options.warm_up, options.warm_up + options.updates)
    loader = DataLoader(
        task.dataset(options.data_root, task.transform()),
        task.batch_size,
        shuffle=True,
        num_workers=options.workers,
        persistent_workers=options.workers > 0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_steps=stopwatch.last, devices=1, default_root_dir=folder, callbacks=[stopwatch])
        trainer.fit(Classifier(options.task), loader)
    tasks.tell(images_per_second=options.updates * task.batch_size / stopwatch.seconds)


if __name__ == "__main__":
    main()
