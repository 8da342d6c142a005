"""Compiling ahead: a model folder's calls, made once through the ordinary route, fill the cache.

Nothing here knows how a call is compiled or what is stored: a later run finds exactly what its own
first call would have made. Works offline; imports torch and transformers when it is called.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rm_abstract.base.errors import ConfigError

if TYPE_CHECKING:
    from rm_abstract.profiling import Profile
    from rm_abstract.report import Report

TOKENS = 3  # generated to reach a prefill, a first and a later decoding step


def compile_ahead(
    model_dir: str | Path,
    *,
    device: Any = None,
    batch_size: Sequence[int] = (1,),
    sequence_length: Sequence[int] = (16,),
    auto_class: str | None = None,
    precision: str | None = None,
    group_size: str | None = None,
    activations: str | None = None,
    quality: str | Path | None = None,
    draw: Callable[[Profile], None] | None = None,
) -> Report:
    """Loads the folder's model, makes every call of the given sizes, and says what happened.

    With ``quality``, a text file, the report also has the perplexity on it before and after.
    ``draw`` is given a profile of the same calls made again.

    Runs in the session there is; without one in a session of its own on ``device``. Raises
    ConfigError for sizes or a folder that make no sense, and what loading or compiling raises.
    """
    folder = Path(model_dir)
    _check(folder, batch_size, sequence_length)
    options = {"precision": precision, "group_size": group_size, "activations": activations}
    with _offline(), _session(device, {k: v for k, v in options.items() if v is not None}):
        from rm_abstract import api, session

        model = load_model(folder, auto_class)
        for batch in batch_size:
            for length in sequence_length:
                _call(model, batch, length)
        if draw is not None:
            with api.profile() as profile:
                for batch in batch_size:
                    for length in sequence_length:
                        _call(model, batch, length)
            draw(profile)
        report = api.explain(model)
        if quality is not None:
            from rm_abstract.quality import measure

            current = session.current()
            assert current is not None
            report.quality = measure(current, model, folder, Path(quality))
        return report


def _check(folder: Path, batch_size: Sequence[int], sequence_length: Sequence[int]) -> None:
    for name, sizes in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if not sizes or min(sizes) < 1:
            raise ConfigError(f"[{name}] expected positive integers such as 1,4,8, got {sizes!r}")
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"[model_dir] expected a folder with a config.json, got '{folder}'; "
            "try the folder that save_pretrained wrote"
        )


@contextmanager
def _offline() -> Iterator[None]:
    """The folder has everything: nothing is fetched."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HF_HUB_OFFLINE"]
        else:
            os.environ["HF_HUB_OFFLINE"] = before


@contextmanager
def _session(device: Any, options: dict[str, str]) -> Iterator[None]:
    from rm_abstract import api, session

    if api.is_initialized():
        current = session.current()
        for name, text in options.items():
            if current is not None and current.settings.text(name) != str(text):
                raise ConfigError(
                    f"[{name}] expected the session's {current.settings.text(name)!r}, got "
                    f"{text!r}; try shutdown() first"
                )
        if device is not None and str(device) != api.current_device():
            raise ConfigError(
                f"[device] expected the session's device {api.current_device()}, got {device!r}; "
                "try shutdown() first"
            )
        yield
        return
    options = {**options, "compile_mode": "sync"}  # the caller waits for the programs
    api.init(device, compile_options=options, fallback="error:capture,compile,device,correctness")
    try:
        yield
    finally:
        api.shutdown()


def load_model(folder: Path, auto_class: str | None) -> Any:
    import transformers

    name = auto_class or _class_of(folder)
    loader = getattr(transformers, name, None)
    if loader is None:
        raise ConfigError(f"[auto_class] expected a class of transformers, got {name!r}")
    return loader.from_pretrained(str(folder)).eval()


def _class_of(folder: Path) -> str:
    """The architecture the folder's config names, else AutoModel."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    architectures = config.get("architectures") or ["AutoModel"]
    return str(architectures[0])


def _call(model: Any, batch: int, length: int) -> None:
    """The calls a user makes at these sizes; values do not matter to a plan."""
    import torch

    with torch.no_grad():
        # Twice each: the first call of a new artefact is served by the original.
        for _ in range(2):
            model(**example_inputs(model, batch, length))
        if model.can_generate() and not model.config.is_encoder_decoder:
            for _ in range(2):
                tokens = {"min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
                inputs = example_inputs(model, batch, length)
                model.generate(**inputs, **tokens, do_sample=False, pad_token_id=0)


def example_inputs(model: Any, batch: int, length: int) -> dict[str, Any]:
    import torch

    if model.main_input_name == "input_ids":
        ids = torch.ones(batch, length, dtype=torch.long, device=model.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if model.config.is_encoder_decoder:
            inputs["decoder_input_ids"] = ids
        return inputs
    return {
        name: torch.cat([value] * batch)[:batch].to(model.device)
        for name, value in model.dummy_inputs.items()
    }
