"""What fewer bits cost: perplexity of a causal model on a text, in its own precision and compiled.

Every token but the first is predicted once, from at least half a window of tokens before it where
the text has that many. All windows have one size, so one program serves them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract import report
from rm_abstract.base.errors import ConfigError
from rm_abstract.base.scope import disabled
from rm_abstract.report import Quality

if TYPE_CHECKING:
    import torch

    from rm_abstract.session import Session

WINDOW = 512
MOST_TOKENS = 16384


def measure(session: Session, model: Any, folder: Path, text: Path) -> Quality:
    """Perplexity of a model that is routed in `session`.

    Raises ConfigError for one that predicts no next token.
    """
    import torch

    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ConfigError(
            f"[quality] expected a causal language model, got {type(model).__name__}; "
            "try without --quality"
        )
    ids = tokens_of(model, folder, text)[:MOST_TOKENS]
    with torch.no_grad():
        with disabled():
            own = perplexity(model, ids)
        window = ids[: _window(model, len(ids))][None]
        for _ in range(2):  # the first call of a program is served by the original
            model(input_ids=window, use_cache=False)
        eager = report.build(session, model).eager
        compiled = perplexity(model, ids)
        after = report.build(session, model)
        if (late := after.eager - eager) > 0:
            raise RuntimeError(
                f"[quality] expected compiled calls only, got {late} eager ones: {after.why_not()}"
            )
    return Quality(len(ids), own, compiled, session.settings.text("precision"))


def perplexity(model: Callable[..., Any], ids: torch.Tensor) -> float:
    """exp of the mean negative log probability of each token after the first."""
    total = 0.0
    for start, stop, fresh in windows(len(ids), _window(model, len(ids))):
        part = ids[start:stop]
        logits = model(input_ids=part[None], use_cache=False).logits[0, :-1]
        chosen = logits[-fresh:].double().log_softmax(-1).gather(1, part[-fresh:, None])
        total -= float(chosen.sum())
    return math.exp(total / (len(ids) - 1))


def windows(count: int, size: int) -> Iterator[tuple[int, int, int]]:
    """(start, stop, tokens at the end that no window before predicted)."""
    done = 1
    while done < count:
        stop = min(max(size, done + size // 2), count)
        yield max(0, stop - size), stop, stop - done
        done = stop


def tokens_of(model: Any, folder: Path, text: Path) -> torch.Tensor:
    """The text by the folder's tokenizer; the bytes themselves where it has none."""
    import torch

    if (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder))
        content = text.read_text(encoding="utf-8", errors="replace")
        found = tokenizer(content, add_special_tokens=False, verbose=False)["input_ids"]
    elif model.config.get_text_config().vocab_size >= 256:
        found = list(text.read_bytes())
    else:
        raise ConfigError(f"[quality] expected a tokenizer in '{folder}', got none")
    if len(found) < 2:
        raise ConfigError(f"[quality] expected a text of at least two tokens, got '{text}'")
    return torch.tensor(found)


def _window(model: Any, count: int) -> int:
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW
    return min(WINDOW, int(longest), count)
