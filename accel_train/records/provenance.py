"""What made a run: the user's own code, and the environment (versions, devices, launcher, commit)."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train.checkpoint.directory import PACKAGES, versions
from accel_train.config.schema import Config, value
from accel_train.user_code.reference import (
    OBJECT,
    PREFIXES,
    Reference,
    code_file,
    file_hash,
    metric_name,
    parse_reference,
    texts_of,
)


def references(config: Config) -> dict[str, Reference]:
    """Return the options of `config` that name a user's code: "model.name" -> its Reference.

    A metric has the key of `metric_key`.
    """
    found = {}
    for option in PREFIXES:
        for text in texts_of(value(config, option)):
            if (reference := parse_reference(option, text)) is not None:
                found[option if option != "metrics" else metric_key(text)] = reference
    return found


def metric_key(text: str) -> str:
    """Return the key of a metric of --metrics in code.json: "metrics:auc"."""
    return f"metrics:{metric_name(text)}"


def code_facts(config: Config) -> dict[str, str]:
    """Return what is equal on processes that have the same code: the hashes of the user's files as one text, and the
    hash of the weights of a model object."""
    used = references(config)
    hashes = " ".join(f"{option} {digest}" for option, digest in _hashes(used).items())
    if OBJECT not in {reference.module for reference in used.values()}:
        return {"code": hashes}
    from accel_train.user_code.reference import weights_hash

    return {"code": hashes, "the weights of the model (give a function that makes it)": weights_hash()}


def _hashes(used: Mapping[str, Reference]) -> dict[str, str]:
    """The SHA-256 of each file among `references`."""
    files = {option: code_file(reference) for option, reference in used.items()}
    return {option: file_hash(path) for option, path in files.items() if path is not None}


LAUNCHER = {
    "": "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS "
        "OMP_WAIT_POLICY MKL_NUM_THREADS CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER CUDA_LAUNCH_BLOCKING "
        "CUBLAS_WORKSPACE_CONFIG PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF NVIDIA_TF32_OVERRIDE GLOO_SOCKET_IFNAME "
        "ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES SLURMD_NODENAME",
    "ACCELERATE_": "USE_CPU MIXED_PRECISION GRADIENT_ACCUMULATION_STEPS GRADIENT_CLIPPING NUM_PROCESSES TORCH_DEVICE "
        "CPU_AFFINITY DEBUG_MODE DOWNCAST_BF16 FP8_BACKEND USE_FSDP USE_DEEPSPEED USE_MEGATRON_LM "
        "USE_PARALLELISM_CONFIG DYNAMO_BACKEND DYNAMO_MODE DYNAMO_USE_FULLGRAPH DYNAMO_USE_DYNAMIC "
        "DYNAMO_USE_REGIONAL_COMPILATION",
    "FSDP_": "VERSION SHARDING_STRATEGY RESHARD_AFTER_FORWARD OFFLOAD_PARAMS AUTO_WRAP_POLICY MIN_NUM_PARAMS "
        "TRANSFORMER_CLS_TO_WRAP BACKWARD_PREFETCH FORWARD_PREFETCH STATE_DICT_TYPE USE_ORIG_PARAMS "
        "CPU_RAM_EFFICIENT_LOADING SYNC_MODULE_STATES ACTIVATION_CHECKPOINTING",
    "TORCHELASTIC_": "RUN_ID RESTART_COUNT MAX_RESTARTS USE_AGENT_STORE",
    "NCCL_": "DEBUG SOCKET_IFNAME SOCKET_FAMILY SOCKET_NTHREADS NSOCKS_PERTHREAD NET NET_PLUGIN NET_GDR_LEVEL "
        "NET_GDR_READ IB_DISABLE IB_HCA IB_GID_INDEX IB_TC IB_SL IB_TIMEOUT IB_RETRY_CNT IB_QPS_PER_CONNECTION "
        "P2P_DISABLE P2P_LEVEL SHM_DISABLE ALGO PROTO BUFFSIZE NTHREADS MIN_NCHANNELS MAX_NCHANNELS MIN_CTAS MAX_CTAS "
        "CROSS_NIC NVLS_ENABLE COLLNET_ENABLE CUMEM_ENABLE ASYNC_ERROR_HANDLING BLOCKING_WAIT TOPO_FILE",
    "TORCH_NCCL_": "ASYNC_ERROR_HANDLING BLOCKING_WAIT ENABLE_MONITORING HEARTBEAT_TIMEOUT_SEC",
    "SLURM_": "JOB_ID JOB_NAME JOB_PARTITION JOB_QOS JOB_NODELIST JOB_NUM_NODES JOB_CPUS_PER_NODE JOB_GPUS "
        "JOB_START_TIME JOB_END_TIME ARRAY_JOB_ID ARRAY_TASK_ID CLUSTER_NAME RESTART_COUNT NNODES NTASKS "
        "NTASKS_PER_NODE TASKS_PER_NODE CPUS_PER_TASK CPUS_ON_NODE MEM_PER_NODE MEM_PER_CPU MEM_PER_GPU GPUS "
        "GPUS_PER_NODE GPUS_PER_TASK GPUS_ON_NODE STEP_ID STEP_NODELIST STEP_NUM_NODES STEP_NUM_TASKS "
        "STEP_TASKS_PER_NODE PROCID LOCALID NODEID CPU_BIND DISTRIBUTION SUBMIT_DIR",
    "PBS_": "JOBID JOBNAME QUEUE ENVIRONMENT NODEFILE NODENUM VNODENUM TASKNUM NP NUM_NODES NUM_PPN ARRAY_ID "
        "ARRAY_INDEX O_HOST O_QUEUE O_WORKDIR",
    "OMPI_COMM_WORLD_": "RANK SIZE LOCAL_RANK LOCAL_SIZE NODE_RANK",
    "PMI_": "RANK SIZE LOCAL_RANK LOCAL_SIZE",
    "PMIX_": "RANK NAMESPACE",
}  # fmt: skip
"""The variables that say how a run was started, or change its numbers or its speed: prefix -> the rest of their names.

Only these are recorded. Any other one may be a secret, whatever its name: a run's folder is given away.
"""


def environment(world_size: int, devices: list[str], precision: str = "fp32") -> dict[str, Any]:
    """Return the versions, devices, precision, host, launcher, commit and command line of a run. Imports torch."""
    import torch

    packages = versions((*PACKAGES, "numpy", "pillow", "simplejpeg"), missing="not installed")
    python = packages.pop("python")
    packages["torch"] = torch.__version__  # with its build: +cpu, +cu130
    names = sorted(prefix + name for prefix, rest in LAUNCHER.items() for name in rest.split())
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
        "launcher": {name: os.environ[name] for name in names if name in os.environ},
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
