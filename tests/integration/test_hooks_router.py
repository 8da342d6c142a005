"""The router's decisions, hazard by hazard (docs/hooks.md); the engine runs the original."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import sys
import threading
import time
import weakref

import hooks_engine
import pytest
import torch
from hooks_engine import ENGINES, reasons, routed
from torch import nn

import rm_abstract as rm


@pytest.fixture(autouse=True)
def session():
    hooks_engine.use()
    yield rm.init("cpu")
    rm.shutdown()
    hooks_engine.drop()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 3)
        self.scale = 1.0

    def forward(self, x, mask=None, *, gain=1.0, extras=None):
        y = self.second(torch.relu(self.norm(self.first(x)))) * self.scale * gain
        if mask is not None:
            y = y + mask
        if extras is not None:
            y = y + extras["bias"]
        return y


def ready() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.randn(5, 4)


def stock(model: nn.Module, *args, **kwargs):
    with rm.disabled(), torch.no_grad():
        return model(*args, **kwargs)


def check_equal(model: nn.Module, *args, **kwargs) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(*args, **kwargs), stock(model, *args, **kwargs))


def test_the_first_call_is_eager_and_later_calls_are_routed():
    model = ready()
    for _ in range(4):
        check_equal(model, X)
    assert ENGINES[0].first_calls == 1
    assert routed(model) == 3


def test_each_kind_of_argument_has_its_own_entry():
    model = ready()
    mask = torch.ones(5, 3)
    calls = [((X,), {}), ((X, mask), {}), ((X,), {"mask": mask}), ((X,), {"gain": 2.0})]
    calls += [((X,), {"gain": 3}), ((X,), {"extras": {"bias": mask}}), ((X,), {"mask": None})]
    for _ in range(3):
        for args, kwargs in calls:
            check_equal(model, *args, **kwargs)
    assert routed(model) == 2 * len(calls) + 1  # mask by name finds the entry made by position


def test_values_of_plain_arguments_are_never_mixed_up():
    model = ready()
    for gain in (1.0, 2.0, 1, True, 3.5, -0.0, 1.0, 2.0):
        check_equal(model, X, gain=gain)


def test_other_shapes_use_the_same_entry_and_other_dtypes_do_not():
    model = ready()
    for rows in (5, 2, 9):
        check_equal(model, torch.randn(rows, 4))
    assert ENGINES[0].first_calls == 1
    with pytest.raises(RuntimeError, match="dtype"), torch.no_grad():
        model(X.double())


def test_type_class_and_forward_of_an_armed_model_are_unchanged():
    model = ready()
    assert type(model) is Net and "forward" not in vars(model)
    assert "_compiled_call_impl" in vars(model)
    assert "_compiled_call_impl" not in dict(model.named_modules())["first"].__dict__


def test_the_users_own_exceptions_keep_type_and_message():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    bad = [((torch.randn(5, 7),), {}), ((X,), {"nonsense": 1}), ((), {}), ((X,), {"x": X})]
    for args, kwargs in bad:
        with pytest.raises(Exception) as stock_error:
            stock(model, *args, **kwargs)
        with pytest.raises(type(stock_error.value)) as error, torch.no_grad():
            model(*args, **kwargs)
        assert str(error.value) == str(stock_error.value)


# ---- H2, H3: copies -------------------------------------------------------------------------


def test_deepcopy_and_pickle_leave_without_the_router():
    model = ready()
    check_equal(model, X)
    for clone in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):
        assert "_compiled_call_impl" not in vars(clone)
        assert type(clone) is Net
    clone = copy.deepcopy(model)
    with torch.no_grad():
        clone.second.bias += 1
        assert torch.allclose(clone(X), stock(model, X) + 1)


@pytest.mark.parametrize(
    "copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), copy.copy]
)
def test_a_copied_lstm_never_uses_the_originals_router(copier):
    lstm = nn.LSTM(4, 6).eval()
    x = torch.randn(7, 1, 4)
    with torch.no_grad():
        lstm(x)
        lstm(x)
        assert routed(lstm) == 1
        clone = copier(lstm)
        assert vars(clone).get("_compiled_call_impl") is None or copier is copy.copy
        clone._parameters = dict(clone._parameters)  # copy.copy shares it
        clone.weight_hh_l0 = nn.Parameter(clone.weight_hh_l0 * 2)
        served = clone(x)[0]
        torch.testing.assert_close(served, clone._call_impl(x)[0])
        if copier is not copy.copy:  # a shallow copy shares torch's own list of weights
            assert not torch.allclose(served, lstm(x)[0])


def test_a_copied_dict_is_noticed_by_identity():
    model = ready()
    check_equal(model, X)
    clone = Net.__new__(Net)
    clone.__dict__ = model.__dict__.copy()
    clone._modules = dict(model._modules)
    clone._modules["second"] = nn.Linear(8, 3)
    with torch.no_grad():
        torch.testing.assert_close(clone(X), clone._call_impl(X))
        assert not torch.allclose(clone(X), model(X))
    assert reasons(model)["RM109"] == 2


# ---- H4: hooks ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["root", "child"])
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_forward_hook_runs_on_every_call_and_routing_returns_when_it_is_gone(where, kind):
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    seen = []
    target = model if where == "root" else model.first
    handle = getattr(target, kind)(lambda *a: seen.append(1))
    with torch.no_grad():
        model(X)
        model(X)
    assert len(seen) == 2
    handle.remove()
    before = routed(model)
    with torch.no_grad():
        model(X)
    assert len(seen) == 2 and routed(model) == before + 1
    assert reasons(model)["RM102"] == 2


def test_a_global_hook_runs_on_every_call():
    model = ready()
    check_equal(model, X)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda *a: seen.append(1))
    try:
        with torch.no_grad():
            model(X)
    finally:
        handle.remove()
    assert len(seen) == 4
    assert reasons(model)["RM102"] == 1


def test_a_forward_replaced_on_an_instance_or_class_is_called(monkeypatch):
    model = ready()
    check_equal(model, X)
    model.second.forward = lambda x: torch.zeros(5, 3)
    with torch.no_grad():
        assert model(X).abs().sum() == 0
    del model.second.forward
    check_equal(model, X)
    monkeypatch.setattr(Net, "forward", lambda self, x: x * 0 + 7)
    with torch.no_grad():
        assert (model(X) == 7).all()


# ---- H6: the slot is the right place ---------------------------------------------------------


def test_calling_an_armed_module_reaches_the_router():
    model = ready()
    check_equal(model, X)
    assert sum(reasons(model).values()) + ENGINES[0].first_calls >= 2


# ---- H7, H8: tracing ------------------------------------------------------------------------


def test_export_trace_and_dynamo_see_the_original():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    before = routed(model)
    other = torch.randn(5, 4)
    expected = stock(model, other)
    with torch.no_grad():
        exported = torch.export.export(model, (X,), strict=False)
        torch.testing.assert_close(exported.module()(other), expected)
        traced = torch.jit.trace(model, (X,), check_trace=False)
        torch.testing.assert_close(traced(other), expected)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(other), expected)
        compiled = torch.compile(model.__call__, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(other), expected)
    assert routed(model) == before
    assert reasons(model)["RM103"] >= 1


def test_transforms_and_modes_see_the_original():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    model = ready()
    check_equal(model, X)
    before = routed(model)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(model)(X[None])[0], stock(model, X))
        with FlopCounterMode(display=False) as counter:
            model(X)
        assert counter.get_total_flops() > 0
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(X).dtype == torch.bfloat16
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = mode.from_tensor(X)
            assert model(fake).shape == (5, 3)
    swapped = {name: value * 0 for name, value in model.named_parameters()}
    with torch.no_grad():
        assert torch.func.functional_call(model, swapped, (X,)).abs().sum() == 0
    assert routed(model) == before
    check_equal(model, X)


# ---- H9: failures ---------------------------------------------------------------------------


def test_a_decline_before_any_effect_runs_the_original_once():
    model = ready()
    check_equal(model, X)
    (entry,) = ENGINES[0].entries.values()
    entry.fail_with = rm.engines.Decline("RM105", "batch 5")
    check_equal(model, X)
    assert entry.runs == 1 and reasons(model)["RM105"] == 1


def test_an_uncommitted_error_falls_back_with_one_warning_and_is_not_tried_again():
    model = ready()
    check_equal(model, X)
    (entry,) = ENGINES[0].entries.values()
    entry.fail_with = rm.ExecutionError("[run] expected a result, got none", code="RM305")
    with pytest.warns(rm.RoutingWarning, match="RM305"):
        check_equal(model, X)
    check_equal(model, X)
    assert entry.runs == 1 and reasons(model)["RM305"] >= 1


def test_a_committed_error_is_raised_and_never_replayed():
    model = ready()
    calls = []
    check_equal(model, X)
    (entry,) = ENGINES[0].entries.values()
    entry.fail_with = rm.ExecutionError("[run] cache moved", committed=True)
    forward = type(model).forward.__code__
    sys.setprofile(lambda frame, event, _: calls.append(1) if frame.f_code is forward else None)
    with pytest.raises(rm.ExecutionError, match="cache moved"), torch.no_grad():
        model(X)
    sys.setprofile(None)
    assert calls == []


def test_an_error_that_is_not_ours_passes_through_unchanged():
    model = ready()
    check_equal(model, X)
    (entry,) = ENGINES[0].entries.values()
    entry.fail_with = KeyError("the user's own")
    with pytest.raises(KeyError, match="the user's own"), torch.no_grad():
        model(X)


def test_a_compile_error_keeps_the_call_eager_and_counts_the_reason():
    model = ready()
    ENGINES.clear()

    def fail():
        raise rm.CompileError("[capture] expected a graph, got none; try less", code="RM201")

    router = vars(model)["_compiled_call_impl"]
    router.engine_for(model).before_first_call = fail
    with pytest.warns(rm.RoutingWarning, match="RM201"):
        check_equal(model, X)
    check_equal(model, X)
    assert reasons(model)["RM201"] == 2 and routed(model) == 0


# ---- H10: gradients -------------------------------------------------------------------------


def test_gradients_are_never_lost():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    before = routed(model)
    output = model(X)
    assert output.requires_grad
    output.sum().backward()
    assert model.first.weight.grad is not None
    model.requires_grad_(False)
    tracked = X.clone().requires_grad_()
    assert model(tracked).requires_grad
    assert routed(model) == before
    assert not model(X).requires_grad
    assert routed(model) == before + 1


def test_training_mode_runs_the_original_and_evaluation_returns_to_the_entry():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    model.train()
    with torch.no_grad():
        model(X)
    assert reasons(model)["RM101"] == 1
    model.eval()
    check_equal(model, X)  # training moved the running statistics: made again, not reused
    check_equal(model, X)
    assert ENGINES[0].first_calls == 2
    model.norm.train()
    with torch.no_grad():
        running = model.norm.running_mean.clone()
        model(X)
    assert not torch.equal(running, model.norm.running_mean)


# ---- H11, H12: weights and structure --------------------------------------------------------


def _in_place(model):
    model.second.weight.mul_(2)


def _load(model):
    model.load_state_dict({k: v + 0.5 for k, v in model.state_dict().items()})


def _swap_data(model):
    model.first.weight.data = model.first.weight.data.clone() * 3


def _new_parameter(model):
    model.first.weight = nn.Parameter(torch.randn(8, 4))


def _new_module(model):
    model.second = nn.Linear(8, 3)


def _buffer(model):
    model.norm.running_mean.add_(1)


def _attribute(model):
    model.scale = 2.0


def _eps(model):
    model.norm.eps = 10.0


def _lora(model):
    class Lora(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base, self.down = base, nn.Linear(4, 2)
            self.up = nn.Linear(2, 8)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model.first = Lora(model.first).eval()


def _parametrize(model):
    nn.utils.parametrizations.weight_norm(model.first)
    model.first.parametrizations.weight.original0.mul_(2)


def _transposed_view(model):
    square = nn.Linear(4, 4)
    model.first = nn.Sequential(square, model.first)


CHANGES = [_in_place, _load, _swap_data, _new_parameter, _new_module, _buffer, _attribute, _eps]
CHANGES += [_lora, _parametrize, _transposed_view]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_changed_model_is_noticed_before_the_next_routed_call(change):
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    old = stock(model, X)
    with torch.no_grad():
        change(model)
    model.eval()  # new parts are born in training mode
    assert not torch.allclose(stock(model, X), old)
    check_equal(model, X)
    assert ENGINES[0].invalidated and ENGINES[0].first_calls == 2
    check_equal(model, X)
    assert routed(model) == 2


def test_same_pointer_with_another_shape_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4, bias=False)).eval()
    check_equal(model, X)
    model[0].weight.data = model[0].weight.data.t()
    check_equal(model, X)
    assert ENGINES[0].invalidated[0][0] == "weights"


def test_weights_and_structure_are_told_apart():
    model = ready()
    check_equal(model, X)
    with torch.no_grad():
        _in_place(model)
    check_equal(model, X)
    _attribute(model)
    check_equal(model, X)
    assert [what for what, _ in ENGINES[0].invalidated] == ["weights", "structure"]
    assert ENGINES[0].invalidated[0][1] == "second.weight"


@pytest.mark.parametrize(("what", "code"), [("weights", "RM107"), ("attribute", "RM118")])
def test_a_model_that_changes_at_every_call_is_left_alone_after_a_while(what, code):
    model = ready()
    for turn in range(60):
        check_equal(model, X)
        if what == "attribute":
            model.scale = 2.0 + turn
        else:
            with torch.no_grad():
                model.second.bias.add_(0.01)
    assert ENGINES[0].first_calls < 20
    assert {"RM107", "RM118"} & set(reasons(model)) == {code}


# ---- H16, H17, H18, H21 ----------------------------------------------------------------------


def test_a_data_parallel_replica_has_no_router():
    model = ready()
    check_equal(model, X)
    replica = model._replicate_for_data_parallel()
    assert "_compiled_call_impl" not in vars(replica)
    assert "_compiled_call_impl" in vars(model)


def test_a_forked_child_runs_the_original():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    torch.set_num_threads(1)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            before = routed(model)
            with torch.no_grad():
                model(X)
            status = 0 if routed(model) == before and not rm.is_initialized() else 2
        finally:
            os.write(write, bytes([status]))
            os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 1) == b"\0"
    check_equal(model, X)


def test_many_first_callers_make_one_compile():
    model = ready()
    check_equal(model.second, torch.randn(2, 8))  # not the root: never routed
    router = vars(model)["_compiled_call_impl"]
    engine = router.engine_for(model)
    engine.before_first_call = lambda: time.sleep(0.2)
    outputs, expected = [], stock(model, X)
    start = threading.Barrier(8)

    def call():
        start.wait()
        with torch.no_grad():
            outputs.append(model(X))

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert engine.first_calls == 1
    assert all(torch.allclose(output, expected) for output in outputs)


def test_a_module_compiled_by_the_user_is_respected():
    model = Net()
    model.compile(backend="eager")
    slot = model._compiled_call_impl
    model.eval()
    assert model._compiled_call_impl is slot
    report = rm.explain(model)
    assert report.not_intercepted[0]["code"] == "RM109"


def test_compiling_an_armed_module_replaces_the_router():
    model = ready()
    check_equal(model, X)
    expected = stock(model, X)
    model.compile(backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(model(X), expected)


# ---- scope and life -------------------------------------------------------------------------


def test_disabled_nests_and_is_local_to_the_thread():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    before = routed(model)
    seen = []

    def other():
        with torch.no_grad():
            model(X)
        seen.append(routed(model))

    with rm.disabled():
        with rm.disabled(), torch.no_grad():
            model(X)
        with torch.no_grad():
            model(X)
        assert routed(model) == before
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert seen == [before + 1]

    @rm.disabled()
    def decorated(depth=2):
        with torch.no_grad():
            model(X)
        if depth:
            decorated(depth - 1)

    decorated()
    assert routed(model) == before + 1


def test_a_dropped_model_frees_its_weights_at_once_and_stays_in_the_report():
    model = ready()
    check_equal(model, X)
    check_equal(model, X)
    weight = weakref.ref(model.first.weight)
    gc.collect()
    gc.disable()
    try:
        del model
        assert weight() is None
    finally:
        gc.enable()
    (record,) = [m for m in rm.explain().models if m["model"] == "Net"]
    assert record["routed"] == 1


@pytest.mark.parametrize(
    ("change", "kind", "code"),
    [
        (lambda model: torch.nn.init.ones_(model.first.weight), "weights", "RM107"),
        (lambda model: setattr(model, "scale", 2.0), "structure", "RM118"),
    ],
    ids=["weights", "structure"],
)
def test_looking_says_of_which_kind_a_change_is(session, change, kind, code):
    model = ready()
    check_equal(model, X)
    (router,) = session.routers()
    assert not router.route.look()[0]
    change(model)
    assert router.route.look()[0] == code
    assert router.route.stale()[0] == kind
    check_equal(model, X)


def test_a_model_on_a_device_that_the_session_does_not_use_is_not_captured(monkeypatch):
    class There:
        device = torch.device("cuda", 1)

    model = ready()
    monkeypatch.setattr("rm_abstract.hooks.slow_path._tensors", lambda module: [There()])
    with pytest.warns(rm.RoutingWarning, match=r"RM119.*the model is on cuda:1"):
        check_equal(model, X)
    check_equal(model, X)
    assert ENGINES[0].first_calls == 0 and reasons(model)["RM119"] == 2


def in_another_thread(work):
    done = []
    thread = threading.Thread(target=lambda: done.append(work()))
    thread.start()
    thread.join()
    (result,) = done
    return result


def test_whether_a_program_served_the_latest_call_is_known_of_each_thread(session):
    model = ready()
    check_equal(model, X)
    (router,) = session.routers()

    def served() -> bool:
        with torch.no_grad():
            model(X)
        return router.served_latest_call

    assert served()
    assert not in_another_thread(lambda: router.served_latest_call)
    stock(model, X)
    before = routed(model)
    assert in_another_thread(served) and routed(model) == before + 1
    assert not router.served_latest_call


def test_a_call_that_the_original_serves_is_not_counted_whatever_other_threads_do(session):
    model = ready()
    check_equal(model, X)
    (router,) = session.routers()
    (engine,) = ENGINES
    (entry,) = engine.entries.values()
    module = engine.module

    def declined():
        entry.fail_with = rm.engines.Decline("RM105", "batch 5")
        with torch.no_grad():
            model(X)
        entry.fail_with = None

    def while_another_call_ends():
        engine.module = module
        router.events.served_by_original()
        in_another_thread(declined)
        return module()

    before = routed(model)
    engine.module = while_another_call_ends
    check_equal(model, X)
    assert engine.module is module and reasons(model)["RM105"] == 1
    assert routed(model) == before
    check_equal(model, X)
    assert routed(model) == before + 1


def test_a_module_inside_or_around_an_armed_root_is_not_armed():
    model = ready()
    model.first.eval()
    outer = nn.Sequential(model).eval()
    assert "_compiled_call_impl" not in vars(model.first)
    assert "_compiled_call_impl" not in vars(outer)
    rm.accelerate(outer)
    assert "_compiled_call_impl" in vars(outer)
    assert "_compiled_call_impl" not in vars(model)


def test_inference_weights_are_declined_because_changes_cannot_be_seen():
    with torch.inference_mode():
        model = Net().eval()
    with torch.no_grad():
        model(X)
        model(X)
    assert routed(model) == 0 and set(reasons(model)) == {"RM113"}


def test_an_argument_the_engine_refuses_stays_eager_with_its_name():
    class Loose(Net):
        def forward(self, x, **kwargs):
            return super().forward(x)

    model = Loose().eval()
    with torch.no_grad():
        for _ in range(3):
            model(X, refuse_me=1)
    assert routed(model) == 0 and reasons(model) == {"RM104": 3}


def test_switch_device_resets_what_was_compiled(session):
    model = ready()
    check_equal(model, X)
    router = vars(model)["_compiled_call_impl"]
    router.reset()
    assert ENGINES[0].closed
    check_equal(model, X)
    assert len(ENGINES) == 2


def test_strict_routing_raises_the_reason():
    rm.shutdown()
    rm.init("cpu", fallback="error:routing")
    model = ready()
    with pytest.raises(rm.Error) as error:
        model(X)
    assert error.value.code == "RM117"
    with torch.no_grad():
        model(X)
        model(X)
    assert routed(model) == 1


def test_compile_returns_an_executable_and_leaves_the_module_alone():
    model = Net().train(False)
    rm.shutdown()
    executable = rm.compile(model, (X,), device="cpu")
    assert "_compiled_call_impl" not in vars(model)
    with torch.no_grad():
        torch.testing.assert_close(executable(X), model(X))
    assert executable.explain().routed == 1


def test_an_executable_refuses_inputs_that_ask_for_gradients():
    model = ready()
    executable = rm.compile(model, (X,), device="cpu")
    wanted = X.clone().requires_grad_()
    for args, kwargs in (((wanted,), {}), ((X,), {"extras": {"bias": wanted[:, :3]}})):
        with pytest.raises(rm.CompileError, match="gradients") as error:
            executable(*args, **kwargs)
        assert error.value.code == "RM117"
    with torch.no_grad():
        torch.testing.assert_close(executable(wanted), stock(model, X))
    torch.testing.assert_close(executable(X), stock(model, X))  # weights may require them


def test_a_closed_executable_frees_what_it_compiled_and_says_so():
    model = ready()
    with rm.compile(model, (X,), device="cpu") as executable:
        torch.testing.assert_close(executable(X), stock(model, X))
    engine = ENGINES[-1]
    assert engine.closed and not engine.entries
    with pytest.raises(rm.Error, match="closed"):
        executable(X)
    executable.close()
    assert executable.explain().routed == 1


def test_compile_raises_instead_of_falling_back():
    rm.shutdown()
    model = Net().train()
    with pytest.raises(rm.Error) as error:
        rm.compile(model, (X,), device="cpu")
    assert error.value.code == "RM101"
