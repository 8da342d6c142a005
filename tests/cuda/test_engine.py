"""``init("gpu:0")``: unmodified models on a GPU, by the engine's own plans."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
rm = pytest.importorskip("rm_abstract")

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("RM_CACHE_DIR", str(tmp_path / "cache"))
    yield rm.init("gpu:0", fallback="error")
    rm.shutdown()


def saved(model: Any, folder: Path) -> Any:
    """The model as a script loads it: from its files, through the hooks."""
    model.eval().save_pretrained(folder)
    return type(model).from_pretrained(folder)


def bert(folder: Path, dtype: Any, hidden: int = 64) -> Any:
    config = transformers.BertConfig(
        hidden_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * hidden,
        vocab_size=100,
    )
    torch.manual_seed(0)
    return saved(transformers.BertModel(config).to(dtype), folder).to(dtype)


def llama(folder: Path, dtype: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=100,
    )
    torch.manual_seed(0)
    return saved(transformers.LlamaForCausalLM(config).to(dtype), folder).to(dtype)


def served(model: Any, calls: int, **inputs: Any) -> tuple[Any, dict[str, Any]]:
    """The last output of so many calls, and the model's record."""
    with torch.no_grad():
        for _ in range(calls):
            output = model(**inputs)
    (record,) = [r for r in rm.explain().to_dict()["models"] if r["routed"]]
    return output, record


def original(model: Any, **inputs: Any) -> Any:
    with torch.no_grad(), rm.disabled():
        return model(**inputs)


def kernels(record: dict[str, Any]) -> set[str]:
    return {name for entry in record["entries"] for name in entry["kernels"]}


TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_near(actual: Any, expected: Any) -> None:
    assert actual.dtype == expected.dtype and actual.device == expected.device
    scale = float(expected.float().abs().max())
    error = float((actual.float() - expected.float()).abs().max())
    assert error <= TOLERANCES[expected.dtype] * scale


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_an_encoder_is_served_where_the_script_put_it(
    tmp_path: Path, where: str, dtype: Any
) -> None:
    model = bert(tmp_path / "model", dtype).to(where)
    ids = torch.randint(0, 100, (3, 24), device=where)
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    expected = original(model, input_ids=ids, attention_mask=mask)
    output, record = served(model, 4, input_ids=ids, attention_mask=mask)
    check_near(output.last_hidden_state, expected.last_hidden_state)
    check_near(output.pooler_output, expected.pooler_output)
    assert record["device"] == "cuda:0" and record["routed"] >= 3
    assert all(name.startswith("cuda/") for name in kernels(record))


def test_positions_that_are_counted_from_a_mask_are_served(tmp_path: Path) -> None:
    """RoBERTa, XLM-R and MPNet count the tokens that are no padding."""
    config = transformers.RobertaConfig(
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=100,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = saved(transformers.RobertaModel(config), tmp_path / "model").cuda()
    ids = torch.randint(3, 100, (3, 50), device="cuda")
    ids[1, 30:] = config.pad_token_id
    mask = (ids != config.pad_token_id).long()
    expected = original(model, input_ids=ids, attention_mask=mask)
    output, record = served(model, 4, input_ids=ids, attention_mask=mask)
    check_near(output.last_hidden_state, expected.last_hidden_state)
    assert any("cumsum" in name for name in kernels(record))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_a_decoder_without_a_cache_is_served(tmp_path: Path, where: str) -> None:
    model = llama(tmp_path / "model", torch.bfloat16).to(where)
    ids = torch.randint(0, 100, (2, 33), device=where)
    expected = original(model, input_ids=ids, use_cache=False)
    output, record = served(model, 3, input_ids=ids, use_cache=False)
    check_near(output.logits, expected.logits)
    assert any("rope" in name for name in kernels(record))


def test_other_sizes_are_served_by_the_same_program(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", torch.float32).cuda()
    for rows, tokens in ((2, 16), (5, 40), (2, 16), (7, 3), (4, 128)):
        ids = torch.randint(0, 100, (rows, tokens), device="cuda")
        expected = original(model, input_ids=ids)
        for _ in range(2):
            with torch.no_grad():
                check_near(model(input_ids=ids).last_hidden_state, expected.last_hidden_state)


def test_weights_on_the_device_are_used_where_they_lie(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", torch.float32).cuda()
    ids = torch.randint(0, 100, (2, 16), device="cuda")
    served(model, 3, input_ids=ids)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.weight.mul_(2.0)
        model.pooler.dense.bias.add_(0.5)
    expected = original(model, input_ids=ids)
    with torch.no_grad():
        for _ in range(3):
            output = model(input_ids=ids)
            check_near(output.last_hidden_state, expected.last_hidden_state)
            check_near(output.pooler_output, expected.pooler_output)


def test_weights_of_the_host_that_change_are_copied_again(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", torch.float32)
    ids = torch.randint(0, 100, (2, 16))
    served(model, 3, input_ids=ids)
    with torch.no_grad():
        model.encoder.layer[0].intermediate.dense.weight.mul_(-1.0)
    expected = original(model, input_ids=ids)
    with torch.no_grad():
        for _ in range(3):
            check_near(model(input_ids=ids).last_hidden_state, expected.last_hidden_state)


def test_work_is_ordered_with_the_callers_stream(tmp_path: Path) -> None:
    """Inputs that a long kernel still writes, outputs read on the same stream, two streams."""
    model = bert(tmp_path / "model", torch.float32, hidden=256).cuda()
    ids = torch.randint(0, 100, (8, 64), device="cuda")
    other = torch.randint(0, 100, (8, 64), device="cuda")
    expected = [original(model, input_ids=i).last_hidden_state for i in (ids, other)]
    served(model, 3, input_ids=ids)
    streams = [torch.cuda.Stream() for _ in range(2)]
    outputs: list[Any] = []
    torch.cuda.synchronize()
    for turn in range(8):
        for which, stream in enumerate(streams):
            with torch.cuda.stream(stream), torch.no_grad():
                given = torch.zeros_like(ids)
                torch.cuda._sleep(2_000_000)
                given.copy_((ids, other)[(which + turn) % 2])
                result = model(input_ids=given).last_hidden_state
                outputs.append(((which + turn) % 2, result.clone()))
                del result, given
    torch.cuda.synchronize()
    for which, output in outputs:
        check_near(output, expected[which])


def test_threads_share_a_program(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", torch.float32).cuda()
    inputs = [torch.randint(0, 100, (2, 16), device="cuda") for _ in range(4)]
    expected = [original(model, input_ids=ids).last_hidden_state for ids in inputs]
    served(model, 3, input_ids=inputs[0])
    wrong: list[str] = []

    def call(ids: Any, right: Any) -> None:
        try:
            with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                for _ in range(30):
                    check_near(model(input_ids=ids).last_hidden_state, right)
        except Exception as error:  # a thread's exception fails no test by itself
            wrong.append(repr(error))

    torch.cuda.synchronize()
    pairs = zip(inputs, expected, strict=True)
    threads = [threading.Thread(target=call, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "where", ["cuda", "cpu"]
)  # of the model and its inputs: all runs on the GPU
@pytest.mark.parametrize("sampled", [False, True])
def test_generation_gives_the_originals_tokens(tmp_path: Path, where: str, sampled: bool) -> None:
    rm.init("gpu:0", fallback="warn")  # the first call of a kind is the original's
    model = llama(tmp_path / "model", torch.float32).to(where)
    ids = torch.randint(3, 100, (3, 9), device=where)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    asked = {"max_new_tokens": 90, "do_sample": sampled, "top_k": 20, "eos_token_id": 2}
    asked |= {"pad_token_id": 0, "attention_mask": mask}
    for turn in range(3):
        torch.manual_seed(turn)
        with rm.disabled():
            expected = model.generate(ids, **asked)
        torch.manual_seed(turn)
        got = model.generate(ids, **asked)
        assert got.device == ids.device and got.tolist() == expected.tolist()
    (record,) = [r for r in rm.explain().to_dict()["models"] if r["routed"]]
    assert record["loop_tokens"] > 200
    assert all(name.startswith("cuda/") for name in kernels(record))


def test_a_cache_that_generation_on_the_gpu_returns_lies_with_the_model(tmp_path: Path) -> None:
    """And holds what the original's would: eager calls go on with it, and so does generate."""
    rm.init("gpu:0", fallback="warn")
    model = llama(tmp_path / "model", torch.float32)
    ids = torch.randint(3, 100, (1, 9))
    asked = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for _ in range(3):
        with rm.disabled():
            expected = model.generate(ids, return_dict_in_generate=True, **asked)
        got = model.generate(ids, return_dict_in_generate=True, **asked)
        assert got.sequences.tolist() == expected.sequences.tolist()
        theirs, ours = expected.past_key_values, got.past_key_values
        for a, b in zip(theirs.layers, ours.layers, strict=True):
            assert b.keys.device == a.keys.device
            check_near(b.keys, a.keys)
            check_near(b.values, a.values)
    more = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    with rm.disabled():
        longer = model.generate(expected.sequences, past_key_values=theirs, **more)
    assert model.generate(got.sequences, past_key_values=ours, **more).tolist() == longer.tolist()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_encoder_decoders_generate_the_originals_tokens(where: str) -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.BartConfig(
        d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=100,
        max_position_embeddings=256, forced_eos_token_id=None, decoder_start_token_id=2,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    rm.init("gpu:0", fallback="allow")
    model = hf.BartForConditionalGeneration(config).eval().to(where)
    model.generation_config.eos_token_id = None
    asked = {"max_new_tokens": 90, "do_sample": False, "pad_token_id": 0}
    for turn in range(4):  # lengths and rows vary, and so do the encoder's keys and values
        ids = torch.randint(3, 100, (1 + turn % 2, 9 + 5 * turn), device=where)
        mask = torch.ones_like(ids)
        mask[-1, 7:] = 0
        with rm.disabled():
            expected = model.generate(ids, attention_mask=mask, **asked)
        got = model.generate(ids, attention_mask=mask, **asked)
        assert got.tolist() == expected.tolist(), turn
    records = rm.explain().to_dict()["models"]
    assert sum(r["loop_tokens"] for r in records) > 200


def test_a_call_inside_a_users_graph_is_left_to_pytorch(tmp_path: Path) -> None:
    model = bert(tmp_path / "model", torch.float32).cuda()
    ids = torch.randint(0, 100, (2, 16), device="cuda")
    expected, _ = served(model, 3, input_ids=ids)
    rm.init("gpu:0", fallback="allow")
    served(model, 3, input_ids=ids)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        output = model(input_ids=ids).last_hidden_state
    graph.replay()
    torch.cuda.synchronize()
    check_near(output, expected.last_hidden_state)


@pytest.mark.parametrize("rows", [1, 3])
def test_whole_steps_of_a_generation_are_replayed(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rm_abstract.generation.step_graph import StepGraph

    replayed = 0

    def counted(self: StepGraph, original: Any = StepGraph.replay) -> None:
        nonlocal replayed
        replayed += 1
        original(self)

    monkeypatch.setattr(StepGraph, "replay", counted)
    rm.init("gpu:0", fallback="warn")
    model = llama(tmp_path, torch.float32).cuda()
    torch.manual_seed(rows)
    ids = torch.randint(10, 100, (rows, 9), device="cuda")
    mask = torch.ones_like(ids)
    if rows > 1:
        mask[1, :4] = 0  # left padding

    def tokens(eos: Any, **options: Any) -> Any:
        asked = {"attention_mask": mask, "max_new_tokens": 90, "do_sample": False, **options}
        return model.generate(ids, eos_token_id=eos, pad_token_id=0, **asked)

    with rm.disabled():
        plain = tokens(None)
    ends = plain[:, 40].unique().tolist()  # in the middle of the rows
    for eos in (None, ends, [*ends, 5]):
        with rm.disabled():
            expected = tokens(eos)
        for number in range(3):
            before = replayed
            assert torch.equal(tokens(eos), expected)
            with torch.inference_mode():
                assert torch.equal(tokens(eos), expected)
            assert torch.equal(tokens(eos, max_new_tokens=12), expected[:, :21]) or eos
            if number == 2 and expected.shape[1] > 30:
                assert replayed > before + 20
    # What a step reads of the weights is what they are: written in place, and replaced.
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    with rm.disabled():
        expected = tokens(None)
    assert not torch.equal(expected, plain)
    assert torch.equal(tokens(None), expected)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone().neg_())
    for _ in range(3):
        assert torch.equal(tokens(None), plain)
