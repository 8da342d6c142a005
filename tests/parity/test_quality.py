"""`compile --quality`: the perplexity that is printed is that of the whole text."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

from rm_abstract import quality
from rm_abstract.base.errors import ConfigError


@pytest.mark.parametrize(("count", "size"), [(40, 16), (16, 16), (17, 16), (3, 2), (1000, 64)])
def test_every_token_but_the_first_is_predicted_once_in_windows_of_one_size(
    count: int, size: int
) -> None:
    seen: list[int] = []
    for start, stop, fresh in quality.windows(count, size):
        assert stop - start == size and 0 < fresh < size
        assert not seen or stop - fresh - start >= size // 2 - 1  # what a token is predicted from
        seen += range(stop - fresh, stop)
    assert seen == list(range(1, count))


def test_perplexity_of_one_window_is_the_models_own_loss() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = hf.LlamaConfig(vocab_size=300, intermediate_size=48, **sizes)
    model = hf.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 300, (50,))
    with torch.no_grad():
        expected = math.exp(model(ids[None], labels=ids[None]).loss)
        assert quality.perplexity(model, ids) == pytest.approx(expected, rel=1e-5)


def test_text_without_a_tokenizer_is_read_as_bytes(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"abc\xff")
    model = type("Model", (), {"config": hf.LlamaConfig(vocab_size=256)})
    assert quality.tokens_of(model, tmp_path, text).tolist() == [97, 98, 99, 255]
    model.config = hf.LlamaConfig(vocab_size=100)
    with pytest.raises(ConfigError, match="tokenizer"):
        quality.tokens_of(model, tmp_path, text)


def test_compile_prints_perplexity_before_and_after(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.py"
    text.write_bytes(Path(subprocess.__file__).read_bytes()[20_000:22_000])
    command = [sys.executable, "-m", "rm_abstract.cli.main", "compile", str(tiny_llama)]
    command += ["--precision", "int4", "--group-size", "64", "--quality", str(text)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    line = done.stdout.splitlines()[-1]
    assert line.startswith("perplexity of 2000 tokens: ") and "precision int4" in line
    own, compiled = (
        float(word) for word in line.replace(",", " ").split() if word[0].isdigit() and "." in word
    )
    # Trained on such text, in shorter pieces: random weights are at 260. Four bits change it by a
    # few percent.
    assert own < 40 and own != compiled and abs(compiled / own - 1) < 0.1
    assert "precision int4, groups of 64, activations int8: 29 weights" in done.stdout
