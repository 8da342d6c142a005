"""`rm-abstract cache warm`: afterwards an ordinary run misses nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import rm_abstract
from rm_abstract import cache as library
from rm_abstract.cli.cache import cache

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
import torch
import rm_abstract
from rm_abstract import cache

rm_abstract.init("cpu")
from transformers import LlamaForCausalLM

model = LlamaForCausalLM.from_pretrained(sys.argv[1]).eval()
for batch in (1, 4):
    ids = torch.arange(batch * 6).reshape(batch, 6) % 50 + 1
    with torch.no_grad():
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
counters = cache.open_cache().counters()
print(json.dumps({name: counters[name] for name in ("miss", "compile", "store")}))
"""


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(**sizes, intermediate_size=64, vocab_size=64, eos_token_id=None)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def warm(model_dir: Path) -> dict:
    command = [sys.executable, "-m", "rm_abstract.cli.main", "cache", "warm", str(model_dir)]
    command += ["--device", "cpu", "--batch-size", "1,4", "--sequence-length", "6", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.sampled(4, of="second process")
def test_a_run_after_warm_misses_nothing(model_dir: Path):
    first = warm(model_dir)
    assert {row["cache"] for row in first["programs"]} == {"miss"}
    assert first["new"].keys() == {"front", "program", "verdict"}
    again = warm(model_dir)
    assert {row["cache"] for row in again["programs"]} == {"hit"}
    assert again["new"] == {}
    command = [sys.executable, "-c", SCRIPT, str(model_dir)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == {"miss": 0, "compile": 0, "store": 0}


def test_warm_says_what_it_cannot_use(tmp_path: Path, model_dir: Path):
    with pytest.raises(rm_abstract.ConfigError, match=r"config\.json"):
        library.warm(tmp_path)
    with pytest.raises(rm_abstract.ConfigError, match="positive integers"):
        library.warm(model_dir, batch_size=[0])
    with pytest.raises(rm_abstract.ConfigError, match="a class of transformers"):
        library.warm(model_dir, auto_class="NoSuchModel")
    assert not rm_abstract.is_initialized()  # its own session is closed again
    result = CliRunner().invoke(cache, ["warm", str(tmp_path)])
    assert result.exit_code == 1 and "config.json" in result.output


def test_warm_stays_on_the_device_of_the_session_there_is(model_dir: Path):
    with rm_abstract.init("cpu"):
        with pytest.raises(rm_abstract.ConfigError, match="session's device cpu"):
            library.warm(model_dir, device="cuda:0")
        report = library.warm(model_dir, sequence_length=[6])
        assert rm_abstract.is_initialized()
    assert report["device"] == "cpu"
