"""What a served call costs with gradients enabled, against eager and against `torch.no_grad()`.

Prints eager / served for both modes and the share of the speed-up that is left with gradients
enabled. Candidates alternate in one process; medians. `--models all` are twenty architectures of
transformers with random weights, four layers of 256, a row of 32 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

import rm_abstract as rm
from rm_abstract.hooks.attaching import router_of

ALIKE = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 1024,
}
HEADS = {"num_key_value_heads": 4}  # their configurations begin with more
GPT = {"n_embd": 256, "n_layer": 4, "n_head": 4}
OPT = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 1024}
NEO = {"hidden_size": 256, "num_layers": 4, "num_heads": 4, "attention_types": [[["global"], 4]]}
# model, configuration, its settings
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForSequenceClassification", "BertConfig", ALIKE),
    "roberta": ("RobertaForSequenceClassification", "RobertaConfig", ALIKE),
    "electra": ("ElectraForSequenceClassification", "ElectraConfig", ALIKE),
    "albert": ("AlbertForSequenceClassification", "AlbertConfig", ALIKE),
    "mpnet": ("MPNetForSequenceClassification", "MPNetConfig", ALIKE),
    "camembert": ("CamembertForSequenceClassification", "CamembertConfig", ALIKE),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", ALIKE),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**GPT, "rotary_dim": 32}),
    "opt": ("OPTForCausalLM", "OPTConfig", {**OPT, "word_embed_proj_dim": 256}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"hidden_size": 256, "n_layer": 4, "n_head": 4}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", ALIKE),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", ALIKE),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**ALIKE, "num_key_value_heads": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**ALIKE, "num_key_value_heads": 2}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**ALIKE, "head_dim": 64, **HEADS}),
    "granite": ("GraniteForCausalLM", "GraniteConfig", ALIKE),
    "phi": ("PhiForCausalLM", "PhiConfig", ALIKE),
    "stablelm": ("StableLmForCausalLM", "StableLmConfig", {**ALIKE, **HEADS}),
}


def build(name: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    ids = torch.randint(2, 1000, (1, 128 if name == "bert-base" else 32))
    inputs: dict[str, Any] = {"input_ids": ids}
    if name == "minilm-shape":
        config = hf.BertConfig(
            hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
        )
        return hf.BertModel(config).eval(), inputs
    if name == "bert-base":
        return hf.BertModel(hf.BertConfig()).eval(), inputs
    if name == "gpt2-small":
        config = hf.GPT2Config(n_layer=6, n_embd=384, n_head=6)
        return hf.GPT2LMHeadModel(config).eval(), inputs
    model, settings, options = ARCHITECTURES[name]
    inputs |= {"attention_mask": torch.ones_like(ids)}
    made = getattr(hf, settings)(vocab_size=1000, **options)
    return getattr(hf, model)(made).eval(), inputs


def timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--models", default="minilm-shape,bert-base,gpt2-small")
    options = parser.parse_args()
    rm.init("cpu")
    names = list(ARCHITECTURES) if options.models == "all" else options.models.split(",")
    shares = []
    for name in names:
        model, inputs = build(name)
        rm.accelerate(model)

        def eager(model: torch.nn.Module = model, inputs: dict = inputs) -> None:
            with rm.disabled():
                model(**inputs)

        def served(model: torch.nn.Module = model, inputs: dict = inputs) -> None:
            model(**inputs)

        def without(call: Callable[[], None]) -> Callable[[], None]:
            def run() -> None:
                with torch.no_grad():
                    call()

            return run

        calls = [eager, served, without(eager), without(served)]
        for call in calls * 3:
            call()
        router = router_of(model)
        if router is None:
            print(f"{name}: left to PyTorch\n{rm.explain()}", flush=True)
            continue
        before = router.routed_calls
        times: list[list[float]] = [[] for _ in calls]
        for round_ in range(options.rounds):
            for i in range(len(calls)):
                k = (i + round_) % len(calls)
                times[k].append(timed(calls[k]))
        if router.routed_calls - before < 2 * options.rounds:
            print(f"{name}: {router.routed_calls - before} of {2 * options.rounds} calls served")
        eager_grad, with_grad, eager_off, with_off = (statistics.median(t) * 1e3 for t in times)
        grad, off = eager_grad / with_grad, eager_off / with_off
        shares.append(grad / off)
        print(
            f"{name}: gradients enabled {eager_grad:.2f} -> {with_grad:.2f} ms ({grad:.2f}x), "
            f"no_grad {eager_off:.2f} -> {with_off:.2f} ms ({off:.2f}x), share {grad / off:.2f}",
            flush=True,
        )
    print(f"least share {min(shares):.2f}, median {statistics.median(shares):.2f}")


if __name__ == "__main__":
    main()
