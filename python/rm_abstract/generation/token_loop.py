"""`generate` with one program step a token: greedy or sampled, streamed, scored, stopped at will.

transformers has resolved everything when `_sample` is called; what it would do there is done here
in the same order and by its own processors, criteria and random draws. The first steps are ordinary
calls of the model: they compile, are compared and checked. Once one was served by a program, its
steps are run directly until rows end, the cache is full, a callback has changed the model or the
program refuses a step, which is an ordinary call then. A call that asks for nothing but greedy
tokens leaves even that to a loop in the core. Whatever a callback raises, the cache then holds
whole steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from transformers.generation.utils import (
    GenerateDecoderOnlyOutput,
    GenerateEncoderDecoderOutput,
    GenerationMixin,
)

from rm_abstract.engines.program_engine import ProgramEngine
from rm_abstract.generation.ahead import Ahead, forgets
from rm_abstract.generation.drafts import WIDTHS, can_widen, widened
from rm_abstract.generation.greedy_step import GreedyStep, Refused
from rm_abstract.generation.served import ServedModel, served
from rm_abstract.generation.sharing import Sharing, release_workers
from rm_abstract.generation.thread_sequence import ThreadSequence
from rm_abstract.kv import kv_cache
from rm_abstract.kv.names import NAMES, cache_name

if TYPE_CHECKING:
    from rm_abstract import _core
    from rm_abstract.generation.request import GenerationRequest
    from rm_abstract.generation.state import RoutedModel

_SILENT = ("MaxLengthCriteria", "EosTokenCriteria")
_KNOWN = {"attention_mask", "position_ids", *NAMES, "use_cache", "logits_to_keep"}
_KNOWN |= {"encoder_outputs", "decoder_attention_mask", "decoder_position_ids"}
_KNOWN |= {"token_type_ids", "mm_token_type_ids"}  # of new tokens: those of the last one, zeros
_NEEDED = ("_prefill", "_update_model_kwargs_for_generation", "prepare_inputs_for_generation")


class TokenLoopEngine:
    """Implements engine.GenerationEngine with the programs that serve a model's forward."""

    name = "native"

    def __init__(self, routed: RoutedModel) -> None:
        self._routed = routed

    def eligible(self, request: GenerationRequest) -> str:
        return why_not(request)

    def start(self, request: GenerationRequest) -> TokenLoop:
        return TokenLoop(self._routed, request)


def why_not(request: GenerationRequest) -> str:
    """What in a request this loop does not do; empty when it does all of it."""
    config, model = request.config, request.model
    if config.num_beams != 1:
        return f"num_beams={config.num_beams}"
    if request.synced_gpus:
        return "synced_gpus"
    if config.is_assistant:
        return "assisted decoding"
    if config.prefill_chunk_size:
        return "prefill_chunk_size"
    if config.return_dict_in_generate:
        for name in ("output_attentions", "output_hidden_states"):
            if getattr(config, name):
                return name
    unknown = sorted(set(request.model_kwargs) - _KNOWN)
    if unknown and not _updates_as_usual(model):
        return f"the argument {unknown[0]}"
    cache = kv_cache.device_part(request.model_kwargs.get(cache_name()))
    if cache is None:
        return "the kind of cache"
    if cache.residence is not None:
        return "a device whose programs the core cannot run"
    if not all(hasattr(model, name) for name in _NEEDED):
        return "this version of transformers"
    return ""


def _updates_as_usual(model: Any) -> bool:
    """Arguments that this file does not know are the same objects in every step, or in none."""
    own = getattr(type(model), "_update_model_kwargs_for_generation", None)
    return own is GenerationMixin._update_model_kwargs_for_generation


class TokenLoop:
    """Implements engine.TokenStream: one call of generate."""

    def __init__(self, router: RoutedModel, request: GenerationRequest) -> None:
        self._model, self._router = request.model, router
        self._config = config = request.config
        self._kwargs = request.model_kwargs
        self._ids = request.input_ids
        self._processors, self._criteria = request.processors, request.criteria
        self._streamer = request.streamer
        self._chunk = request.chunk_tokens or 2**62
        self._dict = bool(config.return_dict_in_generate)
        self._scores: Any = () if self._dict and config.output_scores else None
        self._logits: Any = () if self._dict and config.output_logits else None
        self._silent = all(type(c).__name__ in _SILENT for c in self._criteria)
        self._pads = any(hasattr(c, "eos_token_id") for c in self._criteria)
        self._pad = config._pad_token_tensor
        self._eos: set[int] = set()
        self._length = 2**62
        for criterion in self._criteria if self._silent else ():
            if type(criterion).__name__ == "EosTokenCriteria":
                self._eos.update(criterion.eos_token_id.reshape(-1).tolist())
            else:
                self._length = min(self._length, int(criterion.max_length))
        longest = getattr(config, "max_length", None)  # rows are never longer
        self._longest = int(longest) if longest else self._length
        self._finished = [False] * self._ids.shape[0]
        self._last: list[int] = []
        self._stay = ExitStack()
        self._registered = False

    def __iter__(self) -> Iterator[torch.Tensor]:
        outputs = self._model._prefill(self._ids, self._config, self._kwargs)
        with ExitStack() as self._stay:
            over = self._take(outputs)
            yield self._ids[:, -1:]
            while not over:
                at = self._ids.shape[1]
                over = self._next()
                yield self._ids[:, at:]
        if self._streamer is not None:
            self._streamer.end()

    def result(self) -> Any:
        return self._output() if self._dict else self._ids

    def _next(self) -> bool:
        """At least one token a row. True: all ended."""
        inputs = self._inputs()
        outputs = self._model(**inputs, return_dict=True)
        served = self._router.served_latest_call  # asked at once: what follows is the user's code
        over = self._take(outputs)
        if not over and served:
            over = self._steps(inputs)
        return over

    # ---- one token -------------------------------------------------------------------------------

    def _inputs(self) -> dict[str, Any]:
        found = self._model.prepare_inputs_for_generation(
            self._ids, next_sequence_length=1, **self._kwargs
        )
        return dict(found)

    def _take(self, outputs: Any) -> bool:
        self._advance(outputs, 1)
        return self._accept(outputs.logits)

    def _advance(self, outputs: Any, count: int) -> None:
        # Of several tokens at once transformers repeats the types of as many before them.
        each = 1 if self._kwargs.get("token_type_ids") is not None else count
        for _ in range(count // each):
            self._kwargs = self._model._update_model_kwargs_for_generation(
                outputs,
                self._kwargs,
                is_encoder_decoder=self._model.config.is_encoder_decoder,
                num_new_tokens=each,
            )

    def _accept(self, logits: torch.Tensor) -> bool:
        """Chooses every row's next token from `logits` ``[rows, n, vocabulary]``. True: all ended.

        The float32 copy is what processors may write into.
        """
        raw = logits[:, -1].to(copy=True, dtype=torch.float32)
        scores = self._processors(self._ids, raw)
        if self._scores is not None:
            self._scores += (scores,)
        if self._logits is not None:
            self._logits += (raw,)
        if self._config.do_sample:
            chances = torch.nn.functional.softmax(scores, dim=-1)
            tokens = torch.multinomial(chances, num_samples=1).squeeze(1)
        else:
            tokens = torch.argmax(scores, dim=-1)
        if self._pads and any(self._finished):
            ended = torch.tensor(self._finished, device=tokens.device)
            tokens = torch.where(ended, self._pad, tokens)
        return self._add(tokens)

    def _add(self, tokens: torch.Tensor) -> bool:
        """Every row's next token is known. True: all ended."""
        self._ids = torch.cat([self._ids, tokens[:, None]], dim=-1)
        self._last = tokens.tolist()
        self._end_rows()
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return all(self._finished)

    def _end_rows(self) -> None:
        before = self._finished
        if self._silent:
            full = self._ids.shape[1] >= self._length
            ended = [full or token in self._eos for token in self._last]
        else:
            ended = self._criteria(self._ids, self._scores).tolist()
        self._finished = [a or b for a, b in zip(before, ended, strict=True)]

    # ---- many tokens -----------------------------------------------------------------------------

    def _tokens_only(self) -> bool:
        """The largest logit decides, and nobody asks for logits."""
        kept = self._scores is not None or self._logits is not None
        return not self._config.do_sample and not len(self._processors) and not kept

    def _plain(self) -> bool:
        """Nothing but greedy tokens is asked for, all at the end."""
        return self._tokens_only() and self._streamer is None and self._silent

    def _steps(self, inputs: dict[str, Any]) -> bool:
        """Tokens from the program that served `inputs`, while there is room. True: all ended."""
        found = served(self._router, {**inputs, "return_dict": True})
        if found is None:
            return False
        entry, leaves = found
        following = self._inputs()
        changing = set(following) - _KNOWN - {"input_ids", "decoder_input_ids"}
        if any(following[name] is not inputs.get(name) for name in changing):
            return False
        by_identity = {id(value): following[name] for name, value in inputs.items()}
        leaves = [by_identity.get(id(leaf), leaf) for leaf in leaves]
        # The core's own loop, and what batches rows of threads, read tokens on the host.
        here = self._ids.device.type == "cpu" and not self._on_gpu()
        shared = self._shareable(following) if here else None
        if shared is not None and shared.concurrent():
            if self._with_others(shared, following):
                return all(self._finished)
            shared = None  # nobody to share with: not asked again before the buffers are full
        concurrent = shared.concurrent if shared is not None else None
        step = GreedyStep.serving(entry, leaves, may_be_away=True)
        if step is None:
            return False
        cache = kv_cache.device_part(self._kwargs[cache_name()])
        drafting = self._drafting(step, following) if here else None
        before = step.length()
        try:
            if not here and self._can_run_ahead(step):
                self._ahead(step, cache.capacity)
            elif not here:
                self._one_by_one(step, cache.capacity)
            elif self._plain():
                self._in_core(step, cache.capacity, concurrent, drafting)
            elif self._tokens_only() and self._ids.shape[0] == 1:
                self._delivering(step, cache.capacity, concurrent, drafting)
            else:
                self._one_by_one(step, cache.capacity, concurrent)
        finally:
            length = step.length()
            step.leave()
            cache.advance(length)
            self._router.loop_tokens += (length - before) * self._ids.shape[0]
        if length > before:
            self._advance({}, length - before)
        over = all(self._finished)
        if step.wants_checks and not over:
            self._make_checks()
        return over

    def _on_gpu(self) -> bool:
        """Whether programs run on a GPU; the model may lie on the CPU."""
        return bool(getattr(self._router.engine, "on_gpu", False))

    def _can_run_ahead(self, step: GreedyStep) -> bool:
        """Nobody looks at a token before all are there."""
        if step.device != self._ids.device and not self._tokens_only():
            return False  # processors and the generator of random numbers are where the model is
        kept = self._scores is not None or self._logits is not None or self._streamer is not None
        return self._silent and not kept and forgets(self._processors)

    def _ahead(self, step: GreedyStep, capacity: int) -> None:
        """On a device of its own: tokens are chosen there and read together."""
        pad = self._pad.to(step.device) if self._pads and self._pad is not None else None
        ids = self._ids.to(step.device)
        ahead = Ahead(step, ids, sorted(self._eos), pad, self._finished)
        steps = min(capacity - step.length(), self._room())
        if steps < 1:
            return
        tokens = ahead.run(steps, self._processors, bool(self._config.do_sample))
        tokens = tokens.to(self._ids.device)
        self._ids = torch.cat([self._ids, tokens], dim=-1)
        self._last = tokens[:, -1].tolist()
        self._finished = [
            a or self._ids.shape[1] >= self._length or not self._eos.isdisjoint(row)
            for a, row in zip(self._finished, tokens.tolist(), strict=True)
        ]

    def _one_by_one(
        self, step: GreedyStep, capacity: int, stop: Callable[[], bool] | None = None
    ) -> None:
        for _ in range(min(capacity - step.length(), self._chunk)):
            try:
                logits, _ = step.one(self._last)
            except Refused:
                return  # the original judges this step
            if self._accept(logits) or (stop is not None and stop()):
                return
            if not self._router.holds():
                return

    def _in_core(
        self,
        step: GreedyStep,
        capacity: int,
        stop: Callable[[], bool] | None,
        drafting: _core.Drafting | None,
    ) -> None:
        pad = int(self._pad) if self._pads and self._pad is not None else 0
        rows = self._ids.shape[0]
        eos = [list(self._eos)] * rows
        tokens, self._finished = step.run(
            self._room(), capacity, eos, pad, self._finished, stop=stop, drafting=drafting
        )
        self._append(tokens)

    def _room(self) -> int:
        """Tokens of a row that may come before the stream's next item."""
        return min(min(self._length, self._longest) - self._ids.shape[1], self._chunk)

    def _delivering(
        self,
        step: GreedyStep,
        capacity: int,
        stop: Callable[[], bool] | None,
        drafting: _core.Drafting | None,
    ) -> None:
        """Tokens of one row from the core, each streamed and asked about before the next counts."""
        raised: list[BaseException] = []

        def on_tokens(tokens: list[int]) -> int:
            for number, token in enumerate(tokens, 1):
                try:
                    if self._add(torch.tensor([token])) or not self._router.holds():
                        return number
                except BaseException as error:
                    raised.append(error)
                    return number
            return -1

        step.run(
            self._room(),
            capacity,
            [[]],
            0,
            [False],
            stop=stop,
            drafting=drafting,
            on_tokens=on_tokens,
        )
        if raised:
            raise raised[0]

    # ---- drafts ----------------------------------------------------------------------------------

    def _drafting(self, step: GreedyStep, inputs: dict[str, Any]) -> _core.Drafting | None:
        """Drafts for the row of this step; None where there is none to look for, or where the model
        checks values: what nobody asked for is not to be refused."""
        if step.variant.may_refuse:
            return None
        drafts, engine = self._router.generation.drafts, self._router.engine
        cache = self._kwargs[cache_name()]
        if not isinstance(engine, ProgramEngine) or not self._tokens_only():
            return None
        if not can_widen(inputs):
            return None
        if not kv_cache.is_device(cache) or self._longest >= 2**62:
            return None
        margin = drafts.margin(engine.gate, step)
        if margin is None:
            return None
        fitting = [w for w in WIDTHS if cache.length + w <= cache.capacity]  # else buffers grow
        for width in fitting:
            check = self.step(widened(inputs, width), width)
            if check is not None:
                step.add_check(check, width)
        may_want = WIDTHS[-1] in fitting and not step.has_checks and not drafts.awaited
        return step.drafting(drafts.policy, self._ids[0].tolist(), margin, may_want)

    def _make_checks(self) -> None:
        """An ordinary call over several tokens: compiled and compared. Its tokens do not count.

        The generation goes on without drafts while another process captures it.
        """
        from rm_abstract.engines.deferrals import unhurried  # warm processes need none

        drafts = self._router.generation.drafts
        cache = self._kwargs[cache_name()]
        inputs, length, width = widened(self._inputs(), WIDTHS[-1]), cache.length, WIDTHS[-1]
        cache.on_trial = True
        try:
            for _ in range(2):  # the second one is served, or no later one will be
                with unhurried(drafts.mode == "auto") as begun:
                    outputs = self._model(**inputs, return_dict=True)
                cache.advance(length)
                if begun:
                    drafts.wait_for(begun[0])
                    return
                if self.step(inputs, width) is not None:
                    break
            drafts.refused = outputs.logits.shape[1] != width or self.step(inputs, width) is None
        finally:
            cache.advance(length)
            cache.on_trial = False

    def _append(self, tokens: list[int]) -> None:
        rows = self._ids.shape[0]
        if tokens:
            made = torch.tensor(tokens).reshape(-1, rows).T
            self._ids = torch.cat([self._ids, made], dim=-1)
            self._last = tokens[-rows:]
            self._end_rows()

    # ---- with others -----------------------------------------------------------------------------

    def _shareable(self, inputs: dict[str, Any]) -> Sharing | None:
        """Where this generation may share its steps with others; it is registered there then."""
        cache = self._kwargs[cache_name()]
        if self._chunk < 2**62 or self._longest >= 2**62 or not ThreadSequence.fits(inputs, cache):
            return None
        if self._dict or getattr(cache, "_is_user_defined", False):
            return None  # its content is looked at afterwards
        if torch.is_autocast_enabled("cpu"):
            return None  # the scheduler's thread has settings of its own
        if not self._plain() and any(layer.sliding_window for layer in cache.layers):
            return None  # who chooses may miss steps, and windows count positions of the buffers
        sharing = self._router.generation.sharing
        if sharing is not None and not self._registered:
            self._registered = True
            self._stay.callback(release_workers)
            self._stay.enter_context(sharing.registered())
        return sharing

    def _with_others(self, sharing: Sharing, inputs: dict[str, Any]) -> bool:
        """True when that gave tokens."""
        limit = min(self._length, self._longest) - self._ids.shape[1]
        sequence = ThreadSequence(inputs, limit, list(self._eos), chooses=not self._plain())
        host = ServedModel(self._model, self._router)

        def choose(logits: torch.Tensor) -> int | None:
            over = self._accept(logits[None, None])
            return self._last[0] if not over and self._router.holds() else None

        sharing.decode(sequence, host, choose)
        self._router.loop_tokens += sequence.steps
        self._append(sequence.tokens)
        if sequence.steps:
            self._advance({}, sequence.steps)
        return sequence.steps > 0

    # ---- programs --------------------------------------------------------------------------------

    def step(self, inputs: dict[str, Any], width: int = 1) -> GreedyStep | None:
        found = served(self._router, {**inputs, "return_dict": True})
        return None if found is None else GreedyStep.serving(*found, width)

    def _output(self) -> Any:
        parts = {
            "sequences": self._ids,
            "scores": self._scores,
            "logits": self._logits,
            cache_name(): self._kwargs[cache_name()],
        }
        if self._model.config.is_encoder_decoder:
            return GenerateEncoderDecoderOutput(**parts)
        return GenerateDecoderOnlyOutput(**parts)
