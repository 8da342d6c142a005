"""Directories, homes and clocks that are not as one would like them; keys that must not care."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fault_worker import content, is_right, key

from rm_abstract import _core
from rm_abstract import cache as library
from rm_abstract.base import config

ARTEFACT = {"program": content(1, False), "log": "made 1"}

KEY_PROGRAM = """
from rm_abstract import _core
from rm_abstract.base import config
values = {name: text for name, (text, _) in config.resolve({}).values.items()}
builder = _core.cache.KeyBuilder("program")
builder.set("program", b"graph").set("options", _core.options.artefact_bytes(values))
builder.set("backend", dict([("build_id", "1"), ("isa", "avx2")][::ORDER]))
print(builder.set("salt", values["cache_salt"]).finish().hex)
"""


def key_in_process(
    order: int = 1, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    program = KEY_PROGRAM.replace("ORDER", str(order))
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(env or {})},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_a_key_is_the_same_in_every_process_locale_folder_and_order(tmp_path: Path):
    keys = {
        key_in_process(),
        key_in_process(order=-1, env={"PYTHONHASHSEED": "1"}),
        key_in_process(cwd=tmp_path, env={"PYTHONHASHSEED": "2", "LC_ALL": "tr_TR.UTF-8"}),
        key_in_process(env={"LC_ALL": "C", "TZ": "Asia/Seoul", "HOME": "/nonexistent"}),
    }
    assert len(keys) == 1
    assert len(keys.pop()) == 64


def test_each_environment_variable_changes_the_key_exactly_when_its_row_says_so():
    other = {
        "bool": "true", "int": "1", "number": "7", "bytes": "77M", "duration": "77s",
        "int list": "3,5", "text": "other", "path": "/other", "json": '{"a": 1}', "device": "sim",
        "fallback": "allow", "verify": "off", "log spec": "error",
    }  # fmt: skip
    reference = key_of_options({})
    for row in config.table():
        if not row["env"]:
            continue
        if row["type"] == "choice":
            choices = row["accepted"].split(", ")
            value = choices[1] if choices[0] == row["default"] else choices[0]
        else:
            value = other[row["type"]]
        if value == row["default"]:
            value = {"true": "false", "1": "0"}[value]
        changed = key_of_options({row["name"]: value}) != reference
        assert changed == row["affects_artefact"], row["name"]


def key_of_options(arguments: dict[str, str]) -> str:
    values = {name: text for name, (text, _) in _core.options.resolve(arguments).items()}
    builder = _core.cache.KeyBuilder("program")
    return builder.set("options", _core.options.artefact_bytes(values)).finish().hex


def test_another_core_library_is_another_key(tmp_path: Path):
    folder = tmp_path / "copy"
    folder.mkdir()
    shutil.copy(_core.__file__, folder)
    path = folder / Path(_core.__file__).name
    program = (
        "import importlib.util, sys;"
        "spec = importlib.util.spec_from_file_location('_core', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module);"
        "print(module.cache.CompileCache().new_key('program').finish().hex)"
    )

    def key_with(library: Path) -> str:
        command = [sys.executable, "-c", program, str(library)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    same = key_with(path)
    assert same == key_with(Path(_core.__file__))  # a copy elsewhere is the same machine code
    with open(path, "ab") as file:
        file.write(b"\0")
    assert key_with(path) != same


def test_a_group_writable_directory_is_refused_with_a_remedy(own_cache: Path, capfd):
    _core.cache.CompileCache().publish(key(1), ARTEFACT)
    own_cache.chmod(0o770)
    cache = _core.cache.CompileCache()
    assert cache.lookup(key(1)) is None
    assert "chmod go-w" in cache.disk_problem
    assert "0770" in capfd.readouterr().err
    assert _core.cache.CompileCache({"cache_trust": "true"}).lookup(key(1)) is not None


def test_without_any_home_the_cache_works_in_memory():
    if os.geteuid() != 0:
        pytest.skip("needs a user without an entry in the password file")
    program = (
        "import os; from rm_abstract import _core; os.setuid(54321);"
        "cache = _core.cache.CompileCache({'cache_dir': ''});"
        "k = _core.cache.KeyBuilder('program').finish();"
        "print([cache.get_or_compile(k, lambda: {'rmir': b'x'})[1] for _ in range(2)]);"
        "print(cache.disk_problem)"
    )
    env = {
        k: v for k, v in os.environ.items() if k not in ("HOME", "XDG_CACHE_HOME", "RM_CACHE_DIR")
    }
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert "['compiled', 'memory']" in done.stdout
    assert "RM_CACHE_DIR" in done.stdout


def test_a_read_only_directory_serves_hits_and_survives_misses(tmp_path: Path, own_cache: Path):
    if os.geteuid() != 0:
        cache = _core.cache.CompileCache()
        cache.publish(key(1), ARTEFACT)
        for folder in [own_cache, *own_cache.rglob("*")]:
            if folder.is_dir():
                folder.chmod(0o500)
        check_read_only(_core.cache.CompileCache())
        return
    view = tmp_path / "read_only"
    view.mkdir()
    _core.cache.CompileCache().publish(key(1), ARTEFACT)
    bind = ["mount", "--bind", "-o", "ro", str(own_cache), str(view)]
    if subprocess.run(bind, capture_output=True).returncode != 0:
        pytest.skip("a bind mount needs privileges")
    try:
        check_read_only(_core.cache.CompileCache({"cache_dir": str(view)}))
    finally:
        subprocess.run(["umount", str(view)], check=True)


def check_read_only(cache: _core.cache.CompileCache) -> None:
    assert is_right(cache.lookup(key(1)), 1, False)
    assert cache.get_or_compile(key(2), lambda: {"program": b"x"})[1] == "compiled"
    failures = [name for name in cache.counters() if name.startswith("store_fail")]
    assert failures in (["store_fail{EROFS}"], ["store_fail{EACCES}"])


def test_a_file_where_the_directory_should_be_is_survived(own_cache: Path):
    own_cache.write_text("not a directory")
    cache = _core.cache.CompileCache()
    assert cache.disk_problem
    assert cache.get_or_compile(key(1), lambda: ARTEFACT)[1] == "compiled"
    assert own_cache.read_text() == "not a directory"


def test_a_directory_deleted_while_running_comes_back(own_cache: Path):
    cache = _core.cache.CompileCache()
    cache.publish(key(1), ARTEFACT)
    shutil.rmtree(own_cache)
    assert cache.get_or_compile(key(2), lambda: ARTEFACT)[1] == "compiled"
    assert _core.cache.CompileCache().lookup(key(2)) is not None


@pytest.mark.parametrize("years", [-20, 20])
def test_a_wrong_clock_neither_hides_nor_keeps_entries(own_cache: Path, years: int):
    cache = _core.cache.CompileCache()
    cache.publish(key(1), ARTEFACT)
    (entry,) = (own_cache / "v1" / "objects").glob("*/*.rmc")
    mark = time.time() + years * 365 * 86400
    os.utime(entry, (mark, mark))
    assert cache.collect(max_age=0, max_size=1, dry_run=True)["evicted"] == 1
    assert is_right(_core.cache.CompileCache().lookup(key(1)), 1, False)
    assert abs(entry.stat().st_mtime - time.time()) < 60  # the use put it right
    assert cache.collect(max_age=3600)["evicted"] == 0


def test_counts_of_several_processes_add_up(workers):
    for _ in range(3):
        workers.run("1,2")
    stats = library.stats()
    assert stats["counters"]["compile"] == 2
    assert stats["counters"]["hit_disk"] == 4
    assert stats["hit_rate"] == pytest.approx(4 / 6)


def test_explain_names_the_option_that_made_the_last_run_miss(own_cache: Path):
    cache = _core.cache.CompileCache()
    for level in ("1", "0"):
        values = {
            n: t for n, (t, _) in _core.options.resolve({"optimization_level": level}).items()
        }
        builder = cache.new_key("program").set("program", "p")
        builder.set("options", _core.options.artefact_bytes(values))
        cache.get_or_compile(builder.finish(), lambda: ARTEFACT)
    report = library.explain(last_miss=True)
    assert report["differing"] == ["options"]
    assert json.loads(json.dumps(report)) == report
