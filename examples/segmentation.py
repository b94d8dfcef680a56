"""Segment generated shapes: a loop of your own on Accelerate, with the promises of accel_train (docs/from_python.md).

    python examples/segmentation.py --output-dir runs/shapes
    accelerate launch --config_file accelerate_configs/multi_cpu.yaml examples/segmentation.py --output-dir runs/shapes

Kill it and start it again, on another number of processes: the weights are the same, to the bit.
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, default_convert

from accel_train import parts

TRAIN, TEST, SIZE, CLASSES = 300, 100, 24, 3  # samples; pixels a side; background, disc, square


def draw(numbers):
    """A disc and a square in noise: images [b, 1, SIZE, SIZE] and masks [b, SIZE, SIZE], a function of the numbers."""
    keys = parts.hashed(parts.key("shapes"), numbers)
    y, x, radius, v, u, half = parts.uniforms(keys, range(6))[:, :, None, None]  # each [b, 1, 1], 0 to 1
    rows, columns = torch.arange(SIZE)[:, None], torch.arange(SIZE)
    disc = (rows - SIZE * y) ** 2 + (columns - SIZE * x) ** 2 < (4 + 4 * radius) ** 2
    square = torch.maximum((rows - SIZE * v).abs(), (columns - SIZE * u).abs()) < 3 + 3 * half
    masks = torch.where(square, 2, disc.long())
    noise = parts.uniforms(keys, range(6, 6 + SIZE * SIZE)).T.reshape(-1, SIZE, SIZE)
    return (masks + noise - 1)[:, None], masks


class Shapes(Dataset):
    def __init__(self, first, count, seed=None):
        self.images, self.masks = draw(torch.arange(first, first + count))
        self.seed = seed  # of the random flips; None: no flips

    def __getitems__(self, batch):
        """A whole batch at once: a sample's number is in `ids`; its weight is 1, or 0 if it is only padding."""
        images, masks = self.images[batch.ids], self.masks[batch.ids]
        if self.seed is not None:
            flipped = parts.uniform(batch.keys(self.seed), 0) < 0.5  # a key of the sample, another one in each epoch
            images = torch.where(flipped[:, None, None, None], images.flip(-1), images)
            masks = torch.where(flipped[:, None, None], masks.flip(-1), masks)
        return {"images": images, "masks": masks, "weights": batch.weights}


def block(inputs, outputs):
    # GroupNorm, not BatchNorm: what a sample gives must not depend on the other samples of its batch.
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.middle, self.bottom = block(1, 8), block(8, 16), block(16, 32)
        self.dropout, self.up = nn.Dropout2d(0.1), block(32 + 16, 16)
        self.out = nn.Sequential(block(16 + 8, 8), nn.Conv2d(8, CLASSES, 1))

    def forward(self, images):
        top = self.top(images)
        middle = self.middle(F.max_pool2d(top, 2))
        bottom = self.dropout(self.bottom(F.max_pool2d(middle, 2)))
        middle = self.up(torch.cat([F.interpolate(bottom, scale_factor=2), middle], 1))
        return self.out(torch.cat([F.interpolate(middle, scale_factor=2), top], 1))


def losses_of(logits, masks):
    """Cross-entropy plus Dice loss of each sample, [b]."""
    truth, probabilities = F.one_hot(masks, CLASSES).movedim(-1, 1).float(), logits.softmax(1)
    dice = (2 * (probabilities * truth).sum((2, 3)) + 1) / ((probabilities + truth).sum((2, 3)) + 1)
    return F.cross_entropy(logits, masks, reduction="none").mean((1, 2)) + 1 - dice.mean(1)


def learning_rate(update):
    """Warm-up, then a slow decay: a function of the update's number alone, so there is nothing to save."""
    return 0.01 * min((update + 1) / 10, (10 / (update + 1)) ** 0.5)


@torch.inference_mode()
def evaluate(accelerator, model, batches):
    """The mean loss and the mean IoU of all test samples, each counted once; the same on all processes."""
    model.eval()
    losses, right, found, true = [], *torch.zeros(3, CLASSES, dtype=torch.int64, device=accelerator.device)
    for batch in batches:
        counted = batch["weights"] > 0  # the last batch is filled up with other samples
        logits, masks = model(batch["images"])[counted], batch["masks"][counted]
        losses.append(losses_of(logits, masks))
        classes = logits.argmax(1)
        for total, pixels in ((right, masks[classes == masks]), (found, classes), (true, masks)):
            total += pixels.flatten().bincount(minlength=CLASSES)
    right, found, true = accelerator.reduce(torch.stack([right, found, true]))  # integers: their sum has no order
    loss = parts.exact_sum(torch.cat(losses)[:, None], TEST).item() / TEST
    return loss, (right / (found + true - right)).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="samples of an update, over all processes")
    parser.add_argument("--virtual-batch", type=int, default=4, help="samples of a forward pass")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with parts.StopRequests() as requests:  # from here on Ctrl-C, SIGTERM and SIGUSR1 ask for a checkpoint
        accelerator = parts.connect()  # Accelerate's own, with deterministic kernels
        torch.manual_seed(options.seed)
        model = UNet()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        plan = parts.share_batch(accelerator, TRAIN, options.batch_size, options.virtual_batch)
        order = parts.TrainingSampler(plan, options.seed)
        in_turn = parts.EvaluationSampler(TEST, 10 * accelerator.num_processes)
        # The samplers give whole batches of samples' numbers, and Accelerate gives each process its slice of each.
        training = DataLoader(Shapes(0, TRAIN, options.seed), batch_sampler=order, collate_fn=default_convert)
        test = DataLoader(Shapes(TRAIN, TEST), batch_sampler=in_turn, collate_fn=default_convert)
        training, test = accelerator.prepare(training, test)
        gradients = parts.ExactGradients(list(model.parameters()), plan.virtual_batches)
        prepared = accelerator, model, optimizer
        # Within this block these processes alone own the directory.
        with parts.open_run(options.output_dir, *prepared, requests, plan, seed=options.seed) as (run, state):
            accelerator.print(f"epoch {state.epoch + 1}, after update {state.update}")
            try:
                while state.epoch < options.epochs:
                    order.seek(state.epoch, state.epoch_samples)
                    model.train()
                    for number, batch in enumerate(training):
                        number %= plan.accumulation  # of the forward pass in its update
                        if batch["weights"].any():  # else it is only padding
                            parts.seed_pass(options.seed, accelerator, state.update, number)  # dropout's
                            with accelerator.no_sync(model):  # DDP does not sum the gradients: `finish` does
                                losses = losses_of(model(batch["images"]), batch["masks"])
                                accelerator.backward((losses * batch["weights"]).sum())
                            gradients.add()
                        if number < plan.accumulation - 1:
                            continue
                        samples = plan.real_samples(state.epoch_samples)
                        gradients.finish(samples)  # the sum of all processes, divided by the samples
                        for group in optimizer.param_groups:
                            group["lr"] = learning_rate(state.update)
                        optimizer.step()
                        optimizer.zero_grad()
                        state.update += 1
                        state.epoch_samples += samples
                        stop, save = requests.poll()  # all processes agree
                        if stop:
                            raise parts.StopAskedError
                        if save:
                            run.save(state)
                    loss, iou = evaluate(accelerator, model, requests.interruptible(test))
                    accelerator.print(f"epoch {state.epoch + 1}: test loss {loss}, mean IoU {iou}")
                    state.begin_epoch(state.epoch + 1)
                    run.save(state, wait=state.epoch == options.epochs)
                run.publish_weights(state.update)  # model.safetensors
            except parts.StopAskedError:
                run.save(state, wait=True)
                accelerator.print(f"stopped after update {state.update}; the same command goes on")


if __name__ == "__main__":
    sys.exit(parts.run_program(main))
