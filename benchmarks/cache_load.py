"""Finding, verifying and loading the plan of a 1 B parameter model, in a fresh process.

The model has the shape of Llama 3.2 1B (16 layers, 2048 wide, 32/8 heads, vocabulary 128256) in
bfloat16 with weights that nobody wrote: memory is reserved, not touched, because a plan holds no
weights. One process captures and compiles; then each sample is a new process that measures, after
torch, transformers and the model are there:

    identity   describing module, sources and versions: the front record's key
    lookup     front record and plan from disk: read, verify every digest, parse the metadata
    load       record and canonical IR parsed, conditions compiled, weights bound: a ready program

What is not in it: weights digests for the parity verdict, and planning for a concrete shape. Both
need the weights themselves.

    python benchmarks/cache_load.py [--rounds 5] [--layers 16]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any


def child(mode: str, layers: int) -> dict[str, Any]:
    import torch
    import transformers
    from transformers.initialization import no_init_weights

    import rm_abstract
    from rm_abstract.calls.call import flatten_call
    from rm_abstract.engines.call_parts import unfold
    from rm_abstract.engines.native import create_engine

    session = rm_abstract.init("cpu")
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(
        **sizes, **heads, vocab_size=128256, tie_word_embeddings=True, dtype="bfloat16"
    )
    with no_init_weights():
        model = transformers.LlamaForCausalLM._from_config(config).eval()
    parameters = sum(p.numel() for p in model.parameters())
    engine = create_engine(model, session)
    ids = torch.ones(1, 16, dtype=torch.long)
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    call = flatten_call(engine.parameters, (), kwargs)
    _, pattern, past = unfold(tuple(call.leaves))
    result: dict[str, Any] = {"parameters": parameters}
    if mode == "cold":
        started = time.perf_counter()
        with torch.no_grad(), engine.on_original():
            engine.make_variant(call, pattern, past)
        return {**result, "compile_s": time.perf_counter() - started}
    cache, artefacts = engine.artefacts.cache, engine.artefacts
    times = {"identity": 0.0, "lookup": 0.0}
    originals = {"identity": artefacts._front_key, "lookup": None}

    def timed(what: str, function: Any) -> Any:
        def call_it(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                times[what] += (time.perf_counter() - started) * 1e3

        return call_it

    class Timed:
        """The cache with its two ways in timed; everything else as it is."""

        lookup = staticmethod(timed("lookup", cache.lookup))
        get_or_compile = staticmethod(timed("lookup", cache.get_or_compile))

        def __getattr__(self, name: str) -> Any:
            return getattr(cache, name)

    artefacts.cache = Timed()
    artefacts._front_key = timed("identity", originals["identity"])
    started = time.perf_counter()
    variant = engine.cached_variant(call, pattern, past)
    total = (time.perf_counter() - started) * 1e3
    counters = cache.counters()
    if variant is None or counters["miss"] or counters["compile"] or counters["hit_disk"] != 2:
        raise RuntimeError(f"expected two hits from disk and a program, got {counters}")
    load = total - times["identity"] - times["lookup"]
    return {**result, **times, "load": load, "total": total, "bytes": counters["bytes_read"]}


def run(mode: str, layers: int, cache: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", mode, "--layers", str(layers)]
    done = subprocess.run(
        command, env={**os.environ, "RM_CACHE_DIR": cache}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-3000:])
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--child", choices=["cold", "warm"])
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.child, options.layers)))
        return
    with tempfile.TemporaryDirectory() as cache:
        cold = run("cold", options.layers, cache)
        samples = [run("warm", options.layers, cache) for _ in range(options.rounds)]
    print(
        f"{cold['parameters'] / 1e9:.2f} B parameters, captured and compiled in "
        f"{cold['compile_s']:.1f} s, {samples[0]['bytes'] / 1024:.0f} KiB of entries"
    )
    for what in ("identity", "lookup", "load", "total"):
        values = sorted(sample[what] for sample in samples)
        print(f"{what:<9} {statistics.median(values):7.2f} ms  (best {values[0]:.2f})")


if __name__ == "__main__":
    main()
