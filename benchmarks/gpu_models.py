"""Whole models on an NVIDIA GPU by unmodified calls: eager, torch.compile, ours, in one process.

    python benchmarks/gpu_models.py encoder|decode

encoder: BERT-base bfloat16, milliseconds a call with a synchronisation. decode: a Llama of the 1 B
shape (random weights), bfloat16, one row behind 448 tokens, tokens a second; with the share of a
copy's bandwidth that reading the weights takes.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers

import rm_abstract as rm


def median_ms(call: Callable[[], Any], rounds: int = 40) -> float:
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[rounds // 2] * 1e3


def copy_bytes_a_second() -> float:
    source = torch.empty(1 << 28, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    took = median_ms(lambda: target.copy_(source), 10) / 1e3
    return 2 * source.numel() * source.element_size() / took


def encoder() -> None:
    rm.init("gpu:0")
    model = transformers.BertModel(transformers.BertConfig()).eval().to("cuda", torch.bfloat16)
    for rows, tokens in ((1, 128), (32, 128)):
        ids = torch.randint(0, 30000, (rows, tokens), device="cuda")
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        with torch.no_grad():
            ours = median_ms(lambda inputs=inputs: model(**inputs))
            with rm.disabled():
                eager = median_ms(lambda inputs=inputs: model(**inputs))
                compiled = torch.compile(model, mode="reduce-overhead")
                theirs = median_ms(lambda inputs=inputs, f=compiled: f(**inputs))
        print(f"{rows}x{tokens}: eager {eager:.2f} torch.compile {theirs:.2f} ours {ours:.2f} ms")
    print(rm.explain())


def decode() -> None:
    rm.init("gpu:0")
    config = transformers.LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=8192,
        vocab_size=128256,
        max_position_embeddings=4096,
    )
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(config)
        torch.set_default_dtype(torch.float32)
    model.eval()
    read = 2 * sum(p.numel() for p in model.parameters())
    read -= 2 * model.model.embed_tokens.weight.numel()
    ids = torch.randint(0, 128000, (1, 448), device="cuda")

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def tokens_a_second() -> float:
        for _ in range(3):
            seconds(40)
        short, long = (min(seconds(n) for _ in range(2)) for n in (8, 136))
        return 128 / (long - short)

    copied = copy_bytes_a_second()
    with rm.disabled():
        eager = tokens_a_second()
    ours = tokens_a_second()
    print(rm.explain())
    rm.shutdown()
    model.generation_config.cache_implementation = "static"
    static = tokens_a_second()
    print(
        f"eager {eager:.0f} static cache + torch.compile {static:.0f} ours {ours:.0f} tokens/s, "
        f"{ours * read / copied:.2f} of a copy's {copied / 1e12:.2f} TB/s"
    )


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    {"encoder": encoder, "decode": decode}[sys.argv[1]]()
