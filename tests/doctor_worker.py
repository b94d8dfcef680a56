"""`python doctor_worker.py FOLDER COMMAND WORDS…`: `accel-train COMMAND WORDS`, where rank 1 is on a node that is ill.

Its clock is five minutes slow, its products of matrices are slow, and one of its images is another one; it has a
variable of NCCL's, another driver, another timm, and another NCCL_DEBUG, which does no harm. With FAULT=memory it has
only too little memory for an update, and with FAULT=data no data.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

folder, words = Path(sys.argv[1]), sys.argv[2:]
fault = os.environ.pop("FAULT", "node") if os.environ.get("RANK") == "1" else ""
if fault == "node":
    os.environ |= {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    now = time.time
    time.time = lambda: now() - 300

    other = folder / "timm-0.1.dist-info"  # as in an environment with another timm
    other.mkdir(exist_ok=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: timm\nVersion: 0.1\n")
    sys.path.insert(0, str(folder))

import torch  # noqa: E402

if fault == "node":
    product = torch.Tensor.__matmul__

    def slow(self: torch.Tensor, other: Any) -> torch.Tensor:
        time.sleep(0.5)
        return product(self, other)

    torch.Tensor.__matmul__ = slow  # type: ignore[assignment, method-assign]
elif fault == "memory":

    def backward(self: torch.Tensor, *given: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    torch.Tensor.backward = backward  # type: ignore[method-assign]
if "--data.name" in words:
    words += ["--data.root", str(folder / {"node": "1", "data": "2"}.get(fault, "0"))]

from accel_train.cli import main  # noqa: E402
from accel_train.tools.doctor import job  # noqa: E402

if fault == "node":
    job.DRIVER = folder / "driver"
    job.DRIVER.write_text("NVRM version: 535.183.01\nGCC version: 12\n")
sys.exit(main(words))
