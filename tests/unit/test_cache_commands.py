"""`rm-abstract cache …` and rm_abstract.cache: every command, as text and as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from rm_abstract import CacheError, _core
from rm_abstract import cache as library
from rm_abstract.cli.cache import age_text, cache, size_text


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(cache, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def run_json(*arguments: str, code: int = 0) -> object:
    return json.loads(run(*arguments, "--json", code=code))


@pytest.fixture
def keys(own_cache: Path) -> list[str]:
    """Three plans that differ in their options, one verdict."""
    store = _core.cache.CompileCache()
    made = []
    for number in range(3):
        key = store.new_key("program").set("program", "p").set("options", str(number)).finish()
        artefact = {"sections": {"program": b"x" * 10_000}, "producer": "test", "guards": ""}
        store.publish(key, artefact, compile_ms=1500)
        made.append(key.hex)
    store.publish(store.new_key("verdict").finish(), {"verdict": b"equal"})
    return made


def test_commands_that_look_work_without_a_directory_and_do_not_create_it(own_cache: Path):
    assert run_json("path") == {"path": str(own_cache)}
    assert run_json("stats")["entries"] == 0
    assert run_json("ls") == []
    assert run_json("verify") == {"sound": 0, "bad": []}
    assert not own_cache.exists()


def test_stats_and_ls_show_what_is_there(keys: list[str]):
    stats = run_json("stats")
    assert stats["kinds"]["program"]["entries"] == 3
    assert stats["bytes"] == sum(row["size"] for row in library.entries())
    assert "program     3" in run("stats")
    assert {row["key"] for row in run_json("ls", "--kind", "program")} == set(keys)
    assert "compiled in 1.50 s" in run("ls")


def test_show_wants_an_unambiguous_prefix(keys: list[str]):
    assert run_json("show", keys[0][:12])["compile_ms"] == 1500
    assert keys[0] in run("show", keys[0][:12].upper())
    assert "rm-abstract cache ls" in run("show", "0", code=1)
    missing = "0000000000" if not any(k.startswith("0000000000") for k in keys) else "1111111111"
    run("show", missing, code=1)


def test_explain_names_the_fields_that_differ(keys: list[str]):
    report = run_json("explain", keys[0][:16], keys[1][:16])
    assert report["differing"] == ["options"]
    assert "schema" in report["same"]
    assert run_json("explain", keys[0][:16])["other"] in keys[1:]
    assert "in: options" in run("explain", keys[2][:16])
    run("explain", code=1)
    run("explain", "--last-miss", code=1)  # nothing missed yet


def test_verify_fails_when_an_entry_is_bad_and_remove_puts_it_away(keys: list[str]):
    path = Path(library.show(keys[0])["path"])
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(data)
    assert run_json("verify", code=1)["bad"][0][0] == str(path)
    run("verify", "--remove", code=1)
    assert run_json("verify") == {"sound": 3, "bad": []}


def test_gc_obeys_sizes_and_ages_and_a_dry_run_removes_nothing(keys: list[str]):
    for row in library.entries():
        os.utime(row["path"], (time.time() - 7200,) * 2)
    assert run_json("gc", "--max-age", "1h", "--dry-run")["evicted"] == 4
    assert len(library.entries()) == 4
    assert "removed 4 of 4" in run("gc", "--max-age", "1h")
    assert "expected bytes" in run("gc", "--max-size", "1X", code=1)


def test_clear_asks_first(keys: list[str]):
    assert CliRunner().invoke(cache, ["clear"], input="n\n").exit_code == 1
    assert len(library.entries()) == 4
    assert run_json("clear", "--yes") == {"removed": 4}
    assert library.entries() == []


def test_a_bundle_brings_entries_to_another_directory(
    keys: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    bundle = str(tmp_path / "bundle.tar")
    assert run_json("export", bundle, keys[0][:16]) == {"exported": 1}
    assert "exported 4" in run("export", bundle)
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "other"))
    assert run_json("import", bundle) == {"imported": 4, "known": 0, "refused": []}
    assert run_json("import", bundle)["known"] == 4
    assert {row["key"] for row in library.entries() if row["kind"] == "program"} == set(keys)


def test_what_is_not_a_sound_entry_is_refused_by_name(own_cache: Path, tmp_path: Path):
    bundle = tmp_path / "bundle.tar"
    text = tmp_path / "text"
    text.write_text("not an entry")
    with tarfile.open(bundle, "w") as archive:
        archive.add(text, "../../escape.rmc")
        archive.add(tmp_path, "folder", recursive=False)
    report = run_json("import", str(bundle), code=1)
    assert [name for name, _ in report["refused"]] == ["../../escape.rmc", "folder"]
    assert library.entries() == []
    with pytest.raises(CacheError, match="expected a bundle"):
        library.import_bundle(text)


def test_keys_complete_from_the_listing(keys: list[str]):
    command = cache.commands["show"]
    found = command.params[0].shell_complete(command.make_context("show", [keys[0]]), keys[0][:2])
    assert keys[0][:16] in [item.value for item in found]


def complete(*words: str) -> list[str]:
    """What bash would be offered for the last word, through the installed completion's protocol."""
    env = {"_RM_ABSTRACT_COMPLETE": "bash_complete", "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-m", "rm_abstract.cli.main"],
        env={**os.environ, **env, "COMP_WORDS": " ".join(["rm-abstract", *words])},
        capture_output=True,
        text=True,
        check=True,
    )
    return [line.split(",", 1)[1] for line in done.stdout.splitlines()]


def test_a_shell_completes_commands_options_and_keys(keys: list[str]):
    every = {"path", "stats", "ls", "show", "explain", "verify", "gc", "clear", "export", "import"}
    assert set(complete("cache", "")) == {*every, "warm"}
    assert complete("cache", "ex") == ["explain", "export"]
    assert complete("cache", "explain", "--la") == ["--last-miss"]
    assert complete("cache", "warm", "--dev") == ["--device"]
    for command in ("show", "explain"):
        assert complete("cache", command, keys[0][:6]) == [keys[0][:16]]


def test_every_command_takes_json():
    for name, command in cache.commands.items():
        assert "--json" in [word for option in command.params for word in option.opts], name


def test_sizes_and_ages_are_short():
    assert [size_text(n) for n in (0, 1023, 1536, 5 << 30)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 GiB",
    ]
    assert [age_text(n) for n in (-5, 59, 90, 7200, 3 * 86400)] == ["0s", "59s", "2m", "2h", "3d"]
