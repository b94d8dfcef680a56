"""The environment of a run: versions, devices, launcher, commit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train.checkpoint.format import PACKAGES, versions

LAUNCHER_PREFIXES = ("ACCELERATE_", "SLURM_", "PBS_", "OMPI_COMM_", "PMI_", "NCCL_", "TORCHELASTIC_", "FSDP_")

LAUNCHER_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip

SECRETS = ("TOKEN", "JWT", "KEY", "SECRET", "PASSWORD")


def environment(world_size: int, devices: list[str], precision: str = "fp32") -> dict[str, Any]:
    """Return the versions, devices, precision, host, launcher, commit and command line of a run. Imports torch."""
    import torch

    packages = versions((*PACKAGES, "numpy", "pillow"), missing="not installed")
    python = packages.pop("python")
    packages["torch"] = torch.__version__  # with its build: +cpu, +cu130
    launcher = {
        name: value
        for name, value in sorted(os.environ.items())
        if (name in LAUNCHER_NAMES or name.startswith(LAUNCHER_PREFIXES)) and not any(word in name for word in SECRETS)
    }
    return {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": sys.argv,
        "host": platform.node(),
        "platform": platform.platform(),
        "python": python,
        "packages": packages,
        "cuda": torch.version.cuda,
        "world_size": world_size,
        "devices": devices,
        "precision": precision,
        "cores": os.cpu_count(),
        "commit": _commit(Path(__file__).parent.parent),
        "launcher": launcher,
    }


def _commit(folder: Path) -> str | None:
    """Return the git commit of the package ("…-dirty" with changes), or None if it is not a checkout."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "__init__.py")  # an installed copy may be inside another repository
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None
