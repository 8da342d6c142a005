"""Whole generations by FuriosaAI's furiosa-llm: a bundle of programs built by `fxb`, and its `LLM`.

Greedy only: its sampling takes no seed, so a draw could not be repeated. Only `fxb` was tried, and
`LLM` on a stand-in of its native engine; nothing of it has run on a card (docs/npu_furiosa.md).
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rm_abstract.plugin import Failure, GenerateRequest
from rm_abstract.vendors.furiosa import llm

_VERSIONS = (llm.PACKAGE, "furiosa-llm-native", "furiosa-tcc", "furiosa-kernels")
# What a bundle does not depend on: the same programs serve models that differ in these.
_NOT_SHAPES = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache")


class Generator:
    def __init__(self, device: int, folder: str, options: Mapping[str, str]) -> None:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        self.max_tokens = _longest(config, options)
        bundle = _bundle(config, self.max_tokens, options, Path(folder))
        from furiosa_llm import LLM

        _write_tokenizer(Path(folder), int(config["vocab_size"]))
        self._llm = LLM(
            folder, fxb=str(bundle), devices=f"npu:{device}", max_model_len=self.max_tokens
        )

    def generate(self, request: GenerateRequest) -> Iterator[list[int]]:
        from furiosa_llm import SamplingParams
        from transformers import BatchEncoding

        # All that has a default of its own, such as max_tokens, 16, or the checkpoint's
        # generation_config.json, is said.
        sampling = SamplingParams(
            n=1,
            temperature=0.0,
            max_tokens=request.max_new_tokens,
            min_tokens=0,
            ignore_eos=True,
            stop_token_ids=list(request.stop_tokens),
        )
        rows = [list(prompt) for prompt in request.prompts]
        answers = self._llm.generate(
            [""] * len(rows), sampling, prompt_token_ids=BatchEncoding({"input_ids": rows})
        )
        made = [list(answer.outputs[0].token_ids) for answer in answers]
        for row, tokens in enumerate(made):
            ended = bool(tokens) and tokens[-1] in request.stop_tokens
            if not ended and len(tokens) != request.max_new_tokens:
                raise RuntimeError(
                    f"[furiosa-llm] expected {request.max_new_tokens} tokens of row {row}, got "
                    f"{len(tokens)} and no stop token"
                )
        for step in range(request.max_new_tokens):
            yield [tokens[min(step, len(tokens) - 1)] for tokens in made]


def _longest(config: Mapping[str, Any], options: Mapping[str, str]) -> int:
    own = int(config.get("max_position_embeddings") or 0)
    if own <= 0:
        raise NotImplementedError("a model without max_position_embeddings")
    text = options.get("max_model_len", "")
    if text and not (text.isdecimal() and 0 < int(text) <= own):
        raise Failure(f"[furiosa-llm] expected max_model_len in 1..{own}, got {text!r}")
    return int(text) if text else min(own, llm.LONGEST)


def _bundle(
    config: Mapping[str, Any], length: int, options: Mapping[str, str], scratch: Path
) -> Path:
    """The bundle for a configuration: found, or built where fxb says that it can."""
    level = options.get("fxb_level", "O3")
    if level not in llm.LEVELS:
        raise Failure(f"[furiosa-llm] expected fxb_level of {', '.join(llm.LEVELS)}, got {level!r}")
    missing = llm.tools_missing(sys.executable)
    if missing:
        raise Failure(f"[furiosa-llm] expected {', '.join(missing)} in the environment", "RM401")
    cache = options.get("cache_folder", "")
    facts = {
        "config": {name: v for name, v in config.items() if name not in _NOT_SHAPES},
        "length": length,
        "level": level,
        "versions": {name: _version(name) for name in _VERSIONS},
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    bundle = (Path(cache) if cache else scratch) / f"{key}.fxb"
    if bundle.is_file():
        print(f"furiosa-llm: found {bundle.name}", file=sys.stderr, flush=True)
        return bundle
    answer = llm.dry_run(sys.executable, config, length)
    if answer.why:
        raise NotImplementedError(answer.why)
    print(f"furiosa-llm: building {bundle.name} with {level}", file=sys.stderr, flush=True)
    answer = llm.build(sys.executable, config, bundle, length, level)
    if answer.why:
        raise Failure(f"[furiosa-llm] expected fxb to build the model, got: {answer.why}")
    return bundle


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _write_tokenizer(folder: Path, size: int) -> None:
    """`LLM` wants a tokenizer and decodes every token with it. Only ids are exchanged here: a word
    for each, none of them special."""
    words = {str(number): number for number in range(size)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "0"}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None,
        "decoder": None, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    kind = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")
