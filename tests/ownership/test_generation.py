"""The number of an owner: it only grows, and what was written late is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from owners import checkpoint_of, claim

from accel_train.files import read_json_lines
from accel_train.ownership import owner
from accel_train.ownership.owner import claim_next, is_late, last_begun, read_result
from accel_train.records.directory import RunDirectory


def test_generations_grow_also_where_only_the_records_were_copied(quick: None, tmp_path: Path) -> None:
    (tmp_path / "status.json").write_text('{"generation": 4}')
    (tmp_path / "result.json").write_text('{"generation": "?"}')
    numbers = []
    for _ in range(3):
        lease = claim(tmp_path)
        lease.begin(5)
        numbers.append(lease.generation)
        lease.release()
    assert numbers == [5, 6, 7]
    assert last_begun(tmp_path) == (7, 5)
    assert len(list((tmp_path / "generations").iterdir())) == 1


def test_readers_leave_out_what_was_written_late(quick: None, tmp_path: Path) -> None:
    """On a file system that shows a new file late, the next owner may miss an unfinished write."""
    run = RunDirectory(tmp_path, writes=True, lease=claim(tmp_path))
    run.log("train", update=5)
    checkpoint_of(run, 5)
    run.lease.release()
    for number, content in ((2, {"of": "late"}), (3, {"of": "newest"})):
        (tmp_path / "generations").mkdir(exist_ok=True)
        (tmp_path / "generations" / f"{number:08d}.json").write_text(json.dumps({"update": 5 * (number - 1)}))
        (tmp_path / "result.json").write_text(json.dumps({**content, "generation": number}))
        assert read_result(tmp_path)["of"] == content["of"]
    (tmp_path / "result.json").write_text('{"of": "late", "generation": 2}')
    assert read_result(tmp_path) == {}
    lines = [
        '{"kind": "train", "update": 6, "generation": 2}',
        '{"kind": "train", "update": 6, "generation": 3}',
        '{"kind": "train", "update": 7, "generation": 2}',
        '{"kind": "train", "update": 7}',  # of an older version, which has no generations
        '{"kind": "train", "update": 8, "generation": 3}',
    ]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    updates = [
        (line["update"], line.get("generation")) for line in read_json_lines(tmp_path / "metrics.jsonl", "train")
    ]
    assert updates == [(5, 1), (6, 2), (6, 3), (7, None), (8, 3)]
    for update, number in ((10, 2), (11, 2), (12, 3)):
        assert is_late(tmp_path, {"generation": number}, update) == (update == 11)


def test_two_starts_that_look_at_the_same_moment_get_two_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert claim_next(tmp_path) == 1
    looks: Any = iter([[]])  # the other one's file is not there yet
    numbers = owner._generations
    monkeypatch.setattr(owner, "_generations", lambda directory: next(looks, numbers(directory)))
    assert claim_next(tmp_path) == 2
