"""One server in a process of its own, for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the group `serve` is not installed")
pytest.importorskip("openai", reason="the group `test` is not installed")
from server_process import CONNECTIONS, ENDLESS, KEY, Process
from small_model import save_bert, save_llama


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "tiny": save_llama(root / "tiny"),
        "bert": save_bert(root / "bert"),
        "endless": save_llama(root / "endless", ENDLESS + 1000),
    }


@pytest.fixture(scope="session")
def server_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("server_cache")


@pytest.fixture(scope="session")
def server(folders: dict[str, Path], server_cache: Path) -> Iterator[Process]:
    limits = ["--rows", "4", "--queue", "8", "--max-body", "100000", "--body-timeout", "2"]
    limits += ["--api-key", KEY, "--send-timeout", "5", "--header-timeout", "2"]
    limits += ["--connections", str(CONNECTIONS)]
    found = Process(*map(str, folders.values()), *limits, cache=server_cache)
    yield found
    found.end()
