"""vLLM behind the server: token ids go to its process and come back; text stays the server's."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rm_abstract.base.errors import ExecutionError
from rm_abstract.generation.jobs import Closed, Job, QueueFull, Reason, Sampling, Token
from rm_abstract.generation.remote.process import EngineProcess, Ticket
from rm_abstract.generation.vllm.engine import Vllm

_LOOK_S = 0.1  # how often deadlines are looked at


class VllmText:
    """Implements engine.TextEngine with one worker process. A process that ended fails the jobs it
    had, and the next one starts another: it and those behind it wait for that, and nobody else."""

    name = "vllm"

    def __init__(
        self, folder: Path, kind: Vllm, vocabulary: int, dtype: str, most: int, log_dir: str = ""
    ) -> None:
        """``most``: jobs that may be under way or wait. Raises Error (RM330), ExecutionError."""
        self.vocabulary = vocabulary
        self._folder, self._kind, self._dtype = folder, kind, dtype
        self._most, self._log_dir = most, log_dir
        self._lock = threading.RLock()
        self._jobs: dict[Job, Ticket | None] = {}  # None: until a process has started
        self._starting = False
        self._counts = {"generated_tokens": 0, "prompt_tokens": 0, "cached_tokens": 0}
        self._closed = threading.Event()
        self._not_started = ""  # why the last process did not start
        self._process = self._started()
        threading.Thread(target=self._watch_deadlines, daemon=True).start()

    def _started(self) -> EngineProcess:
        kind = self._kind
        process = EngineProcess(kind.name, kind.command(), kind.environment(), self._log_dir)
        try:
            facts = process.request(
                "start",
                kind.start_timeout_s(),
                model=str(self._folder.absolute()),
                arguments=kind.arguments_for(self._dtype),
                device=kind.device(),
            )
        except BaseException:
            process.close()
            raise
        self.context_length = int(facts["max_model_len"])
        return process

    def submit(self, jobs: Sequence[Job]) -> None:
        with self._lock:
            if self._closed.is_set():
                raise Closed("vLLM was closed")
            if len(self._jobs) + len(jobs) > self._most:
                raise QueueFull(f"{len(self._jobs)} requests are under way")
            if not self._starting and self._process.alive:
                for job in jobs:
                    self._send(job)
                return
            self._jobs.update(dict.fromkeys(jobs))
            if not self._starting:
                self._starting = True
                threading.Thread(target=self._start_again, daemon=True).start()

    def _start_again(self) -> None:
        """Takes as long as vLLM needs to load the model; no lock is held meanwhile."""
        self._process.close()
        process, why = None, ""
        try:
            process = self._started()
        except Exception as error:  # whoever waits must hear of it
            why = str(error).partition("\n")[0]
        with self._lock:
            self._starting, self._not_started = False, why
            if process is not None:
                self._process = process
                if self._closed.is_set():
                    process.close()
            for job in [job for job, ticket in self._jobs.items() if ticket is None]:
                if process is None:
                    self._end(job, "error", why)
                else:
                    self._send(job)

    def _send(self, job: Job) -> None:
        def take(message: dict[str, Any]) -> None:
            self._take(job, message)

        try:
            sampling = _parameters(job)
            ticket = self._process.submit(
                "generate", deliver=take, prompt=job.prompt, sampling=sampling
            )
        except ExecutionError as error:
            self._jobs.pop(job, None)
            job.end("error", str(error).splitlines()[0])
            return
        self._jobs[job] = ticket
        self._counts["prompt_tokens"] += len(job.prompt)

    def _take(self, job: Job, message: dict[str, Any]) -> None:
        """A message about a job; called by the process's reading thread."""
        with self._lock:
            if job not in self._jobs:
                return
            if message["event"] != "tokens":
                what = str(message.get("message", "its process ended"))
                self._end(job, "error", what.splitlines()[0], cancel=False)
                return
            for row in message["chances"] or [[[token, None]] for token in message["tokens"]]:
                (number, chance), *top = row
                self._counts["generated_tokens"] += 1
                job.add(Token(int(number), chance, tuple((int(i), float(p)) for i, p in top)))
                if job.ended:
                    break
            if job.ended:
                self._forget(job, cancel=not message["done"])

    def cancel(self, job: Job) -> None:
        with self._lock:
            job.cancelled = True
            if job in self._jobs:
                self._end(job, "cancelled")

    def facts(self) -> dict[str, Any]:
        with self._lock:
            return {**self._counts, "running": len(self._jobs), "waiting": 0}

    def fault(self) -> str:
        """A process that ended is none: the next job starts another."""
        return "vLLM was closed" if self._closed.is_set() else self._not_started

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            for job in list(self._jobs):
                self._end(job, "cancelled", "the server ends")
        self._process.close()

    def _end(self, job: Job, reason: Reason, message: str = "", cancel: bool = True) -> None:
        self._forget(job, cancel)
        job.end(reason, message)

    def _forget(self, job: Job, cancel: bool) -> None:
        ticket = self._jobs.pop(job)
        if ticket is not None:
            ticket.forget(cancel)

    def _watch_deadlines(self) -> None:
        while not self._closed.wait(_LOOK_S):
            with self._lock:
                for job in list(self._jobs):
                    reason = job.expired()
                    if reason is not None:
                        self._end(job, reason)


def _parameters(job: Job) -> dict[str, Any]:
    wanted: Sampling = job.sampling
    found: dict[str, Any] = {
        "max_tokens": job.limit,
        "ignore_eos": True,
        "stop_token_ids": sorted(job.stop_tokens),
        "temperature": wanted.temperature,
        "top_p": max(wanted.top_p, 1e-6),
        "top_k": wanted.top_k,
        "presence_penalty": wanted.presence_penalty,
        "frequency_penalty": wanted.frequency_penalty,
    }
    if wanted.logit_bias:
        found["logit_bias"] = {str(token): bias for token, bias in wanted.logit_bias.items()}
    if wanted.seed is not None:
        found["seed"] = wanted.seed % 2**31
    if wanted.logprobs is not None:
        found["logprobs"] = wanted.logprobs
    return found
