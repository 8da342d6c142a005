"""The requests that are understood, as OpenAI names their fields.

A field that is unknown, or known and not done, is refused by name: nothing is ignored that would
change the answer. Types are strict: a number in a string is no number.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

Tokens = Annotated[list[Annotated[StrictInt, Field(ge=0)]], Field(min_length=1)]
MOST_CHOICES = 128  # of one request, prompts times n
_SILENT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=(), strict=True)

    model: StrictStr

    @model_validator(mode="before")
    @classmethod
    def _without_labels(cls, given: Any) -> Any:
        """Drops what labels a request for its sender and does not change the answer."""
        if isinstance(given, dict):
            return {k: v for k, v in given.items() if k not in _SILENT}
        return given


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class _TextRequest(_Request):
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # ours, as other servers have it
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # JSON has no keys but strings.
    logit_bias: (
        dict[Annotated[int, Field(strict=False)], Annotated[float, Field(ge=-100, le=100)]] | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    stop: (
        Annotated[str, Field(max_length=1000)]
        | Annotated[list[Annotated[str, Field(max_length=1000)]], Field(max_length=16)]
        | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False  # ours: for measurements
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0  # ours: smaller ones go first

    def stops(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionRequest(_TextRequest):
    prompt: str | Tokens | list[str] | list[Tokens]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: Literal[False] | None = None
    suffix: Literal[""] | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of other than n is not supported")
        return self


class Message(BaseModel):
    # Tool calls and their results go to the template.
    model_config = ConfigDict(extra="allow", strict=True)

    role: Annotated[StrictStr, Field(min_length=1, max_length=64)]
    content: str | list[dict[str, Any]] | None = None

    def for_template(self) -> dict[str, Any]:
        """With its text in one string. Raises ValueError for parts that are no text."""
        found = {k: v for k, v in self.model_dump().items() if v is not None}
        if isinstance(self.content, list):
            parts = []
            for part in self.content:
                if part.get("type") != "text" or not isinstance(part.get("text"), str):
                    raise ValueError("only parts of type text are supported")
                parts.append(part["text"])
            found["content"] = "".join(parts)
        found.setdefault("content", "")
        return found


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class ChatRequest(_TextRequest):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: list[dict[str, Any]] | None = None  # given to the template
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Literal[True] | None = None
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # ours, as other servers have it


class EmbeddingRequest(_Request):
    input: str | Annotated[list[str], Field(min_length=1, max_length=2048)]
    encoding_format: Literal["float", "base64"] | None = None
