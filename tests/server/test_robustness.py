"""Broken, oversized and slow requests: an answer with a reason, and nobody else is disturbed.

RM_HEAVY=1 sends 10 000 malformed requests and keeps 64 connections busy for a minute.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from server_process import ENDLESS, KEY, Process, ask, counted, until

HEAVY = os.environ.get("RM_HEAVY") == "1"
GOOD = {"model": "tiny", "prompt": "the fox", "max_tokens": 8, "temperature": 0}
WITHOUT_END = {**GOOD, "model": "endless", "max_tokens": ENDLESS, "ignore_eos": True}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]


def good(server: Process) -> str:
    answer = ask(server, "POST", PATHS[0], json.dumps(GOOD).encode())
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def value(draw: random.Random, depth: int = 0) -> Any:
    plain = [None, True, -1, 0, 1, 2**70, 1e300, -0.5, "", "tiny", "\ud800", "a" * 3000, "\x00"]
    if depth < 3 and draw.random() < 0.4:
        if draw.random() < 0.5:
            return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
        return {str(draw.choice(plain)): value(draw, depth + 1) for _ in range(draw.randrange(4))}
    return draw.choice(plain)


def malformed(draw: random.Random) -> tuple[str, bytes]:
    """A path and a body that is no request, though it may look like one."""
    path = draw.choice(PATHS)
    kind = draw.randrange(5)
    if kind == 0:
        return path, draw.randbytes(draw.randrange(1, 300))
    if kind == 1:  # cut short
        return path, json.dumps(GOOD).encode()[: draw.randrange(1, 40)]
    if kind == 2:
        return path, b"[" * draw.randrange(1, 50_000)
    if kind == 3:
        return path, json.dumps(value(draw)).encode()
    fields = {"model": "tiny", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    names = ["prompt", "messages", "temperature", "top_p", "n", "stop", "logit_bias", "seed"]
    for name in draw.sample([*names, "max_tokens", "stream", "tools", "logprobs"], 3):
        fields[name] = value(draw)
    fields["surely_unknown"] = 1
    return path, json.dumps(fields).encode()


def test_malformed_requests_are_4xx_with_a_reason(server: Process, seed: int) -> None:
    draw, want = random.Random(seed), good(server)
    over, wrong = threading.Event(), []

    def beside() -> None:
        while not over.is_set():
            if good(server) != want:
                wrong.append("another text beside malformed requests")

    neighbour = threading.Thread(target=beside)
    neighbour.start()
    try:
        for _ in range(10_000 if HEAVY else 200):
            path, body = malformed(draw)
            answer = ask(server, "POST", path, body)
            assert 400 <= answer.status < 500, (path, body[:200], answer.body[:500])
            assert answer.json["error"]["message"], body[:200]
            assert len(answer.body) < 2000, "an answer repeats what was sent"
    finally:
        over.set()
        neighbour.join()
    assert not wrong


def connected(server: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def head(length: int | None, more: str = "") -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}"]
    lines += ["Content-Type: application/json"]
    lines += ["Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n" + more + "\r\n").encode()


def test_bodies_that_are_too_large_are_refused_told_or_not(server: Process) -> None:
    answer = ask(server, "POST", PATHS[0], b"x" * 200_000)
    assert answer.status == 413 and answer.json["error"]["code"] == "body_too_large"
    with connected(server) as connection:
        connection.sendall(head(None))
        try:
            for _ in range(40):
                connection.sendall(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
            connection.sendall(b"0\r\n\r\n")
        except OSError:
            pass  # closed while sending
        else:
            assert connection.recv(100).startswith(b"HTTP/1.1 413")
    good(server)


def test_a_body_that_does_not_come_is_408(server: Process) -> None:
    with connected(server) as connection:
        connection.sendall(head(1000) + b'{"model"')
        assert connection.recv(100).startswith(b"HTTP/1.1 408")


def test_what_is_no_http_is_400_and_half_requests_hurt_nobody(server: Process) -> None:
    with connected(server) as connection:
        connection.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 400")
    left = [connected(server) for _ in range(20)]
    for number, connection in enumerate(left):
        connection.sendall(head(1000)[: 20 * number] or b"P")
        if number % 2:
            connection.shutdown(socket.SHUT_WR)
    good(server)
    for connection in left:
        connection.close()


def test_a_client_that_closes_its_half_frees_its_rows(server: Process) -> None:
    body = json.dumps({**WITHOUT_END, "stream": True}).encode()
    with connected(server) as connection:
        connection.sendall(head(len(body)) + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: counted(server, "running", "endless"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass  # what was sent before the server saw it
    until(lambda: not counted(server, "running", "endless"))


def test_readers_that_do_not_read_delay_nobody_and_are_let_go(server: Process) -> None:
    data = json.dumps({**WITHOUT_END, "stream": True, "logprobs": 20}).encode()
    slow = []
    for _ in range(3):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(head(len(data)) + data)
        slow.append(connection)
    until(lambda: counted(server, "running", "endless") == 3)
    want = good(server)
    assert all(good(server) == want for _ in range(5))
    until(lambda: not counted(server, "running", "endless"))  # their connections were closed
    for connection in slow:
        connection.close()


def memory_kib(server: Process) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith("VmRSS")).split()[1])


def test_64_connections_get_their_texts_and_memory_stays(
    folders: dict[str, Path], server_cache: Path
) -> None:
    server = Process(
        str(folders["tiny"]), "--api-key", KEY, "--prefix-mib", "4", cache=server_cache
    )
    try:
        want, served = good(server), [0]

        def client(end: float) -> None:
            while time.monotonic() < end:
                assert good(server) == want
                served[0] += 1

        def rounds(seconds: float) -> None:
            end = time.monotonic() + seconds
            with ThreadPoolExecutor(64) as pool:
                for done in [pool.submit(client, end) for _ in range(64)]:
                    done.result()

        rounds(1)
        before = memory_kib(server)
        rounds(60 if HEAVY else 2)
        assert served[0] > 64
        assert memory_kib(server) - before < 50_000
    finally:
        assert server.end() == 0


def test_sigterm_lets_a_stream_end_and_takes_no_more(
    folders: dict[str, Path], server_cache: Path
) -> None:
    server = Process(str(folders["tiny"]), "--api-key", KEY, cache=server_cache)
    body = json.dumps({**GOOD, "max_tokens": 1000, "ignore_eos": True, "stream": True}).encode()
    with connected(server) as connection:
        connection.sendall(head(len(body)) + body)
        text = connection.recv(100)
        server.process.send_signal(signal.SIGTERM)
        while part := connection.recv(65536):
            text += part
    assert b"data: [DONE]" in text
    assert server.process.wait(120) == 0
    with pytest.raises(OSError):
        connected(server)
    assert not any("Traceback" in line for line in server.lines)
