"""Continuous batching: one thread owns a model and makes the tokens of all requests.

Between two steps requests are taken in, cancelled and ended. Prompts are computed in chunks beside
the steps, the shortest rest first, so that a long prompt holds up neither rows nor short prompts.
Invariant: only the scheduler's thread calls the model or touches a cache; every job that was
submitted gets exactly one End.
"""

from __future__ import annotations

import inspect
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import DynamicCache

from rm_abstract.base.errors import Error
from rm_abstract.generation.jobs import Closed, Job, QueueFull, Token
from rm_abstract.generation.prefixes import Prefixes
from rm_abstract.generation.rows import Row, Rows
from rm_abstract.generation.sampling import Sampler
from rm_abstract.kv.device_cache import CacheNotes, DeviceCache, expected_shape, from_dynamic


@dataclass(frozen=True)
class Limits:
    rows: int = 16  # that decode together, prompts under way included
    waiting: int = 64  # requests beyond those
    prompt_chunk: int = 64  # tokens of prompts between two steps
    prefix_bytes: int = 256 << 20  # keys and values of earlier prompts


@dataclass
class Counts:
    """What happened so far; written by the scheduler's thread, read by any."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_rows: int = 0  # rows that were live, summed over steps
    waiting: int = 0
    running: int = 0


@dataclass(eq=False)
class _Prompt:
    """A prompt under way: of `job.prompt`, `cache.length` tokens are computed."""

    job: Job
    cache: DeviceCache
    sampler: Sampler

    def left(self) -> int:
        return len(self.job.prompt) - self.cache.length


@dataclass
class _Names:
    """What the model's forward calls its optional arguments."""

    positions: bool = True
    keep: bool = True

    @staticmethod
    def of(model: Any) -> _Names:
        found = inspect.signature(model.forward).parameters
        return _Names("position_ids" in found, "logits_to_keep" in found)


@dataclass
class Scheduler:
    """Any thread may call submit, cancel and close."""

    model: Any  # a causal language model of transformers, on the CPU
    limits: Limits = field(default_factory=Limits)
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Job] = []
        self._prompts: list[_Prompt] = []
        self._closed = False
        self._notes = CacheNotes()
        self._names = _Names.of(self.model)
        self._prefixes = Prefixes(self.limits.prefix_bytes)
        self._rows = Rows(self._new_cache, self._forward)
        self._new_cache()  # raises for a model this cannot batch
        self._thread = threading.Thread(target=self._run, name="rm-scheduler", daemon=True)
        self._thread.start()

    def submit(self, *jobs: Job) -> None:
        """All of them or none. Raises QueueFull or Closed."""
        with self._changed:
            if self._closed:
                raise Closed("the model is being unloaded")
            free = self.limits.rows - self.counts.running
            if len(self._waiting) + len(jobs) > self.limits.waiting + max(free, 0):
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            self._waiting += jobs
            self.counts.waiting = len(self._waiting)
            self._changed.notify_all()

    def cancel(self, job: Job) -> None:
        """The job gets its End before the next step; one that ended is left alone."""
        with self._changed:
            job.cancelled = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every job as cancelled and waits for the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the scheduler's thread ------------------------------------------------------------------

    def _run(self) -> None:
        with torch.no_grad():
            while self._wait():
                self._sweep()
                self._admit()
                self._advance_prompts()
                self._advance_rows()
        for job in self._everybody():
            job.end("cancelled", "the server ends")

    def _wait(self) -> bool:
        """Until there is something to do. False: no more."""
        with self._changed:
            while not self._closed and not (self._waiting or self._prompts or self._rows.live()):
                self._changed.wait()
            return not self._closed

    def _everybody(self) -> list[Job]:
        with self._changed:
            jobs = list(self._waiting)
        return jobs + [p.job for p in self._prompts] + [r.job for r in self._rows.live()]

    def _sweep(self) -> None:
        """Ends what was cancelled or is late, and forgets what ended."""
        for job in self._everybody():
            reason = job.expired()
            if reason is not None:
                job.end(reason)
        with self._changed:
            self._waiting = [job for job in self._waiting if not job.ended]
        self._prompts = [p for p in self._prompts if not p.job.ended]
        self._rows.drop_ended()
        self._count()

    def _count(self) -> None:
        with self._changed:
            self.counts.waiting = len(self._waiting)
            self.counts.running = len(self._prompts) + len(self._rows.live())

    def _admit(self) -> None:
        with self._changed:
            free = self.limits.rows - len(self._prompts) - len(self._rows.live())
            self._waiting.sort(key=lambda job: job.priority)  # stable: first come, first served
            admitted, self._waiting = self._waiting[: max(free, 0)], self._waiting[max(free, 0) :]
        for job in admitted:
            self._prompts.append(_Prompt(job, self._new_cache(), Sampler(job.sampling)))
        self._count()

    # ---- prompts ---------------------------------------------------------------------------------

    def _advance_prompts(self) -> None:
        budget = self.limits.prompt_chunk
        while budget > 0 and self._prompts:
            prompt = min(self._prompts, key=self._urgency)
            for other in self._prompts:
                other.job.turns_waited += other is not prompt
            if prompt.cache.length == 0:
                lent = self._prefixes.lend(prompt.job.prompt, prompt.cache)
                prompt.job.cached_tokens = lent
                self.counts.cached_tokens += lent
            budget -= self._chunk(prompt)

    def _urgency(self, prompt: _Prompt) -> tuple[int, int]:
        """The shortest rest first; who waited for others' chunks counts as shorter by as much."""
        waited = prompt.job.turns_waited * self.limits.prompt_chunk // 4
        return prompt.job.priority, prompt.left() - waited

    def _chunk(self, prompt: _Prompt) -> int:
        """Computes the next tokens of the prompt; how many."""
        job, at = prompt.job, prompt.cache.length
        ids = job.prompt[at : at + self.limits.prompt_chunk]
        end = at + len(ids)
        try:
            logits = self._forward(
                torch.tensor([ids]),
                torch.arange(at, end)[None],
                torch.ones(1, end, dtype=torch.long),
                prompt.cache,
            )
        except Exception as error:  # the model's own: only this request hears of it
            job.end("error", f"{type(error).__name__}: {error}")
            self._prompts.remove(prompt)
            return len(ids)
        self.counts.prompt_tokens += len(ids)
        if end == len(job.prompt):
            self._prompts.remove(prompt)
            self._take(job, prompt.sampler, logits[0, -1].float(), None)
            if not job.ended:
                row = Row(job, prompt.sampler, job.made[-1])
                self._rows.join(row, prompt.cache, to_follow=len(self._prompts))
            self._prefixes.keep(job.prompt, prompt.cache)
        return len(ids)

    # ---- rows ------------------------------------------------------------------------------------

    def _advance_rows(self) -> None:
        live = self._rows.by_slot()
        if not live:
            return
        try:
            logits = self._rows.step()
        except Exception as error:  # the rows share the step, and so the failure
            for _, row in live:
                row.job.end("error", f"{type(error).__name__}: {error}")
            self._rows.clear()
            return
        self.counts.steps += 1
        live = self._rows.by_slot()
        self.counts.step_rows += len(live)
        largest = logits.argmax(-1).tolist()
        for slot, row in live:
            self._take(row.job, row.sampler, logits[slot], largest[slot])
            row.last = row.job.made[-1]

    def _take(self, job: Job, sampler: Sampler, logits: torch.Tensor, largest: int | None) -> None:
        """The job's next token. What cannot be drawn from, such as NaN, ends this job alone."""
        try:
            known = largest is not None and sampler.takes_largest
            token = Token(largest) if known and largest is not None else sampler.choose(logits)
        except (RuntimeError, IndexError) as error:
            job.end("error", f"no token can be drawn: {error}")
            return
        self.counts.generated_tokens += 1
        job.add(token)

    # ---- the model -------------------------------------------------------------------------------

    def _new_cache(self) -> DeviceCache:
        shape = expected_shape(self.model)
        plain: Any = DynamicCache(config=self.model.config)
        cache = None if shape is None else from_dynamic(plain, shape, 0, self._notes)
        if cache is None:
            name = type(self.model).__name__
            raise Error(f"[serve] {name} keeps no keys and values that rows can share")
        return cache

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: DeviceCache
    ) -> torch.Tensor:
        """The logits of the last token of every row, ``[rows, 1 or more, vocabulary]``."""
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": mask, "use_cache": True}
        if self._names.positions:
            given["position_ids"] = positions
        if self._names.keep:
            given["logits_to_keep"] = 1
        before = cache.length
        try:
            outputs = self.model(**given, past_key_values=cache, return_dict=True)
        except BaseException:
            if cache.length > before:
                cache.advance(before)
            raise
        logits: torch.Tensor = outputs.logits
        return logits
