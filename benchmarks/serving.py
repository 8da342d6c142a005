"""`rm-abstract serve` under load: streams beside each other against one after the other.

The model is the Llama of 0.13 B parameters of `rm-abstract bench decode`, random weights, bfloat16;
every request has a prompt of its own and goes to its length. The server runs in a process of its
own; the client reads streams with threads. Per load: tokens per second of all streams together,
and seconds to the first token.

    python benchmarks/serving.py [--streams 16] [--tokens 64] [--prompt 64] [--threads 2]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rm_abstract.bench.decoders import SHAPES


def save(folder: Path, dtype: str) -> None:
    """Weights, and a tokenizer whose words are numbers: prompts are sent as token ids anyway."""
    SHAPES[0].model(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(SHAPES[0].vocabulary)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


def stream(port: int, prompt: list[int], tokens: int) -> tuple[float, float, int]:
    """(seconds to the first token, seconds in all, tokens)"""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started, first, made = time.perf_counter(), 0.0, 0
    connection.request(
        "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(answer.read().decode())
    for line in answer:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if "error" in chunk:
            raise RuntimeError(chunk["error"]["message"])
        first = first or time.perf_counter() - started
        if chunk.get("usage"):
            made = chunk["usage"]["completion_tokens"]
    connection.close()
    if made != tokens:
        raise RuntimeError(f"expected {tokens} tokens, got {made}")
    return first, time.perf_counter() - started, made


def load(port: int, width: int, count: int, length: int, tokens: int, seed: int) -> dict:
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 31000) for _ in range(length)] for _ in range(count)]
    started = time.perf_counter()
    with ThreadPoolExecutor(width) as pool:
        rows = list(pool.map(lambda prompt: stream(port, prompt, tokens), prompts))
    seconds = time.perf_counter() - started
    return {
        "streams": width,
        "tokens_per_s": round(sum(row[2] for row in rows) / seconds, 1),
        "first_token_ms": round(statistics.median(row[0] for row in rows) * 1e3, 1),
    }


def behind_a_long_prompt(port: int, seed: int, long: int, short: int) -> dict:
    """Seconds to the first token of short prompts, alone and 50 ms after a long prompt."""
    draw = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(3, 31000) for _ in range(length)]

    lone = [stream(port, prompt(short), 1)[0] for _ in range(5)]
    late = []
    for _ in range(3):
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(stream, port, prompt(long), 1)
            time.sleep(0.05)
            late += [stream(port, prompt(short), 1)[0] for _ in range(2)]
            waited = first.result()[0]
    return {
        "short_alone_ms": round(statistics.median(lone) * 1e3, 1),
        "short_behind_long_ms": round(statistics.median(late) * 1e3, 1),
        "long_ms": round(waited * 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "bench"
        save(folder, given.dtype)
        env = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
        command = [sys.executable, "-m", "rm_abstract.cli.main", "serve", "--port", "0"]
        command += ["--rows", str(given.streams), str(folder)]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
        try:
            assert server.stderr is not None
            found = next(filter(None, (re.search(r"at \S+:(\d+)$", x) for x in server.stderr)))
            port, same = int(found[1]), (given.prompt, given.tokens)
            load(port, given.streams, given.streams, *same, seed=1)  # shapes planned, not timed
            load(port, 1, 2, *same, seed=2)
            for number in range(given.rounds):
                print(json.dumps(load(port, 1, 4, *same, seed=10 + number)), flush=True)
                print(
                    json.dumps(load(port, given.streams, given.streams * 2, *same, 100 + number)),
                    flush=True,
                )
            behind_a_long_prompt(port, 7, 1500, 32)
            print(json.dumps(behind_a_long_prompt(port, 8, 1500, 32)))
        finally:
            server.terminate()
            server.wait(60)


if __name__ == "__main__":
    main()
