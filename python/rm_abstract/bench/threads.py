"""Several threads that call `generate` on one model: together against one after another.

The whole of the calls counts, prompts too. Every thread's tokens are compared with those its
request gives alone.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

from rm_abstract.bench import decoders, method


def prompts(shape: decoders.Shape, threads: int) -> list[list[int]]:
    """Of different lengths, as requests have."""
    draw = random.Random(0)
    return [[draw.randrange(3, shape.vocabulary) for _ in range(14 + k)] for k in range(threads)]


def generate(model: Any, prompt: list[int], tokens: int) -> list[int]:
    import torch

    ids = torch.tensor([prompt])
    with torch.no_grad():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
        )
    found: list[int] = out[0, len(prompt) :].tolist()
    return found


def together(model: Any, asked: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """Seconds from the start of the first thread to the end of the last, and their tokens."""
    found: list[list[int]] = [[] for _ in asked]
    failed: list[BaseException] = []
    gate = threading.Barrier(len(asked) + 1)

    def work(k: int) -> None:
        gate.wait()
        try:
            found[k] = generate(model, asked[k], tokens)
        except BaseException as error:  # shown in the thread that measures
            failed.append(error)

    workers = [threading.Thread(target=work, args=(k,)) for k in range(len(asked))]
    for worker in workers:
        worker.start()
    gate.wait()
    start = time.perf_counter()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - start
    if failed:
        raise failed[0]
    return seconds, found


def one_by_one(model: Any, asked: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    found = [generate(model, prompt, tokens) for prompt in asked]
    return time.perf_counter() - start, found


def run(
    shape: decoders.Shape, precision: str, threads: int, tokens: int, rounds: int
) -> dict[str, Any]:
    """Tokens a second of both ways, their ratio paired by round, and tokens that agree."""
    import rm_abstract
    from rm_abstract.bench.decode import DTYPES, same_prefix

    asked = prompts(shape, threads)
    model = shape.model(DTYPES[precision])
    taken: dict[str, list[float]] = {"one by one": [], "together": []}
    rm_abstract.init(compile_options={"prompt_lookup": "off"})  # a row alone could take drafts
    try:
        rm_abstract.accelerate(model)
        for _ in range(2):  # captures, whose first call is eager
            _, alone = one_by_one(model, asked, tokens)
            together(model, asked, tokens)
        same = []
        for _ in range(rounds):
            taken["one by one"].append(one_by_one(model, asked, tokens)[0])
            seconds, found = together(model, asked, tokens)
            taken["together"].append(seconds)
            same.append(sum(same_prefix(a, b) or 0 for a, b in zip(found, alone, strict=True)))
    finally:
        rm_abstract.shutdown()
    total = threads * tokens
    pairs = zip(taken["one by one"], taken["together"], strict=True)
    return {
        "case": f"{shape.name} {precision}, {threads} threads of {tokens} tokens",
        "tokens_s": {
            name: vars(method.Estimate.of([total / s for s in seconds]))
            for name, seconds in taken.items()
        },
        "over": vars(method.Estimate.of([alone_s / s for alone_s, s in pairs])),
        "same_tokens": min(same),
        "tokens": total,
    }


HEADER = "| case | one by one, tok/s | together, tok/s | x | tokens as alone |\n|" + "---|" * 5


def markdown(result: dict[str, Any]) -> str:
    def span(values: dict[str, float], digits: int) -> str:
        low, high = values["low"], values["high"]
        return f"{values['median']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    cells = [
        result["case"],
        span(result["tokens_s"]["one by one"], 0),
        span(result["tokens_s"]["together"], 0),
        span(result["over"], 2),
        f"{result['same_tokens']} of {result['tokens']}",
    ]
    return f"| {' | '.join(cells)} |"
