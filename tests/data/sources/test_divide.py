"""The splits of a dataset: disjoint, complete, and the same for any order of its files."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_train.config.schema import Data
from accel_train.data.sources.divide import divide, stratified_choice
from accel_train.data.sources.splits import Splits
from accel_train.errors import UserError


class Named:
    """A source that has only names and labels."""

    in_memory = True

    def __init__(self, names: list[str], labels: list[int]) -> None:
        self.names, self.labels = names, torch.tensor(labels, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.names)

    def fetch(self, ids):
        return torch.tensor([int(self.names[id].split("-")[-1]) for id in ids], dtype=torch.uint8)

    def name(self, id: int) -> str:
        return f"root/{self.names[id]}"


def splits(names: list[str], labels: list[int], **others: Named) -> Splits:
    sources: dict[str, Any] = {"validation": None, "test": None} | others
    return Splits(("a", "b", "c"), 1, 8, (0.0,), (1.0,), Named(names, labels), **sources)


DATA = Data(name="folder", root=Path("root"))


def names(source) -> set[str]:
    return {source.name(i) for i in range(len(source))}


@st.composite
def samples(draw):
    labels = draw(st.lists(st.integers(0, 2), min_size=10, max_size=60))
    return [f"{label}/image-{i}" for i, label in enumerate(labels)], labels


@given(
    samples(),
    st.integers(0, 9),
    st.floats(0.1, 0.45),
    st.floats(0.1, 0.45),
    st.randoms(use_true_random=False),
)
def test_splits_are_disjoint_complete_and_independent_of_order(found, seed, val, test, random) -> None:
    paths, labels = found
    data = replace(DATA, val_fraction=val, test_fraction=test)
    order = list(range(len(paths)))
    random.shuffle(order)
    one = divide(splits(paths, labels), data, seed)
    other = divide(splits([paths[i] for i in order], [labels[i] for i in order]), data, seed)
    parts = [names(one.train), names(one.validation), names(one.test)]
    assert parts == [names(other.train), names(other.validation), names(other.test)]
    assert sum(map(len, parts)) == len(paths) and set.union(*parts) == {f"root/{path}" for path in paths}
    assert len(parts[1]) == round(val * len(paths)) and len(parts[2]) == round(test * len(paths))
    for source in (one.train, one.validation, one.test):  # labels follow their samples
        assert [int(source.name(i).split("/")[1]) for i in range(len(source))] == source.labels.tolist()


@given(samples(), st.integers(1, 59))
def test_choosing_gives_each_class_its_share(found, count) -> None:
    paths, labels = found
    count = min(count, len(paths))
    chosen = stratified_choice(paths, labels, count, "salt")
    assert chosen.sum() == count
    for label in set(labels):
        of_class = np.array(labels) == label
        assert abs(chosen[of_class].sum() - count * of_class.sum() / len(labels)) <= 3


def test_validation_of_a_set_with_its_own_test_split_comes_from_training() -> None:
    test = Named(["0/t-1", "1/t-2"], [0, 1])
    divided = divide(splits([f"0/i-{i}" for i in range(10)], [0] * 10, test=test), replace(DATA, val_fraction=0.2), 0)
    assert (len(divided.train), len(divided.validation), len(divided.test)) == (8, 2, 2)
    assert divided.test is test


@pytest.mark.parametrize(("split", "option"), [("validation", "val_fraction"), ("test", "test_fraction")])
def test_a_share_for_a_split_that_is_there_is_refused(split: str, option: str) -> None:
    found = splits(["0/i-1"] * 10, [0] * 10, **{split: Named(["0/i-2"], [0])})
    with pytest.raises(UserError, match=f"already has a {split} split"):
        divide(found, replace(DATA, **{option: 0.5}), 0)  # type: ignore[arg-type]


def test_a_share_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="is 0 images"):
        divide(splits(["0/i-1", "1/i-2"], [0, 1]), replace(DATA, val_fraction=0.1), 0)


def test_limits_draw_from_all_classes_and_leave_the_rest() -> None:
    paths = [f"{i // 30}/i-{i}" for i in range(90)]
    labels = [i // 30 for i in range(90)]
    own = {"validation": Named(paths, labels), "test": Named(paths, labels)}
    divided = divide(splits(paths, labels, **own), replace(DATA, train_limit=9, test_limit=6), 3)
    assert torch.bincount(divided.train.labels).tolist() == [3, 3, 3]
    assert (
        torch.bincount(divided.test.labels).tolist() == [2, 2, 2] == torch.bincount(divided.validation.labels).tolist()
    )
    assert names(divided.train) != {f"root/{path}" for label in range(3) for path in paths[30 * label : 30 * label + 3]}
    again = divide(splits(paths[::-1], labels[::-1], **own), replace(DATA, train_limit=9, test_limit=6), 3)
    assert names(again.train) == names(divided.train)
    generous = divide(splits(paths, labels), replace(DATA, train_limit=10**6), 0)
    assert len(generous.train) == 90


def test_a_subset_fetches_its_own_samples() -> None:
    divided = divide(
        splits([f"0/i-{i}" for i in range(50)], [0] * 50), replace(DATA, test_fraction=0.5, test_limit=9), 0
    )
    fetched = divided.test.fetch(range(9)).tolist()
    assert [f"root/0/i-{i}" for i in fetched] == [divided.test.name(i) for i in range(9)]


def test_labels_outside_the_classes() -> None:
    with pytest.raises(UserError, match=r"2 labels outside its 3 classes \(0 to 2\): the first is 3, of root/x-2"):
        divide(splits(["0/x-1", "x-2", "x-3"], [0, 3, -1]), DATA, 0)


def test_one_class_is_no_task() -> None:
    with pytest.raises(UserError, match="only one class, 'a'"):
        divide(replace(splits(["0/i-1"], [0]), classes=("a",)), DATA, 0)


class TestSkipping:
    def skip(self, path: Path, **changes) -> Splits:
        found = splits([f"{i % 2}/i-{i}" for i in range(20)], [i % 2 for i in range(20)])
        return divide(found, replace(DATA, skip_unreadable=path, **changes), 0)

    @pytest.mark.parametrize("limit", [None, 6])
    @pytest.mark.parametrize("seed", range(6))
    def test_listed_images_move_no_other_into_another_split(self, tmp_path: Path, seed: int, limit: int | None) -> None:
        found = splits([f"{i % 2}/i-{i}" for i in range(20)], [i % 2 for i in range(20)])
        data = replace(DATA, val_fraction=0.2, test_fraction=0.3, train_limit=limit)
        whole = divide(found, data, seed)
        before = [names(source) for source in (whole.train, whole.validation, whole.test)]
        listed = {min(before[0]), min(before[1]), min(before[2])}
        lines = [name.removeprefix("root/") for name in listed] + ["0/deleted-since", ""]
        (tmp_path / "list").write_text("\n".join(lines))
        after = divide(found, replace(data, skip_unreadable=tmp_path / "list"), seed)
        assert after.left_out == 3
        assert [names(source) for source in (after.to_train_on, after.validation, after.test)] == [
            part - listed for part in before
        ]
        # Those to train on keep their numbers, and with them their places in the order and their augmentation.
        assert [after.train.name(i) for i in range(len(after.train))] == [
            whole.train.name(i) for i in range(len(whole.train))
        ]
        assert {after.train.name(i) for i in after.unreadable.nonzero()[:, 0].tolist()} == listed & before[0]

    def test_an_empty_list_leaves_all(self, tmp_path: Path) -> None:
        (tmp_path / "list").touch()
        divided = self.skip(tmp_path / "list")
        assert divided.left_out == 0 and len(divided.train) == 20

    def test_no_list(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match=r"No such file.*accel-train check-data folder --data.root 'my root'"):
            self.skip(tmp_path / "list", root=Path("my root"))

    def test_a_list_of_another_folder(self, tmp_path: Path) -> None:
        (tmp_path / "list").write_text("2/other\n")
        with pytest.raises(UserError, match=r"none of the 1 images .* '2/other', is in root"):
            self.skip(tmp_path / "list")

    def test_a_class_that_it_would_empty(self, tmp_path: Path) -> None:
        (tmp_path / "list").write_text("".join(f"1/i-{i}\n" for i in range(1, 20, 2)))
        with pytest.raises(UserError, match="all training images of class 'b'"):
            self.skip(tmp_path / "list")


def test_a_sample_with_several_labels_is_divided_by_its_rarest() -> None:
    rows = np.zeros((400, 3), dtype=np.bool_)
    rows[:, 0] = True  # all have the first label
    rows[:100, 1] = True
    rows[:20, 2] = True
    chosen = stratified_choice(map(str, range(400)), rows, 100, "salt")
    assert (chosen[:20].sum(), chosen[20:100].sum(), chosen[100:].sum()) == (5, 20, 75)
    turned = stratified_choice(map(str, reversed(range(400))), rows[::-1], 100, "salt")
    assert (turned[::-1] == chosen).all()
    none = np.zeros((10, 3), dtype=np.bool_)
    assert stratified_choice(map(str, range(10)), none, 4, "salt").sum() == 4


def test_the_choice_is_the_same_for_ever() -> None:
    """Runs that were started with earlier versions go on with the same validation images."""
    keys = [f"class/{number}.jpg" for number in range(100)] + ["\udcff.jpg"]
    chosen = stratified_choice(keys, [number % 3 for number in range(101)], 10, "0 validation")
    assert np.flatnonzero(chosen).tolist() == [12, 17, 39, 65, 73, 88, 89, 93, 97, 100]
