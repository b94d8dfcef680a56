"""Recipe file and command line -> Config: the values, and the message for each mistake."""

from __future__ import annotations

import dataclasses
import pickle
import shlex
import typing
from pathlib import Path
from typing import Any, Literal

import helpers
import pytest
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from accel_train.config.declaration import WITHOUT_MOMENTUM, Needs, bytes_of
from accel_train.config.options import LAUNCH, SYNONYMS, parse, parse_command, parse_command_of_recipe, parse_settings
from accel_train.config.schema import Config, Data, Model, Optim, declared, option_types, to_yaml, value
from accel_train.errors import UserError

RECIPE = """\
about: {reproduces: a test, accuracy: none}
epochs: 3
optim:
  name: adam
  lr: 1e-3
  betas: [0.9, 0.99]
schedule: {name: multistep, milestones: [1, 2]}
data:
  train_limit: 010
  test-limit:
ema:
augment.mean: [-0.5, 1e-1]
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE)
    return str(path)


def told(*arguments: str) -> str:
    """Return the message of the UserError; there must be exactly one, of one line."""
    with pytest.raises(UserError) as caught:
        parse(arguments)
    assert "\n" not in str(caught.value)
    assert len(caught.value.messages) == 1
    return str(caught.value)


def test_the_recipe_gives_values_and_the_command_line_wins(recipe: str) -> None:
    found = parse([recipe])
    assert found.recipe == "mine"
    assert found.epochs == 3
    assert found.optim == Optim(name="adam", lr=1e-3, betas=(0.9, 0.99))
    assert found.schedule.milestones == (1, 2)
    assert found.data == Data(train_limit=10)
    assert found.augment.mean == (-0.5, 0.1)

    found = parse(
        f"{recipe} --optim.lr -0 --optim.lr=2 --data.train_limit none --epochs 7 --schedule.milestones 4 5 6 "
        "--augment.mean -1e-2 -.5 --config-only --ema.enabled true --data.drop-last FALSE "
        "--resume=--odd=name".split()
    )
    assert found.optim.lr == 2
    assert found.optim.name == "adam"
    assert found.data.train_limit is None
    assert found.schedule.milestones == (4, 5, 6)
    assert found.augment.mean == (-0.01, -0.5)
    assert (found.config_only, found.ema.enabled, found.data.drop_last) == (True, True, False)
    assert found.resume == "--odd=name"


def test_lists_can_be_emptied_and_null_undoes_a_base(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text(
        "base: mine.yaml\nschedule: {name: cosine, milestones: []}\naugment: {mean: null}\noptim.lr: 5e-1\n"
    )
    found = parse([str(tmp_path / "child.yaml")])
    assert found.recipe == "child"
    assert (found.schedule.name, found.schedule.milestones) == ("cosine", ())
    assert found.augment.mean is None
    assert (found.optim.name, found.optim.lr, found.epochs) == ("adam", 0.5, 3)
    # what stands in the base is told with the base's name and line
    (tmp_path / "mine.yaml").write_text(RECIPE.replace("adam", "adam\n  warmth: 1"))
    assert f"--optim.warmth: unknown option ({tmp_path}/mine.yaml:5)" in told(str(tmp_path / "child.yaml"))


@pytest.mark.parametrize("name", ["resnet18", "resnet18.a1_in1k"])
def test_timms_models_may_have_the_hubs_names(recipe: str, tmp_path: Path, name: str) -> None:
    assert parse([recipe, "--model.name", f"timm/{name}"]).model.name == name
    (tmp_path / "hub.yaml").write_text(f"base: {recipe}\nmodel:\n  name: timm/{name}\n")
    assert parse([str(tmp_path / "hub.yaml")]).model.name == name
    assert parse_settings({"model.name": f"timm/{name}"}).model.name == name
    with pytest.raises(UserError, match=r"--model\.name: expected the name of a model, found ''"):
        parse([recipe, "--model.name", "timm/"])


def test_the_configuration_of_a_run_keeps_its_recipes_name(recipe: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(parse([recipe, "--epochs", "4"])))
    again = parse([str(tmp_path / "config.yaml")])
    assert (again.recipe, again.epochs) == ("mine", 4)
    (tmp_path / "child.yaml").write_text("base: config.yaml")  # a recipe of its own
    assert parse([str(tmp_path / "child.yaml")]) == dataclasses.replace(again, recipe="child")


def test_a_home_folder_is_found_in_paths_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "r.yaml").write_text("data: {root: ~/images}\nresume: ~/x")
    found = parse([str(tmp_path / "r.yaml")])
    assert found.data.root == Path("/home/someone/images")
    assert found.resume == "~/x"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--optim.lr", "abc"], "--optim.lr: expected a number, found 'abc' (command line)."),
        (["--optim.lr"], "--optim.lr: expected a number, found no value (command line)."),
        (["--optim.lr", "nan"], "--optim.lr: expected a number that is not negative, found 'nan'"),
        (["--optim.lr", "inf"], "--optim.lr: expected a finite number, found 'inf' (command line)."),
        (["--batch-size", "1.5"], "--batch-size: expected a whole number, found '1.5' (command line)."),
        (["--data.train-limit", "x"], "--data.train-limit: expected a whole number or none, found 'x'"),
        (["--ema.enabled", "yes"], "'yes': neither an option nor the value of one; options are written --key value,"),
        (["--ema.enabled=yes"], "--ema.enabled: expected true or false, found 'yes' (command line)."),
        (["--augment.scale", "1"], "--augment.scale: expected 2 numbers, found '1' (command line)."),
        (["--schedule.milestones", "1", "x"], "--schedule.milestones: expected any number of whole numbers"),
        (["--loss.class-weights", "balance"], "one of none, balanced, found 'balance' (command line)"),
        (["--lr", "1"], "--lr: unknown option (command line). Did you mean 'optim.lr'?"),
        (["--weight-decya=1"], "unknown option (command line). Did you mean 'optim.weight-decay'?"),
        (["--decay", "1"], "Did you mean 'schedule.decay' or 'ema.decay'?"),
        (["--optim", "sgd"], "a group of options, not one (command line). Did you mean 'optim.name'?"),
        (["adam"], "'adam': neither an option nor the value of one"),
        (["-x", "1"], "'-x': neither an option"),
        (["--schedule.warmup-epochs", "9"], "--schedule.warmup-epochs: expected at most the 3 epochs"),
        (["--schedule.milestones"], "at least one epoch for schedule.name=multistep, found ''"),
    ],
)  # fmt: skip
def test_each_slip_on_the_command_line_is_told(recipe: str, arguments: list[str], message: str) -> None:
    assert message in told(recipe, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "r.yaml: the file is empty"),
        (b"epochs", "r.yaml:1: expected lines `key: value`, found a value."),
        (b"epochs: 1\nseed: 2\nepochs: 3", "r.yaml:3: epochs is given twice; the first time in "),
        (b"optim: {lr: 1}\noptim.lr: 2", "r.yaml:2: optim.lr is given twice"),
        (b"epochs: {a: 1}", "--epochs.a: unknown option ("),
        (b"optim:\n  lr: {a: 1}", "r.yaml:2: optim.lr: expected a value, found a mapping."),
        (b"seed: 1\nepochs:", "r.yaml:2)"),
        (b"seed: 1\n\noptim: {lrr: 1}", "r.yaml:3). Did you mean 'optim.lr'?"),
        (b"ema: {enabled: on}", "--ema.enabled: expected true or false, found 'on' ("),
        (b"recipe: x", "--recipe: unknown option ("),
        (b"model: {kwargs: &a {x: *a}}", "r.yaml:1: not YAML: an alias (*NAME), which is not read here; write its"),
        (b"<<: {seed: 1}", "--<<.seed: unknown option ("),
        (b"{? [a] : 1}", "expected the name of an option, found a list."),
        (b"optim:\n\tlr: 1", "r.yaml:2: not YAML: a tab; indent lines with spaces."),
        (b"a: b: c", "r.yaml:1: not YAML: a `:` where no option can be: the line is indented too far"),
        (b"optim:\n  lr: 1\n name: sgd", "r.yaml:3: not YAML: the line is not indented as the others of its group"),
        (b"seed: 1\noptim\n  lr: 1", "r.yaml:3: not YAML: line 2 has no `: ` after the name of its option."),
        (b"seed: 1\naugment:\n  mean: [1, 2\nepochs: 2", "the bracket that begins in line 3 is not closed before this"),
        (b"data.name: @a", "r.yaml:1: not YAML: a value that begins with one of @ % ` needs quotes."),
        (b"seed: 1\ndata.name: 'a\n", "the quote that begins in line 2 is not closed."),
        (b"- seed\nepochs: 1", "r.yaml:2: not YAML: lines `key: value` and lines `- value` are mixed."),
        (b"a: 1\n---\nb: 2", "not YAML: but found another document."),
        (b"seed: 1\nepochs: \xff", "r.yaml:2: not UTF-8 text"),
        (b"seed: \x00", "r.yaml: not YAML: "),
        (b"[" * 5000, "r.yaml:1: not YAML: more than 100 parts inside each other"),
        (b"base: r.yaml", "r.yaml: the recipe is its own base: r.yaml -> r.yaml."),
        (b"base: no_such", "unknown recipe 'no_such' (the base of r.yaml)."),
        (b"base: other.yaml", "other.yaml: no such file."),
        (b"about: words", "r.yaml:1: about: expected lines `key: text`, found a value."),
    ],
)  # fmt: skip
def test_each_slip_in_a_recipe_is_told_with_its_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(content)
    assert message in told(str(path))


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("learning_rate", "Did you mean 'optim.lr'?"),
        ("optimizer", "Did you mean 'optim.name'?"),
        ("optim", "Did you mean 'optim.name'?"),
        ("num_workers", "Did you mean 'data.workers'?"),
        ("model", "Did you mean 'model.name'?"),
        ("gradient_accumulation_steps", "Did you mean 'micro-batch-size'?"),
        ("train-interpolation", "Did you mean 'augment.train-interpolation'?"),
        ("fp16", "on the launch command: accelerate launch --mixed_precision fp16 …; see accelerate_configs/."),
        ("device", "accelerate launch --config_file accelerate_configs/multi_gpu.yaml …"),
        ("compile", "accelerate launch --dynamo_backend inductor …"),
    ],
)  # fmt: skip
def test_what_other_trainers_call_it_is_known(tmp_path: Path, word: str, advice: str) -> None:
    assert advice in told("digits", f"--{word}", "1")
    (tmp_path / "r.yaml").write_text(f"{word}: 1")
    message = told(str(tmp_path / "r.yaml"))
    assert advice in message and f"{tmp_path}/r.yaml:1" in message


@pytest.mark.parametrize("word", ["frobnicate", "turbo-mode", "beta-rays", "sizes"])
def test_nothing_is_proposed_that_is_not_close(word: str) -> None:
    assert "Did you mean" not in told("digits", f"--{word}", "1")


def test_what_is_proposed_exists() -> None:
    from accelerate.commands.launch import launch_command_parser

    kinds = option_types()
    assert SYNONYMS.keys() <= kinds.keys()
    words = [word for names in (*SYNONYMS.values(), *LAUNCH.values()) for word in names.split()]
    assert len(words) == len(set(words)) and not set(words) & kinds.keys()
    for command in LAUNCH:
        flag, value = command.split()
        assert f'"{flag}"' in repr(launch_command_parser()._option_string_actions).replace("'", '"')
        if flag == "--config_file":
            assert (helpers.ROOT / value).is_file()


def test_only_options_of_the_command_are_proposed() -> None:
    from accel_train.cli.evaluate import Predict

    def told_by_predict(word: str) -> str:
        with pytest.raises(UserError) as caught:
            parse_command(Predict, ["run", "x.png", word, "1"])
        return str(caught.value)

    assert "Did you mean 'output'?" in told_by_predict("--outptu")
    assert "optim.lr" not in told_by_predict("--learning-rate")
    assert "accelerate launch" not in told_by_predict("--gpus")


def all_told(*arguments: str) -> list[str]:
    """Return all messages of the UserError."""
    with pytest.raises(UserError) as caught:
        parse(arguments)
    return list(caught.value.messages)


def test_the_mistakes_of_a_recipe_and_of_an_option_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text("epoch: 3\noptim: {lrr: 1, lr: fast}\nseed: 1\nseed: 2\nbase: base.yaml")
    (tmp_path / "base.yaml").write_text("augment.flip: 2\nmodle: {name: x}\nema: [[1]]\n")
    assert all_told(str(path), "--loss.class-weights", "balance") == [
        f"{path}:4: seed is given twice; the first time in {path}:3.",
        f"{tmp_path}/base.yaml:3: ema: expected a value, found a list.",
        f"--modle.name: unknown option ({tmp_path}/base.yaml:2). Did you mean 'model.name'?",
        f"--epoch: unknown option ({path}:1). Did you mean 'epochs'?",
        f"--optim.lrr: unknown option ({path}:2). Did you mean 'optim.lr'?",
        f"--optim.lr: expected a number, found 'fast' ({path}:2).",
        "--loss.class-weights: expected one of none, balanced, found 'balance' (command line). "
        "Did you mean 'balanced'?",
        f"--augment.flip: expected a number from 0 to 1, found '2' ({tmp_path}/base.yaml:1).",
    ]


def test_a_mistake_causes_no_second_one(recipe: str) -> None:
    # without --epochs the recipe has 3 epochs, less than the warm-up; without the value lr has its default
    assert len(all_told(recipe, "--epoch", "99", "--schedule.warmup-epochs", "9")) == 1
    assert len(all_told(recipe, "--epochs", "x", "--schedule.warmup-epochs", "9")) == 1
    # an option's value of the recipe that another one of the command line replaces is not looked at
    Path(recipe).write_text("epochs: many")
    assert parse([recipe, "--epochs", "9"]).epochs == 9


def test_the_mistakes_of_other_commands_are_told_at_once(tmp_path: Path, recipe: str) -> None:
    from accel_train.cli.data import Shards
    from accel_train.cli.evaluate import Evaluate
    from accel_train.cli.recipes import Bench

    def told_by(cls: type[Any], *words: str) -> list[str]:
        with pytest.raises(UserError) as caught:
            parse_command(cls, words)
        return list(caught.value.messages)

    words = ("folder", "out", "--data.channels", "2", "--encoding", "jpg", "--short-side", "0", "--shard-sise", "1GB")
    assert told_by(Shards, *words) == [
        "--shard-sise: unknown option (command line). Did you mean 'shard-size'?",
        "--encoding: expected one of copy, jpeg, raw, found 'jpg' (command line). Did you mean 'jpeg'?",
        "--short-side: expected a number greater than 0, found '0' (command line).",
        "--data.channels: expected 1 or 3, found '2' (command line).",
    ]
    (tmp_path / "config.yaml").touch()
    overrides = ("--data.train-limit", "0", "--data.workers", "many", "--split", "tset")
    assert told_by(Evaluate, str(tmp_path), *overrides) == [
        "--split: expected one of test, val, train, found 'tset' (command line). Did you mean 'test'?",
        "--data.workers: expected a whole number or none, found 'many' (command line).",
        "--data.train-limit: expected a number greater than 0, found '0' (command line).",
    ]
    first, second = told_by(Evaluate, "--split", "tset")
    assert first.startswith("accel-train evaluate: RUN is missing; ")
    assert second.startswith("--split: expected one of ")
    first, second = told_by(Evaluate, str(tmp_path), "more", "--split", "x")
    assert first.startswith("'more': neither an option nor the value of one; ")
    assert second.startswith("--split: expected one of ")
    Path(recipe).write_text("epochs: 0\noptim: {lr: fast}")
    with pytest.raises(UserError) as caught:
        parse_command_of_recipe(Bench, [recipe, "--rounds", "0", "--seed", "-1"])
    assert list(caught.value.messages) == [
        "--rounds: expected a number greater than 0, found '0' (command line).",
        f"--optim.lr: expected a number, found 'fast' ({recipe}:2).",
        "--seed: expected a number that is not negative, found '-1' (command line).",
        f"--epochs: expected a number greater than 0, found '0' ({recipe}:1).",
    ]


def test_a_circle_of_bases_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml")
    (tmp_path / "b.yaml").write_text("base: ./a.yaml")
    assert "the recipe is its own base: a.yaml -> b.yaml -> a.yaml" in told(str(tmp_path / "a.yaml"))


def test_the_recipe_itself_is_checked(tmp_path: Path) -> None:
    assert "no recipe: accel-train train RECIPE" in told()
    assert parse(["--epochs", "3", "digits"]).recipe == "digits"
    assert "Without a recipe, give --model.name and --data.name" in told("--model.name", "resnet18")
    assert "unknown recipe 'no_such_one'." in told("no_such_one")
    assert "no such file" in told("./no_such.yaml")
    assert "cannot be read: a folder, not a regular file" in told(f"{tmp_path}/")


def test_without_a_recipe_the_options_name_model_and_data() -> None:
    words = ["--model.name", "resnet18", "--data.name", "folder", "--data.root", "photos"]
    found = parse([*words, "--epochs", "3"])
    assert (found.model.name, found.data.name, found.data.root) == ("resnet18", "folder", Path("photos"))
    assert (found.recipe, found.epochs, found.optim.name, found.schedule.name) == ("neutral", 3, "adamw", "cosine")
    assert parse(words).epochs == 10
    assert "--epochs" in told(*words, "--epochs", "x")


@pytest.mark.parametrize(
    "url", ["s3://key:secret@bucket/x", "https://user@host/x.tar", "https://host/x.tar?X-Amz-Signature=1", "s3://b/x#1"]
)
def test_a_url_with_a_secret_is_refused_and_not_said(url: str) -> None:
    text = told("digits", "--data.name", "wds", "--data.root", url)
    assert "leave it out, and give credentials where the storage's own client looks" in text
    assert "secret@" not in text and "user@" not in text and "Signature" not in text


def test_a_url_keeps_its_slashes() -> None:
    root = parse(["digits", "--data.name", "wds", "--data.root", "s3://bucket/a"]).data.root
    for each in (root, pickle.loads(pickle.dumps(root))):
        assert (str(each), str(each / "b.tar"), each.name) == ("s3://bucket/a", "s3://bucket/a/b.tar", "a")


@pytest.mark.parametrize(("size", "count"), [("200GB", 2e11), ("1.5 TB", 1.5e12), ("512MiB", 2**29), ("10B", 10)])
def test_sizes(size: str, count: float) -> None:
    assert bytes_of(size) == count
    for wrong in (size[:-1], f"~{size}", f"{size}s", "1.2.3GB", "0GB", 330 * "9" + "B"):
        assert bytes_of(wrong) == 0


def written_and_read(config: Config, path: Path) -> Config:
    path.write_text(to_yaml(config), encoding="utf-8")
    return parse([str(path)], checks_code=False)


@pytest.mark.parametrize("key", option_types())
def test_each_option_is_written_and_read(key: str, tmp_path: Path) -> None:
    words = shlex.split(reference.example(key, option_types()[key], value(Config(), key)))
    config = parse(["digits", *words], checks_code=False)
    expected = dataclasses.replace(config, recipe="digits", take_over=False, config_only=False, traceback=False)
    assert written_and_read(config, tmp_path / "round.yaml") == expected  # these three are of one start


WORDS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8)


@settings(max_examples=50, deadline=None)
@given(
    WORDS,
    st.lists(WORDS.filter(lambda word: not word.startswith("-")), max_size=3),  # which cannot be one of several
    st.floats(1e-9, 1e9),
    st.none() | st.integers(1, 99),
)
def test_any_word_and_number_is_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, word: str, layers: list[str], rate: float, limit: int | None
) -> None:
    config = Config(
        # Path("None") and Path("~/x") are told from None and a home folder by "./" only
        output_dir=Path("/") / word.replace("/", "_"),
        data=Data(train_limit=limit),
        model=Model(name=word, freeze=tuple(layers)),
        optim=Optim(lr=rate),
    )
    path = tmp_path_factory.getbasetemp() / "round.yaml"
    assert written_and_read(config, path) == dataclasses.replace(config, recipe="round")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--schedule.milestones 1", "with schedule.name=cosine; give --schedule.name multistep, or leave it out"),
        ("--schedule.decay 0.5", "with schedule.name=cosine; give --schedule.name step or multistep or plateau, or"),
        ("--schedule.warmup-lr 0.1", "without schedule.warmup-epochs; give --schedule.warmup-epochs, or leave it out"),
        ("--ema.decay 0.9", "without ema.enabled; give --ema.enabled true, or leave it out (command line)."),
        ("--optim.name adamw --optim.momentum 0.9", "with optim.name=adamw; choose another one, or leave it out"),
        ("--augment.mix-mode elem", "without augment.mixup or augment.cutmix"),
        ("--augment.scale 0.5 1", "with augment.crop=random; give --augment.crop resized, or"),
        ("--data.open-shards 4", "with data.order=full; give --data.order shards"),
    ],
)
def test_an_option_that_nothing_reads_is_refused(words: str, message: str) -> None:
    found = told("digits", *words.split())
    assert ": nothing reads it" in found and message in found and "(command line)" in found


@pytest.mark.parametrize(
    "words",
    [
        "--schedule.name step --schedule.decay 0.5 --schedule.step-epochs 2 --epochs 3",
        "--ema.enabled true --ema.decay 0.9",
        "--schedule.milestones --ema.after-epochs 0 --schedule.warmup-lr 0",  # turned off
        "--augment.crop center --augment.pad 0",
        "--augment.cutmix 1 --augment.mix-mode elem",
        "--optim.momentum 0.5 --optim.name rmsprop",
    ],
)
def test_an_option_that_is_read_or_turned_off_is_accepted(words: str) -> None:
    parse(["digits", *words.split()])


def test_a_recipe_may_have_options_for_other_settings_of_the_command_line(recipe: str, tmp_path: Path) -> None:
    assert parse([recipe, "--schedule.name", "cosine"]).schedule.milestones == (1, 2)
    assert parse([recipe, "--epochs", "1"]).schedule.milestones == (1, 2)
    (tmp_path / "config.yaml").write_text(to_yaml(parse([recipe, "--schedule.name", "cosine"])))
    parse([str(tmp_path / "config.yaml"), "--epochs", "1"])


def test_what_options_need_exists_and_optimizers_without_momentum_have_none() -> None:
    from timm.optim import get_optimizer_info

    known = option_types()
    for key, needs in declared(Needs):
        for other in needs.options.split():
            kinds = typing.get_args(known[other]) if typing.get_origin(known[other]) is Literal else needs.values
            assert other in known and set(needs.values) <= set(kinds), key
    assert not any(get_optimizer_info(name).has_momentum for name in WITHOUT_MOMENTUM)
