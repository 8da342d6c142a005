"""The status page in a real browser: a person gives the key, and sees models and tokens.

Any Chromium on the path is enough (Debian's package chromium); without one nothing here runs.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import browser
import pytest
from server_process import ENDLESS, KEY, Process, ask, until

pytestmark = pytest.mark.skipif(
    browser.PATH is None, reason="no Chromium on the path: apt-get install chromium"
)
CELLS = (
    "[...document.querySelectorAll('#models tr')].map(r => [...r.children].map(c => c.innerText))"
)
HEADS = "[...document.querySelectorAll('thead th')].map(c => c.innerText)"


@pytest.fixture
def page(tmp_path: Path) -> Iterator[browser.Page]:
    made = browser.Page(tmp_path / "profile")
    yield made
    made.close()


def rows(page: browser.Page) -> dict[str, dict[str, str]]:
    """Cells by their heads, by model."""
    heads = page.value(HEADS)
    return {cells[0]: dict(zip(heads, cells, strict=True)) for cells in page.value(CELLS)}


def test_a_person_gives_the_key_and_sees_what_is_going_on(
    server: Process, page: browser.Page
) -> None:
    page.call("Page.navigate", url=server.url + "/")
    until(lambda: page.value("document.getElementById('problem')?.innerText"))
    assert "key" in page.value("document.getElementById('problem').innerText")
    assert not page.value("document.getElementById('ask').hidden") and not rows(page)
    page.value("document.getElementById('key').focus()")
    page.type(KEY)
    until(lambda: rows(page))
    assert page.value("document.getElementById('problem').innerText") == ""
    assert page.value("document.getElementById('device').innerText") == "cpu"
    found = rows(page)
    assert list(found) == ["tiny", "bert", "endless"]
    assert [row["Serves"] for row in found.values()] == ["text", "embeddings", "text"]
    assert found["endless"]["Running"] == "0"

    body = json.dumps(
        {"model": "endless", "prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}
        | {"stream": True}
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall((head + body).encode())
        until(lambda: rows(page)["endless"]["Running"] == "1")
        until(lambda: connection.recv(1 << 16) and float(rows(page)["endless"]["Tokens/s"]) > 0)
        page.save(Path(page.folder) / "status.png")
    until(lambda: rows(page)["endless"]["Running"] == "0")
    tokens = int(rows(page)["endless"]["Tokens"])
    told = {row["name"]: row["facts"] for row in ask(server, "GET", "/status").json["models"]}
    assert tokens == told["endless"]["generated_tokens"] > 0
    wrong = [e for e in page.events if e["method"] == "Runtime.exceptionThrown"]
    noted = [e["params"]["entry"] for e in page.events if e["method"] == "Log.entryAdded"]
    # The browser itself notes the answers 401 from before the key.
    wrong += [e for e in noted if e["level"] == "error" and "401" not in e["text"]]
    assert not wrong
    asked = {
        e["params"]["request"]["url"]
        for e in page.events
        if "requestId" in e["params"] and "request" in e["params"]
    }
    assert asked == {server.url + "/", server.url + "/status"}
