"""Text generation through unmodified `model.generate`: tokens a second against the bound.

The bound of a token is reading its weights and keys once. Memory on shared machines changes speed
by the minute, so every sample has read probes right before and right after it and is judged by
their mean; candidates take turns within a round.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rm_abstract.bench import decoders, method, probes

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LLAMA_CPP = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "q8_0", "int4": "q4_0"}
# Smallest cosine of the first token's logits with fp32 eager's. Random weights are the hardest
# case for few bits: real models are not that noisy.
MIN_COSINE = {"fp32": 0.99999, "bf16": 0.99, "fp16": 0.999, "int8": 0.99, "int4": 0.8}
# Bits a weight takes with its share of a 16-bit scale: one for 32 weights in q8_0, q4_0 and our
# int4, one for 128 in our int8.
STORED_BITS = {"fp32": 32.0, "bf16": 16.0, "fp16": 16.0, "int8": 8.125, "int4": 4.5}
LLAMA_CPP_BITS = {**STORED_BITS, "int8": 8.5}


@dataclass(frozen=True)
class Case:
    shape: decoders.Shape
    precision: str
    prompt: int
    new_tokens: int = 64

    @property
    def name(self) -> str:
        return f"{self.shape.name} {self.precision} prompt {self.prompt}"

    def step_bytes(self, rows: int, name: str = "") -> float:
        """Bytes a token of every row must read, at the middle of the generation, as candidate
        `name` stores them."""
        kv_bits = max(16, BITS[self.precision])
        stored = LLAMA_CPP_BITS if name.startswith("llama.cpp") else STORED_BITS
        weights = self.shape.linear_parameters * stored[self.precision] / 8
        return weights + rows * self.shape.kv_bytes(self.prompt + self.new_tokens // 2, kv_bits)


CASES = [
    Case(shape, precision, prompt)
    for shape in decoders.SHAPES
    for precision in ("fp32", "bf16", "int8", "int4")
    for prompt in (16, 512, 4096)
]


@dataclass
class Taken:
    """What one candidate took, a value a round."""

    tokens_s: list[float] = field(default_factory=list)
    read_share: list[float] = field(default_factory=list)  # of the probe with huge pages
    small_page_share: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    gemm_share: list[float] = field(default_factory=list)


class Bounds:
    """Probes that are asked again and again."""

    def __init__(self, dtype: str) -> None:
        import torch

        self.read = {huge: probes.ReadProbe(huge) for huge in (True, False)}
        self.gemm = probes.gemm_probes(getattr(torch, dtype))

    def reads(self) -> dict[bool, float]:
        return {huge: probe.rate() for huge, probe in self.read.items()}

    def gemm_rate(self) -> float:
        return max(probe.amount / method.time_calls(probe.call, 0.0) for probe in self.gemm)


def baseline_of(case: Case) -> Any:
    """The model every candidate of a case is made from; quantised cases start from bf16."""
    return case.shape.model(DTYPES.get(case.precision, "bfloat16"))


def ours(case: Case, model: Any) -> decoders.HuggingFace:
    import rm_abstract

    # What is asked is how fast a token is; drafts would make several of one reading of the weights.
    options = {"prompt_lookup": "off"}
    if case.precision in ("int8", "int4"):
        options["precision"] = case.precision
    rm_abstract.init(compile_options=options)
    twin = type(model)(model.config).eval()  # its own module, the same weights
    twin.load_state_dict(model.state_dict(), assign=True)
    if model.config.tie_word_embeddings:
        twin.tie_weights()
    return decoders.HuggingFace(rm_abstract.accelerate(twin))


@contextlib.contextmanager
def candidates(
    case: Case, llama_python: str | None, eager: bool, batch: int
) -> Iterator[dict[str, decoders.Generator]]:
    import torch

    import rm_abstract

    model = baseline_of(case)
    made: dict[str, decoders.Generator] = {}
    with contextlib.ExitStack() as stack:
        stack.callback(rm_abstract.shutdown)
        if eager:
            made["eager"] = decoders.HuggingFace(model)
        made["rm_abstract"] = mine = ours(case, model)
        if batch > 1:
            made[f"rm_abstract batch {batch}"] = decoders.HuggingFace(mine.model, batch)
        if llama_python:
            kind = LLAMA_CPP[case.precision]
            threads = torch.get_num_threads()
            rows = f" batch {batch}" if batch > 1 else ""
            made[f"llama.cpp {kind}{rows}"] = decoders.LlamaCpp(
                llama_python, model, kind, threads, batch
            )
        for candidate in made.values():
            stack.callback(candidate.close)
        yield made


def cosines(case: Case, made: dict[str, decoders.Generator], prompt: list[int]) -> dict[str, float]:
    """Of the first token's logits with eager's in fp32; a wrong candidate is not timed."""
    import torch

    import rm_abstract

    with rm_abstract.disabled():
        exact = decoders.HuggingFace(baseline_of(case).float()).first_logits(prompt)
    found = {}
    for name, candidate in made.items():
        logits = candidate.first_logits(prompt)
        found[name] = torch.cosine_similarity(logits, exact, dim=0).item()
        if not found[name] >= MIN_COSINE[case.precision]:
            raise ValueError(
                f"[bench] expected the logits of {name} to be eager's on {case.name} (cosine >= "
                f"{MIN_COSINE[case.precision]}), got {found[name]:.6f}; a wrong one is not timed"
            )
    return found


def take(
    case: Case, name: str, candidate: decoders.Generator, prompt: list[int], bounds: Bounds
) -> tuple[dict[str, float], list[int]]:
    gemm_before = bounds.gemm_rate()
    before = bounds.reads()
    sample = candidate.generate(prompt, case.new_tokens)
    after = bounds.reads()
    if len(sample.tokens) != case.new_tokens or sample.rest_s <= 0:
        raise ValueError(
            f"[bench] expected {case.new_tokens} tokens of {name}, got {len(sample.tokens)} in "
            f"{sample.rest_s:.3f} s; try more tokens"
        )
    steps_s = (case.new_tokens - 1) / sample.rest_s
    bytes_s = steps_s * case.step_bytes(sample.rows, name)
    share = {huge: bytes_s / ((before[huge] + after[huge]) / 2) for huge in before}
    operations = sample.rows * case.shape.prefill_operations(case.prompt)
    row = {
        "tokens_s": sample.rows * steps_s,
        "read_share": share[True],
        "small_page_share": share[False],
        "first_ms": sample.first_s * 1e3,
        "gemm_share": operations / sample.first_s / gemm_before,
    }
    return row, sample.tokens


def run_case(
    case: Case, llama_python: str | None, rounds: int, eager: bool = True, batch: int = 1
) -> dict[str, Any]:
    import torch

    draw = random.Random(0)
    prompt = [draw.randrange(3, case.shape.vocabulary) for _ in range(case.prompt)]
    with torch.no_grad(), candidates(case, llama_python, eager, batch) as made:
        for candidate in made.values():  # warm: captures (whose first call is eager), page faults
            candidate.generate(prompt, case.new_tokens)
        found = cosines(case, made, prompt)
        routed = routed_calls(case, made["rm_abstract"])
        # Activations of quantised cases are bf16: what matrix instructions of that type reach.
        bounds = Bounds(DTYPES.get(case.precision, "bfloat16"))
        taken = {name: Taken() for name in made}
        texts: dict[str, list[int]] = {}
        order = list(made)
        started = time.perf_counter()
        for _ in range(rounds):
            draw.shuffle(order)
            for name in order:
                row, texts[name] = take(case, name, made[name], prompt, bounds)
                for key, value in row.items():
                    getattr(taken[name], key).append(value)
        seconds = time.perf_counter() - started
    return {
        "case": case.name,
        "bytes_a_token": case.step_bytes(1),
        "seconds": seconds,
        "routed": routed,
        "candidates": {
            name: {
                "over_first": ratio(taken[name].tokens_s, taken[next(iter(made))]),
                "cosine": found[name],
                "same_tokens": same_prefix(texts[name], texts.get("eager")),
                **{key: vars(method.Estimate.of(v)) for key, v in vars(taken[name]).items()},
            }
            for name in made
        },
    }


def ratio(values: list[float], baseline: Taken) -> float:
    pairs = zip(values, baseline.tokens_s, strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs)


def same_prefix(tokens: list[int], eager: list[int] | None) -> int | None:
    """How many tokens agree with eager's before the first that differs."""
    if eager is None:
        return None
    for at, (mine, theirs) in enumerate(zip(tokens, eager, strict=True)):
        if mine != theirs:
            return at
    return len(eager)


def routed_calls(case: Case, candidate: decoders.Generator) -> dict[str, Any]:
    """What ran; raises where it is not what the case says: eager calls, or weights of more bits."""
    import rm_abstract

    assert isinstance(candidate, decoders.HuggingFace)
    report = rm_abstract.explain(candidate.model).to_dict()
    if not report["routed"]:
        raise RuntimeError(f"[bench] expected routed calls, got eager ones:\n{report}")
    kernels: dict[str, int] = {}
    for model in report["models"]:
        for entry in model["entries"]:
            kernels.update(entry["kernels"])
    if BITS[case.precision] < 16 and not any("quant_linear" in name for name in kernels):
        raise RuntimeError(
            f"[bench] expected weights of {BITS[case.precision]} bits, got {sorted(kernels)}; "
            "this build does not quantise in generation"
        )
    return {"calls": report["routed"], "kernels": kernels}


def markdown(result: dict[str, Any]) -> str:
    """The rows of one case."""
    lines = []
    for name, row in result["candidates"].items():
        same = "" if row["same_tokens"] is None else str(row["same_tokens"])
        cells = [
            result["case"],
            name,
            f"{row['tokens_s']['median']:.1f}",
            span(row["read_share"]),
            span(row["small_page_share"]),
            f"{row['over_first']:.2f}",
            f"{row['first_ms']['median']:.1f}",
            span(row["gemm_share"]),
            f"{row['cosine']:.6f}",
            same,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def span(values: dict[str, float]) -> str:
    return f"{values['median']:.2f} ({values['low']:.2f}-{values['high']:.2f})"


HEADER = (
    "| case | candidate | tok/s | of read probe | of read probe, 4 KiB pages | x first | "
    "first token ms | of GEMM probe | cosine | tokens as eager |\n|" + "---|" * 10
)
