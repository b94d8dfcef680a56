"""The same training with Lightning, with what its Trainer enables by default: logger, progress bar, checkpoint.

pip install 'accel-train[bench]'
python benchmarks/lightning_script.py mnist_cnn --workers 2
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from typing import Any

import tasks
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

    def validation_step(self, batch: tuple[Tensor, Tensor], _number: int) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = tasks.torch_optimizer(self.name, self)
        return [optimizer], [tasks.decay(self.name, optimizer)]


class Report(lightning.Callback):
    def __init__(self, progress: tasks.Progress) -> None:
        self.progress = progress

    def on_train_batch_end(self, *_: Any) -> None:
        self.progress.advance()

    def on_validation_end(self, trainer: lightning.Trainer, _module: lightning.LightningModule) -> None:
        if not trainer.sanity_checking:
            tasks.tell_accuracy(trainer.current_epoch + 1, trainer.callback_metrics["accuracy"].item())


def main() -> None:
    options, task = tasks.parse(tasks.arguments(__doc__ or ""))
    if options.seed is not None:
        lightning.seed_everything(options.seed)
    report = Report(tasks.Progress(task, options.every))
    make_loader = partial(DataLoader, num_workers=options.workers, persistent_workers=options.workers > 0)
    train_set = task.dataset(options.data_root, task.transform(), images=options.images)
    loader = make_loader(train_set, task.batch_size, shuffle=True)
    test_loader = None
    if options.evaluate:
        test_set = task.dataset(options.data_root, task.transform(), train=False)
        test_loader = make_loader(test_set, tasks.TEST_BATCH)
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=-1, max_steps=options.updates or -1, devices=1, default_root_dir=folder, callbacks=[report]
        )
        trainer.fit(Classifier(options.task), loader, test_loader)


if __name__ == "__main__":
    main()
