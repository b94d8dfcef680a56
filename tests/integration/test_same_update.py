"""One update is the same, but for rounding, on 1 to 4 real processes with any accumulation, whatever the model."""

from __future__ import annotations

from pathlib import Path

import helpers
import pytest
import torch

from accel_train.config.options import parse
from accel_train.config.recipe import recipe_names

WORKER = Path(__file__).parent.parent / "update_worker.py"
ODD_MODELS = Path(__file__).parent.parent / "odd_models.py"
SPLITS = {1: "1,4", 2: "2", 3: "1,2", 4: "1"}  # processes -> accumulations; 3 share four virtual batches as 2, 1, 1
SHAPES = {"digits": ("1", "8"), "mnist": ("1", "28"), "fashion_mnist": ("1", "28"), "cifar10": ("3", "32")}


def small(recipe: str) -> list[str]:
    """Two updates of the recipe, or of "model:NAME", on made images; the second has 10 samples of 16, in
    virtual batches of 4.

    The learning rate is 0: both begin with equal weights, and a rounding cannot grow from one to the other.
    """
    if recipe.startswith("model:"):
        return [*small("cifar10_resnet18"), "--model.name", recipe.removeprefix("model:")]
    config = parse([recipe])
    channels, size = SHAPES.get(config.data.name, ("3", "96"))
    options = [recipe, "--data.name", "synthetic", "--data.channels", channels, "--model.image-size", size]
    options += ["--data.train-limit", "26", "--data.drop-last", "false", "--epochs", "1", "--batch-size", "16"]
    options += ["--optim.lr", "0"]
    options += ["--virtual-batch-size", "4", "--data.workers", "0", "--schedule.warmup-epochs", "0"]
    options += ["--data.val-fraction", "0", "--data.test-fraction", "0"]
    if config.data.name == "folder":
        options += ["--augment.resize", "96", "--augment.crop-fraction", "none"]
    if config.model.eval_image_size is not None:
        options += ["--model.eval-image-size", "96"]
    if config.model.name.startswith("torchvision/resnet"):
        options += ["--augment.mixup", "0.2"]
    return options


def computed(tmp_path: Path, groups: list[list[str]], precision: str = "float32") -> dict:
    """(processes, group, accumulation) -> its updates."""
    results = {}
    for processes, accumulations in SPLITS.items():
        words = [word for group in groups for word in ("--", *group)]
        out = tmp_path / f"{processes}.pt"
        done = helpers.python(WORKER, out, precision, accumulations, *words, processes=processes, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        for (group, accumulation), updates in torch.load(out).items():
            results[processes, group, accumulation] = updates
    return results


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    return ((first - second).norm() / first.norm().clamp(min=1e-30)).item()


def differences(results: dict, recipes: list[str], limits: dict[str, float]) -> list[tuple]:
    """Where an update is further than `limits` from that of one process in one pass: loss, gradient, statistics.

    In the short second update one virtual batch has only two real samples, whose BatchNorm multiplies a rounding more:
    ten times the limits.
    """
    assert len(results) == len(recipes) * sum(len(each.split(",")) for each in SPLITS.values())
    far = []
    for (processes, group, accumulation), updates in results.items():
        for number, (alone, here) in enumerate(zip(results[1, group, 1], updates, strict=True)):
            apart = {name: distance(alone[name], here[name]) for name in limits}
            if any(apart[name] > limit * (10 if number else 1) for name, limit in limits.items()):
                far.append((recipes[group], processes, accumulation, number, apart))
    return far


# Dropout; BatchNorm and mixup; a BatchNorm that is called twice, and layers that are never called; some that are called
# in some passes, on some processes.
QUICK = ["mnist_cnn", "model:test_resnet", f"model:{ODD_MODELS}:SharedNorm", f"model:{ODD_MODELS}:Experts"]
LARGE = "imagenet_vit_b16"  # four processes with its weights in float64 need much memory


@pytest.mark.ci
def test_the_update_is_the_same_however_it_is_divided(tmp_path: Path) -> None:
    results = computed(tmp_path, [small(recipe) for recipe in QUICK])
    assert not differences(results, QUICK, {"loss": 1e-6, "gradient": 1e-4, "statistics": 1e-4})


@pytest.mark.slow
def test_in_float64_each_recipe_s_updates_are_the_same_to_nine_digits(tmp_path: Path) -> None:
    recipes = [name for name in recipe_names() if name != LARGE]
    results = computed(tmp_path, [small(recipe) for recipe in recipes], "float64")
    assert not differences(results, recipes, dict.fromkeys(("loss", "gradient", "statistics"), 1e-9))


# One small model of each: with BatchNorm in many forms, without, with attention, with dropout as a function.
FAMILIES = """
test_resnet test_efficientnet test_convnext test_vit test_mambaout test_nfnet regnetx_002 mobilenetv3_small_050
ghostnet_050 mobilenetv2_035 mnasnet_small lcnet_035 tinynet_e densenet121 dla46x_c hrnet_w18_small res2net50_14w_8s
resnest14d repvgg_a0 mobileone_s0 fbnetc_100 hardcorenas_a semnasnet_050 selecsls42b vovnet39a xcit_nano_12_p16_224
levit_128s pit_ti_224 mixer_s32_224 resmlp_12_224 poolformer_s12 edgenext_xx_small efficientformerv2_s0 fastvit_t8
torchvision/shufflenet_v2_x0_5 torchvision/squeezenet1_1 torchvision/vgg11_bn torchvision/swin_t
""".split()  # noqa: SIM905


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_timm_and_torchvision(tmp_path: Path, name: str) -> None:
    results = computed(tmp_path, [small(f"model:{name}")], "float64")
    assert not differences(results, [name], dict.fromkeys(("loss", "gradient", "statistics"), 1e-9))
