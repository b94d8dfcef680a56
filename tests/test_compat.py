"""The parts of torch, timm and multiprocessing without a public name: a version that changes one fails here first."""

from __future__ import annotations

import multiprocessing
import re
import signal
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import helpers
import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from accel_train import compat

PACKAGE = Path(compat.__file__).parent


@pytest.fixture
def group() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_time_outs_of_collectives_and_of_the_store_are_set(group: None) -> None:
    compat.set_collective_timeout(7)
    backend: Any = distributed.group.WORLD
    assert backend._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=7)
    compat.set_store_timeout(0.2)
    with pytest.raises(RuntimeError, match=r"(?i)time"):  # and not after the 300 s of a new store
        compat.process_group_store().get("nobody sets this")


def test_without_a_process_group_time_outs_have_no_effect() -> None:
    compat.set_collective_timeout(7)
    compat.set_store_timeout(7)


def test_the_store_has_the_keys_of_all_connections(group: None) -> None:
    copy = distributed.PrefixStore("watchdog", compat.process_group_store().clone())
    copy.set("key", "value")
    assert compat.process_group_store().get("watchdog/key") == b"value"
    assert copy.compare_set("end", "", "first") == b"first"
    assert copy.compare_set("end", "", "second") == b"first"


def test_the_scale_is_a_tensor_or_none() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    assert compat.scale_without_waiting(scaler) is None
    scaler.scale(torch.ones(1))
    scale = compat.scale_without_waiting(scaler)
    assert scale is not None and scale.item() == 8.0


@pytest.mark.parametrize(("value", "expected"), [(1.0, 0.0), (float("nan"), 1.0), (float("inf"), 1.0)])
def test_a_nonfinite_value_sets_the_flag_and_no_value_changes(value: float, expected: float) -> None:
    tensors = [torch.tensor([3.0, value]), torch.tensor([2.0], dtype=torch.bfloat16)]
    copies = [tensor.clone() for tensor in tensors]
    flag = torch.zeros(())
    compat.flag_nonfinite(tensors, flag, torch.ones(()))
    assert flag.item() == expected
    assert all(torch.equal(tensor, copy) or value != value for tensor, copy in zip(tensors, copies, strict=True))


def test_only_a_backward_pass_has_a_number() -> None:
    seen = []

    class Layer(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            seen.append(compat.backward_pass())
            return values.exp()

    assert compat.backward_pass() is None
    values = torch.ones(2, requires_grad=True)
    for _ in range(2):
        checkpoint(Layer(), values, use_reentrant=False).sum().backward()
    first, second = seen[1], seen[3]  # of the recomputations
    assert seen == [None, first, None, second] and first != second and None not in (first, second)


def test_wrapped_parts_repeat_their_random_numbers_and_names_show_the_wrappers() -> None:
    model: Any = nn.Sequential(
        nn.Linear(4, 4), checkpoint_wrapper.checkpoint_wrapper(nn.Dropout(), preserve_rng_state=False)
    )
    model.append(torch.compile(checkpoint_wrapper.checkpoint_wrapper(nn.Linear(4, 4))))
    found = compat.checkpoint_wrappers(model)
    assert [type(wrapper).__name__ for wrapper in found] == ["CheckpointWrapper"] * 2
    kinds = {part for name, _ in model.named_parameters() for part in name.split(".")}
    assert kinds == {"0", "2", "weight", "bias", *compat.WRAPPERS}
    compat.repeat_random_numbers(found[0])
    values = torch.ones(1000, requires_grad=True)
    output = found[0](values)
    output.sum().backward()
    assert values.grad is not None and torch.equal(values.grad, output.detach())  # the same mask, both times


def test_the_bases_of_layers_are_those_of_torch() -> None:
    assert all(issubclass(kind, compat.NormBase) for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm))
    assert {"p", "inplace"} <= vars(nn.Dropout2d(0.5)).keys()


def test_a_dispatch_mode_sees_each_operation() -> None:
    seen = []

    class Watch(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.ones(2).sum().item()
    assert torch.ops.aten._local_scalar_dense.default in seen


# Started as a script, whose main module a worker of multiprocessing's own would import again.
SCRIPT = """
import os, sys
from multiprocessing.context import ForkServerContext
from accel_train.compat import ForkServerWorker, start_fork_server

class Context(ForkServerContext):
    Process = ForkServerWorker

if __name__ != "__main__":
    raise SystemExit("the main module was imported")
start_fork_server()
worker = Context().Process(target=os.getpid)
worker.start()
worker.join()
assert sys.modules["__main__"].__file__ == sys.argv[0]
sys.exit(worker.exitcode)
"""


def test_a_worker_does_not_import_the_main_module(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = helpers.python(script)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_the_resource_tracker_unblocks_signals() -> None:
    """worker_processes.py blocks them again."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        compat.start_resource_tracker()
        assert resource_tracker._resource_tracker._fd is not None  # type: ignore[attr-defined]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert callable(multiprocessing.set_forkserver_preload)


def test_no_other_file_uses_a_private_part_of_torch_or_multiprocessing() -> None:
    private = re.compile(
        r"torch\._[A-Zad-z]|torch\.(\w+\.)+_[a-z]|from (torch|multiprocessing).* import .*\b_\w|_Popen\(process|"
        r"(forkserver|resource_tracker)\."
    )
    documented = re.compile(r"torch\._(foreach|dynamo)_?|torch\.ops\.aten\.")
    allowed = {"compat.py"}
    found = [
        f"{name}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := str(path.relative_to(PACKAGE))) not in allowed
        for line in path.read_text().splitlines()
        if private.search(documented.sub("", line))
    ]
    assert not found
