"""Files that are not what a writer wrote. C++ tests flip every bit of a small entry; these go
through the directory, with small and with mapped entries."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from fault_support import SOAK, objects
from fault_worker import content, is_right, key

from rm_abstract import _core

pytestmark = pytest.mark.timeout(7200 if SOAK else 300)

FLIPS = 20_000 if SOAK else 3_000  # all 1 280 of the header, the others at random


def artefact(number: int, large: bool = False) -> dict[str, bytes | str]:
    return {"program": content(number, large), "log": f"made {number}"}


def published(own_cache: Path, number: int, large: bool = False) -> Path:
    _core.cache.CompileCache().publish(key(number), artefact(number, large))
    (entry,) = [path for path in objects(own_cache) if path.stem == key(number).hex]
    return entry


def replace(path: Path, data: bytes) -> None:
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_no_flipped_bit_is_served(own_cache: Path, seed: int):
    rng = random.Random(seed)
    entry = published(own_cache, 1)
    good = entry.read_bytes()
    header_bits = list(range(160 * 8))
    others = [rng.randrange(160 * 8, len(good) * 8) for _ in range(FLIPS - len(header_bits))]
    for bit in header_bits + others:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        replace(entry, bytes(bad))
        cache = _core.cache.CompileCache()
        assert cache.lookup(key(1)) is None, f"bit {bit}"
        assert not entry.exists()  # put away, so that the next store is not lost
    replace(entry, good)
    assert is_right(_core.cache.CompileCache().lookup(key(1)), 1, False)
    assert len(list((own_cache / "v1" / "quarantine").iterdir())) <= 16


def test_no_truncation_is_served(own_cache: Path):
    entry = published(own_cache, 1)
    good = entry.read_bytes()
    for size in range(0, len(good), 1 if SOAK else 13):
        replace(entry, good[:size])
        assert _core.cache.CompileCache().lookup(key(1)) is None, f"{size} bytes"


def test_mapped_entries_are_checked_as_small_ones_are(own_cache: Path, seed: int):
    rng = random.Random(seed)
    entry = published(own_cache, 2, large=True)
    good = entry.read_bytes()
    cuts = [rng.randrange(len(good)) for _ in range(10)]
    for bad in [good[:cut] for cut in cuts] + [
        good[:cut] + bytes([good[cut] ^ 1]) + good[cut + 1 :] for cut in cuts
    ]:
        replace(entry, bad)
        assert _core.cache.CompileCache().lookup(key(2)) is None


def test_a_file_under_another_key_is_not_that_key(own_cache: Path):
    one, two = published(own_cache, 1), published(own_cache, 2)
    replace(one, two.read_bytes())
    assert _core.cache.CompileCache().lookup(key(1)) is None
    assert is_right(_core.cache.CompileCache().lookup(key(2)), 2, False)


def test_an_entry_of_another_kind_is_not_served(own_cache: Path):
    entry = published(own_cache, 1)
    data = bytearray(entry.read_bytes())
    data[6:8] = (2).to_bytes(2, "little")  # vendor
    data[128:160] = _core.cache.digest(bytes(data[:128]))
    replace(entry, bytes(data))
    assert _core.cache.CompileCache().lookup(key(1)) is None


@pytest.mark.parametrize("number", [0, 2, 60_000])
def test_other_formats_are_removed_and_compiled_again(own_cache: Path, number: int):
    entry = published(own_cache, 1)
    data = bytearray(entry.read_bytes())
    data[4:6] = number.to_bytes(2, "little")
    data[128:160] = _core.cache.digest(bytes(data[:128]))
    replace(entry, bytes(data))
    cache = _core.cache.CompileCache()
    assert cache.get_or_compile(key(1), lambda: artefact(1))[1] == "compiled"
    assert cache.counters()["incompatible"] == 1
    assert _core.cache.CompileCache().get_or_compile(key(1), lambda: artefact(1))[1] == "disk"


def test_a_reader_keeps_its_mapped_bytes_across_eviction_and_a_new_entry(own_cache: Path):
    published(own_cache, 3, large=True)
    held = _core.cache.CompileCache().lookup(key(3))
    view = held.section("program")
    cache = _core.cache.CompileCache()
    assert cache.clear() == 1
    cache.publish(key(3), {"program": b"x" * len(view), "log": ""})
    del held
    assert bytes(view) == content(3, True)


def test_a_planted_pickle_is_never_loaded(own_cache: Path, tmp_path: Path):
    witness = tmp_path / "executed"
    entry = published(own_cache, 1)
    replace(entry, f"cos\nsystem\n(S'touch {witness}'\ntR.".encode())
    assert _core.cache.CompileCache().lookup(key(1)) is None
    assert not witness.exists()


def test_quarantine_and_links_do_not_lead_outside(own_cache: Path, tmp_path: Path):
    entry = published(own_cache, 1)
    outside = tmp_path / "outside"
    outside.write_bytes(entry.read_bytes())
    entry.unlink()
    os.symlink(outside, entry)
    assert _core.cache.CompileCache().lookup(key(1)) is None
    assert outside.exists()
