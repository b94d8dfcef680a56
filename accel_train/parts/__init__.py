"""The promises of the trainer for a loop of your own on Accelerate. EXPERIMENTAL: a later version may change all of it.

`accel-train train` uses the same classes and functions: here are those that know nothing of classes and recipes, with a
few lines around them. docs/own_loop.md explains them, and examples/segmentation.py is a whole program.

    from accel_train import parts

    with parts.StopRequests() as requests:
        accelerator = parts.connect()
        plan = parts.share_batch(accelerator, samples=50_000, batch_size=256)
        sampler = parts.TrainingSampler(plan, seed)
        loader = parts.create_loader(accelerator, dataset, sampler)
        with parts.Checkpoints(directory, accelerator, model, optimizer, requests, plan, seed=seed) as checkpoints:
            state = checkpoints.restore()
"""

from accel_train.checkpoint.train_state import TrainState
from accel_train.data.order.plan import Plan
from accel_train.data.order.samplers import EvaluationSampler, IndexBatch, TrainingSampler
from accel_train.errors import UnsavedError, UserError
from accel_train.exact_sum import ExactGradients, exact_sum
from accel_train.keyed import hashed, key, permuted, uniform, uniforms
from accel_train.models.batchnorm import VirtualBatches
from accel_train.optim.bitwise import compute_deterministically, seed_pass
from accel_train.ownership.lease import LostError
from accel_train.parts.checkpoints import Checkpoints
from accel_train.parts.program import connect, create_loader, run_program, share_batch
from accel_train.run.stopping import StopAskedError, StopRequests

__all__ = [
    "Checkpoints",
    "EvaluationSampler",
    "ExactGradients",
    "IndexBatch",
    "LostError",
    "Plan",
    "StopAskedError",
    "StopRequests",
    "TrainState",
    "TrainingSampler",
    "UnsavedError",
    "UserError",
    "VirtualBatches",
    "compute_deterministically",
    "connect",
    "create_loader",
    "exact_sum",
    "hashed",
    "key",
    "permuted",
    "run_program",
    "seed_pass",
    "share_batch",
    "uniform",
    "uniforms",
]
