"""The public functions. Everything heavy is imported when it is needed: `init()` imports neither
torch nor transformers.
"""

from __future__ import annotations

import atexit
import os
import sys
import warnings
from typing import TYPE_CHECKING, Any

from rm_abstract import device as _devices
from rm_abstract import session
from rm_abstract.base import config
from rm_abstract.base.errors import Error, RoutingWarning
from rm_abstract.base.scope import disabled
from rm_abstract.generation import registry as generation

if TYPE_CHECKING:
    from rm_abstract.profiling import Profile
    from rm_abstract.report import Report
    from rm_abstract.session import Session
    from rm_abstract.training.loss import CompiledLoss
    from rm_abstract.training.parallel import ParallelStep
    from rm_abstract.training.step import TrainingStep
    from rm_abstract.training.trainer import TrainerLoss

__all__ = [
    "accelerate",
    "backends",
    "compile",
    "compile_step",
    "current_device",
    "devices",
    "disabled",
    "explain",
    "get_device_info",
    "init",
    "is_initialized",
    "patches",
    "profile",
    "shutdown",
    "switch_device",
]


def init(
    device: Any = None,
    *,
    cache_dir: Any = None,
    compile_options: dict[str, Any] | None = None,
    verbose: Any = None,
    inference_engine: str | None = None,
    engine_options: dict[str, Any] | None = None,
    fallback: str | None = None,
    verify: Any = None,
) -> Session:
    """Catches every model from here on and runs it compiled on ``device``.

    A second call with the same settings does nothing; with others it works like
    ``switch_device``. Raises ConfigError for a value that is not understood and
    DeviceUnavailableError when the device cannot be used and ``fallback`` is "error"; Error (RM330)
    when the software of ``inference_engine`` is missing.
    """
    settings = config.resolve(
        {
            "device": device,
            "cache_dir": cache_dir,
            "compile_options": compile_options,
            "verbose": verbose,
            "inference_engine": inference_engine,
            "engine_options": engine_options,
            "fallback": fallback,
            "verify": verify,
        }
    )
    generation.check(settings)
    config.apply_log(settings)
    with session.lock():
        active = session.current()
        if active is not None and active.owned_by_this_process:
            active.initialised_again()
            if not active.settings.same_as(settings):
                _change(active, settings)
            return active
        resolved = _resolve_early(settings)
        if active is not None:  # inherited by fork: its devices belong to the parent
            active.close()
        fresh = session.Session(settings, resolved)
        if not settings.flag("disable"):
            fresh.install()
        session.set_current(fresh)
        atexit.unregister(_tell_at_exit)
        atexit.register(_tell_at_exit)
        return fresh


def _tell_at_exit() -> None:
    """One line for each model that was called often and never served: else nobody would know."""
    active = session.last()
    if active is None or not active.owned_by_this_process or active.policy("RM101") != "warn":
        return
    from rm_abstract import report

    for line in report.never_served(report.build(active).models):
        print(line, file=sys.stderr)


def shutdown() -> None:
    """Restores every patched attribute exactly and takes the routers out; idempotent."""
    with session.lock():
        active = session.current()
        if active is not None:
            active.close()
            session.set_current(None)


def switch_device(device: Any) -> Session:
    """Moves the session, and every routed model with it, to another device."""
    with session.lock():
        active = _required("switch_device")
        settings = active.settings.replaced("device", config.to_text("device", device))
        if not active.settings.same_as(settings):
            _change(active, settings)
        return active


def is_initialized() -> bool:
    active = session.current()
    return active is not None and active.owned_by_this_process


def current_device() -> str:
    """The session's device, such as "cpu" or "cuda:0"."""
    return _required("current_device").device


def devices() -> list[str]:
    """Usable devices of this machine, best first."""
    active = session.current()
    return _devices.devices(active is not None and active.settings.flag("sim_npu"))


def backends() -> list[dict[str, Any]]:
    """Every backend plugin found, with version, score and, when unusable, the reason."""
    active = session.current()
    return _devices.backends(active.settings.text("backend_path") if active is not None else "")


def get_device_info(device: str | None = None) -> dict[str, Any]:
    """Name, architecture, memory and properties of a device (default: the session's)."""
    return _devices.info(current_device() if device is None else device)


def explain(model: Any = None) -> Report:
    """What ran where, why not, and what it cost; of one model or of the whole session.

    After ``shutdown()`` it gives the report of the session that ended. Raises Error when there was
    none.
    """
    from rm_abstract import report

    active = session.last()
    return report.build(_required("explain") if active is None else active, model)


def profile(trace: Any = None) -> Profile:
    """A context manager that times every step of the compiled programs that run inside it.

    ``trace``: a file to write for chrome://tracing or ui.perfetto.dev. Programs that are made
    inside are not in it, so call the models before. Outside of the block nothing is timed. Raises
    Error without a session.
    """
    from rm_abstract.profiling import Profile

    return Profile(_required("profile"), trace)


def patches() -> list[dict[str, str]]:
    """Every attribute of foreign modules that is changed right now: target, before, after, why."""
    active = session.current()
    if active is None or active.installation is None:
        return []
    return active.installation.listed()


def accelerate(module: Any, example_inputs: Any = None) -> Any:
    """Gives a router to a module that nothing else catches, and returns it.

    ``example_inputs`` (a tuple of positional or a dict of keyword arguments) compiles it now.
    Calls must go through ``module(...)``: ``module.forward(...)`` bypasses every hook.
    """
    active = _required("accelerate")
    router = active.attach(module, "accelerate")
    if router is None and not active.settings.flag("disable"):
        code, why = active.skipped.get(type(module).__qualname__, ("RM113", "not an nn.Module"))
        raise Error(
            f"[accelerate] expected a module that can have a router, got {type(module).__name__}: "
            f"{why}; try the module that holds the parameters",
            code=code,
        )
    if example_inputs is not None:
        import torch

        args, kwargs = _call_of(example_inputs)
        with torch.no_grad():
            module(*args, **kwargs)
    return module


def compile(
    module: Any,
    example_inputs: Any = None,
    *,
    device: Any = None,
    options: dict[str, Any] | None = None,
) -> Any:
    """Compiles a module by itself, without changing it. Raises CompileError
    instead of falling back.

    Without ``example_inputs`` compilation happens at the first call. Gives an Executable; for the
    path or the bytes of an ONNX file an ``onnx_file.OnnxExecutable``, which takes and returns
    tensors or arrays.
    """
    from rm_abstract.executable import Executable

    settings = config.resolve({"device": device, "compile_options": options, "fallback": "error"})
    settings = settings.replaced("compile_mode", "sync")  # the caller waits for the result
    fresh = session.Session(settings, _devices.resolve(settings))
    if isinstance(module, (str, os.PathLike, bytes)):
        from rm_abstract.onnx_file import OnnxExecutable

        loaded = OnnxExecutable(module, fresh)
        if example_inputs is not None:
            args, kwargs = _call_of(example_inputs)
            loaded(*args, **kwargs)
        return loaded
    executable = Executable(module, fresh)
    if example_inputs is not None:
        args, kwargs = _call_of(example_inputs)
        executable.prepare(*args, **kwargs)
    return executable


def compile_step(
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    memory_budget: int | None = None,
    precision: str = "auto",
    scaler: Any = None,
    accumulate: int = 1,
    options: dict[str, Any] | None = None,
) -> TrainingStep:
    """A training step of an ordinary module, its loss and its optimizer as one compiled program.

    ``step(inputs, *targets)`` does what ``optimizer.zero_grad(); loss.backward();
    optimizer.step()`` does for ``loss = loss_fn(model(inputs), *targets)`` and returns the loss, a
    scalar without gradient. ``inputs``: a tensor, a tuple of positional or a dict of keyword
    arguments; without a ``loss_fn`` the model's output has a field ``loss``. ``clip_norm``:
    gradients are clipped to this norm as by ``torch.nn.utils.clip_grad_norm_``; ``step.grad_norm``
    is what it was before; ``clip_value``: as by ``clip_grad_value_``.

    ``memory_budget``: bytes for activations, gradients and workspaces of the program; values are
    computed twice where that keeps within it (``step.memory_report()``), and what cannot be kept
    within it says so (RM711). Eager's first step is not bound by it. ``precision``: "bf16" and
    "fp16" are ``torch.autocast`` around model and loss. ``scaler``: a ``torch.amp.GradScaler`` that
    the step uses as a loop would: where a gradient is no finite number, parameters and state stay
    and the scale shrinks. "fp16" without one makes one, ``step.scaler``.

    ``accumulate``: so many calls, each with a micro-batch, make one step: gradients of
    ``loss / accumulate`` are summed in the parameters' ``.grad``, as a loop does it, and the last
    of the calls clips and updates. ``step.accumulated`` is how many of them wait; set it to 0 after
    an ``optimizer.step()`` and ``zero_grad()`` of your own, as for the rest of an epoch.

    Dropout draws numbers of its own, not those of torch's generator; they follow
    ``torch.manual_seed``. Parameters and optimiser state stay the tensors they are and are updated
    in place; gradients (``.grad``) are None after a step. A model on an NVIDIA GPU is trained
    there, with the optimizer's counters on the host (neither ``fused`` nor ``capturable``); only a
    ``scaler`` makes a step wait for the GPU, as torch's own does. Of batches of a new structure the
    first step is eager's and watched, the second is compared; what cannot be compiled (SGD,
    Adam and AdamW; float32: products in float64 have no fast kernels) runs eager, with the reason
    in ``step.report()``; with ``options`` {"fallback": "error"} it raises Error instead.
    """
    from rm_abstract.training.step import TrainingStep

    return TrainingStep(
        model,
        loss_fn,
        optimizer,
        _training_settings(options),
        clip_norm,
        memory_budget,
        precision,
        clip_value,
        scaler,
        accumulate,
    )


def compile_parallel_step(
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    process_group: Any = None,
    *,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    precision: str = "auto",
    scaler: Any = None,
    accumulate: int = 1,
    options: dict[str, Any] | None = None,
) -> ParallelStep:
    """A training step on this process's part of a batch, its gradients averaged over a group.

    ``process_group``: of ``torch.distributed``, which is initialised; None is all processes (one a
    device, such as ``torchrun`` starts). All begin with the first process's parameters and buffers.
    With SGD, Adam and AdamW the averages and the update are a part of the program, as in
    ``compile_step``. With any other optimizer, and where this process's loss does not reach all
    parameters, loss and gradients are those of ``compile_loss``, and clipping and update torch's
    own. Arguments and ``step.grad_norm`` are as for ``compile_step``; the loss
    that a step returns is this process's. Of the calls that ``accumulate`` makes one step, only
    the last one averages gradients, as under ``DistributedDataParallel.no_sync``: all processes
    make the same number of calls. ``scaler``: one a process; where a gradient of any process is no
    finite number, all of them skip the update. Parameters change only after every process has sent
    its gradients; when one does not, the others raise torch.distributed's error after its time
    limit.
    """
    import torch.distributed

    from rm_abstract.training.parallel import ParallelStep

    group = torch.distributed.group.WORLD if process_group is None else process_group
    if group is None:
        raise Error(
            "[compile_parallel_step] expected torch.distributed to be initialised, got none; try "
            "torch.distributed.init_process_group('gloo')"
        )
    settings = _training_settings(options)
    return ParallelStep(
        model,
        loss_fn,
        optimizer,
        settings,
        group,
        clip_norm,
        precision,
        clip_value,
        scaler,
        accumulate,
    )


def compile_loss(
    model: Any,
    loss_fn: Any = None,
    *,
    precision: str = "auto",
    scaler: Any = None,
    options: dict[str, Any] | None = None,
) -> CompiledLoss:
    """The loss of an ordinary module, computed together with its gradients by one program.

    ``loss(inputs, *targets)`` gives ``loss_fn(model(inputs), *targets)``, a scalar whose
    ``backward()`` adds the gradients to ``.grad``. What comes behind is the loop's own: scaling,
    accumulation, clipping, any optimizer. Arguments, dropout and what runs eager (with its reason
    in ``loss.report()``) are as for ``compile_step``; as in eager, parameters must not change
    before ``backward()`` (RuntimeError). Gradients of gradients are not computed (RuntimeError).
    ``scaler``: the ``torch.amp.GradScaler`` of a loop in fp16 (``scaler.scale(loss).backward()``):
    gradients are computed at once with the loss, so its scale must be known before.
    """
    from rm_abstract.training.loss import CompiledLoss

    return CompiledLoss(model, loss_fn, _training_settings(options), precision, scaler)


def compile_trainer(trainer: Any, *, options: dict[str, Any] | None = None) -> TrainerLoss:
    """Makes a ``transformers.Trainer`` train on compiled losses; call it before ``train()``.

    Replaces ``trainer.compute_loss``, nothing else: accumulation, clipping, schedules, checkpoints
    and evaluation stay the Trainer's. Returns what has ``report()`` (how many losses were compiled
    and eager, and why) and ``remove()``. Label smoothing, ``compute_loss_func``, an overridden
    ``compute_loss`` and models that the Trainer wraps stay eager (RM710).
    """
    from rm_abstract.training.trainer import TrainerLoss

    return TrainerLoss(trainer, _training_settings(options))


def _training_settings(options: dict[str, Any] | None) -> config.Settings:
    given = dict(options or {})
    return config.resolve({"fallback": given.pop("fallback", None), "compile_options": given})


def _call_of(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(example_inputs, dict):
        return (), example_inputs
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if hasattr(example_inputs, "keys"):  # a tokenizer's BatchEncoding
        return (), dict(example_inputs)
    return (example_inputs,), {}


def _required(where: str) -> Session:
    active = session.current()
    if active is None:
        raise Error(f"[{where}] expected an initialised session, got none; try rm_abstract.init()")
    return active


def _change(active: Session, settings: config.Settings) -> None:
    active.change(settings, _resolve_early(settings))


def _resolve_early(settings: config.Settings) -> _devices.Resolved | None:
    """An accelerator asked for by name is looked for now, and reported when it is not there."""
    if settings.text("device") in ("auto", "cpu"):
        return None
    resolved = _devices.resolve(settings)
    if resolved.fell_back and resolved.action == "warn":
        for note in resolved.notes:
            text = f"{note['code']} {note['message']}; {resolved.name} is used instead"
            warnings.warn(text, RoutingWarning, stacklevel=4)
    return resolved
