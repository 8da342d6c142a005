"""One row's next token from its logits.

Invariant: a choice depends on the row's own logits, tokens and seed alone, never on its neighbours.
"""

from __future__ import annotations

import torch

from rm_abstract.generation.jobs import Sampling, Token


class Sampler:
    """The choices of one row; holds its random state."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._counts: dict[int, int] = {}
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed % 2**63)
        self._changes = bool(
            sampling.presence_penalty or sampling.frequency_penalty or sampling.logit_bias
        )

    @property
    def takes_largest(self) -> bool:
        """The largest logit decides and nothing else is asked for."""
        wanted = self._sampling
        return wanted.temperature == 0 and wanted.logprobs is None and not self._changes

    def choose(self, logits: torch.Tensor) -> Token:
        """`logits` ``[vocabulary]`` in float32, not changed."""
        wanted = self._sampling
        scores = self._changed(logits) if self._changes else logits
        if wanted.temperature == 0:
            chosen = int(scores.argmax())
        else:
            chosen = self._drawn(scores / wanted.temperature)
        self._counts[chosen] = self._counts.get(chosen, 0) + 1
        if wanted.logprobs is None:
            return Token(chosen)
        known = torch.log_softmax(logits, dim=-1)
        top = known.topk(min(wanted.logprobs, len(known)))
        alternatives = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        return Token(chosen, float(known[chosen]), tuple(alternatives))

    def _changed(self, logits: torch.Tensor) -> torch.Tensor:
        wanted, scores = self._sampling, logits.clone()
        if self._counts:
            tokens = torch.tensor(list(self._counts))
            times = torch.tensor(list(self._counts.values()), dtype=scores.dtype)
            scores[tokens] -= wanted.presence_penalty + wanted.frequency_penalty * times
        for token, bias in wanted.logit_bias.items():
            scores[token] += bias
        return scores

    def _drawn(self, scores: torch.Tensor) -> int:
        wanted = self._sampling
        if 0 < wanted.top_k < len(scores):
            least = scores.topk(wanted.top_k).values[-1]
            scores = scores.masked_fill(scores < least, -torch.inf)
        chances = torch.softmax(scores, dim=-1)
        if wanted.top_p < 1:
            ordered, tokens = chances.sort(descending=True)
            # Kept is what the more likely ones leave short of top_p: the first always.
            kept = ordered.cumsum(-1) - ordered < wanted.top_p
            kept[0] = True
            place = int(torch.multinomial(ordered * kept, 1, generator=self._generator))
            return int(tokens[place])
        return int(torch.multinomial(chances, 1, generator=self._generator))
