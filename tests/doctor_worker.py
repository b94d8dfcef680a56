"""`python doctor_worker.py FOLDER WORDS…`: `accel-train doctor WORDS`, where rank 1 has what users' nodes had.

Its clock is slow, its products of matrices are slow, and one of its images is another one; it has another NCCL_DEBUG
and another driver, and writes to a folder that rank 0 does not see. With FAULT=memory it has only too little memory for
an update.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

folder, words = Path(sys.argv[1]), sys.argv[2:]
fault = os.environ.pop("FAULT", "node") if os.environ.get("RANK") == "1" else ""
if fault == "node":
    os.environ["NCCL_DEBUG"] = "INFO"
    now = time.time
    time.time = lambda: now() - 90

import torch  # noqa: E402

if fault == "node":
    product = torch.Tensor.__matmul__

    def slow(self: torch.Tensor, other: Any) -> torch.Tensor:
        time.sleep(0.1)
        return product(self, other)

    torch.Tensor.__matmul__ = slow  # type: ignore[assignment, method-assign]
    folder /= "1"
    words += ["--data.root", str(folder), "--output-dir", str(folder / "runs" / "a")]
elif fault == "memory":

    def backward(self: torch.Tensor, *given: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    torch.Tensor.backward = backward  # type: ignore[method-assign]
elif "--data.name" in words:
    folder /= "0"
    words += ["--data.root", str(folder), "--output-dir", str(folder / "runs" / "a")]

from accel_train.cli import main  # noqa: E402
from accel_train.doctor import world  # noqa: E402

if fault == "node":
    world._driver = lambda: "NVRM version: 535.183.01"
sys.exit(main(["doctor", *words]))
