"""Bodies of requests. A field that is not here is refused by its name; one that is here is used, or can only say what is
so anyway (``store: false``). null is the same as leaving a field out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kittiwake.engine.request import MAX_BIAS, MAX_PRIORITY, MAX_SAMPLES, MAX_TOP_K, MAX_TOP_LOGPROBS

STATE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
MAX_STOPS = 64
MAX_KEYS = 256
MAX_BIASES = 1 << 16
MAX_SEED = 2**63 - 1

StateName = Annotated[str, Field(pattern=STATE_NAME, description="letters, digits, dots, dashes and underscores")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenName = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")]  # one spelling a token, so that none is given twice
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]
Stop = Annotated[str, Field(min_length=1)]


class Strict(BaseModel):
    """No field but those named, no value of another type. Lists are read up to their first wrong item (``fail_fast``) and
    objects have few keys: a large body may not make an error out of each of its values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _is_small(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_KEYS:
            raise ValueError(f"an object has {len(value)} fields, at most {MAX_KEYS} are read")
        return value


Unsupported = Annotated[None, Field(description="not supported: null only, as clients send that name every field")]


class StreamOptions(Strict):
    """What a stream holds beside the answer."""

    include_usage: bool | None = Field(None, description="a last chunk with usage and no choices")
    include_obfuscation: Literal[False] | None = None


class SamplingFields(Strict):
    """What the two ways of asking have in common."""

    model: str | None = Field(None, description="the served name; may be left out")
    stream: bool | None = Field(None, description="answer in server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only with stream")
    max_tokens: int | None = Field(None, ge=0, lt=2**31, description="most tokens to draw, reasoning among them")
    min_tokens: int | None = Field(None, ge=0, lt=2**31, description="ends of text and stops wait for that many tokens")
    temperature: float | None = Field(None, ge=0, description="1 if left out; 0 is greedy, whatever the filters say")
    top_p: float | None = Field(None, ge=0, le=1, description="1 (off) if left out; 0 is greedy")
    top_k: int | None = Field(None, ge=-1, le=MAX_TOP_K, description="0 or -1 (off) if left out")
    min_p: float | None = Field(None, ge=0, le=1, description="0 (off) if left out")
    seed: int | None = Field(
        None, ge=-MAX_SEED - 1, le=MAX_SEED, description="drawn at random if left out, and told in the header x-seed"
    )
    n: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="answers to draw, 1 if left out")
    stop: Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MAX_STOPS)] | None = Field(
        None, description="texts that end the answer and are not part of it"
    )
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = Field(None, description="go on past the end of text")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="reads the prompt too; 1 is off")
    logit_bias: dict[TokenName, Bias] | None = Field(
        None, description="token id → what is added to its logit; -100 bans it"
    )
    sampling_order: Literal["standard", "rwkv"] | None = Field(
        None, description="rwkv: the filters read the probabilities before the temperature"
    )
    cache_prompt: bool | None = Field(
        None, description="false: read the whole prompt, whatever is kept of its beginning"
    )
    return_progress: bool | None = Field(
        None, description="chunks that tell how much of the prompt is read; needs stream"
    )
    return_token_ids: bool | None = Field(None, description="token_ids in each choice, prompt_token_ids in the answer")
    priority: int | None = Field(None, ge=-MAX_PRIORITY, le=0, description="below 0: after those of others")
    timeout_s: float | None = Field(None, gt=0, le=1e6, description="give the request up when it has not ended by then")
    state: StateName | None = Field(None, description="go on from this named state")
    keep_state: StateName | None = Field(None, description="keep the state after the answer under this name")
    user: str | None = Field(None, description="not used")
    safety_identifier: str | None = Field(None, description="not used")
    metadata: dict[str, str] | None = Field(None, description="not used")
    store: Literal[False] | None = Field(None, description="nothing is stored")
    service_tier: Literal["auto", "default"] | None = None
    prompt_cache_key: str | None = Field(None, description="not used: prompts are found by what they say")

    @field_validator("logit_bias", "metadata", mode="before")
    @classmethod
    def _has_few(cls, value: Any, info: ValidationInfo) -> Any:
        most = MAX_BIASES if info.field_name == "logit_bias" else MAX_KEYS
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"{info.field_name} has {len(value)} entries, at most {most} are read")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> SamplingFields:
        for name in ("stream_options", "return_progress"):
            if getattr(self, name) and not self.stream:
                raise ValueError(f"{name} needs stream to be true")
        if self.keep_state and (self.n or 1) > 1:
            raise ValueError("keep_state keeps the state after one answer, n asks for several")
        return self


class TextPart(Strict):
    """A piece of a message."""

    type: Literal["text"]
    text: str
    cache_control: dict[str, Any] | None = Field(None, description="not used: prompts are cached anyway")
    prompt_cache_breakpoint: Unsupported = None


class ChatMessage(Strict):
    """One message. Those without any text are left out, unless they are the user's."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = Field(None, description="what was thought before an answer: not read again")
    reasoning: str | None = Field(None, description="the same by another name")
    name: Unsupported = None
    refusal: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    annotations: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None


class TextFormat(Strict):
    """The only form an answer can have."""

    type: Literal["text"]


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=100_000)]
    max_completion_tokens: int | None = Field(None, ge=1, lt=2**31, description="the newer name of max_tokens")
    logprobs: bool | None = Field(None, description="the log-probability of each token")
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="and of the likeliest beside it")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="none: answer at once; all others: think first. Refused where the template cannot do it"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of a Jinja template; enable_thinking works with the templates g1 too"
    )
    tools: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = Field(None, description="not used: there are no tools")
    functions: Annotated[list[Any], Field(fail_fast=True, max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None
    response_format: TextFormat | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True, min_length=1, max_length=1)] | None = None
    verbosity: Literal["medium"] | None = None
    audio: Unsupported = None
    moderation: Unsupported = None
    prediction: Unsupported = None
    prompt_cache_options: Unsupported = None
    prompt_cache_retention: Unsupported = None
    web_search_options: Unsupported = None

    @model_validator(mode="after")
    def _chat_fits_together(self) -> ChatRequest:
        if self.max_tokens == 0:
            raise ValueError("max_tokens must be at least 1")
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} contradict each other"
            )
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        return self


Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True, min_length=1)]
        | Ids
        | Annotated[list[Ids], Field(fail_fast=True, min_length=1)]
    )
    echo: bool | None = Field(None, description="the prompt first; with logprobs, those of the prompt too")
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="how many of the likeliest; 0: the drawn one only"
    )
    parse_special: bool | None = Field(None, description="text of the prompt may spell control tokens")
    best_of: int | None = Field(None, ge=1, le=MAX_SAMPLES, description="the same as n, or left out")
    suffix: Literal[""] | None = None

    @model_validator(mode="after")
    def _completion_fits_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ValueError("best_of must be the same as n: all answers that are drawn are returned")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1, or 0 with echo")
        if self.max_tokens == 0 and self.keep_state:
            raise ValueError("keep_state needs max_tokens to be at least 1")
        return self


class TokenizeRequest(Strict):
    """POST /tokenize: exactly one of prompt, content and messages."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = Field(None, description="another name of prompt")
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=100_000)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = Field(None, description="the text may spell control tokens")
    add_special_tokens: Literal[False] | None = Field(None, description="none are ever added")
    return_token_strs: bool | None = Field(None, description="token_strs: how each token is spelled")

    @model_validator(mode="after")
    def _is_one(self) -> TokenizeRequest:
        if [self.prompt, self.content, self.messages].count(None) != 2:
            raise ValueError("it needs exactly one of prompt, content and messages")
        return self


class DetokenizeRequest(Strict):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


class MakeStateRequest(Strict):
    """POST /v1/states: keep the state after a prompt, or after messages."""

    name: StateName
    model: str | None = None
    prompt: Annotated[str, Field(min_length=1)] | Ids | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=100_000)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    parse_special: bool | None = None
    state: StateName | None = Field(None, description="go on from this one")

    @model_validator(mode="after")
    def _is_one(self) -> MakeStateRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("it needs exactly one of prompt and messages")
        return self


class ForkStateRequest(Strict):
    """POST /v1/states/{name}/fork"""

    name: StateName
