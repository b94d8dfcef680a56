"""What a GPU's user meets first, on a pretended one (pretend_cuda.py): no command may crash there, or wait unseen.

Every command line here is carried out by one process that believes in a CUDA device. Whether kernels compute the same
there, and how fast, only a GPU can show: test_gpu.py.

Decisions that depend on the kind of device, and which no test without a GPU (nor this one) covers:

| where | what happens on the device | why not |
|---|---|---|
| data/loading.py | a copy overlaps with computation; its memory is kept | computes at once here |
| data/memory.py, mps and xpu | free memory of the device | none to ask |
| step.py, the guard, several processes | the all-reduce by NCCL | one process here; gloo: test_nonfinite.py |
| performance.py, FSDP2, several processes on CUDA | contiguous weights | one process here |
| performance.py, compilation | inductor's kernels, CUDA graphs (only that they are refused) | nothing to compile for |
| accelerator.py | the backends nccl, rccl and xccl; MIG | decisions alone: test_accelerator.py |
| accelerate's set_device, DDP's device_ids | the index that LOCAL_RANK gives | one device here |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from functools import reduce
from operator import or_
from pathlib import Path

import helpers
import pytest
import torch
from PIL import Image
from pretend_cuda import FREE_BYTES, Done, Pretended
from safetensors.torch import load_file
from test_recipes_run import small

from accel_train.cli import main
from accel_train.config.options import parse
from accel_train.config.recipe import recipe_names

pytestmark = pytest.mark.skipif(
    not hasattr(torch._C, "_ensureCUDADeviceGuardSet"), reason="older versions of torch (2.9) cannot pretend a device"
)

# The one wait of an update: for the answer whether the update before was finite, by then long there.
READ_LATER = {"step.py:check_previous event.synchronize": 1}
# With `skip` the answer must be known before the optimizer's step.
READ_NOW = {"step.py:check_step _local_scalar_dense": 1}

SMALL = "--epochs 1 --batch-size 16 --data.train-limit 96 --data.test-limit 24 --log-every-updates 6".split()  # noqa: SIM905
ALL_AT_ONCE = """
--augment.crop random --augment.pad 1 --augment.flip 0.5 --augment.erase 0.5 --augment.mixup 0.2 --augment.cutmix 1
--optim.clip 1 --ema.enabled true
""".split()  # noqa: SIM905


FREE = [pytest.param({}, id="device"), pytest.param({FREE_BYTES: "0"}, id="host")]
"""Where the images of a small set are kept, by the free memory of the device."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[Pretended]:
    pretended = Pretended()
    yield pretended
    pretended.end()


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write JPEGs and PNGs of many sizes, of two classes, to train/ and val/."""
    root = tmp_path_factory.mktemp("photos")
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 12), ("val", 4)):
        for label in ("Cat", "Dog"):
            (root / split / label).mkdir(parents=True)
            for number in range(count):
                height, width = torch.randint(40, 90, (2,), generator=generator).tolist()
                pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
                kind = "png" if number % 4 == 0 else "jpg"
                Image.fromarray(pixels.numpy()).save(root / split / label / f"{number}.{kind}")
    return root


def succeeded(done: Done) -> Done:
    assert done.code == 0, done.output
    return done


def quiet_updates(done: Done) -> list[dict[str, int]]:
    """Return the waits of the updates without a log line, checkpoint, epoch's end or start."""
    return done.waits[2:5]


WRONG = """
import torch, pretend_cuda as pretended
pretended.install()
with pretended.PretendedCuda():
    there, here = torch.arange(4.0, device="cuda"), torch.arange(4.0)
    assert there.device == torch.device("cuda:0") != torch.device("cuda")
    for wrong in (lambda: there + here, lambda: there.pin_memory(), lambda: there.numpy(), lambda: here.add_(there),
                  lambda: torch.cat([here, there]), lambda: torch.nn.Linear(4, 1)(there)):
        try:
            wrong()
        except (RuntimeError, TypeError):
            continue
        raise AssertionError("no error")
    back = torch.empty(4, pin_memory=True).copy_(there, non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not pretended.waits and not torch.equal(back, here)  # not yet there
    event.synchronize()
    assert torch.equal(back, here) and (there + 1)[1:].sum().item() == 9
    here.to("cuda"), here.to("cuda", non_blocking=True), here.pin_memory().to("cuda", non_blocking=True)
    there[there > 1]
    assert sorted(map(lambda name: name.split(" ", 1)[1], pretended.waits)) == [
        "_local_scalar_dense", "copy to the device", "copy to the device from memory that is not pinned",
        "event.synchronize", "index by torch.bool on cuda:0"], pretended.waits
"""


@pytest.mark.ci
def test_the_pretended_device_fails_and_waits_where_a_gpu_would() -> None:
    done = helpers.python("-c", WRONG, cwd=helpers.ROOT / "tests")
    assert done.returncode == 0, done.stderr


SIDE_STREAM = """
import torch, pretend_cuda as pretended
pretended.install()
from accel_train.data.loading import SideStream
from accel_train.errors import UserError

fetched = []
def loader():
    for number in range(3):
        fetched.append(number)
        yield {"ids": torch.full((4,), number).pin_memory().to("cuda", non_blocking=True), "names": "of the host's"}
    yield UserError("cannot be read")

with pretended.PretendedCuda():
    side = SideStream(torch.device("cuda", 0))
    with torch.cuda.stream(side.stream):
        early = next(loader())["ids"]
    assert (early + 0).tolist() == [0x7F] * 4  # garbage: nobody has waited
    pretended.orders.clear(), pretended.waits.clear(), fetched.clear()
    batches = side.copied(loader())
    for number in range(3):
        ids = next(batches)["ids"] + 0
        assert fetched == list(range(number + 1))  # none ahead of what was asked for
        assert pretended.orders == ["default waits for side", "memory used on default"] * (number + 1)
        assert not pretended.waits
        assert ids.tolist() == [number] * 4
        pretended.waits.clear()
    assert str(next(batches)) == "cannot be read"
    assert next(batches, None) is None
"""


@pytest.mark.ci
def test_copies_on_a_stream_of_their_own_are_waited_for_by_the_device_alone() -> None:
    done = helpers.python("-c", SIDE_STREAM, cwd=helpers.ROOT / "tests")
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("free", FREE)
def test_a_set_in_memory_with_every_augmentation(gpu: Pretended, tmp_path: Path, free: dict[str, str]) -> None:
    done = succeeded(gpu("train", "digits", *SMALL, *ALL_AT_ONCE, "--output-dir", tmp_path / "run", **free))
    assert quiet_updates(done) == [READ_LATER] * 3


GUARD = ("step.py:check_step", "step.py:_find_bad", "step.py:_is_not_finite", "compat.py:flag_nonfinite")


def launched(done: Done) -> dict[str, int]:
    """Kernels that each file of accel_train starts in an update, with the guard apart: the most of the quiet ones."""
    found: list[Counter[str]] = [Counter() for _ in range(3)]
    for count, kernels in zip(found, done.kernels[2:5], strict=True):
        for where, times in kernels.items():
            count["guard" if where in GUARD else where.partition(":")[0]] += times
    assert found[0]
    return dict(reduce(or_, found))


@pytest.mark.ci
@pytest.mark.parametrize("free", FREE)
def test_kernels_of_an_update_of_digits(gpu: Pretended, tmp_path: Path, free: dict[str, str]) -> None:
    kernels = launched(succeeded(gpu("train", "digits", *SMALL, "--output-dir", tmp_path / "run", **free)))
    assert "keyed.py" not in kernels  # all is drawn on the host
    assert kernels["batch_transform.py"] <= 6
    assert kernels["guard"] <= 2
    assert kernels.get("meter.py", 0) + kernels.get("metrics.py", 0) <= 1
    assert sum(kernels.values()) <= 43
    assert "batchnorm.py" not in kernels and "dropout.py" not in kernels  # the net has neither


CIFAR = "--data.name synthetic --data.channels 3 --model.image-size 32 --optim.name momentum"


NETS = [  # and how many BatchNorms they have
    (f"cifar10_resnet18 {CIFAR} --model.name resnet18", 20),
    (f"cifar10_resnet18 {CIFAR} --model.name resnet50", 53),
    (f"cifar10_fast {CIFAR} --schedule.warmup-epochs 0", 8),
]


def kernels_of(gpu: Pretended, run: Path, words: str, virtual_batch: int, batch: int = 32) -> Counter[str]:
    """Kernels of the third update, by the file that starts them."""
    shape = f"--batch-size {batch} --virtual-batch-size {virtual_batch} --data.train-limit {3 * batch}"
    shape += " --data.test-limit 4"
    more = f"--epochs 1 --log-every-updates 9 --output-dir {run / str(virtual_batch)}"
    done = succeeded(gpu("train", *words.split(), *shape.split(), *more.split()))
    found: Counter[str] = Counter()
    for line, count in done.kernels[2].items():
        found[line.partition(":")[0]] += count
    return found


def kernels_of_torchs_own(gpu: Pretended, run: Path, words: str, layers: int, batch: int = 32) -> int:
    """The same with torch's own BatchNorm: each layer normalises, and adds 1 to its own counter."""
    one = kernels_of(gpu, run, words, batch, batch)
    return one.total() - one["batchnorm.py"] + 2 * layers


@pytest.mark.slow
@pytest.mark.parametrize(("words", "layers"), NETS)
def test_kernels_do_not_grow_with_the_virtual_batches(gpu: Pretended, tmp_path: Path, words: str, layers: int) -> None:
    """Eight virtual batches take at most three times the kernels of the model with torch's own BatchNorm."""
    four, eight = (kernels_of(gpu, tmp_path, words, size).total() for size in (8, 4))
    plain = kernels_of_torchs_own(gpu, tmp_path, words, layers)
    assert four == eight <= 3 * plain, (four, eight, plain)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "layers"), NETS)
@pytest.mark.timeout(900)
def test_kernels_with_triton(tmp_path: Path, words: str, layers: int) -> None:
    """Two forward and two backward of each layer: at most 1.3 times the kernels of torch's own, and the same run."""
    words += " --optim.lr 1e-6"  # a rounding cannot grow from update to update
    gpu, composed = Pretended(triton=True), Pretended()
    try:
        found = kernels_of(gpu, tmp_path / "triton", words, 2, 16)  # few images: the interpreter is slow
        plain = kernels_of_torchs_own(composed, tmp_path, words, layers, 16)
        kernels_of(composed, tmp_path / "composed", words, 2, 16)
    finally:
        gpu.end()
        composed.end()
    assert found["batchnorm_triton.py"] == 4 * layers and found.total() <= 1.3 * plain, (found, plain)
    results = [json.loads((tmp_path / way / "2" / "result.json").read_text()) for way in ("triton", "composed")]
    assert results[0]["test_loss"] == pytest.approx(results[1]["test_loss"], rel=1e-3)
    print(f"{words}: {found.total()} kernels of {plain}")


@pytest.mark.slow
@pytest.mark.parametrize("free", FREE)
def test_kernels_of_an_update_with_two_dropout_layers(gpu: Pretended, tmp_path: Path, free: dict[str, str]) -> None:
    """Their masks are computed together, from keys that the host has hashed and sends without waiting."""
    images = "--data.name synthetic --data.channels 1 --model.image-size 28 --data.train-limit 384 --data.test-limit 4"
    words = ("mnist_cnn", *images.split(), "--epochs", 1, "--log-every-updates", 6)
    done = succeeded(gpu("train", *words, "--output-dir", tmp_path / "run", **free))
    assert not [line for waits in quiet_updates(done) for line in waits if not line.startswith("step.py:check_")]
    kernels = launched(done)
    assert kernels["keyed.py"] + kernels["dropout.py"] <= 19
    assert sum(kernels.values()) <= 80


BATCHNORM = 32


@pytest.mark.ci
@pytest.mark.parametrize(("mixing", "augmenting"), [("--augment.mixup 0.2", 19), ("--augment.cutmix 1", 17)])
def test_kernels_of_an_update_with_every_augmentation(
    gpu: Pretended, tmp_path: Path, mixing: str, augmenting: int
) -> None:
    """A ResNet of channels last, with BatchNorm, whose counters EMA copies."""
    model = ("--model.name", "test_resnet", "--model.image-size", 32, "--data.name", "synthetic")
    images = ("--data.channels", 3, "--augment.crop", "random", "--augment.pad", 4)
    more = ("--augment.flip", 0.5, "--augment.erase", 0.5, "--optim.clip", 1, "--ema.enabled", "true", *mixing.split())
    done = succeeded(gpu("train", "digits", *SMALL, *model, *images, *more, "--output-dir", tmp_path / "run"))
    kernels = launched(done)
    assert "keyed.py" not in kernels  # the host has drawn all parameters
    assert kernels["batch_transform.py"] <= augmenting
    assert kernels["guard"] <= 2
    assert kernels.get("meter.py", 0) + kernels.get("metrics.py", 0) <= 2
    # One for each BatchNorm, and the rest for the statistics of all of them together.
    assert kernels["batchnorm.py"] <= BATCHNORM, kernels
    assert max(update["step.py:apply"] for update in done.kernels[2:5]) <= 8 + 2  # clipping and the optimizer's step
    # Of step.py: also the net's forward and backward pass.
    assert kernels["loss.py"] <= 4 and kernels["step.py"] <= 120 and kernels["ema.py"] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["cats_dogs_alexnet", "cifar10_alexnet", "cifar10_fast"])
def test_bitwise_needs_no_kernel_that_is_not_deterministic(gpu: Pretended, tmp_path: Path, recipe: str) -> None:
    """Their nets have adaptive pooling. The first two on small images: of 7x7 values one is pooled to 6x6."""
    words = [*SMALL, "--data.name", "synthetic", "--bitwise", "true", "--ema.enabled", "false"]
    words += ["--data.train-limit", "32", "--data.test-limit", "8", "--batch-size", "16", "--epochs", "1"]
    words += ["--virtual-batch-size", "8"] if recipe != "cifar10_alexnet" else []
    sizes = {"cats_dogs_alexnet": "256", "cifar10_alexnet": "64", "cifar10_fast": "32"}
    words += ["--model.image-size", sizes[recipe], "--schedule.name", "constant"]
    words += ["--schedule.warmup-epochs", "0", "--augment.resize", sizes[recipe]]
    words += ["--data.train-limit", "none", "--data.test-limit", "none", "--data.test-fraction", "0"]
    done = gpu("train", recipe, *words, "--output-dir", tmp_path / "run")
    assert done.code == 0, done.output


REFLECTING = """
from torch import nn
def net(num_classes, in_chans, image_size):
    return nn.Sequential(nn.Conv2d(in_chans, 4, 3), nn.BatchNorm2d(4), nn.ReflectionPad2d(1), nn.Flatten(),
                         nn.Dropout(0.1), nn.Linear(256, num_classes))
"""


@pytest.mark.ci
def test_bitwise_names_an_operator_that_is_not_deterministic_before_the_run(gpu: Pretended, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFLECTING)
    words = ["digits", *SMALL, "--model.name", f"{tmp_path}/mine.py:net", "--output-dir", tmp_path / "run"]
    done = gpu("train", *words, "--bitwise", "true")
    assert done.code == 2 and "--bitwise: the model uses reflection_pad2d_backward_cuda, which has no" in done.output, (
        done.output
    )
    succeeded(gpu("train", *words))


TRANSFORMED = """
import itertools, sys, torch, pretend_cuda as pretended
pretended.install()
from accel_train.config.schema import Augment
from accel_train.keyed import hashed
from accel_train.data.batch_transform import BatchTransform
images = torch.randint(256, (40, 3, 12, 12), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
crops = [{}, {"crop": "random", "pad": 2}, {"crop": "random", "pad": 3, "pad_mode": "reflect"}]
mixing = [{}, {"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0, "mix_probability": 0.7}]
layouts = torch.contiguous_format, torch.channels_last
vertical = {"vertical_flip": 0.5}
cases = itertools.product(crops, mixing, [{}, vertical], [0.0, 0.5], [0.0, 0.5], layouts, [12, 9])
cases = itertools.islice(cases, 0, None, int(sys.argv[1]))
with pretended.PretendedCuda():
    for crop, mix, upside, flip, erase, layout, size in cases:
        found = []
        for device in "cpu", "cuda":
            transform = BatchTransform(
                Augment(flip=flip, erase=erase, resize=12, **crop, **mix, **upside), size=size, mean=(0.2, 0.5, 0.7),
                std=(0.3, 0.25, 0.1), num_classes=5, training=True, per_image=False,
                device=torch.device(device), memory_format=layout)
            weights = torch.ones(40)
            weights[-1] = 0
            batch = {"images": images.contiguous(memory_format=layout), "labels": torch.arange(40) % 5}
            if transform.draw_parameters is not None:
                batch["parameters"] = transform.draw_parameters(hashed(7, torch.arange(40)), weights)
            inputs, targets = transform({name: each.to(device) for name, each in batch.items()})
            assert inputs.is_contiguous(memory_format=layout) and inputs.dtype == torch.float32
            found.append((inputs.cpu(), targets.cpu()))
        assert all(map(torch.equal, *found)), (crop, mix, colour, flip, erase, layout, size)
"""


# Every 11th of the 384: 11 has no factor of theirs, so that each setting meets each of the others.
@pytest.mark.slow
@pytest.mark.parametrize("stride", [11, 1])
def test_a_gpus_way_to_augment_gives_the_bits_of_the_cpus(stride: int) -> None:
    done = helpers.python("-c", TRANSFORMED, stride, cwd=helpers.ROOT / "tests", timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.mark.ci
@pytest.mark.parametrize("free", FREE)
def test_the_weights_are_those_of_the_cpu(
    gpu: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: dict[str, str]
) -> None:
    words = ("digits", *SMALL, *ALL_AT_ONCE)
    succeeded(gpu("train", *words, "--output-dir", tmp_path / "gpu", **free))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert main(["train", *map(str, words), "--output-dir", str(tmp_path / "cpu")]) == 0
    helpers.forget_accelerate()
    for name in ("model", "ema"):
        ours, theirs = (load_file(tmp_path / place / f"{name}.safetensors") for place in ("gpu", "cpu"))
        for key, values in theirs.items():
            torch.testing.assert_close(ours[key], values, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "augmentation",
    [
        "--augment.crop resized --augment.flip 0.5 --augment.mixup 0.2",
        "--augment.crop center --augment.policy trivialaugment --augment.cutmix 1",
        "--augment.crop random --augment.policy randaugment --augment.erase 1",
        "--augment.resize 40 --augment.crop center",
    ],
)
def test_image_files_that_workers_decode(gpu: Pretended, photos: Path, tmp_path: Path, augmentation: str) -> None:
    model = "--model.name test_resnet --model.image-size 32 --data.name folder --data.workers 1 --optim.name adamw"
    words = ("digits", *model.split(), "--data.root", photos, *augmentation.split())
    done = succeeded(
        gpu("train", *words, "--epochs", 1, "--batch-size", 4, "--output-dir", tmp_path / "run", precision="bf16")
    )
    assert len(done.waits) == 6
    assert done.waits[2:5] == [READ_LATER] * 3


@pytest.mark.slow
def test_pixels_of_shards(gpu: Pretended, photos: Path, tmp_path: Path) -> None:
    pixels = tmp_path / "pixels"
    succeeded(gpu("shards", "folder", pixels, "--data.root", photos / "train", "--short-side", 40, "--encoding", "raw"))
    words = ("--model.name", "test_resnet", "--model.image-size", 32, "--data.name", "wds", "--data.root", pixels)
    shape = ("--batch-size", 4, "--epochs", 1, "--data.workers", 0)
    done = succeeded(gpu("train", "digits", *words, *shape, "--output-dir", tmp_path / "run"))
    assert done.waits[2:5] == [READ_LATER] * 3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", recipe_names())
def test_every_recipe(gpu: Pretended, photos: Path, tmp_path: Path, recipe: str) -> None:
    """With its own augmentation, optimizer, schedule and accumulation, on data of the shape that it is for."""
    words = [*small(recipe, photos / "train", photos), "--data.train-limit", "12", "--batch-size", "4"]
    words += ["--log-every-updates", "3", "--output-dir", str(tmp_path / "run")]
    if "--micro-batch-size" in words:
        words += ["--micro-batch-size", "2", "--virtual-batch-size", "2"]
    if any(name in parse([recipe]).model.name for name in ("alexnet", "resnet50", "vit_b", "convnext")):
        words += ["--model.name", "test_resnet"]  # their many weights take long
    done = succeeded(gpu("train", recipe, *words))
    assert done.waits[1] == READ_LATER
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["updates"] == 3


@pytest.mark.ci
@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_waits_of_each_policy_and_precision(gpu: Pretended, tmp_path: Path, policy: str, precision: str) -> None:
    words = ("--on-nonfinite", policy, "--output-dir", tmp_path / "run")
    done = succeeded(gpu("train", "digits", *SMALL, *words, precision=precision))
    assert quiet_updates(done) == [READ_NOW if policy == "skip" else READ_LATER] * 3


STEEP = """
import torch.nn.functional as F
def steep(logits, targets):  # its value is finite, its gradient is not
    return F.cross_entropy(logits, targets, reduction="none") + (logits - logits.detach()).sqrt().sum(1)
"""


@pytest.mark.slow
def test_gradients_that_overflow_whatever_the_loss_scale(gpu: Pretended, tmp_path: Path) -> None:
    """The scaler halves 65536 in each update; the first one with a scale below 1 is called bad."""
    (tmp_path / "mine.py").write_text(STEEP)
    words = (*SMALL, "--epochs", 4, "--loss.name", f"{tmp_path}/mine.py:steep", "--output-dir", tmp_path / "run")
    done = gpu("train", "digits", *words, precision="fp16")
    assert done.code == 2 and "Update 18 is not finite: the gradient, though" in done.output, done.output


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adadelta", "lamb"])
def test_a_first_step_that_overflows(gpu: Pretended, tmp_path: Path, optimizer: str) -> None:
    """fp16 begins with a scale of 65536, which is found too large in the very first update: nothing is left of it."""
    huge = ("--augment.mean", 0, "--augment.std", "0.001", "--optim.name", optimizer, "--optim.lr", "1e-9")
    words = ("digits", *SMALL, *huge, "--checkpoint.every-updates", 1, "--checkpoint.keep", 9)
    succeeded(gpu("train", *words, "--output-dir", tmp_path / "run", precision="fp16"))
    scales = []
    for checkpoint in sorted((tmp_path / "run" / "checkpoints").iterdir()):
        scales.append(json.loads((checkpoint / "state.json").read_text())["scaler"]["scale"])
        state = torch.load(checkpoint / "optimizer.pt", weights_only=True)["state"]
        values = [value for each in state.values() for value in each.values() if isinstance(value, torch.Tensor)]
        assert all(value.isfinite().all() for value in values)
    assert scales[0] == 32768  # halved


@pytest.mark.ci
def test_it_goes_on_where_it_was_and_is_evaluated_and_used(gpu: Pretended, photos: Path, tmp_path: Path) -> None:
    words = ("digits", *SMALL, *ALL_AT_ONCE, "--checkpoint.every-updates", 2)
    succeeded(gpu("train", *words, "--output-dir", tmp_path / "whole"))
    parts = tmp_path / "parts"
    parts.mkdir()
    for stops in (True, True, False):
        if stops:
            (parts / "STOP").touch()
        succeeded(gpu("train", *words, "--output-dir", parts))
    for name in ("model", "ema"):
        one, other = (load_file(tmp_path / place / f"{name}.safetensors") for place in ("whole", "parts"))
        assert all(torch.equal(values, other[key]) for key, values in one.items())

    done = succeeded(gpu("evaluate", parts, "--split", "test"))
    found = json.loads((parts / "evaluation-test.json").read_text())
    result = json.loads((parts / "result.json").read_text())
    assert found["model"]["accuracy"] == result["test_accuracy"]
    assert math.isclose(found["model"]["loss"], result["test_loss"], rel_tol=1e-5)
    assert "on cuda" in done.output
    done = succeeded(gpu("predict", parts, photos / "val", precision="bf16"))
    assert done.output.count(".jpg") >= 6


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_save_waits_for_the_device_once(gpu: Pretended, tmp_path: Path, optimizer: str) -> None:
    model = (
        "--model.name",
        "test_resnet",
        "--model.image-size",
        32,
        "--ema.enabled",
        "true",
        "--optim.name",
        optimizer,
    )
    words = ("digits", *SMALL, *model, "--checkpoint.every-updates", 1, "--checkpoint.keep", 9)
    done = succeeded(gpu("train", *words, "--output-dir", tmp_path / "run"))
    saved = {"state.py:gather_to_main stream.synchronize": 1}
    for waits in done.waits[2:5]:
        assert {name: times for name, times in waits.items() if "state_dict" in name or "manager" in name} == saved
    last = torch.load(tmp_path / "run/checkpoints/update-00000006/optimizer.pt", weights_only=True)
    assert all(torch.isfinite(value).all() for each in last["state"].values() for value in each.values())


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train", "bench"])
def test_cuda_graphs_and_accumulation_are_refused(gpu: Pretended, tmp_path: Path, command: str) -> None:
    graphs = {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": "reduce-overhead"}
    output = ("--output-dir", tmp_path / "run") if command == "train" else ("--output", tmp_path / "figures.json")
    done = gpu(command, "digits", *SMALL, "--micro-batch-size", 8, *output, **graphs)
    assert (done.code, done.output.count("\n")) == (2, 1), done.output
    assert "CUDA graphs" in done.output and "(here 2 micro-batches)" in done.output
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_doctor(gpu: Pretended, tmp_path: Path) -> None:
    """All checks; what the device does not say is not called good."""
    done = gpu("doctor", "--output-dir", tmp_path / "run")
    succeeded(done)
    found = {line.split()[1]: line for line in done.output.splitlines() if line.startswith(("PASS", "WARN ", "n/a"))}
    assert "8.0 of 16.0 GiB of cuda:0 are used by other programs" in done.output
    assert all(found[name].startswith("PASS") for name in ("matmul", "update", "save"))


@pytest.mark.slow
def test_bench(gpu: Pretended, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    succeeded(gpu("bench", "digits", "--rounds", 1, "--updates", 4, "--output", output))
    figures = json.loads(output.read_text())
    assert figures["environment"]["devices"] == ["cuda:0"]
    assert {"limit", "input", "trainer"} == figures["images_per_second"].keys()


LARGE = """
digits --epochs 1 --batch-size 48 --virtual-batch-size 4 --data.train-limit 96 --data.test-limit 24
--model.name test_resnet --model.image-size 32 --augment.resize 32 --model.dropout 0.3 --augment.mixup 0.2
--optim.name adamw --ema.enabled true
""".split()  # noqa: SIM905


@pytest.mark.slow
def test_a_run_that_needs_too_much_memory_names_the_next_number(gpu: Pretended, tmp_path: Path) -> None:
    memory = {"PRETENDED_MEMORY": "17000000"}
    done = gpu("train", *LARGE, "--micro-batch-size", 48, "--output-dir", tmp_path / "large", **memory)
    (line,) = [line for line in done.output.splitlines() if "error" in line]
    assert done.code == 2 and "48 images of a process at once: give --micro-batch-size 24," in line
    assert "Traceback" not in done.output
    succeeded(gpu("train", *LARGE, "--micro-batch-size", 4, "--output-dir", tmp_path / "small", **memory))
    words = ("--micro-batch-size", "4", "--eval-batch-size", "300", "--output-dir", tmp_path / "evaluation")
    done = gpu("train", *LARGE, *words, **memory)
    assert done.code == 2 and "out of memory in evaluation" in done.output and "--eval-batch-size 150." in done.output
    words = ("--micro-batch-size", "4", "--output-dir", tmp_path / "least")
    done = gpu("train", *LARGE, *words, PRETENDED_MEMORY="1500000")
    assert done.code == 2 and done.output.count("error") == 1 and "gradient-checkpointing" in done.output
