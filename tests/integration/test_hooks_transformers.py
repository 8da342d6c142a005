"""Catching transformers models: loading, restoring every attribute, both import orders."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import warnings

import hooks_engine
import pytest
import torch
import transformers
from hooks_engine import ENGINES, reasons, routed
from torch import nn
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import rm_abstract as rm

PATCHED = [
    (torch.nn.Parameter, "data"),
    (transformers.PreTrainedModel, "from_pretrained"),
    (transformers.PreTrainedModel, "_from_config"),
    (nn.Module, "train"),
    (nn.Module, "to"),
    (nn.Module, "_replicate_for_data_parallel"),
    (torch.jit._recursive, "ignored_attributes"),
    (transformers.generation.GenerationMixin, "_prepare_cache_for_generation"),
    (transformers.generation.GenerationMixin, "_sample"),
]
WATCHED = [transformers.PreTrainedModel, nn.Module, nn.Parameter, torch.Tensor, torch.compiler]
WATCHED += [
    torch.jit._recursive,
    transformers.generation.GenerationMixin,
    nn.modules.module,
    transformers.modeling_utils,
]


@pytest.fixture(autouse=True)
def engine():
    hooks_engine.use()
    yield
    rm.shutdown()
    hooks_engine.drop()


@pytest.fixture(scope="module")
def bert_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    config = BertConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
    )
    torch.manual_seed(0)
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        vocab_size=50,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


IDS = torch.tensor([[3, 4, 5, 6], [7, 8, 9, 2]])


def snapshot():
    """Every attribute of the watched classes and modules, by identity."""
    state = {(owner, name): value for owner in WATCHED for name, value in vars(owner).items()}
    state[("sys", "meta_path")] = tuple(map(id, sys.meta_path))
    return state


def differences(before, after):
    changed = {key for key in before.keys() | after.keys() if before.get(key) is not after.get(key)}
    return changed - {("sys", "meta_path")}


def test_init_changes_exactly_the_listed_attributes_and_shutdown_restores_every_object():
    gc.collect()  # results of rm.compile that earlier tests dropped hold the watch on weights
    before = snapshot()
    rm.init("cpu")
    assert differences(before, snapshot()) == set(PATCHED)
    listed = {".".join(row["target"].split(".")[-2:]) for row in rm.patches()}
    # sentence-transformers: its import is watched, or its class patched (its own test file)
    optional = {"sys.meta_path", "Transformer.forward"}
    optional.add("optimizer._global_optimizer_post_hooks")  # torch's own registration
    expected = {f"{owner.__name__.split('.')[-1]}.{name}" for owner, name in PATCHED}
    assert listed - optional == expected
    assert len(rm.patches()) <= 12 and all(row["why"] for row in rm.patches())
    rm.shutdown()
    assert differences(before, snapshot()) == set()
    assert snapshot()[("sys", "meta_path")] == before[("sys", "meta_path")]
    assert rm.patches() == []
    rm.shutdown()  # idempotent


def test_shutdown_takes_the_router_out_of_live_models(bert_dir):
    rm.init("cpu")
    model = BertModel.from_pretrained(bert_dir)
    keys = set(vars(model))
    rm.shutdown()
    assert keys - set(vars(model)) == {"_compiled_call_impl"}
    with torch.no_grad():
        assert model(IDS).last_hidden_state.shape == (2, 4, 16)


def test_every_class_builds_itself_during_and_after_a_session(bert_dir):
    original = transformers.PreTrainedModel.__dict__["from_pretrained"]
    rm.init("cpu")
    assert type(BertModel.from_pretrained(bert_dir)) is BertModel
    assert type(AutoModel.from_pretrained(bert_dir)) is BertModel
    rm.shutdown()
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is original
    assert isinstance(original, classmethod)
    assert type(BertModel.from_pretrained(bert_dir)) is BertModel
    masked = transformers.BertForMaskedLM.from_pretrained(bert_dir)
    assert type(masked) is transformers.BertForMaskedLM


def test_somebody_elses_later_patch_is_left_alone_and_reported(bert_dir, monkeypatch):
    original = transformers.PreTrainedModel.__dict__["from_pretrained"]
    rm.init("cpu")
    ours = transformers.PreTrainedModel.__dict__["from_pretrained"]
    seen = []

    def theirs(cls, *args, **kwargs):
        seen.append(cls)
        return ours.__func__(cls, *args, **kwargs)

    monkeypatch.setattr(transformers.PreTrainedModel, "from_pretrained", classmethod(theirs))
    theirs_object = transformers.PreTrainedModel.__dict__["from_pretrained"]
    with pytest.warns(rm.RoutingWarning, match="from_pretrained"):
        rm.shutdown()
    assert transformers.PreTrainedModel.__dict__["from_pretrained"] is theirs_object
    model = BertModel.from_pretrained(bert_dir)
    assert seen == [BertModel] and "_compiled_call_impl" not in vars(model)
    transformers.PreTrainedModel.from_pretrained = original


def test_loading_arms_the_root_only_and_touches_no_engine(bert_dir):
    rm.init("cpu")
    model, info = BertModel.from_pretrained(bert_dir, output_loading_info=True)
    assert info["missing_keys"] == set() or info["missing_keys"] == []
    routed = [name for name, part in model.named_modules() if "_compiled_call_impl" in vars(part)]
    assert routed == [""] and ENGINES == []
    assert rm.explain(model).models[0]["caught_by"] == "from_pretrained"


def test_a_model_from_a_configuration_is_armed_when_it_is_put_into_evaluation(bert_dir):
    rm.init("cpu")
    config = BertConfig.from_pretrained(bert_dir)
    made = AutoModel.from_config(config)
    assert rm.explain(made).models[0]["caught_by"] == "_from_config"
    plain = BertModel(config)
    assert "_compiled_call_impl" not in vars(plain)
    plain.eval()
    assert rm.explain(plain).models[0]["caught_by"] == "train"


def test_a_model_loaded_before_init_is_caught_when_it_is_moved(bert_dir):
    model = BertModel.from_pretrained(bert_dir)
    rm.init("cpu")
    assert model.to("cpu") is model
    assert rm.explain(model).models[0]["caught_by"] == "to"


def _values(output):
    return output.to_tuple() if isinstance(output, dict) else output


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"return_dict": False},
        {"output_hidden_states": True},
        {"output_attentions": True},
        {"attention_mask": torch.ones(2, 4, dtype=torch.long)},
        {"attention_mask": torch.ones(2, 1, 4, 4)},
        {"position_ids": torch.tensor([[3, 2, 1, 0]])},
    ],
    ids=lambda kwargs: next(iter(kwargs), "plain"),
)
def test_outputs_have_the_originals_class_keys_dtypes_and_values(bert_dir, kwargs):
    expected_model = BertModel.from_pretrained(bert_dir, attn_implementation="eager")
    with torch.no_grad():
        expected = expected_model(IDS, **kwargs)
    rm.init("cpu")
    model = BertModel.from_pretrained(bert_dir, attn_implementation="eager")
    with torch.no_grad():
        for _ in range(3):
            output = model(IDS, **kwargs)
            assert type(output) is type(expected)
            if isinstance(expected, dict):
                assert list(output) == list(expected)
            torch.testing.assert_close(_values(output), _values(expected), rtol=0, atol=0)
    assert routed(model) == 2


def test_output_capture_hooks_left_on_submodules_do_not_stop_routing(bert_dir):
    rm.init("cpu")
    model = BertModel.from_pretrained(bert_dir)
    with torch.no_grad():
        for _ in range(2):
            assert len(model(IDS, output_hidden_states=True).hidden_states) == 3
        assert any(part._forward_hooks for part in model.modules())
        before = routed(model)
        model(IDS)
        model(IDS)
    assert routed(model) >= before + 1 and "RM102" not in reasons(model)


def test_generate_reaches_the_router_once_a_token_with_equal_tokens(llama_dir):
    plain = LlamaForCausalLM.from_pretrained(llama_dir)
    expected = plain.generate(IDS, max_new_tokens=6, do_sample=False)
    rm.init("cpu")
    model = LlamaForCausalLM.from_pretrained(llama_dir)
    tokens = model.generate(IDS, max_new_tokens=6, do_sample=False)
    assert torch.equal(tokens, expected)
    (record,) = rm.explain(model).models
    assert record["routed"] + record["eager"] == 6


def test_type_copies_pickle_and_saving_behave_as_without_us(bert_dir, tmp_path):
    rm.init("cpu")
    model = BertModel.from_pretrained(bert_dir)
    with torch.no_grad():
        expected = model(IDS).last_hidden_state
        model(IDS)
        for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert type(clone) is BertModel and "_compiled_call_impl" not in vars(clone)
            assert torch.equal(clone(IDS).last_hidden_state, expected)
        model.save_pretrained(tmp_path)
        loaded = BertModel.from_pretrained(tmp_path)
        assert torch.equal(loaded(IDS).last_hidden_state, expected)
        assert list(model.state_dict()) == list(loaded.state_dict())
        half = model.to(torch.bfloat16)
        assert half(IDS).last_hidden_state.dtype == torch.bfloat16


def test_resized_and_retied_embeddings_are_noticed(llama_dir):
    rm.init("cpu")
    model = LlamaForCausalLM.from_pretrained(llama_dir)
    with torch.no_grad():
        for _ in range(2):
            assert model(IDS, use_cache=False).logits.shape[-1] == 50
        model.resize_token_embeddings(60)
        for _ in range(3):
            logits = model(IDS, use_cache=False).logits
            assert logits.shape[-1] == 60
            with rm.disabled():
                torch.testing.assert_close(logits, model(IDS, use_cache=False).logits)
        model.tie_weights()
        model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
        model.get_input_embeddings().weight.mul_(2)
        logits = model(IDS, use_cache=False).logits
        with rm.disabled():
            torch.testing.assert_close(logits, model(IDS, use_cache=False).logits)
    assert {what for what, _ in ENGINES[0].invalidated} <= {"weights", "structure"}
    assert ENGINES[0].invalidated


def test_a_configuration_changed_in_place_is_noticed(bert_dir):
    rm.init("cpu")
    model = BertModel.from_pretrained(bert_dir)
    with torch.no_grad():
        model(IDS)
        assert model(IDS).attentions is None
        model.set_attn_implementation("eager")
        model.config.output_attentions = True
        assert model(IDS).attentions is not None
    assert ENGINES[0].invalidated, rm.explain()
    assert ENGINES[0].invalidated[0][0] == "structure"


def test_an_armed_model_inside_a_plain_module_is_left_in_place(bert_dir):
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner
            self.head = nn.Linear(16, 2)

        def forward(self, ids):
            return self.head(self.inner(ids).last_hidden_state)

    rm.init("cpu")
    inner = BertModel.from_pretrained(bert_dir)
    outer = Wrapper(inner).eval()
    assert "_compiled_call_impl" in vars(inner) and "_compiled_call_impl" not in vars(outer)
    with torch.no_grad():
        outer(IDS)
        outer(IDS)
    assert routed(inner) == 1


SCRIPT = """
import sys, warnings
warnings.simplefilter("error")
first, folder = sys.argv[1:]
if first == "ours":
    import rm_abstract as rm
    rm.init("cpu")
    assert "torch" not in sys.modules and "transformers" not in sys.modules
    from transformers import AutoModel
elif first == "between":
    import torch
    import rm_abstract as rm
    rm.init("cpu")
    from transformers import AutoModel
else:
    from transformers import AutoModel
    import torch
    import rm_abstract as rm
    rm.init("cpu")
model = AutoModel.from_pretrained(folder)
targets = sorted(row["target"].split(".")[-1] for row in rm.patches())
print(rm.explain(model).models[0]["caught_by"], *targets)
import torch, transformers.modeling_utils as mu
assert type(mu.__spec__.loader).__name__ == "SourceFileLoader"
assert mu.__loader__ is mu.__spec__.loader
rm.shutdown()
assert not any("rm_abstract" in type(f).__module__ for f in sys.meta_path)
assert torch.nn.Module.train.__module__ == "torch.nn.modules.module"
assert not hasattr(torch.nn.Module.train, "__wrapped__")
"""


@pytest.mark.sampled(2)
@pytest.mark.sampled(1)
@pytest.mark.parametrize("first", ["ours", "between", "theirs"])
def test_import_order_does_not_matter(first, bert_dir):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, first, str(bert_dir)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert words[0] == "from_pretrained"
    expected = sorted(name for _, name in PATCHED)
    listed = ("meta_path", "_global_optimizer_post_hooks")
    assert [word for word in words[1:] if word not in listed] == expected


def test_nothing_is_printed_or_warned_when_all_goes_well(bert_dir, capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rm.init("cpu")
        model = AutoModel.from_pretrained(bert_dir)
        capfd.readouterr()  # transformers' own loading bar
        with torch.no_grad():
            model(IDS)
            model(IDS)
        rm.shutdown()
    assert capfd.readouterr() == ("", "")
