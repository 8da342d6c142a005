"""Files and folders of a vendor's on their way to its runtime: what is refused, what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import rm_abstract
from rm_abstract.worker import artefact_files, artefact_header


def header(digest: str, form: str, name: str) -> artefact_header.Header:
    return artefact_header.Header("vendor", "one", "v1", digest, form, name)


def frozen(source: Path) -> memoryview:
    """What `packed` wrote."""
    descriptor = artefact_files.packed(source, header)
    try:
        size = os.fstat(descriptor).st_size
        return memoryview(os.pread(descriptor, size, 0))
    finally:
        os.close(descriptor)


def folder_of(path: Path) -> Path:
    (path / "inside").mkdir(parents=True)
    (path / "inside" / "weights").write_bytes(b"w" * 5000)
    (path / "link").symlink_to("inside/weights")
    return path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def of(folder: Path) -> dict[str, str]:
    """The environment of a process that keeps its files there."""
    package = str(Path(rm_abstract.__file__).parent.parent)
    return {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": package}


def test_a_folder_comes_back_with_its_links_and_goes(tmp_path: Path, own_folder: Path) -> None:
    data = frozen(folder_of(tmp_path / "made"))
    found, payload = artefact_header.unwrap(data, "vendor", "one", "v1")
    path = artefact_files.unpacked(found, payload)
    assert (path / "link").read_bytes() == b"w" * 5000
    artefact_files.remove(path)
    assert list(own_folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["absolute link", "link out of it", "fifo", "fifo alone"])
def test_what_could_not_be_taken_out_is_refused_when_it_is_packed(
    kind: str, tmp_path: Path
) -> None:
    made = folder_of(tmp_path / "made")
    if kind == "absolute link":
        (made / "again").symlink_to(made)
    elif kind == "link out of it":
        (made / "out").symlink_to("../secret")
    else:
        os.mkfifo(made / "fifo")
    source = made / "fifo" if kind == "fifo alone" else made
    with pytest.raises(ValueError, match="expected"):
        artefact_files.packed(source, header)


LIVES_ON = """
import sys, time
from pathlib import Path
from rm_abstract.worker import artefact_files, artefact_header
data = memoryview(Path(sys.argv[1]).read_bytes())
artefact_files.unpacked(*artefact_header.unwrap(data, "vendor", "one", "v1"))
print(flush=True)
time.sleep(60)
"""


def test_those_of_a_process_that_is_ending_are_waited_for(tmp_path: Path, own_folder: Path) -> None:
    (tmp_path / "artefact").write_bytes(frozen(folder_of(tmp_path / "made")))
    command = [sys.executable, "-c", LIVES_ON, str(tmp_path / "artefact")]
    with subprocess.Popen(command, env=of(own_folder), stdout=subprocess.PIPE) as living:
        assert living.stdout is not None and living.stdout.readline()
        artefact_files.sweep()
        assert len(list(own_folder.iterdir())) == 2  # its folder and its lock
        timer = threading.Timer(0.3, living.kill)
        timer.start()
        artefact_files.sweep(ended=[living.pid])
        timer.join()
    assert list(own_folder.iterdir()) == []


CRASHES = """
import os, signal, sys
from pathlib import Path
from rm_abstract.worker import artefact_files, artefact_header
data = memoryview(Path(sys.argv[1]).read_bytes())
artefact_files.unpacked(*artefact_header.unwrap(data, "vendor", "one", "v1"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_that_was_killed_left_goes_with_the_next_one(
    tmp_path: Path, own_folder: Path
) -> None:
    data = frozen(folder_of(tmp_path / "made"))
    (tmp_path / "artefact").write_bytes(data)
    found, payload = artefact_header.unwrap(data, "vendor", "one", "v1")
    living = artefact_files.unpacked(found, payload)
    env = of(own_folder)
    command = [sys.executable, "-c", CRASHES, str(tmp_path / "artefact")]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        folders = [path for path in own_folder.iterdir() if path.is_dir()]
        assert len(folders) == 2  # this process's, and the last one's
    artefact_files.sweep()
    assert sorted(own_folder.iterdir()) == sorted([living.parent, Path(f"{living.parent}.lock")])
    artefact_files.remove(living)
    assert list(own_folder.iterdir()) == []
