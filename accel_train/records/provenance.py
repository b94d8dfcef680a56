"""What made a run: the user's own code, and the environment (versions, devices, launcher, commit).

code.json names the user's code, and code/ keeps the text of each file. Only the named files are kept; what they import
is recorded by version or hash, but not copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from accel_train.checkpoint.format import PACKAGES, versions
from accel_train.config.option_types import value
from accel_train.config.schema import Config, to_yaml
from accel_train.errors import UserError
from accel_train.untrusted import is_file_name, parse_json, read_regular_file
from accel_train.user_code.reference import (
    OBJECT,
    PREFIXES,
    Reference,
    code_file,
    file_hash,
    metric_name,
    missing,
    parse_reference,
    texts_of,
)

FILE, FOLDER = "code.json", "code"


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
    from accel_train.user_code.objects import weights_hash

    return {"code": hashes, "the weights of the model (give a function that makes it)": weights_hash()}


def _hashes(used: Mapping[str, Reference]) -> dict[str, str]:
    """The SHA-256 of each file among `references`."""
    files = {option: code_file(reference) for option, reference in used.items()}
    return {option: file_hash(path) for option, path in files.items() if path is not None}


def keep_code(config: Config, run: Path, write: Callable[[str, bytes], object], update: int) -> list[str]:
    """Keep the user's code in the folder `run`, by `write(name, content)`. Returns notes about what has changed.

    `update`: the number of updates before this start.
    """
    used = references(config)
    if not used:
        return []
    from accel_train.user_code.record import imports

    before, notes = _read(run), []
    now: dict[str, dict[str, Any]] = {}
    for option, reference in used.items():
        path = code_file(reference)
        if path is None:  # a module that is not a file of Python
            now[option] = {"reference": str(reference)}
            continue
        kept = f"{FOLDER}/{path.stem}-{file_hash(path)[:12]}.py"
        write(kept, read_regular_file(path, follow=True))
        old = before.get(option, {})
        earlier = old.get("earlier", [])
        if old.get("sha256", file_hash(path)) != file_hash(path):
            earlier = [*earlier, {"kept": old.get("kept"), "sha256": old["sha256"], "until_update": update}]
            notes.append(
                f"{option}: {path} has changed since the last start of this run. From update {update} on the new text "
                f"is used; the old one is {old.get('kept')}."
            )
        now[option] = {
            "reference": str(reference),
            "kept": kept,
            "sha256": file_hash(path),
            "imports": imports(path),
            "earlier": earlier,
        }
    write(FILE, (json.dumps(now, indent=2) + "\n").encode())
    return notes


def remember_training(config: Config) -> list[str]:
    """Record outside the run's folder that this user trains with this code. Returns a note if that is not possible."""
    used = references(config)
    if not used and not config.model.kwargs:
        return []
    from accel_train.user_code.record import remember

    try:
        remember(to_yaml(config), _hashes(used))
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
        return [
            f"your folder for the state of programs cannot be used ({error}): evaluate, predict, report and export "
            "will ask for --trust-code true for this run. Set XDG_STATE_HOME to a folder of yours."
        ]
    return []


def trained_code(run: Path, text: str) -> dict[str, str] | None:
    """Return the SHA-256 of the code of the run in the folder `run` (option -> hash), if this user has trained the run:
    with `text` as its config.yaml and with this code. Else None.

    A record outside the folder says so: what is in the folder may have been written by anybody, at any time. So what
    is returned, not what is in the folder a moment later, is the code that may be run.
    """
    from accel_train.user_code.record import is_remembered

    code = {}
    try:
        for option, entry in _read(run).items():
            name = str(entry.get("kept", "")).removeprefix(f"{FOLDER}/")
            if is_file_name(name):
                code[option] = hashlib.sha256(read_regular_file(run / FOLDER / name, follow=True)).hexdigest()
    except (OSError, ValueError):
        return None
    return code if is_remembered(text.encode(), code) else None


def _read(run: Path) -> dict[str, dict[str, Any]]:
    """Return the content of code.json; {} if there is none. Raises UserError if it is damaged."""
    path = run / FILE
    if not path.exists():
        return {}
    try:
        content = parse_json(read_regular_file(path, follow=True))
        if not (isinstance(content, dict) and all(isinstance(entry, dict) for entry in content.values())):
            raise ValueError("it is not a table of options")
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy it again from where the model was trained.") from error
    return content


def code_to_run(option: str, reference: Reference, run: Path, *, trained: Mapping[str, str] | None, trust: bool) -> str:
    """Return the value of `option` that runs the code which the run in the folder `run` keeps for it. Runs none of it.

    `reference`: as it was given to the run. Raises UserError if the code is missing, or if nobody has said that it is
    safe. It is if `trust`, or if this user has trained the run (see `trained_code`) and the file that the run names is
    as it was. A module is run by its name only if `trained`: else the kept text is what one can read.
    """
    name = str(_read(run).get(option, {}).get("kept", "")).removeprefix(f"{FOLDER}/")
    path = run / FOLDER / name
    is_object = reference.module == OBJECT  # which has no file of its own
    if is_object and not name:
        raise UserError(missing(option, reference))
    if not (is_file_name(name) and path.is_file()):
        raise UserError(
            f"--{option.partition(':')[0]} {reference.short}: the run does not have the text of this code ({FILE} and "
            f"{FOLDER}/); copy them again from where the model was trained."
        )
    named = path if is_object else code_file(reference)
    kept = f"{path.absolute()}:{reference.name.partition('#')[0]}"
    found = file_hash(named) if named is not None and _is_own(named) else ""
    if trained is not None and found and found == trained.get(option):
        return kept if is_object else str(reference)
    same = found == file_hash(path)
    if trust:
        return str(reference) if same and reference.file else kept
    reason = "this file is missing, is not yours, or has changed"
    if same:
        reason = "you have not trained the run with this configuration on this machine"
    raise UserError(
        f"--{option.partition(':')[0]} {reference}: the run uses its own code, but {reason}. Read {path} and the "
        "arguments in config.yaml; if you trust them, add --trust-code true."
    )


def _is_own(path: Path) -> bool:
    try:
        return path.is_file() and path.stat().st_uid in (os.getuid(), 0)
    except OSError:
        return False


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

    packages = versions((*PACKAGES, "numpy", "pillow"), missing="not installed")
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
