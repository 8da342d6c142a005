"""A generation engine that runs in a process of its own, for one model.

The process starts with the first generation it can serve, with the weights the model has then.
Before every generation the model is looked at: what changed reaches the engine first. What the
engine computes is compared with PyTorch whenever it has taken weights; one that differs is not
used. A process that ended is started again at the next call.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol

import torch

from rm_abstract.base.decline import Decline
from rm_abstract.base.errors import Error, ExecutionError
from rm_abstract.base.scope import disabled_var
from rm_abstract.generation.remote.process import STALL_S, EngineProcess, Ticket
from rm_abstract.generation.remote.stream import RemoteStream, tokens_of
from rm_abstract.generation.remote.weights import check_structure, write_folder
from rm_abstract.generation.remote.worker_side import members
from rm_abstract.generation.request import GenerationRequest

MOST_CRASHES = 3  # one after the other, without a generation that ended well between them
_PROBE_TOKENS = 8
_TOLERANCE = {torch.float32: 1e-2, torch.bfloat16: 0.25, torch.float16: 0.1}  # of log probabilities

Notice = Callable[[str, str], None]  # (code, detail): a call goes elsewhere; raises where asked to


class Plan(Protocol):
    """A request in the engine's terms."""

    def rows(self) -> list[tuple[list[int], dict[str, Any]]]:
        """(prompt, sampling) of every row; may draw seeds."""


class Kind(Protocol):
    """What is particular to one engine."""

    name: str
    start_option: str  # that sets start_timeout_s()
    repeats: bool  # transformers' own loop would give what a generation that was cut off had to

    def plan(self, request: GenerationRequest, longest: float) -> Plan:
        """Raises Decline, which names the field. Changes nothing."""

    def command(self) -> list[str]: ...

    def environment(self) -> dict[str, str]: ...

    def arguments(self, model: Any, rows: int) -> dict[str, Any]:
        """For a process that takes generations of so many rows."""

    def batch(self, rows: int) -> int:
        """What the engine runs so many rows as; each batch is compared before it serves."""

    def supports(self, rows: int, facts: dict[str, Any]) -> bool:
        """Whether the process that told these facts takes so many rows; else it is replaced."""

    def device(self) -> str: ...

    def start_timeout_s(self) -> float: ...

    def load_timeout_s(self) -> float:
        """Of the operation "load", which follows a start that only compiles; 0: the start loads."""

    def step_timeout_s(self) -> float:
        """How long the next token of a row may take."""

    def idle_timeout_s(self) -> float:
        """The process ends after so long without a generation; 0: it stays."""

    def probe(self, rows: int) -> list[dict[str, Any]] | None:
        """For each row of a batch the sampling for greedy tokens with their log probabilities.
        None: the engine computes with other numbers on purpose."""


class Watch(Protocol):
    """Notices changes of a model since it was made (the router's guard)."""

    def look(self) -> tuple[str | None, str]:
        """(code, what) of a change; no code when there is none."""


class _Live:
    """A process that serves, the weights it has, and what it told."""

    def __init__(self, process: EngineProcess, watch: Watch, facts: dict[str, Any]) -> None:
        self.process, self.watch, self.facts = process, watch, facts
        self.compared: set[int] = set()  # batches
        self.structure = 0


class RemoteEngine:
    """Implements engine.GenerationEngine. Thread safe: generations of several threads are under
    way at once, and the engine batches them."""

    def __init__(
        self,
        kind: Kind,
        watch: Callable[[], Watch],
        notice: Notice,
        log_dir: str = "",
        stall_s: float = STALL_S,
    ) -> None:
        self.name = kind.name
        self._kind, self._watch, self._notice, self._log_dir = kind, watch, notice, log_dir
        self._stall_s = stall_s
        self._lock = threading.RLock()
        self._live: _Live | None = None
        self._finalizer: Any = None
        self._refused: Decline | None = None  # for the weights and the structure it was found with
        self._refused_at: Watch | None = None
        self._busy = 0
        self._used = time.monotonic()
        self._timer: threading.Timer | None = None
        self._pid = os.getpid()
        self._crashed = 0  # in a row
        self._declined: Counter[str] = Counter()
        self.crashes: list[str] = []
        self.starts = self.reloads = self.requests = self.tokens = 0
        self.start_seconds = 0.0
        self.checked = ""

    # ---- the protocol ----------------------------------------------------------------------------

    def eligible(self, request: GenerationRequest) -> str:
        """Starts the process, or brings it up to date, when the request is one for it."""
        try:
            self._kind.plan(request, float("inf"))
            live = self._current(request.model, len(request.input_ids))
            self._kind.plan(request, float(live.facts["max_model_len"]))
        except Decline as decline:
            self.decline(decline.code, decline.detail)
            return decline.detail or decline.code
        return ""

    def decline(self, code: str, detail: str) -> None:
        """A generation goes elsewhere. Raises Error where the user's policy says so."""
        with self._lock:
            self._declined[detail.splitlines()[0] if detail else code] += 1
        self._notice(code, detail)

    def start(self, request: GenerationRequest) -> RemoteStream:
        return RemoteStream(request, _Source(self, request))

    def repeats(self, request: GenerationRequest, error: ExecutionError) -> bool:
        """Whether transformers may generate anew what ``error`` cut off. Raises where the user's
        policy says so."""
        drawn = bool(request.config.do_sample)
        if not self._kind.repeats or drawn or request.streamer is not None:
            return False
        self._notice(error.code or "RM331", str(error))
        return True

    # ---- what the user can do with it ------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """What happened so far, as data for the report."""
        with self._lock:
            facts = {} if self._live is None else self._live.facts
        return {
            "engine": self.name,
            "facts": facts,
            "pid": None if self._live is None else self._live.process.pid,
            "requests": self.requests,
            "tokens": self.tokens,
            "starts": self.starts,
            "reloads": self.reloads,
            "start_seconds": round(self.start_seconds, 3),
            "checked": self.checked,
            "crashes": list(self.crashes),
            "declined": dict(self._declined),
        }

    def pids(self) -> list[int]:
        """Of the running process and what it started."""
        with self._lock:
            live = self._live
        return [] if live is None or not live.process.alive else members(live.process.pid)

    def call(self, name: str, timeout_s: float = 60.0, **arguments: Any) -> dict[str, Any] | None:
        """An operation of the running process; None when none runs. Raises ExecutionError."""
        with self._lock:
            live = self._live
        if live is None or not live.process.alive:
            return None
        return live.process.request("call", timeout_s, name=name, arguments=arguments)

    def close(self) -> None:
        """Ends the process; a later generation starts another."""
        with self._lock:
            live, self._live = self._live, None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        if live is not None:
            live.process.close()

    # ---- inside ----------------------------------------------------------------------------------

    def _current(self, model: Any, rows: int) -> _Live:
        """A process that serves so many rows of the model as it is now. Raises Decline, or Error
        for the user."""
        if os.getpid() != self._pid:
            raise Decline("RM332", "a process made by fork: the engine belongs to its parent")
        with self._lock:
            self._bury()
            if self._refused is not None and self._refused_at is not None:
                if not self._refused_at.look()[0]:
                    raise self._refused
                self._refused = None
            check_modes(model)
            live = self._live
            is_new = live is None or bool(live.watch.look()[0])
            if live is not None and not is_new:
                if not self._kind.supports(rows, live.facts):
                    is_new = True
                elif self._kind.batch(rows) in live.compared:
                    return live
            if is_new:
                check_structure(model)
            if live is not None and is_new and self._busy:
                raise Decline("RM332", "the engine must change while another thread generates")
            if self._crashed >= MOST_CRASHES:
                raise Decline(
                    "RM303", f"its process ended {self._crashed} times, last: {self.crashes[-1]}"
                )
            try:
                if live is None or is_new:
                    live = self._made(model, rows)
                self._compare(model, live, self._kind.batch(rows))
            except Decline as decline:
                self.close()
                self._refused, self._refused_at = decline, self._watch()
                raise
            except BaseException:
                self.close()
                raise
            return live

    def _bury(self) -> None:
        live = self._live
        if live is not None and not live.process.alive:
            self.crashes.append(str(live.process.crash()))
            self._crashed += 1
            self.close()

    def _made(self, model: Any, rows: int) -> _Live:
        """A process with the model as it is now, for so many rows."""
        live = self._live
        if live is not None and self._kind.supports(rows, live.facts):
            return self._reloaded(model, rows)
        self.close()
        return self._started(model, rows)

    def _started(self, model: Any, rows: int) -> _Live:
        begun = time.monotonic()
        process = EngineProcess(
            self.name,
            self._kind.command(),
            self._kind.environment(),
            self._log_dir,
            self._stall_s,
            self._kind.start_option,
        )
        self._finalizer = weakref.finalize(self, process.close)
        self.starts += 1
        try:
            folder = process.scratch / "model"
            written = write_folder(model, folder)
            watch = self._watch()  # after: to save a model looks like a write to it
            facts = process.request(
                "start",
                self._kind.start_timeout_s(),
                model=str(folder),
                arguments=self._kind.arguments(model, rows),
                device=self._kind.device(),
            )
            _check_facts(facts)
            if limit_s := self._kind.load_timeout_s():
                option = "load_timeout_s in compile_options"
                process.request("call", limit_s, option, name="load", arguments={})
        except ExecutionError as error:
            tail = process.log_tail() if error.code != "RM303" else ""
            process.close()
            where = f"\n{tail}" if tail else ""
            raise Decline("RM331", f"{error}{where}") from None
        except BaseException:
            process.close()
            raise
        for path in written:  # it has read them
            path.unlink(missing_ok=True)
        self.start_seconds = time.monotonic() - begun
        live = _Live(process, watch, facts)
        self._live = live
        return live

    def _reloaded(self, model: Any, rows: int) -> _Live:
        """The running process with the weights of now."""
        live = self._live
        assert live is not None
        folder = live.process.scratch / f"reload{self.reloads}"
        self.reloads += 1
        try:
            write_folder(model, folder)
            watch = self._watch()
            live.process.request(
                "call",
                self._kind.start_timeout_s(),
                name="reload",
                arguments={"model": str(folder)},
            )
        except ExecutionError as error:
            self.close()
            if error.code != "RM331":
                raise Decline(str(error.code), str(error)) from None
            return self._started(model, rows)  # what it cannot take while it runs
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        live.watch = watch
        live.compared.clear()
        return live

    def _compare(self, model: Any, live: _Live, batch: int) -> None:
        """Greedy tokens of the engine must be as likely to PyTorch as to it. Raises Decline."""
        samplings = self._kind.probe(batch)
        tolerance = _TOLERANCE.get(model.dtype)
        live.compared.add(batch)
        if samplings is None or tolerance is None:
            self.checked = "not compared: the engine computes in other numbers"
            return
        size = int(model.config.get_text_config().vocab_size)
        draws = torch.Generator().manual_seed(7)
        prompts = [
            torch.randint(0, size, (12 - row % 5,), generator=draws).tolist()
            for row in range(len(samplings))
        ]
        count, worst = 0, 0.0
        answers = self._probe(live.process, prompts, samplings, size)
        for prompt, (tokens, chances) in zip(prompts, answers, strict=True):
            count += len(tokens)
            worst = max(worst, _apart(model, prompt, tokens, chances))
        self.checked = f"log probabilities of {count} tokens within {worst:.2g}"
        if not worst <= tolerance:
            raise Decline(
                "RM501",
                f"{self.name}'s log probabilities differ from PyTorch's by "
                f"{worst:.3g}, expected at most {tolerance}",
            )

    def _probe(
        self,
        process: EngineProcess,
        prompts: list[list[int]],
        samplings: list[dict[str, Any]],
        size: int,
    ) -> list[tuple[list[int], list[float]]]:
        """Tokens and their log probabilities, for each prompt of one batch. Raises Decline."""
        tickets = [
            process.submit(
                "generate", prompt=prompt, sampling={**sampling, "max_tokens": _PROBE_TOKENS}
            )
            for prompt, sampling in zip(prompts, samplings, strict=True)
        ]
        answers: list[tuple[list[int], list[float]]] = []
        limit_s, option = self._kind.start_timeout_s(), ""
        if self._kind.step_timeout_s() < limit_s:
            limit_s, option = self._kind.step_timeout_s(), "execute_timeout_s in compile_options"
        try:
            for ticket in tickets:
                tokens: list[int] = []
                chances: list[float] = []
                done = False
                while not done:
                    message = ticket.next(time.monotonic() + limit_s, option)
                    tokens += tokens_of(message, size)
                    chances += _chances_of(message)  # where it tells them
                    done = message["done"] or len(tokens) > _PROBE_TOKENS
                if len(tokens) != _PROBE_TOKENS:
                    raise ExecutionError(
                        f"[generate] expected {_PROBE_TOKENS} tokens for a prompt, got "
                        f"{'more' if len(tokens) > _PROBE_TOKENS else len(tokens)}",
                        code="RM331",
                    )
                answers.append((tokens, chances))
        except ExecutionError as error:
            raise Decline("RM331", f"{error}") from None
        finally:
            process.forget(tickets, cancel=len(answers) < len(tickets))
        return answers

    def step_timeout_s(self) -> float:
        return self._kind.step_timeout_s()

    def opened(self, request: GenerationRequest) -> tuple[EngineProcess, list[Ticket]]:
        """Starts a request for every row of a generation."""
        with self._lock:
            try:
                live = self._current(request.model, len(request.input_ids))
                plan = self._kind.plan(request, float(live.facts["max_model_len"]))
            except Decline as decline:  # it was eligible: something changed since
                raise Error(f"[{self.name}] {decline.detail}", code=decline.code) from None
            self._busy += 1
            self.requests += 1
        tickets: list[Ticket] = []
        try:
            for prompt, sampling in plan.rows():
                tickets.append(live.process.submit("generate", prompt=prompt, sampling=sampling))
        except BaseException:
            self.ended(live.process, tickets, 0, well=False)
            raise
        return live.process, tickets

    def ended(self, process: EngineProcess, undone: list[Ticket], tokens: int, well: bool) -> None:
        process.forget(undone, cancel=True)
        with self._lock:
            self._busy -= 1
            self.tokens += tokens
            self._used = time.monotonic()
            if well:
                self._crashed = 0
            self._bury()
            self._wait_for_idleness()

    def _wait_for_idleness(self) -> None:
        idle = self._kind.idle_timeout_s()
        if idle <= 0 or self._live is None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(idle, _unload_idle, (weakref.ref(self), idle))
        self._timer.daemon = True
        self._timer.start()

    def unload_idle(self, idle: float) -> None:
        with self._lock:
            if not self._busy and time.monotonic() - self._used >= idle - 0.01:
                self.close()


def _unload_idle(engine: weakref.ref[RemoteEngine], idle: float) -> None:
    found = engine()
    if found is not None:
        found.unload_idle(idle)


def _check_facts(facts: dict[str, Any]) -> None:
    """Raises ExecutionError (RM331)."""
    longest = facts.get("max_model_len")
    if isinstance(longest, bool) or not isinstance(longest, (int, float)) or not longest > 0:
        raise ExecutionError(
            f"[generate] expected the most tokens of a row from the engine, got {longest!r:.40}",
            code="RM331",
        )


def _chances_of(message: dict[str, Any]) -> list[float]:
    """The log probabilities of a message's tokens. Raises ExecutionError (RM331)."""
    try:
        return [float(row[0][1]) for row in message["chances"]]
    except (TypeError, LookupError, ValueError, OverflowError):
        raise ExecutionError(
            f"[generate] expected (token, log probability) rows, got {message['chances']!r:.80}",
            code="RM331",
        ) from None


def _apart(model: Any, prompt: list[int], tokens: list[int], chances: list[float]) -> float:
    """How far log probabilities are from PyTorch's, and the tokens from the likeliest; without
    ``chances`` the tokens alone."""
    token = disabled_var.set("compiling")
    try:
        with torch.no_grad():
            ids = torch.tensor([[*prompt, *tokens]], device=model.device)
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().cpu()
    finally:
        disabled_var.reset(token)
    own = torch.log_softmax(logits, dim=-1)
    picked = own[torch.arange(len(tokens)), torch.tensor(tokens)]
    below = own.max(dim=-1).values - picked  # PyTorch would have chosen another
    if len(chances) != len(tokens):  # it does not tell them, or not all
        return float(below.nan_to_num(float("inf")).max())
    apart = (picked - torch.tensor(chances)).abs()
    return float(torch.maximum(apart, below).nan_to_num(float("inf")).max())


def check_modes(model: Any) -> None:
    """What the watch does not see. Raises Decline (RM332)."""
    if model.training:
        raise Decline("RM332", "training mode")
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise Decline("RM332", "autocast")


class _Source:
    """Implements stream.Source for one generation."""

    def __init__(self, engine: RemoteEngine, request: GenerationRequest) -> None:
        self._engine, self._request = engine, request
        self._process: EngineProcess | None = None
        self.step_timeout_s = engine.step_timeout_s()

    def open(self) -> list[Ticket]:
        self._process, tickets = self._engine.opened(self._request)
        return tickets

    def cancel(self, tickets: list[Ticket]) -> None:
        assert self._process is not None
        self._process.forget(tickets, cancel=True)

    def close(self, tickets: list[Ticket], undone: list[Ticket], tokens: int, well: bool) -> None:
        assert self._process is not None
        self._process.forget(tickets)
        self._engine.ended(self._process, undone, tokens, well)
