"""A client that means harm, with only docs/serving.md in hand: every field of a wrong type, texts
that are none, broken HTTP, uploads cut short, hundreds of connections at once.

Whatever it does, it gets 4xx with a reason or a closed connection, and requests beside it get all
of their text, once.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_process import CONNECTIONS, ENDLESS, KEY, Answer, Process, ask, bearer, counted, until

HEAVY = os.environ.get("RM_HEAVY") == "1"
GOOD = {"model": "tiny", "prompt": "the fox", "max_tokens": 8, "temperature": 0}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the fox"}], "max_tokens": 2}
VECTOR = {"model": "bert", "input": "the fox"}
BODIES = {"/v1/completions": GOOD, "/v1/chat/completions": CHAT, "/v1/embeddings": VECTOR}

# What each field may be, in terms of JSON; what is not of it is refused by the field's name.
NUMBER, WHOLE, WORD, FLAG, LIST, OBJECT = "number", "whole", "string", "flag", "list", "object"
COMMON = {
    **dict.fromkeys(("temperature", "top_p", "presence_penalty", "frequency_penalty"), (NUMBER,)),
    **dict.fromkeys(("seed", "n", "max_tokens", "top_k", "priority"), (WHOLE,)),
    "logit_bias": (OBJECT,),
    "stop": (WORD, LIST),
    "stream": (FLAG,),
    "stream_options": (OBJECT,),
    "ignore_eos": (FLAG,),
    "model": (WORD,),
}
FIELDS = {
    "/v1/completions": {**COMMON, "prompt": (WORD, LIST), "logprobs": (WHOLE,)},
    "/v1/chat/completions": {
        **COMMON,
        "messages": (LIST,),
        "logprobs": (FLAG,),
        "top_logprobs": (WHOLE,),
        "max_completion_tokens": (WHOLE,),
        "tools": (LIST,),
        "chat_template_kwargs": (OBJECT,),
    },
    "/v1/embeddings": {"model": (WORD,), "input": (WORD, LIST), "encoding_format": (WORD,)},
}
WRONG: tuple[tuple[Any, str], ...] = (
    (True, FLAG),
    ("1", WORD),
    ("true", WORD),
    (1.5, NUMBER),
    (10**40, NUMBER),
    (float("nan"), "none"),
    (float("-inf"), "none"),
    ([], "none"),
    ([[]], "none"),
    ([None], "none"),
    ([{"a": 1}], "none"),
    ({"\u0000": None}, "none"),
    ({"5": "5"}, "none"),
)


def sent(server: Process, path: str, body: Any) -> Answer:
    return ask(server, "POST", path, json.dumps(body).encode())


def text_of(server: Process) -> str:
    answer = sent(server, "/v1/completions", GOOD)
    assert answer.status == 200, answer.body
    return str(answer.json["choices"][0]["text"])


def refused(answer: Answer) -> bool:
    return 400 <= answer.status < 500 and bool(answer.json["error"]["message"])


@contextlib.contextmanager
def undisturbed(server: Process) -> Iterator[None]:
    """Beside what happens inside, another client gets its text again and again; after it, nothing
    is left of anybody's requests."""
    want, over, wrong = text_of(server), threading.Event(), []

    def beside() -> None:
        while not over.is_set():
            try:
                if (found := text_of(server)) != want:
                    wrong.append(found)
            except Exception as error:
                wrong.append(repr(error))

    neighbour = threading.Thread(target=beside)
    neighbour.start()
    try:
        yield
    finally:
        over.set()
        neighbour.join()
    assert not wrong, wrong[:3]
    until(lambda: not any(counted(server, n) for n in ("running", "waiting")), 60)
    until(lambda: not counted(server, "running", "endless"), 60)
    assert text_of(server) == want


@pytest.mark.parametrize("path", BODIES)
def test_a_value_of_a_wrong_type_is_refused_by_its_fields_name(server: Process, path: str) -> None:
    with undisturbed(server):
        for name, kinds in FIELDS[path].items():
            for value, kind in WRONG:
                if kind in kinds:
                    continue
                if name in ("tools", "chat_template_kwargs") and isinstance(value, list | dict):
                    continue  # go to the template as they are
                if name == "stop" and value == []:
                    continue
                if name in ("prompt", "messages", "input") and isinstance(value, list):
                    assert refused(sent(server, path, {**BODIES[path], name: value}))
                    continue
                answer = sent(server, path, {**BODIES[path], name: value})
                assert refused(answer), (name, value, answer.status, answer.body[:300])
                param = answer.json["error"]["param"]
                assert param == name, (name, value, answer.json)


def texts(draw: random.Random) -> str:
    """Of all of Unicode, half of it meant to hurt."""
    odd = ["\x00", "\ufeff", "\u202e", "e" + "\u0301" * 50, "\U0001f469\u200d\U0001f680", "\uffff"]
    odd += ["<s>", "</s>", "<pad>", "{{ 7 * 7 }}", "{% raw %}", "\r\n\r\n", "data: [DONE]\n\n"]
    made = []
    for _ in range(draw.randrange(1, 40)):
        number = draw.randrange(0x110000)
        letter = chr(number) if not 0xD800 <= number < 0xE000 else "\ufffd"
        made.append(draw.choice(odd) if draw.random() < 0.4 else letter)
    return "".join(made)


def test_any_text_is_a_prompt_and_streams_whole(server: Process, seed: int) -> None:
    """The pieces of a stream are the text that comes at once, whatever is in it."""
    draw = random.Random(seed)
    with undisturbed(server):
        for _ in range(400 if HEAVY else 10):
            text = texts(draw)
            body = {"model": "tiny", "max_tokens": 12, "temperature": 1.5, "seed": 3, "top_k": 300}
            body |= {"stop": [texts(draw)[:900]], "ignore_eos": True}
            for path, given, part in (
                ("/v1/completions", {"prompt": text}, lambda c: c["text"]),
                (
                    "/v1/chat/completions",
                    {"messages": [{"role": "user", "content": text, "name": text}]},
                    lambda c: c["delta"].get("content") or "",
                ),
            ):
                whole = sent(server, path, {**body, **given})
                assert whole.status == 200, whole.body
                choice = whole.json["choices"][0]
                want = choice["text"] if "text" in choice else choice["message"]["content"]
                events = sent(server, path, {**body, **given, "stream": True}).body
                lines = [x for x in events.decode().split("\n\n") if x]
                assert lines[-1] == "data: [DONE]"
                chunks = [json.loads(line[6:])["choices"][0] for line in lines[:-1]]
                assert "".join(map(part, chunks)) == want
            assert ask(server, "GET", "/v1/models/" + "%00%2e%2e%2f" + "x").status == 404


@pytest.mark.parametrize(
    "body",
    [
        b"\xff\xfe\xfd",
        json.dumps(GOOD).encode().replace(b"the fox", b"the \xc3\x28 fox"),
        json.dumps(GOOD).encode() + b"{}",
        b'{"model": "tiny", "prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 20_000,
        b"null",
        b"[]",
        b'"tiny"',
        b"",
        json.dumps({**GOOD, "stop": ["x"] * 17}).encode(),
        json.dumps({**GOOD, "prompt": ["x"] * 129}).encode(),
        json.dumps({**GOOD, "prompt": ["x"] * 2, "n": 128}).encode(),
        json.dumps({**GOOD, "prompt": [-1]}).encode(),
        json.dumps({**GOOD, "prompt": [[1], "a"]}).encode(),
        json.dumps({**GOOD, "logit_bias": {"5.5": 1}}).encode(),
        json.dumps({**GOOD, "logit_bias": {"99999": 1}}).encode(),
        json.dumps({**GOOD, "model": "../tiny"}).encode(),
    ],
    ids=lambda body: repr(body[:40]),
)
def test_what_is_no_request_is_refused(server: Process, body: bytes) -> None:
    answer = ask(server, "POST", "/v1/completions", body)
    assert refused(answer), (answer.status, answer.body[:300])


# ---- below the requests --------------------------------------------------------------------------


def connected(server: Process) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def head(*lines: str, path: str = "/v1/completions") -> bytes:
    first = [f"POST {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}"]
    return "\r\n".join([*first, "Content-Type: application/json", *lines, "", ""]).encode()


def until_closed(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(65536):
            found += part
    return found


BODY = json.dumps(GOOD).encode()
SIZE = f"Content-Length: {len(BODY)}"
BROKEN = {
    "two lengths": head(SIZE, "Content-Length: 5") + BODY,
    "a negative length": head("Content-Length: -5") + BODY,
    "a length that is a word": head("Content-Length: many") + BODY,
    "a huge length": head("Content-Length: 99999999999999999999"),
    "a bad chunk": head("Transfer-Encoding: chunked") + b"zz\r\n" + BODY,
    "a negative chunk": head("Transfer-Encoding: chunked") + b"-5\r\n" + BODY,
    "an unknown coding": head("Transfer-Encoding: gzip") + BODY,
    "a header without a name": head(": x", SIZE) + BODY,
    "a folded name": head("A\r\n B", SIZE) + BODY,
    "a zero in a header": head("A: \x00", SIZE) + BODY,
    "a method that is none": b"G\x00T / HTTP/1.1\r\n\r\n",
    "another protocol": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no host": b"GET /v1/models HTTP/1.1\r\n\r\n",
    "many headers": head(*(f"X-{n}: {'y' * 100}" for n in range(20_000))),
    "a long header": head("X: " + "y" * 2_000_000),
    "a long path": head(path="/" + "y" * 2_000_000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_http_is_refused_with_a_reason(server: Process, name: str) -> None:
    with connected(server) as connection:
        try:
            connection.sendall(BROKEN[name])
        except OSError:
            found = b"HTTP/1.1 400 closed while it sent"
        else:
            found = until_closed(connection)
    if found:  # else reset, with what was sent still unread
        status, body = found.split(b" ", 2)[1], found.partition(b"\r\n\r\n")[2]
        assert status.startswith(b"4"), found[:200]
        assert not body or json.loads(body)["error"]["message"], found[:400]
    else:
        assert len(BROKEN[name]) > 60_000, "no answer"
    text_of(server)


def test_uploads_that_end_in_the_middle_hold_nothing(server: Process, seed: int) -> None:
    draw = random.Random(seed)
    with undisturbed(server):
        for number in range(300 if HEAVY else 40):
            body = json.dumps({**GOOD, "prompt": "a" * draw.randrange(5000)}).encode()
            if number % 2:
                data = head(f"Content-Length: {len(body)}") + body
            else:
                data = head("Transfer-Encoding: chunked")
                while body:
                    size = draw.randrange(1, 700)
                    data += f"{len(body[:size]):x};x=y\r\n".encode() + body[:size] + b"\r\n"
                    body = body[size:]
            cut = draw.randrange(1, len(data))
            with connected(server) as connection:
                connection.sendall(data[:cut])
                if draw.random() < 0.3:
                    connection.shutdown(socket.SHUT_WR)
                    found = until_closed(connection)
                    assert not found or found.split(b" ")[1].startswith(b"4"), found[:200]


def test_heads_that_do_not_come_are_let_go(server: Process) -> None:
    """Also when a byte comes now and then, and when an answered body goes on for ever."""
    left = [connected(server) for _ in range(4)]
    left[1].sendall(head(SIZE)[:50])
    left[2].sendall(b"POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\n")
    until(lambda: select.select([left[2]], [], [], 0)[0])
    left[3].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
    begun = time.monotonic()
    closed: set[int] = set()
    while len(closed) < 4:
        assert time.monotonic() - begun < 60, f"{set(range(4)) - closed} are held"
        for number, connection in enumerate(left):
            with contextlib.suppress(ConnectionError):
                if number:
                    connection.sendall(b"x")
                if select.select([connection], [], [], 0)[0] and connection.recv(65536):
                    continue
                if not select.select([connection], [], [], 0)[0]:
                    continue
            closed.add(number)
        time.sleep(0.1)
    for connection in left:
        connection.close()
    text_of(server)


def test_wrong_keys_are_refused_whatever_they_are(server: Process, seed: int) -> None:
    draw = random.Random(seed)
    keys = [KEY[:-1], KEY + KEY, KEY.upper(), "", " ", "\x7f", "é", "x" * 8000, KEY + ","]
    keys += ["".join(chr(draw.randrange(33, 255)) for _ in range(draw.randrange(60))) for _ in keys]
    for key in keys:
        answer = ask(server, "POST", "/v1/completions", BODY, {"Authorization": f"Bearer {key}"})
        assert answer.status == 401 and KEY not in answer.body.decode()
    for scheme in ("Basic", "Bearer\t", "bearer:", ""):
        value = {"Authorization": f"{scheme} {KEY}".strip()}
        assert ask(server, "POST", "/v1/completions", BODY, value).status == 401, scheme
    assert ask(server, "GET", "/v1/models", headers=bearer(KEY)).status == 200


# ---- all at once ---------------------------------------------------------------------------------


def storm(server: Process, draw: random.Random, want: str) -> Callable[[], str]:
    """One of many clients; what became of it in a word."""
    kind, number = draw.randrange(8), draw.randrange(10**9)

    def good() -> str:
        answer = sent(server, "/v1/completions", GOOD)
        if answer.status == 429:
            assert answer.headers["retry-after"]
            return "429"
        assert answer.status == 200, (answer.status, answer.body[:300])
        choice = answer.json["choices"][0]
        assert choice["text"] == want, "lost, doubled or another's"
        return "good"

    def streamed() -> str:
        answer = sent(server, "/v1/completions", {**GOOD, "stream": True, "n": 2})
        if answer.status == 429:
            return "429"
        lines = [x for x in answer.body.decode().split("\n\n") if x]
        assert answer.status == 200 and lines.count("data: [DONE]") == 1
        found = ["", ""]
        ends = Counter()
        for line in lines[:-1]:
            choice = json.loads(line[6:])["choices"][0]
            found[choice["index"]] += choice["text"]
            ends[choice["index"]] += choice["finish_reason"] is not None
        assert found == [want, want] and ends == {0: 1, 1: 1}
        return "good"

    def leaves() -> str:
        body = json.dumps({**GOOD, "model": "endless", "max_tokens": ENDLESS, "stream": True})
        with connected(server) as connection:
            connection.sendall(head(f"Content-Length: {len(body)}") + body.encode())
            assert connection.recv(65536).split(b" ")[1] in (b"200", b"429")
        return "left"

    def half() -> str:
        with connected(server) as connection:
            connection.sendall(head(SIZE) + BODY)
            connection.shutdown(socket.SHUT_WR)
            found = until_closed(connection)
            assert not found or found.split(b" ")[1] in (b"200", b"429", b"499"), found[:100]
        return "half"

    def broken() -> str:
        with connected(server) as connection:
            connection.sendall(random.Random(number).randbytes(300))
            connection.shutdown(socket.SHUT_WR)
            until_closed(connection)
        return "broken"

    def cut() -> str:
        with connected(server) as connection:
            connection.sendall((head(SIZE) + BODY)[: number % 250 + 1])
        return "cut"

    def impatient() -> str:
        given = {**GOOD, "prompt": "a" * 3000, "max_tokens": 1}
        answer = sent(server, "/v1/completions", given)
        assert answer.status in (200, 429), answer.body[:300]
        return "long"

    kinds = (good, good, streamed, leaves, half, broken, cut, impatient)
    return kinds[kind]


def test_two_hundred_connections_at_once(server: Process, seed: int) -> None:
    draw, want = random.Random(seed), text_of(server)
    for _ in range(20 if HEAVY else 1):
        clients = [storm(server, draw, want) for _ in range(200)]
        with ThreadPoolExecutor(200) as pool:
            found = Counter(pool.map(lambda client: client(), clients))
        assert sum(found.values()) == 200 and found["good"], found
        for model in ("tiny", "endless"):
            for name in ("running", "waiting"):
                until(lambda n=name, m=model: not counted(server, n, m), 60)
        assert text_of(server) == want
    assert not any("Traceback" in line for line in server.lines), server.lines[-30:]


def test_connections_beyond_the_limit_are_told_so(server: Process) -> None:
    idle: list[socket.socket] = []
    try:
        while len(idle) <= CONNECTIONS:
            idle.append(connected(server))
        idle[-1].sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        found = until_closed(idle[-1])
        assert found.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in found
        assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["message"]
        assert all(until_closed(one).startswith(b"HTTP/1.1 408") for one in idle[:-1])
    finally:
        for one in idle:
            one.close()
    text_of(server)
