"""Trains a small model with BatchNorm and dropout by `accel_train.parts`: parts_worker.py DIRECTORY UPDATES [plain].

Its samples are 50 rows of 6 numbers; an update has 24 in virtual batches of 4, so the last one of an epoch has 2. With
"plain" the BatchNorm is not converted.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_convert

from accel_train import parts

SEED, ROWS = 5, 50


class Rows(Dataset):
    def __getitems__(self, batch: parts.IndexBatch) -> dict[str, torch.Tensor]:
        rows = parts.uniforms(parts.hashed(parts.key("rows"), batch.ids), range(6)).T
        return {"rows": rows + parts.uniform(batch.keys(SEED), 0)[:, None], "weights": batch.weights}


def main() -> None:
    directory, last, *plain = sys.argv[1:]
    with parts.StopRequests() as requests:
        accelerator = parts.connect()
        torch.manual_seed(SEED)
        bare = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        plan = parts.share_batch(accelerator, ROWS, 24, 4)
        norms = None if plain else parts.VirtualBatches(bare, plan.virtual_batch, exact=plan.virtual_batches)
        model, optimizer = accelerator.prepare(bare, torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9))
        order = parts.TrainingSampler(plan, SEED)
        rows: DataLoader = DataLoader(Rows(), batch_sampler=order, collate_fn=default_convert)  # type: ignore[arg-type]
        loader = accelerator.prepare(rows)
        gradients = parts.ExactGradients(list(bare.parameters()), plan.virtual_batches)
        prepared = accelerator, model, optimizer
        with parts.open_run(Path(directory), *prepared, requests, plan, seed=SEED) as (run, state):
            while state.update < int(last):
                order.seek(state.epoch, state.epoch_samples)
                for number, batch in enumerate(loader):
                    number %= plan.accumulation
                    samples = plan.real_samples(state.epoch_samples)
                    if batch["weights"].any():
                        parts.seed_pass(SEED, accelerator, state.update, number)
                        norms.begin(batch["weights"], padded=samples < plan.batch_size, may_be_empty=plan.empty > 0)
                        with accelerator.no_sync(model):
                            losses = (model(batch["rows"])[:, 0] - batch["rows"].sum(1)).square()
                            accelerator.backward((losses * batch["weights"]).sum())
                        gradients.add()
                    if number < plan.accumulation - 1:
                        continue
                    gradients.finish(samples)
                    norms.sum_processes()
                    optimizer.step()
                    norms.end_update()
                    optimizer.zero_grad()
                    state.update, state.epoch_samples = state.update + 1, state.epoch_samples + samples
                    requests.poll()
                    if state.update == int(last):
                        break
                if plan.updates_from(state.epoch_samples) == 0:
                    state.begin_epoch(state.epoch + 1)
            run.save(state, wait=True)
            run.publish_weights(state.update)


if __name__ == "__main__":
    sys.exit(parts.run_program(main))
