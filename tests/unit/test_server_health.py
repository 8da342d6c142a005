"""/health says what a load balancer needs: 503 as soon as a model makes no more text.

Why it does not is for whom has a key.
"""

from __future__ import annotations

import queue
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the group `serve` is not installed")
from starlette.testclient import TestClient
from transformers import LlamaConfig, LlamaForCausalLM

from rm_abstract.generation.jobs import End, Job, Sampling
from rm_abstract.generation.scheduler import Limits
from rm_abstract.server.app import Server, create_app
from rm_abstract.server.limits import Policy
from rm_abstract.server.models import Served
from rm_abstract.server.native import NativeText

KEY = {"Authorization": "Bearer a-key"}
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def text() -> NativeText:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
    )
    return NativeText(LlamaForCausalLM(config).eval(), Limits(), None)


@pytest.mark.parametrize("event_that_fails", [1, 2, 5])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_scheduler_that_ended_is_no_good_health(text: NativeText, event_that_fails: int) -> None:
    server = Server({"tiny": Served("tiny", None, text)}, Policy(keys=("a-key",)))
    client = TestClient(create_app(server))
    assert client.get("/health").status_code == 200
    assert client.get("/status", headers=KEY).json()["models"][0]["fault"] == ""

    heard: list[Any] = []

    def fails(event: Any) -> None:
        heard.append(event)
        if len(heard) == event_that_fails:  # before a step, or within one
            raise ValueError("a fault of the server's own")

    events: queue.Queue[Any] = queue.Queue()
    text.submit([Job([5], 4000, events.put, GREEDY)])
    events.get(timeout=60)
    text.submit([Job([5], 4000, fails, GREEDY)])
    while not isinstance(event := events.get(timeout=60), End):
        pass
    assert event.reason == "error" and "a fault of the server's own" in event.message

    answer = client.get("/health")
    assert answer.status_code == 503 and answer.json() == {"status": "failed"}
    told = client.get("/status", headers=KEY).json()["models"][0]["fault"]
    assert "a fault of the server's own" in told
    body = {"model": "tiny", "prompt": [5], "max_tokens": 2}
    answer = client.post("/v1/completions", json=body, headers=KEY)
    assert answer.status_code == 503 and told in answer.json()["error"]["message"]
    server.close()
