"""The text generators `bench decode` compares: ours, eager transformers, llama.cpp in a child.

Every generator takes prompt ids and a number of new tokens and answers with what it took.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

CHILD = Path(__file__).with_name("llama_cpp_child.py")


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped decoder; weights are random normal (standard deviation 0.02)."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int = 32000

    def model(self, dtype: str) -> Any:
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=8192,
            bos_token_id=1,
            eos_token_id=None,  # random weights: every generation goes to its length
            pad_token_id=0,
        )
        return LlamaForCausalLM(config).to(getattr(torch, dtype)).eval()

    @property
    def linear_parameters(self) -> int:
        """What one token reads: every linear weight; of the embedding only a row."""
        size = self.hidden // self.heads
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_heads * size
        mlp = 3 * self.hidden * self.intermediate
        return self.layers * (attention + mlp) + self.hidden * self.vocabulary

    def kv_bytes(self, length: int, bits: int) -> int:
        size = self.hidden // self.heads
        return 2 * self.layers * self.kv_heads * size * length * bits // 8

    def prefill_operations(self, length: int) -> float:
        """Products and causal attention of a prompt, the head for its last token only."""
        head = self.hidden * self.vocabulary
        attention = 2.0 * self.layers * self.hidden * length * length
        return 2.0 * ((self.linear_parameters - head) * length + head) + attention


SHAPES = [
    Shape("llama-0.13b", 12, 768, 2048, 12, 12),
    Shape("llama-0.44b", 32, 1024, 2816, 16, 8),
]


@dataclass
class Sample:
    """Seconds to the first token, seconds of all the others, and what was generated."""

    first_s: float
    rest_s: float
    tokens: list[int]  # of the first row
    rows: int = 1
    first_logits: torch.Tensor | None = None


class Generator(Protocol):
    def generate(self, prompt: list[int], new_tokens: int) -> Sample: ...
    def first_logits(self, prompt: list[int]) -> torch.Tensor: ...
    def close(self) -> None: ...


class HuggingFace:
    """`model.generate` as a user calls it: greedy, no streamer; the prompt in every row."""

    def __init__(self, model: Any, rows: int = 1) -> None:
        self.model = model
        self.rows = rows

    def _call(self, prompt: list[int], new_tokens: int, **more: Any) -> Any:
        import torch

        ids = torch.tensor([prompt] * self.rows)
        return self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            **more,
        )

    def generate(self, prompt: list[int], new_tokens: int) -> Sample:
        start = time.perf_counter()
        self._call(prompt, 1)
        first = time.perf_counter()
        ids = self._call(prompt, new_tokens)
        end = time.perf_counter()
        first_s = first - start
        tokens = ids[0, len(prompt) :].tolist()
        return Sample(first_s, end - first - first_s, tokens, self.rows)

    def first_logits(self, prompt: list[int]) -> torch.Tensor:
        # One token more than looked at, so that the path of many tokens is the one that is checked.
        out = self._call(prompt, 2, return_dict_in_generate=True, output_logits=True)
        logits: torch.Tensor = out.logits[0][0].double()
        return logits

    def close(self) -> None:
        self.model = None


class LlamaCpp:
    """llama.cpp in a process of its own, spoken to in lines of JSON."""

    def __init__(self, python: str, model: Any, kind: str, threads: int, rows: int = 1) -> None:
        self.rows = rows
        self.directory = tempfile.TemporaryDirectory(prefix="rm_bench_")
        dump(model, Path(self.directory.name))
        self.process = subprocess.Popen(
            [python, str(CHILD), self.directory.name, kind, str(threads), str(rows)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(
                "[bench] expected an answer of llama.cpp, got the end of its process; "
                "try running its interpreter with llama_cpp_child.py by hand"
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def generate(self, prompt: list[int], new_tokens: int) -> Sample:
        answer = self._ask(prompt=prompt, new_tokens=new_tokens)
        return Sample(answer["first_s"], answer["rest_s"], answer["tokens"], self.rows)

    def first_logits(self, prompt: list[int]) -> torch.Tensor:
        import torch

        answer = self._ask(prompt=prompt, new_tokens=1, logits=True)
        return torch.tensor(answer["logits"], dtype=torch.float64)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait(timeout=30)
        self.directory.cleanup()


def dump(model: Any, folder: Path) -> None:
    """The weights as float32 in one file with an index, for a process that has no torch."""
    import torch

    index, at = {}, 0
    with (folder / "weights.bin").open("wb") as file:
        for name, tensor in model.state_dict().items():
            data = tensor.detach().to(torch.float32).contiguous().numpy()
            file.write(data.tobytes())
            index[name] = {"shape": list(tensor.shape), "offset": at}
            at += data.nbytes
    description = {"config": model.config.to_dict(), "tensors": index}
    (folder / "model.json").write_text(json.dumps(description, default=str))
