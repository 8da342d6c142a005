"""Whole models on an NVIDIA GPU by unmodified calls: eager, torch.compile, ours, in one process.

    python benchmarks/gpu_models.py encoder
    python benchmarks/gpu_models.py decode [0.5b|1b|8b] [alone]

encoder: BERT-base bfloat16, milliseconds a call with a synchronisation. decode: a Llama of that
shape (random weights), bfloat16, one row behind 448 tokens, tokens a second, and the shares of the
read probe's and a copy's bandwidth that reading the weights takes; `alone` measures nothing else.
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


# Layers, hidden, intermediate, heads, key heads, vocabulary; head size.
SHAPES = {
    "1b": (16, 2048, 8192, 32, 8, 128256, 64),
    "0.5b": (24, 896, 4864, 14, 2, 151936, 64),
    "8b": (32, 4096, 14336, 32, 8, 128256, 128),
}


def read_bytes_a_second() -> float:
    """The yardstick of gemv: 4 GiB, read once by bulk copies."""
    from rm_abstract.ops import _ops_gemv as gemv

    data = torch.zeros(1 << 31, dtype=torch.bfloat16, device="cuda")
    stream = torch.cuda.current_stream().cuda_stream
    took = median_ms(lambda: gemv.read_probe(data, stream=stream), 10) / 1e3
    return data.numel() * data.element_size() / took


def decoder(name: str) -> Any:
    layers, hidden, inner, heads, groups, words, size = SHAPES[name]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=size,
        intermediate_size=inner,
        vocab_size=words,
        max_position_embeddings=8192,
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    return model.eval()


def decode(name: str, against: bool) -> None:
    rm.init("gpu:0")
    model = decoder(name)
    read = 2 * sum(p.numel() for p in model.parameters())
    read -= 2 * model.model.embed_tokens.weight.numel()
    model.generation_config.eos_token_id = None  # every row is as long as asked for
    ids = torch.randint(0, 128000, (1, 448), device="cuda")

    def seconds(count: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def tokens_a_second() -> float:
        for count in (8, 136) * 3:
            seconds(count)
        short, long = (min(seconds(n) for _ in range(4)) for n in (8, 136))
        return 128 / (long - short)

    probe, copied = read_bytes_a_second(), copy_bytes_a_second()
    ours = tokens_a_second()
    print(rm.explain())
    print(
        f"{name}: ours {ours:.0f} tokens/s, {ours * read / probe:.2f} of the read probe's "
        f"{probe / 1e12:.2f} TB/s, {ours * read / copied:.2f} of a copy's {copied / 1e12:.2f}",
        flush=True,
    )
    if against:
        with rm.disabled():
            eager = tokens_a_second()
        rm.shutdown()
        model.generation_config.cache_implementation = "static"
        static = tokens_a_second()
        print(f"{name}: eager {eager:.0f}, static cache + torch.compile {static:.0f} tokens/s")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "encoder":
        encoder()
    else:
        decode(sys.argv[2] if len(sys.argv) > 2 else "1b", "alone" not in sys.argv)
