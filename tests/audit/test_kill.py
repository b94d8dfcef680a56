"""An audit that is really killed, with its processes, loses nothing of what it has looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import planted
import pytest

from accel_train.audit.audit import check_data
from accel_train.audit.look import RECORD
from accel_train.config.schema import Data

IMAGES = 400


@pytest.mark.slow
def test_an_audit_goes_on_after_sigkill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(IMAGES):
        path = Path("pets", ("train", "val")[number % 5 == 0], ("cat", "dog")[number % 2], f"{number}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        planted.scene(number // 2 if number < 20 else number, 320, 240).save(path)
    Path("pets/train/cat/empty.jpg").write_bytes(b"")
    line = [sys.executable, "-m", "accel_train", "check-data", "folder", "--root", "pets", "--processes", "2"]
    kept = Path("audit-pets/looked-at.bin")
    with subprocess.Popen(line, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as audit:
        try:
            until = time.monotonic() + 120
            while not kept.exists() or not kept.stat().st_size:
                assert audit.poll() is None and time.monotonic() < until
                time.sleep(0.002)
        finally:
            os.killpg(audit.pid, signal.SIGKILL)
    assert audit.returncode == -signal.SIGKILL
    assert not Path("audit-pets/audit.json").exists() and not Path("unreadable-pets.txt").exists()
    looked_at = kept.stat().st_size // RECORD.itemsize
    assert 0 < looked_at < IMAGES
    continued = check_data(Data("folder", Path("pets")), processes=1)
    assert continued.reused == looked_at
    undisturbed = check_data(
        Data("folder", Path("pets")), output=Path("other/unreadable.txt"), folder=Path("other"), processes=1
    )
    assert undisturbed.reused == 0 and undisturbed.finding("unreadable") is not None
    found = [json.loads((each / "audit.json").read_text()) for each in (continued.folder, undisturbed.folder)]
    assert found[0] == found[1]
    assert Path("unreadable-pets.txt").read_text() == Path("other/unreadable.txt").read_text()
