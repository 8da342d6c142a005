"""Continuous batching: one thread makes the tokens of all requests of a model.

Between two steps requests are taken in, cancelled and ended. Prompts are computed in chunks beside
the steps, the shortest rest first, so that a long prompt holds up neither rows nor short prompts.
Sequences of threads bring their prompts' keys and values along and may choose their tokens
themselves.
Invariant: only the scheduler's thread touches the common buffers; every job that was submitted gets
exactly one End, and every sequence that joined leaves, whatever happens.

A job that may get longer than rows of its model can be without changing each other (rotary.py) runs
alone: its prompt in one call as `generate` computes it, with no other row, and nothing remembered.
So does each job of a model that counts positions by what a cache holds (own_positions.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rm_abstract.generation.greedy_step import Refused
from rm_abstract.generation.jobs import Closed, Job, Outbox, QueueFull, Token
from rm_abstract.generation.model_calls import ModelCalls, Programs, no_program
from rm_abstract.generation.own_positions import rows_count_their_own
from rm_abstract.generation.prefixes import Prefixes, begin_alike, content_of
from rm_abstract.generation.prompt_batch import computed_together
from rm_abstract.generation.rotary import independent_length
from rm_abstract.generation.rows import Calls, Row, Rows, Step
from rm_abstract.generation.sampling import Sampler
from rm_abstract.generation.thread_sequence import ThreadSequence
from rm_abstract.kv.device_cache import DeviceCache

_LONGEST_WAIT_S = 0.05  # for a thread's choice, before others go on without it
# Tokens of a prompt in one call while it is longer than what may lie between two steps: a short
# prompt that comes meanwhile waits for one such piece. Where there are no matrix tiles products of
# more rows pack weights first, in every call.
_PIECE = 32


@dataclass(frozen=True, kw_only=True)
class Limits:
    rows: int = 16  # that decode together, prompts under way included
    waiting: int = 64  # requests beyond those
    prompt_chunk: int = 64  # tokens of a prompt between two steps
    prompts_at_once: int = 4  # that end between two steps, where so many wait
    prefix_bytes: int = 256 << 20  # keys and values of earlier texts


@dataclass
class Counts:
    """What happened so far; written by the scheduler's thread, read by any."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    step_rows: int = 0  # rows that were live, summed over steps
    steps_apart: int = 0  # of these, made again for each row alone because the first try failed
    waiting: int = 0
    running: int = 0


@dataclass(eq=False)
class _Prompt:
    """A prompt under way: of `job.prompt`, `cache.length` tokens are computed."""

    job: Job
    cache: DeviceCache
    row: _Text
    alone: bool

    def left(self) -> int:
        return len(self.job.prompt) - self.cache.length


class _Text:
    """Implements rows.Row for a job; `alone`: no other row may be computed beside it."""

    def __init__(self, job: Job, sampler: Sampler, counts: Counts, alone: bool) -> None:
        self.job, self._sampler, self._counts, self.alone = job, sampler, counts, alone
        self.last: int | None = None
        self.position = len(job.prompt)

    @property
    def ended(self) -> bool:
        return self.job.ended

    def left(self) -> int:
        return self.job.limit - len(self.job.made)

    def take_back(self) -> None:
        """The last token of the prompt goes through the model with the first step."""
        self.last, self.position = self.job.prompt[-1], len(self.job.prompt) - 1

    def accept(self, logits: Callable[[], torch.Tensor], largest: int) -> None:
        """What cannot be drawn from, such as NaN, ends this job alone."""
        sampler = self._sampler
        try:
            token = Token(largest) if sampler.takes_largest else sampler.choose(logits())
        except Exception as error:  # no memory, say, or a token that the vocabulary does not have
            self.job.end("error", f"no token can be drawn: {error}")
            return
        self._counts.generated_tokens += 1
        self.job.add(token)
        self.last = token.id

    def failed(self, error: Exception) -> None:
        self.job.end("error", f"{type(error).__name__}: {error}")


class Scheduler:
    """Any thread may call submit, join, cancel and close.

    The thread starts with the first request. Without `company` it stays until `close`. `company`
    says how many threads generate: a sequence that is alone goes back to its thread, and the
    scheduler's ends with the last one; `failed` then hears of errors of common steps. Jobs that may
    have more than `independent` tokens run alone; None: none do.
    """

    def __init__(
        self,
        calls: Calls,
        limits: Limits | None = None,
        company: Callable[[], int] | None = None,
        failed: Callable[[Exception], None] | None = None,
        independent: int | None = None,
    ) -> None:
        self.limits, self.counts = limits or Limits(), Counts()
        self._independent = independent
        self._calls, self._company, self._failed = calls, company, failed
        self._changed = threading.Condition()
        self._open: list[Job] = []  # taken, and not ended when the last one came
        self._waiting: list[Job] = []
        self._joining: list[ThreadSequence] = []
        self._prompts: list[_Prompt] = []
        self._closed = False
        self._error = ""  # that ended the thread
        self._prefixes = Prefixes(self.limits.prefix_bytes)
        self._outbox = Outbox()
        self._rows = Rows(calls, self._outbox.deliver)
        self._step_s = _LONGEST_WAIT_S
        self._thread: threading.Thread | None = None

    @staticmethod
    def of(model: Any, limits: Limits | None = None, programs: Programs = no_program) -> Scheduler:
        """For a causal language model of transformers, on the CPU. Raises Error for one that this
        cannot batch."""
        config = model.config.get_text_config(decoder=True)
        independent, calls = independent_length(config), ModelCalls.of_model(model, programs)
        if not calls.gives_positions:
            plain = ModelCalls.of_model(model)
            if not rows_count_their_own(plain, int(config.vocab_size)):
                independent = 0
        return Scheduler(calls, limits, independent=independent)

    def submit(self, *jobs: Job) -> None:
        """All of them or none. Raises QueueFull or Closed."""
        with self._changed:
            if self._closed:
                raise Closed(self.fault())
            # Whoever heard of an end finds its place free, whatever the thread is at.
            self._open = [job for job in self._open if not job.ended]
            if len(self._open) + len(jobs) > self.limits.rows + self.limits.waiting:
                raise QueueFull(f"{len(self._waiting)} requests are waiting")
            for job in jobs:
                job.outbox = self._outbox
            self._open += jobs
            self._waiting += jobs
            self.counts.waiting = len(self._waiting)
            self._go()

    def cancel(self, job: Job) -> None:
        """The job gets its End before the next step; one that ended is left alone."""
        with self._changed:
            job.cancelled = True
            self._changed.notify_all()

    def join(self, sequence: ThreadSequence) -> bool:
        """Its next steps are made here, until it leaves. False: no more are made here."""
        with self._changed:
            if self._closed:
                return False
            self._joining.append(sequence)
            self._go()
            return True

    def answer(self, sequence: ThreadSequence, token: int) -> None:
        """What the sequence goes on with after the logits it got."""
        with self._changed:
            sequence.last = token
            self._changed.notify_all()

    def fault(self) -> str:
        """Why no more requests are taken; empty while they are."""
        if self._error:
            return f"the scheduler ended: {self._error}"
        return "the model is being unloaded" if self._closed else ""

    def close(self) -> None:
        """Ends every job as cancelled, gives sequences back to their threads, and waits for its own
        thread."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and threading.current_thread() is not thread:
            thread.join()

    def forked(self) -> None:
        """In a child made by fork, which the thread is not part of."""
        self._changed = threading.Condition()
        self._closed = True
        for sequence in self._thread_sequences():
            sequence.forked()

    def _go(self) -> None:
        """Under the lock: something is to be done."""
        if self._thread is None:
            # One that ends with its sequences is waited for when Python ends, as they are.
            stays = self._company is None
            self._thread = threading.Thread(target=self._run, name="rm-scheduler", daemon=stays)
            self._thread.start()
        self._changed.notify_all()

    # ---- the scheduler's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with torch.no_grad():
                while self._wait():
                    self._raise_fault()
                    self._sweep()
                    self._admit()
                    self._advance_prompts()
                    self._advance_rows()
        except Exception as error:  # of ours: the model's own end no more than their requests
            self._error = f"{type(error).__name__}: {error}"
            raise
        finally:
            with self._changed:
                self._closed = True
            if not self._abandoned():  # else nobody may start to compute now: they wait on
                self._send_home()
            for job in self._open:
                job.end("error" if self._error else "cancelled", self.fault())
            self._outbox.deliver()

    def _raise_fault(self) -> None:
        """What a listener raised."""
        if self._outbox.fault is not None:
            raise self._outbox.fault

    def _wait(self) -> bool:
        """Until there is something to do. False: no more."""
        if not self._due():
            self._outbox.deliver()
            self._raise_fault()
        with self._changed:
            while not self._closed and not self._due():
                if self._company is not None and not self._rows.live():
                    self._closed = True  # nobody joins from here on
                else:
                    self._changed.wait(None if self._company is None else 1.0)
                    self._closed = self._closed or self._abandoned()
            return not self._closed

    def _due(self) -> bool:
        rows = any(row.ended or row.last is not None for row in self._rows.live())
        return bool(self._waiting or self._joining or self._prompts or rows)

    def _abandoned(self) -> bool:
        """Python ends, and does not wait for any of their threads."""
        if self._company is None or threading.main_thread().is_alive():
            return False
        return all(sequence.daemon for sequence in self._thread_sequences())

    def _thread_sequences(self) -> list[ThreadSequence]:
        return [
            *self._joining,
            *(row for row in self._rows.live() if isinstance(row, ThreadSequence)),
        ]

    def _everybody(self) -> list[Job]:
        with self._changed:
            jobs = list(self._waiting)
        rows = [row.job for row in self._rows.live() if isinstance(row, _Text)]
        return jobs + [p.job for p in self._prompts] + rows

    def _sweep(self) -> None:
        """Ends what was cancelled or is late, and forgets what ended."""
        for job in self._everybody():
            reason = job.expired()
            if reason is not None:
                job.end(reason)
        with self._changed:
            self._waiting = [job for job in self._waiting if not job.ended]
            self._joining = [sequence for sequence in self._joining if not sequence.gone]
            self._closed = self._closed or self._abandoned()
        self._prompts = [p for p in self._prompts if not p.job.ended]
        self._keep_ended()
        self._rows.drop_ended()
        self._count()

    def _count(self) -> None:
        with self._changed:
            self.counts.waiting = len(self._waiting)
            self.counts.running = len(self._prompts) + len(self._rows.live())

    def _admit(self) -> None:
        free = max(self.limits.rows - len(self._prompts) - len(self._rows.live()), 0)
        while free and self._joining:
            self._enter(self._joining[0])  # it stays there until it is a row: nobody is forgotten
            with self._changed:
                self._joining.pop(0)
            free -= 1
        with self._changed:
            self._waiting.sort(key=lambda job: job.priority)  # stable: first come, first served
            count = self._admissible(free)
            admitted, self._waiting = self._waiting[:count], self._waiting[count:]
        for job in admitted:
            alone = self._alone(job)
            try:
                text = _Text(job, Sampler(job.sampling), self.counts, alone)
                self._prompts.append(_Prompt(job, self._calls.new_cache(), text, alone))
            except Exception as error:  # only this request hears of it
                job.end("error", f"{type(error).__name__}: {error}")
        self._count()
        if self._company is not None and len(self._rows.live()) == 1 and self._company() < 2:
            self._send_home()

    def _alone(self, job: Job) -> bool:
        return self._independent is not None and len(job.prompt) + job.limit > self._independent

    def _admissible(self, free: int) -> int:
        """How many of those that wait may begin now; who has to be alone holds up all behind it."""
        rows = [row for row in self._rows.live() if isinstance(row, _Text)]
        under_way = [*(prompt.alone for prompt in self._prompts), *(row.alone for row in rows)]
        if any(under_way):
            return 0
        for count, job in enumerate(self._waiting[:free]):
            if self._alone(job):
                return count or int(not under_way)
        return min(free, len(self._waiting))

    # ---- sequences of threads --------------------------------------------------------------------

    def _enter(self, sequence: ThreadSequence) -> None:
        live = len(self._rows.live())
        about = min(self._company() if self._company is not None else 1, self.limits.rows)
        try:
            self._rows.join(sequence, sequence.cache, sequence.shown(), max(about - live - 1, 0))
            sequence.in_own_cache = False
        except Exception as error:  # no memory, say: it goes on where it was
            sequence.failed(error)

    def _send_home(self) -> None:
        """Sequences of threads get what was appended for them, and go on alone."""
        with self._changed:
            sequences, self._joining = self._thread_sequences(), []
        for sequence in sequences:
            if not sequence.gone and not sequence.in_own_cache:
                self._rows.give_back(sequence, sequence.cache, sequence.steps)
                sequence.in_own_cache = True
            sequence.leave()
        self._rows.drop_ended()

    # ---- prompts ---------------------------------------------------------------------------------

    def _advance_prompts(self) -> None:
        """A piece of a prompt; of prompts that end with their next piece several, in few calls. A
        step costs about as much for one row as for all, so rows that begin together save steps."""
        chunk = self.limits.prompt_chunk
        short = sum(prompt.left() <= chunk for prompt in self._prompts)
        whole = budget = chunk * min(max(short, 1), self.limits.prompts_at_once)
        while budget > 0 and self._prompts:
            if budget < whole:
                self._admit()  # a short prompt that came meanwhile
            group = self._next_prompts(budget)
            for other in self._prompts:
                other.job.turns_waited += other not in group
            budget -= self._compute(group)
        self._count()  # a prompt may end with its first token

    def _next_prompts(self, budget: int) -> list[_Prompt]:
        """The most urgent one; with it others that end with their next piece and may be computed in
        the same call: they hold as much already, and gain nothing by each other's beginning."""
        first, *others = sorted(self._prompts, key=self._urgency)
        if not self._extended(first):
            return [first]
        group, at = [first], first.cache.length
        budget -= _cost(first.left())
        for other in others:
            if _cost(other.left()) > budget:
                continue
            rest = other.job.prompt[at:]
            alike = any(begin_alike(rest, one.job.prompt[at:]) for one in group)
            equal = any(other.job.prompt == one.job.prompt for one in group)
            if not alike and not equal and self._extended(other) and other.cache.length == at:
                group.append(other)
                budget -= _cost(other.left())
        return group

    def _extended(self, prompt: _Prompt) -> bool:
        """It goes on from what is known of it. True: it ends with its next piece, and may do so
        beside others: not a single token, which would have nothing behind it in its first step."""
        if prompt.alone or len(prompt.job.prompt) < 2:
            return False
        try:
            self._go_on_from_known(prompt)
        except Exception:  # no memory, say: told to its request when it is computed
            return False
        return prompt.left() <= self.limits.prompt_chunk

    def _go_on_from_known(self, prompt: _Prompt) -> None:
        if not prompt.alone:
            self._cached(prompt.job, self._prefixes.extend(prompt.job.prompt, prompt.cache))

    def _compute(self, group: list[_Prompt]) -> int:
        """A piece of each; what they cost of the tokens between two steps."""
        found = self._computed_together(group) if len(group) > 1 else None
        if found is None:
            return sum(_cost(self._chunk(prompt)) for prompt in group)
        cost = 0
        for prompt, (logits, cache) in zip(group, found, strict=True):
            count, prompt.cache = prompt.left(), cache
            self.counts.prompt_tokens += count
            cost += _cost(count)
            try:
                self._remember(prompt)
            except Exception as error:
                self._give_up(prompt, error)
            else:
                self._begin_rows(prompt, logits)
        return cost

    def _computed_together(
        self, group: list[_Prompt]
    ) -> list[tuple[torch.Tensor | None, DeviceCache]] | None:
        """None where the call failed: by one of them, mostly, and each alone says whose fault."""
        pieces = [prompt.job.prompt[prompt.cache.length :] for prompt in group]
        self._outbox.deliver()
        try:
            return computed_together(self._calls, pieces, [prompt.cache for prompt in group])
        except Exception:
            return None

    def _cached(self, job: Job, count: int) -> None:
        job.cached_tokens += count
        self.counts.cached_tokens += count

    def _urgency(self, prompt: _Prompt) -> tuple[int, int]:
        """The shortest rest first; who waited for others' chunks counts as shorter by as much."""
        waited = prompt.job.turns_waited * self.limits.prompt_chunk // 4
        return prompt.job.priority, prompt.left() - waited

    def _chunk(self, prompt: _Prompt) -> int:
        """Computes the next tokens of the prompt; how many."""
        before = self.counts.prompt_tokens
        try:
            logits = self._computed(prompt)
            self._remember(prompt)
        except Exception as error:
            self._give_up(prompt, error)
            return 0
        if not prompt.left():
            self._begin_rows(prompt, logits[0, -1])
        return self.counts.prompt_tokens - before

    def _give_up(self, prompt: _Prompt, error: Exception) -> None:
        """The model's own error, or no memory: only this request hears of it."""
        prompt.row.failed(error)
        self._prompts.remove(prompt)

    def _remember(self, prompt: _Prompt) -> None:
        """A prompt under way is known to others: those that begin alike go on from there."""
        if not prompt.alone:
            done = prompt.job.prompt[: prompt.cache.length]
            self._prefixes.insert(done, content_of(prompt.cache))

    def _computed(self, prompt: _Prompt) -> torch.Tensor:
        job, cache = prompt.job, prompt.cache
        self._go_on_from_known(prompt)
        at, most = cache.length, self.limits.prompt_chunk
        if prompt.alone:
            most = prompt.left()
        elif prompt.left() > most:
            most = min(most, _PIECE)
        ids = job.prompt[at : at + most]
        end = at + len(ids)
        self._outbox.deliver()
        logits = self._calls.logits(
            torch.tensor([ids]),
            torch.arange(at, end)[None],
            torch.ones(1, end, dtype=torch.long),
            cache,
        )
        self.counts.prompt_tokens += len(ids)
        return logits

    def _begin_rows(self, prompt: _Prompt, logits: torch.Tensor | None) -> None:
        """`prompt` is computed, and so are those that equal it: choices of one request, mostly.
        Without `logits` its last token is the row's first."""
        largest = -1 if logits is None else int(logits.float().max(-1).indices)
        if logits is None:
            prompt.cache.advance(len(prompt.job.prompt) - 1)
        equal = [p for p in self._prompts if p.job.prompt == prompt.job.prompt]
        self._prompts = [p for p in self._prompts if p not in equal]
        for number, one in enumerate(equal, 1):
            self._cached(one.job, one.left() if one is not prompt else 0)
            if logits is None:
                one.row.take_back()
            else:
                one.row.accept(logits.float, largest)
            if one.job.ended:
                continue
            to_follow = len(equal) - number + len(self._prompts)
            try:
                self._rows.join(one.row, prompt.cache, to_follow=to_follow)
            except Exception as error:  # no memory, say
                one.row.failed(error)

    # ---- rows ------------------------------------------------------------------------------------

    def _advance_rows(self) -> None:
        if not self._gathered():
            return
        started = time.monotonic()
        try:
            steps = self._steps()
        except Exception as error:  # of threads' sequences, or of ours
            self._fail(error)
            return
        self._step_s = time.monotonic() - started
        self.counts.steps += 1
        self.counts.step_rows += sum(len(step.rows) for step in steps)
        for step in steps:
            step.accept()

    def _steps(self) -> list[Step]:
        """A step of all rows. One of jobs that fails is made again for each job alone: a job hears
        of its own error only. Threads' sequences go home, and on alone: raises what was raised."""
        try:
            return [self._step()]
        except Exception:
            if self._company is not None:
                raise
            self.counts.steps_apart += 1
            return self._rows.step_apart()

    def _step(self) -> Step:
        """Of what a program refuses, the original judges jobs at once, and threads' sequences each
        in its thread: raises Refused then."""
        try:
            return self._rows.step()
        except Refused:
            if self._company is not None:
                raise
            return self._rows.step(judged=True)

    def _keep_ended(self) -> None:
        """What was made goes into the next prompt where a conversation goes on."""
        for row in self._rows.live():
            if row.ended and isinstance(row, _Text) and not row.alone:
                text = [*row.job.prompt, *row.job.made]
                try:
                    self._prefixes.insert(text[: self._rows.held(row)], self._rows.content(row))
                except (MemoryError, RuntimeError):  # no memory: its next prompt is computed whole
                    continue

    def _gathered(self) -> bool:
        """Some rows can go on. Waits a while for those whose choice is on its way."""
        rows = self._rows.live()
        if not all(_settled(row) for row in rows):
            self._outbox.deliver()
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or all(_settled(row) for row in rows),
                min(self._step_s, _LONGEST_WAIT_S),
            )
        return any(row.last is not None and not row.ended for row in rows)

    def _fail(self, error: Exception) -> None:
        rows = self._rows.live()
        self._send_home()
        for row in rows:
            row.failed(error)
        self._rows.clear()
        if self._failed is not None:
            self._failed(error)


def _cost(tokens: int) -> int:
    """Of a piece, of what may lie between two steps: fewer tokens take as long."""
    return max(tokens, _PIECE)


def _settled(row: Row) -> bool:
    return row.ended or row.last is not None
