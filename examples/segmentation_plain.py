"""The training of segmentation.py in plain Accelerate: docs/from_python.md says which promises are gone."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from segmentation import CLASSES, TEST, TRAIN, UNet, draw, learning_rate, losses_of
from torch.utils.data import DataLoader, Dataset


class Shapes(Dataset):
    def __init__(self, first, count, flips=False):
        self.images, self.masks = draw(torch.arange(first, first + count))
        self.flips = flips

    def __len__(self):
        return len(self.images)

    def __getitem__(self, number):
        image, mask = self.images[number], self.masks[number]
        return (image.flip(-1), mask.flip(-1)) if self.flips and torch.rand(()) < 0.5 else (image, mask)


@torch.inference_mode()
def evaluate(accelerator, model, loader):
    """The mean loss and the mean IoU of the test samples."""
    model.eval()
    losses, right, found, true = [], *torch.zeros(3, CLASSES, dtype=torch.int64, device=accelerator.device)
    for images, masks in loader:
        logits = model(images)
        loss, classes, masks = accelerator.gather_for_metrics((losses_of(logits, masks), logits.argmax(1), masks))
        losses.append(loss)
        for total, pixels in ((right, masks[classes == masks]), (found, classes), (true, masks)):
            total += pixels.flatten().bincount(minlength=CLASSES)
    return torch.cat(losses).mean().item(), (right / (found + true - right)).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of an update, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    project = ProjectConfiguration(options.output_dir, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(),
        dataloader_config=DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True),
        project_config=project,
    )
    set_seed(options.seed)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate)
    training = DataLoader(Shapes(0, TRAIN, flips=True), options.batch_size, shuffle=True)
    test = DataLoader(Shapes(TRAIN, TEST), 10 * accelerator.num_processes)
    model, optimizer, training, test = accelerator.prepare(model, optimizer, training, test)
    accelerator.register_for_checkpointing(schedule)
    saved = sorted((options.output_dir / "checkpoints").glob("checkpoint_*"), key=lambda path: int(path.name[11:]))
    first = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        first = int(saved[-1].name[11:]) + 1
        project.iteration = first
    accelerator.print(f"epoch {first + 1}")
    for epoch in range(first, options.epochs):
        training.set_epoch(epoch)
        model.train()
        for images, masks in training:
            loss = losses_of(model(images), masks).mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        loss, iou = evaluate(accelerator, model, test)
        accelerator.print(f"epoch {epoch + 1}: test loss {loss}, mean IoU {iou}")
        accelerator.save_state()
    accelerator.save_model(model, options.output_dir)


if __name__ == "__main__":
    main()
