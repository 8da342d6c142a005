"""The server as OpenAI's own client sees it."""

from __future__ import annotations

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import openai
import pytest
import torch
from server_process import ENDLESS, KEY, ask, bearer, counted, until
from small_model import TEMPLATE, tokenizer
from transformers import LlamaForCausalLM

PROMPT = "the quick brown fox"


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def expected(folders):
    """Greedy texts by transformers alone."""
    model, words = LlamaForCausalLM.from_pretrained(folders["tiny"]).eval(), tokenizer()

    def text(prompt: str, count: int) -> str:
        ids = torch.tensor([words(prompt)["input_ids"]])
        made = model.generate(ids, max_new_tokens=count, do_sample=False)
        return words.decode(made[0, ids.shape[1] :], skip_special_tokens=True)

    return text


def test_the_named_models_are_listed_and_no_others(client):
    assert [row.id for row in client.models.list()] == ["tiny", "bert", "endless"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as raised:
        client.completions.create(model="other", prompt=PROMPT)
    assert raised.value.code == "model_not_found"


def test_a_greedy_completion_is_what_transformers_generates(client, expected):
    made = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
    assert made.choices[0].text == expected(PROMPT, 20)
    assert made.choices[0].finish_reason in ("length", "stop")
    count = len(tokenizer()(PROMPT)["input_ids"])
    assert made.usage.prompt_tokens == count
    assert made.usage.total_tokens == count + made.usage.completion_tokens


def test_a_stream_gives_the_same_text_in_pieces_with_usage_last(client, expected):
    stream = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks[:-1]) == expected(PROMPT, 20)
    assert chunks[-1].usage.completion_tokens and not chunks[-1].choices


def test_a_stream_is_sent_while_its_text_is_made(client, server):
    stream = client.completions.create(
        model="endless",
        prompt=PROMPT,
        max_tokens=ENDLESS,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    with stream:
        assert all(next(stream).choices[0].finish_reason is None for _ in range(5))
        assert counted(server, "running", "endless") == 1
    until(lambda: counted(server, "running", "endless") == 0)


def test_a_chat_goes_through_the_models_template(client, expected):
    question = [{"role": "user", "content": [{"type": "text", "text": "the fox"}]}]
    made = client.chat.completions.create(
        model="tiny", messages=question, max_completion_tokens=12, temperature=0
    )
    assert "add_generation_prompt" in TEMPLATE
    assert made.choices[0].message.content == expected("<user>the fox\n<assistant>", 12)
    stream = client.chat.completions.create(
        model="tiny", messages=question, max_completion_tokens=12, temperature=0, stream=True
    )
    parts = [c.choices[0].delta for c in stream]
    assert parts[0].role == "assistant"
    assert "".join(p.content or "" for p in parts) == made.choices[0].message.content


def test_tools_are_given_to_the_template_and_its_errors_to_the_client(client, expected):
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    question = [{"role": "user", "content": "the fox"}]
    made = client.chat.completions.create(
        model="tiny", messages=question, tools=[tool], max_tokens=8, temperature=0
    )
    assert made.choices[0].message.content == expected("<user>the fox\n1 tools\n<assistant>", 8)
    with pytest.raises(openai.BadRequestError, match="nobody may not ask"):
        client.chat.completions.create(model="tiny", messages=[{"role": "nobody", "content": ""}])


def test_a_stop_string_ends_the_text_before_it(client, expected):
    whole = expected(PROMPT, 40)
    stop = whole[11:14]
    want = whole[: whole.index(stop)]
    for stream in (False, True):
        made = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop], stream=stream
        )
        rows = [c.choices[0] for c in made] if stream else [made.choices[0]]
        assert "".join(r.text for r in rows) == want
        assert rows[-1].finish_reason == "stop"


def test_a_seed_repeats_a_text_and_choices_differ(client):
    def texts(seed: int) -> list[str]:
        made = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=16, temperature=1.3, top_p=0.95, seed=seed, n=3
        )
        return [choice.text for choice in made.choices]

    first = texts(7)
    assert texts(7) == first and texts(8) != first
    assert len(set(first)) == 3


def test_penalties_and_biases_change_what_is_chosen(client, expected):
    settings = {"model": "tiny", "prompt": PROMPT, "temperature": 0}
    toward = {tokenizer()("z")["input_ids"][0]: 20}
    made = client.completions.create(**settings, max_tokens=6, logit_bias=toward)
    assert made.choices[0].text == "z" * 6
    made = client.completions.create(
        **settings, max_tokens=30, logit_bias=toward, frequency_penalty=2, presence_penalty=2
    )
    assert 3 <= made.choices[0].text.count("z") < 12  # until 2 + 2 * times outweighs 20


def test_logprobs_are_those_of_the_model(client, folders):
    words, model = tokenizer(), LlamaForCausalLM.from_pretrained(folders["tiny"]).eval()
    made = client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=3, temperature=0, logprobs=2
    )
    found = made.choices[0].logprobs
    with torch.no_grad():
        logits = model(torch.tensor([words(PROMPT)["input_ids"]])).logits[0, -1]
    best = torch.log_softmax(logits, -1).max()
    assert found.token_logprobs[0] == pytest.approx(float(best), abs=1e-4)
    assert len(found.top_logprobs[0]) == 2 and found.text_offset[0] == 0
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "a"}],
        max_tokens=2,
        logprobs=True,
        top_logprobs=3,
    )
    assert all(len(row.top_logprobs) == 3 for row in chat.choices[0].logprobs.content)


def test_prompts_may_be_several_and_tokens(client, expected):
    ids = tokenizer()(PROMPT)["input_ids"]
    made = client.completions.create(
        model="tiny", prompt=[ids, ids[:2]], max_tokens=9, temperature=0, n=2
    )
    texts = [choice.text for choice in made.choices]
    assert texts[:2] == [expected(PROMPT, 9)] * 2 and texts[2] == texts[3]


def test_embeddings_are_means_of_length_one(client):
    texts = ["the fox", "a longer text about the lazy dog"]
    plain = client.embeddings.create(model="bert", input=texts, encoding_format="float")
    packed = client.embeddings.create(model="bert", input=texts)  # base64 on the wire
    for a, b in zip(plain.data, packed.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-6)
        assert sum(x * x for x in a.embedding) == pytest.approx(1, abs=1e-4)
    alone = client.embeddings.create(model="bert", input=texts[0])
    assert alone.data[0].embedding == pytest.approx(plain.data[0].embedding, abs=1e-4)
    for empty in ("", ["a", ""], [""]):
        with pytest.raises(openai.BadRequestError, match="empty"):
            client.embeddings.create(model="bert", input=empty)
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError, match="no text"):
        client.completions.create(model="bert", prompt="a")


def test_requests_beside_each_other_get_what_they_would_get_alone(client, expected):
    prompts = [f"the {'quick ' * (i % 5)}fox {i}" for i in range(12)]
    want = [expected(prompt, 24) for prompt in prompts]

    def text(prompt: str) -> str:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, temperature=0)
        return made.choices[0].text

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(text, prompts)) == want


def ask_without_end(server, stream: bool, n: int = 1) -> socket.socket:
    """A connection whose request goes on until the connection is closed."""
    body = {"model": "endless", "prompt": "a", "max_tokens": ENDLESS, "ignore_eos": True}
    data = json.dumps({**body, "stream": stream, "n": n}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=120)
    connection.sendall(head.encode() + data)
    return connection


def test_a_full_queue_is_429_and_nobody_else_is_disturbed(client, server, expected):
    with ExitStack() as held:
        for _ in range(3):  # 4 rows and 8 that wait
            held.enter_context(ask_without_end(server, stream=False, n=4))
        until(lambda: counted(server, "running", "endless") == 4)
        until(lambda: counted(server, "waiting", "endless") == 8)
        with pytest.raises(openai.RateLimitError) as raised:
            client.completions.create(model="endless", prompt="a", max_tokens=1)
        assert raised.value.code == "queue_full" and raised.value.response.headers["retry-after"]
        made = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=20, temperature=0)
        assert made.choices[0].text == expected(PROMPT, 20)
    until(lambda: counted(server, "running", "endless") == 0)
    assert client.completions.create(model="endless", prompt="a", max_tokens=1).choices


def test_more_requests_than_rows_and_queue_hold_are_served_or_refused(client):
    def one(number: int) -> int:
        try:
            client.completions.create(model="tiny", prompt=PROMPT, max_tokens=50)
            return 200
        except openai.RateLimitError:
            return 429

    with ThreadPoolExecutor(40) as pool:
        codes = list(pool.map(one, range(40)))
    assert codes.count(200) + codes.count(429) == 40 and codes.count(200) >= 12


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server, stream):
    def made() -> float:
        return counted(server, "generated_tokens_total", "endless")

    for _ in range(10):  # the loss of a cancellation was a matter of luck
        enough = made() + 100
        with ask_without_end(server, stream, n=4) as connection:
            if stream:
                assert connection.recv(1000).startswith(b"HTTP/1.1 200")
            until(lambda enough=enough: made() > enough)
        until(lambda: counted(server, "running", "endless") == 0)


def test_errors_have_openais_shape(client, server):
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert raised.value.param == "temperature" and raised.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="suffix"):
        client.completions.create(model="tiny", prompt="a", suffix="b")
    with pytest.raises(openai.BadRequestError, match="unheard_of"):
        client.completions.create(model="tiny", prompt="a", extra_body={"unheard_of": 1})
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="tiny", prompt="a " * 400, max_tokens=4000)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt=[99999])
    for path, status in (("/v1/nothing", 404), ("/v1/completions", 405)):
        answer = ask(server, "GET", path)
        assert answer.status == status and answer.json["error"]["message"]


def test_without_the_right_key_nothing_is_said(server):
    for headers in ({}, bearer(KEY[:-1]), bearer(KEY + "x"), bearer(""), {"Authorization": KEY}):
        answer = ask(server, "GET", "/v1/models", headers=headers)
        assert answer.status == 401
        assert answer.json["error"]["code"] == "invalid_api_key"
    assert ask(server, "GET", "/metrics", headers={}).status == 401
    assert ask(server, "GET", "/health", headers={}).json == {"status": "ok"}
    answer = ask(server, "GET", "/v1/models", headers={**bearer(KEY), "Origin": "http://else"})
    assert answer.status == 200
    assert not any(name.lower().startswith("access-control") for name in answer.headers)


def test_the_status_page_is_one_file_and_its_facts_need_the_key(server):
    page = ask(server, "GET", "/", headers={})
    assert page.status == 200 and page.headers["content-type"].startswith("text/html")
    text = page.body.decode()
    assert "//" not in re.sub(r"^ *//.*$", "", text, flags=re.MULTILINE), "it loads something"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert ask(server, "GET", "/status", headers={}).status == 401
    found = ask(server, "GET", "/status").json
    assert found["device"] == "cpu" and found["up_seconds"] > 0
    tiny, bert, _ = found["models"]
    assert (tiny["name"], tiny["serves"], tiny["engine"]) == ("tiny", "text", "native")
    assert bert["serves"] == "embeddings"
    shown = set(re.findall(r"\bf\.(\w+)", text))
    assert shown and shown <= set(tiny["facts"]), "the page shows what the server does not say"
