"""The parts of torch and multiprocessing that the package uses and that have no public name, or no documented one.

They were last checked with torch 2.15 and Python 3.11. tests/test_compat.py uses each of them, and fails if one
disappears or changes its meaning. torch documents its `_foreach_` functions.
"""

from __future__ import annotations

import multiprocessing.util
import os
import sys
import tempfile
from collections.abc import Iterable
from datetime import timedelta
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["ForkServerContext", "NormBase", "TorchDispatchMode"]  # handed on as they are

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Parts of parameter names that torch.compile and gradient checkpointing add."""


def checkpoint_wrappers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` that torch's CheckpointWrapper recomputes in the backward pass."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    return [module for module in model.modules() if isinstance(module, CheckpointWrapper)]


def repeat_random_numbers(wrapper: nn.Module) -> None:
    """Let a CheckpointWrapper recompute with the same random numbers, which Accelerate 1.15 turns off."""
    cast(Any, wrapper).checkpoint_fn.keywords["preserve_rng_state"] = True


def backward_pass() -> int | None:
    """Return the number of the backward pass that is under way in this thread; None outside of one."""
    number = torch._C._current_graph_task_id()
    return None if number == -1 else number


def set_collective_timeout(seconds: float, group: Any = None) -> None:
    """From now on a collective (of `group`) that takes longer raises an error; no effect on a single process.

    torch 2.15 has the public torch.distributed.set_timeout; in older versions the same function is `_set_pg_timeout`.
    """
    if distributed.is_initialized():
        set_timeout = getattr(distributed, "set_timeout", None) or distributed.distributed_c10d._set_pg_timeout
        set_timeout(timedelta(seconds=seconds), group)


def process_group_store() -> Any:
    """Return the store in which the processes of the default group meet."""
    return distributed.distributed_c10d._get_default_store()


def set_store_timeout(seconds: float) -> None:
    """Set how long a process waits in the process group's store for another process's first collective."""
    if distributed.is_initialized():
        process_group_store().set_timeout(timedelta(seconds=seconds))


def scale_without_waiting(scaler: torch.amp.GradScaler) -> Tensor | None:
    """Return the loss scale, float32 [1] on the device; None before the first backward pass.

    The public `get_scale()` returns a float and therefore waits for the device.
    """
    return scaler._get_scale_async()


def flag_nonfinite(tensors: Iterable[Tensor], flag: Tensor, one: Tensor) -> None:
    """Set `flag` (float32 [], on the device) to 1 if a value is not finite; it stays as it is otherwise.

    Uses the GradScaler's kernel, one launch for many tensors of one dtype. `one`: a 1 like `flag`, the factor by which
    the kernel multiplies the tensors, so that it does not change them.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same_dtype, flag, one)


# Of multiprocessing.


start_resource_tracker = resource_tracker.ensure_running
"""Start the process that removes what others have left in shared memory. Unblocks SIGINT and SIGTERM in this thread."""
start_fork_server = forkserver.ensure_running
"""Start this process's fork server, which imports the preloaded modules, unless it runs."""


_LONGEST = 107 - len("/pymp-12345678/listener-12345678")
"""Bytes of a folder's path in which multiprocessing can make its sockets: a socket's path has at most 107 (unix(7))."""


def shorten_socket_paths() -> None:
    """Let this process and its workers have their sockets in /tmp if the path of the folder for temporary files is too
    long. (Python 3.14 does so itself.) Raises OSError."""
    before = tempfile.gettempdir()
    if len(os.fsencode(before)) <= _LONGEST:
        return
    tempfile.tempdir = "/tmp"
    try:
        multiprocessing.util.get_temp_dir()  # makes a folder once; it is removed when this process ends
    finally:
        tempfile.tempdir = before


class ForkServerWorker(ForkServerProcess):
    """A process of the fork server that does not import the main module of the process that starts it."""

    ensure_server = staticmethod(start_fork_server)
    """Called before each start: the server may have ended."""

    @classmethod
    def _Popen(cls, process_obj: Any) -> Any:  # noqa: N802 -- multiprocessing's name
        """Start the process with an empty main module in place of this process's.

        multiprocessing would import the main module, the training script, in case a pickled object is defined there.
        None is.
        """
        cls.ensure_server()
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process_obj)
        finally:
            sys.modules["__main__"] = main
