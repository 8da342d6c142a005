"""generation/vllm/mapping.py against the processors and criteria that transformers really makes.

The table of docs/engines.md is the same: every field it names has a row here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationMixin

from rm_abstract.base.decline import Decline
from rm_abstract.generation.request import GenerationRequest
from rm_abstract.generation.vllm.mapping import Plan, plan
from rm_abstract.kv.names import NAMES

DRAWN = {"do_sample": True, "top_k": 0}
TAKEN: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"do_sample": False}, {"temperature": 0.0, "stop_token_ids": [1], "ignore_eos": True}),
    ({"max_new_tokens": 7}, {"max_tokens": 7}),
    ({"max_new_tokens": None, "max_length": 20}, {"max_tokens": 20}),
    ({"eos_token_id": [4, 9]}, {"stop_token_ids": [4, 9]}),
    ({"min_new_tokens": 3}, {"min_tokens": 3}),
    ({"min_length": 4, "max_new_tokens": 8}, {}),
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"suppress_tokens": [5, 3]}, {"suppressed": [3, 5]}),
    ({"bad_words_ids": [[7], [8]]}, {"suppressed": [7, 8]}),
    ({"sequence_bias": {(6,): 2.5}}, {"logit_bias": {"6": 2.5}}),
    ({**DRAWN}, {"temperature": 1.0}),
    ({**DRAWN, "temperature": 0.5}, {"temperature": 0.5}),
    ({**DRAWN, "top_k": 11}, {"top_k": 11}),
    ({**DRAWN, "top_p": 0.9}, {"top_p": 0.9}),
    ({**DRAWN, "min_p": 0.1}, {"min_p": 0.1}),
    ({**DRAWN, "num_return_sequences": 3}, {"temperature": 1.0}),
    ({"max_time": 5.0}, {}),
    ({"stopping_criteria": [lambda ids, scores: torch.zeros(len(ids)).bool()]}, {}),
    ({"renormalize_logits": True}, {}),
)
DECLINED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"return_dict_in_generate": True}, "return_dict_in_generate"),
    ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    ({"sequence_bias": {(6, 7): 2.5}}, "several tokens"),
    ({"sequence_bias": {(6,): 200.0}}, "sequence_bias=200"),
    ({"sequence_bias": {(6,): 1.0}, "repetition_penalty": 1.2}, "repetition_penalty"),
    ({"bad_words_ids": [[7, 8]]}, "several tokens"),
    ({**DRAWN, "typical_p": 0.5}, "TypicalLogitsWarper"),
    ({**DRAWN, "epsilon_cutoff": 0.1}, "EpsilonLogitsWarper"),
    ({**DRAWN, "eta_cutoff": 0.1}, "EtaLogitsWarper"),
    ({**DRAWN, "temperature": 3.0}, "temperature=3.0"),
    ({**DRAWN, "top_p": 0.9, "min_p": 0.1}, "min_p with top_p"),
    ({"guidance_scale": 1.5}, "UnbatchedClassifierFreeGuidance"),
    ({"prefix_allowed_tokens_fn": lambda row, ids: [5]}, "PrefixConstrained"),
    ({"logits_processor": [lambda ids, scores: scores]}, "function"),
)
# Seen before `_sample`, or only by the hook: tests of the engine itself have them.
ELSEWHERE = {"num_beams", "assistant_model", *NAMES, "inputs_embeds"}
ELSEWHERE |= {"stop_strings", "streamer", "attention_mask"}


class Captured(Exception):
    pass


@pytest.fixture(scope="module")
def request_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What transformers hands to `_sample` for the arguments of generate."""
    folder = models.saved("gpt2", tmp_path_factory.mktemp("models") / "gpt2", 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    original = GenerationMixin._sample

    def make(**options: Any) -> GenerationRequest:
        found = []

        def stop(self: Any, *args: Any, **kwargs: Any) -> None:
            found.append(GenerationRequest.of(original, self, args, kwargs))
            raise Captured

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(GenerationMixin, "_sample", stop)
            with pytest.raises(Captured):
                model.generate(**{**models.prompts(3, 8), "max_new_tokens": 12, **options})
        return found[0]

    return make


@pytest.mark.parametrize(("options", "sampling"), TAKEN)
def test_what_is_taken_becomes_these_parameters(
    request_of: Any, options: dict[str, Any], sampling: dict[str, Any]
) -> None:
    request = request_of(**options)
    # Older transformers count the padding among the tokens that a penalty is for; vLLM has none.
    if any(getattr(p, "prompt_ignore_length", ()) is None for p in request.processors):
        with pytest.raises(Decline, match="prompt_ignore_length"):
            plan(request)
        return
    made: Plan = plan(request)
    width = request.input_ids.shape[1]
    for name, value in sampling.items():
        wanted = value - width if options.get("max_length") and name == "max_tokens" else value
        assert made.sampling[name] == wanted, name
    lengths = request.model_kwargs["attention_mask"].sum(-1).tolist()
    assert [len(prompt) for prompt in made.prompts] == lengths
    for row, (prompt, parameters) in enumerate(made.rows()):
        assert prompt == request.input_ids[row, width - lengths[row] :].tolist()
        assert ("seed" in parameters) == bool(options.get("do_sample"))


@pytest.mark.parametrize(("options", "name"), DECLINED)
def test_what_is_declined_is_named(request_of: Any, options: dict[str, Any], name: str) -> None:
    with pytest.raises(Decline) as declined:
        plan(request_of(**options))
    assert declined.value.code == "RM332" and name in declined.value.detail


def test_lengths_and_paddings_that_it_cannot_keep_are_declined(request_of: Any) -> None:
    request = request_of()
    longest = request.input_ids.shape[1] + 12
    assert plan(request, longest)
    with pytest.raises(Decline, match="max_model_len"):
        plan(request, longest - 1)
    kwargs = request.model_kwargs
    request.model_kwargs = {**kwargs, "tokenizer": object()}  # as stop_strings leaves it
    assert plan(request)
    for name, value in (
        ("attention_mask", kwargs["attention_mask"].flip(-1)),
        ("position_ids", torch.zeros_like(request.input_ids) + 3),
        ("token_type_ids", torch.zeros_like(request.input_ids)),
    ):
        request.model_kwargs = {**kwargs, name: value}
        with pytest.raises(Decline, match=name):
            plan(request)


def test_seeds_repeat_with_torchs(request_of: Any) -> None:
    made = plan(request_of(**DRAWN))
    torch.manual_seed(3)
    first = made.rows()
    torch.manual_seed(3)
    assert made.rows() == first != made.rows()


def test_the_page_names_what_is_tested_here(repository: Path) -> None:
    page = (repository / "docs" / "engines.md").read_text()
    table = page.partition("| transformers | vLLM | |")[2].partition("\n\n")[0]
    said = {
        word
        for line in table.splitlines()[2:]
        for word in re.findall(r"`([a-z_]+)(?:=\w+)?`", line.split("|")[1])
    }
    tested = {name for options, _ in (*TAKEN, *DECLINED) for name in options} | ELSEWHERE
    assert said <= tested, said - tested
    assert {name for options, _ in TAKEN for name in options} <= said | {"renormalize_logits"}
