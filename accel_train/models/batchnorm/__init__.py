"""BatchNorm over virtual batches: the same statistics on any number of processes.

BatchNorm normalises by the mean and the variance of the samples that are computed together. In plain data-parallel
training these are the micro-batch of one process, so another number of processes trains another model. Here they are a
*virtual batch*: a fixed number of consecutive samples of the update's batch, which one process computes, whichever it
is. Hoffer et al. 2017 (arxiv.org/abs/1705.08741) call this Ghost Batch Normalization, and find that it generalises
better than statistics of a large batch.

The running statistics, which evaluation uses, are updated once per update, by the mean over its virtual batches on all
processes, and over all calls of a layer that a forward pass calls several times. Padding never counts, nor does a call
that gradient checkpointing repeats.
"""

from accel_train.models.batchnorm.layers import has_batchnorm, virtual_class
from accel_train.models.batchnorm.virtual_batches import VirtualBatches

__all__ = ["VirtualBatches", "has_batchnorm", "virtual_class"]
