"""Does a plugin that generates itself give the tokens of the model?

The process a user's script would start, asked for small models of transformers with random weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from rm_abstract.base.config import resolve
from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.plugin.engine import PluginGeneration
from rm_abstract.generation.remote.process import EngineProcess, Ticket

VOCABULARY, LONGEST, NEW = 48, 96, 10
_LIMIT_S = 600.0
_TOLERANCE = 1e-2  # of log probabilities


def models() -> Iterator[tuple[str, Any]]:
    """(architecture, model) with all of transformers' defaults for it. Needs transformers."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip
    gpt2 = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": LONGEST}
    llama = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": LONGEST,
    }  # fmt: skip
    for name, config, sizes in (
        ("GPT2LMHeadModel", "GPT2Config", gpt2),
        ("LlamaForCausalLM", "LlamaConfig", llama),
    ):
        torch.manual_seed(0)
        model = getattr(transformers, name)
        yield name, model(getattr(transformers, config)(**sizes, **common)).eval()


class _Served:
    """One model in the plugin's process."""

    def __init__(self, name: str, properties: dict[str, str], model: Any) -> None:
        self._kind = PluginGeneration(resolve({"cache_mode": "off"}), f"{name}:0", properties)
        self.process = EngineProcess(name, self._kind.command(), self._kind.environment())
        self._groups = 0
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            self.facts = self.process.request(
                "start",
                _LIMIT_S,
                model=folder,
                arguments={"options": {"cache_folder": ""}},
                device=f"{name}:0",
            )

    def submit(
        self, prompts: list[list[int]], new: int, sampling: dict[str, Any], seed: int = 0
    ) -> list[Ticket]:
        said = {"stop_token_ids": [], "max_tokens": new, **sampling, "seed": seed, "logprobs": 0}
        rows = len(prompts)
        self._groups += 1
        return [
            self.process.submit(
                "generate",
                prompt=prompt,
                sampling={**said, "group": f"g{self._groups}", "row": row, "rows": rows},
            )
            for row, prompt in enumerate(prompts)
        ]

    def tokens(
        self, prompts: list[list[int]], new: int, sampling: dict[str, Any], seed: int = 0
    ) -> tuple[list[list[int]], list[list[float]]]:
        """New tokens of every row, and their log probabilities where it tells them."""
        tickets = self.submit(prompts, new, sampling, seed)
        found: list[list[int]] = []
        known: list[list[float]] = []
        for ticket in tickets:
            row: list[int] = []
            chances: list[float] = []
            done = False
            while not done:
                message = ticket.next()
                row += message["tokens"]
                chances += [one[0][1] for one in message["chances"]]
                done = message["done"]
            found.append(row)
            known.append(chances)
        self.process.forget(tickets)
        return found, known


def check(name: str, properties: dict[str, str]) -> str:
    """Which architectures were compared. Raises AssertionError for tokens that are not the
    model's."""
    compared, refused = [], []
    for architecture, model in models():
        try:
            served = _Served(name, properties, model)
        except ExecutionError as error:
            refused.append(f"{architecture}: {str(error).splitlines()[0]}")
            continue
        try:
            _check_model(served, model, properties.get("samples", "").split())
        finally:
            served.process.close()
        compared.append(architecture)
    assert compared, "it generates for none of " + "; ".join(refused)
    return ", ".join(compared)


def _check_model(served: _Served, model: Any, samples: list[str]) -> None:
    most = int(served.facts["max_model_len"])
    assert most >= 32, f"it takes {most} tokens a row at most, of which the test needs 32"
    draws = torch.Generator().manual_seed(5)

    def prompt(size: int) -> list[int]:
        return list(torch.randint(0, VOCABULARY, (size,), generator=draws).tolist())

    greedy = {"temperature": 0.0}
    batches = [[prompt(7)], [prompt(6), prompt(3), prompt(9)]]
    answers = []
    for prompts in batches:
        found, known = served.tokens(prompts, NEW, greedy)
        answers.append(found)
        for row in range(len(prompts)):
            _check_row(model, prompts[row], found[row], known[row])
    stop = answers[0][0][4]
    ended, _ = served.tokens(batches[0], NEW, {**greedy, "stop_token_ids": [stop]})
    first = answers[0][0].index(stop) + 1
    assert ended[0] == answers[0][0][:first], "a row goes on behind a stop token"
    _check_cancelling(served, batches[1], answers[1], most)
    if "temperature" in samples:
        _check_seeds(served, prompt(4), samples)


def _check_row(model: Any, prompt: list[int], tokens: list[int], chances: list[float]) -> None:
    assert len(tokens) == NEW, f"{len(tokens)} tokens instead of {NEW}"
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    own = torch.log_softmax(logits.float(), -1)
    picked = own[torch.arange(NEW), torch.tensor(tokens)]
    below = float((own.max(-1).values - picked).max())
    assert below <= _TOLERANCE, f"a greedy token is less likely than another by {below:.3g}"
    if chances:
        apart = float((picked - torch.tensor(chances)).abs().max())
        assert apart <= _TOLERANCE, f"log probabilities differ from PyTorch's by {apart:.3g}"


def _check_cancelling(
    served: _Served, prompts: list[list[int]], expected: list[list[int]], most: int
) -> None:
    """A generation nobody wants any more leaves the next ones as they were."""
    tickets = served.submit(prompts, most - max(map(len, prompts)), {"temperature": 0.0})
    tickets[0].next()
    served.process.forget(tickets, cancel=True)
    after, _ = served.tokens(list(prompts), NEW, {"temperature": 0.0})
    assert after == expected, "a generation that was left changes the next one"


def _check_seeds(served: _Served, prompt: list[int], samples: list[str]) -> None:
    """The same seed draws the same tokens, another one others."""
    sampling: dict[str, Any] = {"temperature": 1.5}
    if "top_k" in samples:
        sampling["top_k"] = VOCABULARY // 2
    one, again, other = (served.tokens([list(prompt)], 20, sampling, seed)[0] for seed in (1, 1, 2))
    assert one == again, "the same seed draws other tokens"
    assert one != other, "another seed draws the same tokens"
