"""Reading the words of other trainers' commands, and `accel-train convert` itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from accel_train import convert as package
from accel_train.cli import main
from accel_train.config.option_types import option_types
from accel_train.convert.command_line import read_command
from accel_train.convert.peers import PEERS, Peer
from accel_train.convert.translation import reason
from accel_train.errors import UserError

LINE = "torchrun --nproc_per_node=8 train.py --model resnet50 --data-path imagenet"


@pytest.mark.parametrize(
    ("front", "processes"),
    [
        ("python train.py", 1),
        ("CUDA_VISIBLE_DEVICES=0,1 python3 -m torch.distributed.launch --nproc_per_node=2 --use_env train.py", 2),
        ("torchrun --nproc-per-node 8 --nnodes 4 --rdzv-backend c10d train.py", 32),
        ("accelerate launch --num_processes 6 train.py", 6),
        ("mpirun -np 3 python train.py", 3),
        ("srun --ntasks=16 python -u train.py", 16),
        ("srun --nodes=2 --ntasks-per-node=8 python train.py", 16),
        ("srun -N2 -n8 numactl -N 0 python train.py", 8),
        ("nice -n 19 python train.py", 1),
        ("cd /x && nohup torchrun --nproc_per_node=2 train.py", 2),
        ("./train.py", 1),
    ],
)
def test_the_launcher_says_how_many_processes(front: str, processes: int) -> None:
    command = read_command(f"{front} --ra-sampler -b64 --wd=1e-4")
    assert (command.peer.name, command.processes) == ("torchvision", processes)
    assert [command.values[name] for name in ("batch-size", "weight-decay", "epochs")] == [64, 1e-4, 90]
    assert command.given == {"ra-sampler", "batch-size", "weight-decay"}


def test_words_are_read_as_the_trainer_reads_them(tmp_path: Path) -> None:
    long = 'train.py  --model "resnet 50" --exper 7 \\\n'
    long += "  --mean 0.5 0.5 0.5 --sm 0.2 --torchcompile \\\r\n --scale 0.2 1 # a remark"
    command = read_command(long)
    assert command.peer.name == "timm"
    names = ("model", "mean", "smoothing", "torchcompile", "scale")
    assert [command.values[name] for name in names] == ["resnet 50", [0.5] * 3, 0.2, "inductor", [0.2, 1.0]]
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n# timm's\nexport X=1\ncd /tmp\n" + long + "\necho done\n")
    assert read_command(str(script)).values == command.values
    script.write_text(f"{LINE}\n{LINE} --epochs 3\n")
    with pytest.raises(UserError, match="found 2 commands"):
        read_command(str(script))
    settings = tmp_path / "hparams.yaml"
    settings.write_text("smoothing: 0.3\nlr: 5e-4\n")
    command = read_command(f"train.py --config {settings} --opt adamw --epochs 7")
    assert [command.values[name] for name in ("smoothing", "lr", "opt", "epochs")] == [0.3, 5e-4, "adamw", 7]


@pytest.mark.parametrize(
    "rest", ["> log.txt 2>&1 &", "| tee 'log 1.txt'", "2>> err.txt < /dev/null; echo done", "&& python val.py"]
)
def test_what_the_shell_does_with_the_output_is_left_out(rest: str) -> None:
    command = read_command(f"{LINE} --ra-sampler --epochs 2 {rest}")
    assert (command.given, command.values["epochs"]) == ({"model", "data-path", "ra-sampler", "epochs"}, 2)


@pytest.mark.parametrize("end", ["^", "`", "\\"])
def test_a_command_of_windows(end: str) -> None:
    """A shell of Unix would drop the backslashes of its paths."""
    command = read_command(
        f"python C:\\timm\\train.py {end}\r\n --ra-sampler --data-path C:\\data\\net --output-dir 'a\\b'"
    )
    assert (command.values["data-path"], command.values["output-dir"]) == ("C:\\data\\net", "a\\b")


def test_the_job_script_says_how_many_processes_srun_starts(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node 4 --time=1:00:00\n"
    for line, processes in ((f"srun python {LINE[29:]}", 8), (f"srun -n 3 python {LINE[29:]}", 3), (LINE, 8)):
        script.write_text(head + line)
        assert read_command(str(script)).processes == processes
    script.write_text(f"{head}python {LINE[29:]}")  # one process, whatever the job has
    assert read_command(str(script)).processes == 1


def test_a_file_of_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As timm writes it: all options, with defaults, and those of another version."""
    options = {name.replace("-", "_"): option.default for name, option in PEERS["timm"].options.items()}
    file = tmp_path / "args.yaml"
    file.write_text(yaml.safe_dump(options | {"model": "resnet18", "batch_size": 32, "gone": None, "future_option": 3}))
    command = read_command(str(file), processes=4)
    assert (command.peer.name, command.processes, command.unknown) == ("timm", 4, {"future-option": 3})
    assert main(["convert", "--processes", "4", str(file)]) == 1
    assert main(["convert", str(file), "--processes=4", "--lossy"]) == 0
    out = capsys.readouterr().out
    assert "future-option: 3: no option of timm" in out
    assert "batch_size: 128  # 4 processes x 32 images" in out
    own = tmp_path / "yolo.yaml"
    own.write_text("task: classify\nmode: train\nmodel: yolo11n-cls.pt\ndata: photos\nepochs: 3\n")
    assert read_command(str(own)).peer.name == "ultralytics"
    assert main(["convert", "--lossy", str(own)]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.py --model resnet50"], "--peer timm or --peer torchvision"),
        (["python main.sh"], "no train.py"),
        ([""], "no train.py"),
        (["train.py 'x"], "quotation mark"),
        (["train.py --ra-sampler --lr $LR"], r"\$LR: the shell replaces this"),
        (["torchrun --nproc_per_node=gpu train.py --ra-sampler"], "--nproc_per_node gpu: the number of processes"),
        (["accelerate launch train.py --ra-sampler"], "accelerate: the command does not say how many processes"),
        (["train.py --ra-sampler --data-path `pwd`"], "`pwd`: the shell replaces this"),
        (["train.py --ra-sampler --lr-warmup-epochs 3 --lr-step-size 0"], "--lr-step-size 0: nothing can be computed"),
        (["--peer=timm", "train.py --lr-base-size 0"], "--lr-base-size 0: nothing can be computed with that"),
        (["yolo classify train data=x nbs=0"], "nbs=0: nothing can be computed with that"),
        (["yolo classify train data=x lr0=fast"], "lr0: expected a number, found 'fast'"),
        (["yolo classify train data=x batch="], "batch: expected a number, found nothing"),
        (["distributed_train.sh --model resnet50"], "expected the number of processes"),
        (["train.py --ra-sampler --smoothing 0.1 --sched cosine --mixup 1"], "--ra-sampler: no option of timm"),
        (["train.py --ra-sampler --epochs many"], "argument --epochs: invalid int value"),
        (["train.py --ra-sampler --lr-warmup 3"], "torchvision: ambiguous option: --lr-warmup could match"),
        (["--peer=torchvision", "train.py --opt"], "argument --opt: expected one argument"),
        (["yolo classify train epochz=3"], "epochz: no option of ultralytics .* Did you mean 'epochs'"),
        (["yolo classify train data=x batch=-1"], "give the number that it found"),
        (["yolo classify train data=x epochs={"], "cannot be read as YAML"),
    ],
)
def test_what_cannot_be_read_is_said(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(message, err), err
    assert len([line for line in err.splitlines() if line.startswith("accel-train")]) <= 1 and "Traceback" not in err


def test_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, content in (("a.yaml", b"- 1\n- 2\n"), ("b.yaml", b"a: [\n"), ("c.sh", b"\xff\xfe"), ("d.yaml", b"x: 1")):
        file = tmp_path / name
        file.write_bytes(content)
        assert main(["convert", str(file)]) == 2, name
    right = ("opt: many", "decay_milestones: [1, 2]")
    values = ("null", "[1, 2]", "{a: 1}", "true", "many")
    for line in (f"{name}: {each}" for name in ("batch_size", "opt", "decay_milestones") for each in values):
        (tmp_path / "args.yaml").write_text(f"model: resnet18\nsched: multistep\n{line}\n")
        code = main(["convert", "--lossy", str(tmp_path / "args.yaml")])
        assert code == (0 if line in right else 2), line
    big = tmp_path / "big.sh"
    big.write_bytes(b"x" * (2 << 20))
    assert main(["convert", str(big)]) == 2
    assert main(["convert", "train.py", "--config", str(tmp_path / "none.yaml"), "--sched", "step"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_words_and_one_word_are_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", LINE]) == 0
    one = capsys.readouterr().out
    assert main(["convert", *LINE.split()]) == 0
    assert capsys.readouterr().out == one
    assert "accelerate_configs/multi_gpu.yaml --num_processes 8 --mixed_precision no -m" in one


def test_what_is_lost_is_an_error_unless_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{LINE} --mixup-alpha 0.2 -b 25"
    assert main(["convert", line]) == 1
    out, err = capsys.readouterr()
    assert "LOST" in out and "is lost: --mixup-alpha 0.2." in err
    assert main(["convert", "--lossy", line]) == 0
    assert capsys.readouterr() == (out, "")
    assert main(["convert", "--peer", "fastai", line]) == 2
    assert main(["convert", "--lossy"]) == 2
    assert main(["convert"]) == 2


@pytest.mark.parametrize("peer", PEERS.values(), ids=lambda peer: peer.name)
def test_each_option_of_a_peer_that_is_one_here_is_converted(peer: Peer) -> None:
    """An option that comes here must get its entry: `accel-train train` would name it, and convert call it lost."""
    files = Path(package.__file__).parent.glob(f"{peer.name}*.py")
    words = set(re.findall(r"[\w-]+", "\n".join(path.read_text() for path in files)))
    missing = [name for name in peer.options if name not in words and reason(name).startswith("Did you mean")]
    assert not missing


@pytest.mark.slow
def test_a_printed_recipe_passes_config_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, line in enumerate((LINE, "yolo classify train data=mnist160 model=yolo11n-cls.pt epochs=3 imgsz=64")):
        main(["convert", "--lossy", line])
        file = tmp_path / f"recipe{number}.yaml"
        file.write_text(capsys.readouterr().out)
        assert main(["train", str(file), "--config-only"]) == 0
        assert "# processes: 1" in capsys.readouterr().out


def test_each_option_of_a_peer_has_a_verdict() -> None:
    """Of an option that is refused, `accel-train train` says so; no reason is missing and no verdict contradicts it."""
    for peer in PEERS.values():
        assert all(option.verdict == "" for option in peer.older.values())
        for name, option in peer.options.items():
            assert option.verdict in ("has", "partly", "not", *["apart"] * (peer.name == "ultralytics")), name
            assert "|" not in option.answer and (option.answer or option.verdict != "apart"), name
            said = option.answer or reason(name)
            if option.verdict != "apart":
                assert said.startswith("Not supported: ") == (option.verdict == "not"), name


def test_an_option_that_is_named_in_a_verdict_exists() -> None:
    known, commands = option_types(), {"time", "name"}
    for peer in PEERS.values():
        for name, option in peer.options.items():
            named = set(re.findall(r"`([a-z-]+(?:\.[a-z-]+)?)`", option.answer)) - commands
            assert named <= known.keys(), (name, named - known.keys())
