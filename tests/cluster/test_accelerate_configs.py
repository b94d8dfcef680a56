"""Each accelerate config is loaded by the installed accelerate; those that need no GPU are run."""

import contextlib
import io
import os

import helpers
import pytest
import worlds
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

DIRECTORY = helpers.ROOT / "accelerate_configs"
IGNORED_BY_ACCELERATE = {"rdzv_backend", "same_network", "enable_cpu_affinity"}  # only on the launch line
NAMES = [
    "cpu", "fsdp2", "marvin_4xa100", "mps", "multi_cpu", "multi_gpu", "multi_node", "noctua2_4xa100",
    "palmetto_2x2", "single_gpu", "xpu",
]  # fmt: skip


def test_there_is_one_for_each_kind_of_machine() -> None:
    assert sorted(path.stem for path in DIRECTORY.iterdir()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_takes_every_setting(name: str) -> None:
    path = DIRECTORY / f"{name}.yaml"
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    text = path.read_text()
    assert text.startswith("# ") and "accelerate launch --config_file accelerate_configs/" in text
    keys = {line.split(":")[0] for line in text.splitlines() if line and line[0] not in "# "}
    assert not keys & IGNORED_BY_ACCELERATE
    line = ["--config_file", str(path)]
    if name == "multi_node":
        line += [
            "--multi_gpu",
            "--num_machines=2",
            "--num_processes=8",
            "--machine_rank=1",
            "--main_process_ip=a",
        ]
    parser = launch_command_parser()
    # as `accelerate launch` does: the options given on the line are not overwritten by the file's
    args = parser.parse_args([*line, "script.py"])
    with contextlib.redirect_stdout(io.StringIO()):
        args, _, _ = _validate_launch_command(args)
    assert args.mixed_precision == ("no" if name in {"cpu", "multi_cpu", "mps"} else "bf16")
    processes = {
        "multi_cpu": 2, "multi_gpu": 4, "multi_node": 8, "noctua2_4xa100": 4, "marvin_4xa100": 4,
        "palmetto_2x2": 4, "xpu": 2, "fsdp2": 2,
    }.get(name, 1)  # fmt: skip
    assert int(args.num_processes) == processes
    assert (args.multi_gpu, args.use_fsdp) == (processes > 1 and name != "fsdp2", name == "fsdp2")
    if name == "fsdp2":
        assert args.fsdp_version == 2 and args.fsdp_auto_wrap_policy == "SIZE_BASED_WRAP"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "world_size"),
    [("multi_cpu", 2), *(pytest.param(name, 1, marks=pytest.mark.slow) for name in ("cpu", "single_gpu"))],
)
def test_those_that_need_no_gpu_run_without_one(name: str, world_size: int) -> None:
    config = str(DIRECTORY / f"{name}.yaml")
    codes, found, text = worlds.finish(
        worlds.start("accelerate", "launch", "--config_file", config, worlds.PROGRAM, ACCELERATE_USE_CPU="true")
    )
    assert codes == [0], text
    assert [world["rank"] for world in found] == list(range(world_size))
    assert all(world["world_size"] == world["sum"] == world_size for world in found)
    assert found[0]["precision"] == ("bf16" if name == "single_gpu" else "no")
    assert found[0]["threads"] == max(1, len(os.sched_getaffinity(0)) // world_size)
