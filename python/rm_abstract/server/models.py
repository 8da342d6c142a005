"""The models a server has by name: loaded from folders, prompts made of requests for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rm_abstract.base.errors import Error
from rm_abstract.generation.scheduler import Limits
from rm_abstract.server.engine import EmbeddingEngine, TextEngine
from rm_abstract.server.errors import ApiError
from rm_abstract.server.native import NativeEmbeddings, NativeText

T = TypeVar("T")


@dataclass
class Served:
    """One model. Its tokenizer is used by one thread of its own: it is not safe for several."""

    name: str
    tokenizer: Any
    text: TextEngine | None = None
    embeddings: EmbeddingEngine | None = None
    stop_tokens: frozenset[int] = frozenset()
    created: int = field(default_factory=lambda: int(time.time()))
    pending: int = 0  # requests for embeddings that have no answer yet

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"rm-{self.name}")

    async def apart(self, work: Callable[[], T]) -> T:
        """Runs `work` on this model's own thread, so that the event loop goes on."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def prompt_of_text(self, text: str) -> list[int]:
        _encodable(text)
        return await self.apart(lambda: list(self.tokenizer(text)["input_ids"]))

    async def prompt_of_chat(
        self, messages: list[dict[str, Any]], tools: Any, settings: dict[str, Any]
    ) -> list[int]:
        """By the tokenizer's own template. Raises ApiError when it has none or refuses."""
        if not getattr(self.tokenizer, "chat_template", None):
            raise ApiError(400, f"{self.name} has no chat template.", param="messages")
        reserved = {"tokenize", "add_generation_prompt", "conversation", "tools", "chat_template"}
        if wrong := sorted(reserved & set(settings)):
            raise ApiError(400, f"{wrong[0]} cannot be set.", param="chat_template_kwargs")

        def made() -> list[int]:
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, tokenize=False, **settings
            )
            _encodable(text)
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

        try:
            return await self.apart(made)
        except ApiError:
            raise
        except Exception as error:  # templates are the model's code and refuse in many ways
            what = f"{type(error).__name__}: {error}"
            raise ApiError(400, f"The chat template refused: {what}", param="messages") from None

    def facts(self) -> dict[str, Any]:
        engine = self.text if self.text is not None else self.embeddings
        return {} if engine is None else engine.facts()

    def fault(self) -> str:
        """Why nothing is made any more; empty while it is."""
        return "" if self.text is None else self.text.fault()

    def close(self) -> None:
        for engine in (self.text, self.embeddings):
            if engine is not None:
                engine.close()
        self._thread.shutdown(wait=True, cancel_futures=True)


def _encodable(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ApiError(400, "The text has half of a surrogate pair.") from None


def load(
    folder: Path,
    name: str,
    limits: Limits,
    dtype: str,
    context_length: int | None,
    engine: str = "native",
) -> Served:
    """A causal language model serves text, any other one embeddings. Raises Error.

    Only files of the folder are read, and no code in it is run.
    """
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        config = None
    sentences = (folder / "modules.json").is_file()
    if not isinstance(config, dict) and not sentences:
        raise Error(f"[serve] expected a model in {folder}, found no config.json that can be read")
    if sentences:
        return _sentence_model(folder, name)
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

    assert isinstance(config, dict)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    decodes = any("CausalLM" in str(n) or "LMHead" in str(n) for n in _architectures(config))
    if decodes and engine == "vllm":
        return _with_vllm(folder, name, tokenizer, limits, dtype, context_length)
    if decodes and engine != "native":
        raise Error(f"[serve] expected --engine native or vllm for text, got {engine}")
    kind = AutoModelForCausalLM if decodes else AutoModel
    model = kind.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    if not decodes:
        return Served(name, tokenizer, embeddings=NativeEmbeddings(model, tokenizer, False))
    text = NativeText(model, limits, context_length)
    text.warm()
    stops = _stops(model.generation_config, tokenizer)
    return Served(name, tokenizer, text, stop_tokens=stops)


def _stops(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    ends = generation_config.eos_token_id
    found = ends if isinstance(ends, list) else [ends]
    return frozenset(t for t in (*found, tokenizer.eos_token_id) if t is not None)


def _with_vllm(
    folder: Path,
    name: str,
    tokenizer: Any,
    limits: Limits,
    dtype: str,
    context_length: int | None,
) -> Served:
    """The model lies in vLLM's process only; its options are the session's engine_options."""
    from transformers import AutoConfig, GenerationConfig

    from rm_abstract import session
    from rm_abstract.generation.vllm.engine import Vllm
    from rm_abstract.server.vllm import VllmText

    active = session.current()
    assert active is not None
    given = json.loads(active.settings.text("engine_options"))
    given.setdefault("max_num_seqs", limits.rows)
    if context_length:
        given.setdefault("max_model_len", context_length)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    try:
        ends = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        ends = GenerationConfig.from_model_config(config)
    vocabulary = int(config.get_text_config(decoder=True).vocab_size)
    kind = Vllm(json.dumps(given), active.device)
    log_dir = active.settings.text("worker_log_dir")
    text = VllmText(folder, kind, vocabulary, dtype, limits.rows + limits.waiting, log_dir)
    return Served(name, tokenizer, text, stop_tokens=_stops(ends, tokenizer))


def _architectures(config: dict[str, Any]) -> list[Any]:
    found = config.get("architectures")
    return found if isinstance(found, list) else []


def _sentence_model(folder: Path, name: str) -> Served:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), local_files_only=True)
    engine = NativeEmbeddings(model, model.tokenizer, True)
    return Served(name, model.tokenizer, embeddings=engine)
