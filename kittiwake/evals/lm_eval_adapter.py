"""kittiwake as a model of lm-eval (the Language Model Evaluation Harness, extra ``eval``), registered as "kittiwake".

    python -m kittiwake.evals.lm_eval_adapter run --model kittiwake --model_args model=PATH --tasks TASK

Importing this module registers the model; it needs ``lm_eval``. Requests are answered ``batch_size`` at a time, which
changes no bit of a result. There is no longest text: a rolling likelihood is that of the whole text in one run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import LM
from lm_eval.api.registry import register_model

from kittiwake.engine.request import SamplingParams
from kittiwake.errors import UsageError
from kittiwake.evals.likelihood import Pair, likelihoods, split_pair
from kittiwake.evals.subject import begin_token
from kittiwake.llm import LLM

MAX_GEN_TOKENS = 256
"""Drawn where a task sets no limit; lm-eval's own default."""
_LIMITS = ("max_gen_toks", "max_tokens", "max_new_tokens")
_PASSED_ON = ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@register_model("kittiwake")
class KittiwakeLM(LM):
    """The adapter. ``model`` is a bundle or checkpoint (left out: the packaged model), ``options`` are EngineConfig's.

    ``bos`` puts the model's end-of-text token before every context; an empty context has it before it in any case,
    where the tokenizer has one. ``seed`` is that of the first sampled request, counted up from there.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | None = None,
        bos: bool = False,
        batch_size: int | str = 64,
        max_batch_size: int | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        self.batch_size = _batch_size(batch_size, max_batch_size)
        self.llm = LLM(model, tokenizer=tokenizer, **options)
        self._begin = begin_token(self.llm.tokenizer) if bos else None
        self._seed = seed

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval keys its caches by."""
        return f"{self.llm.tokenizer.kind}-{self.llm.tokenizer.digest()[:16]}"

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability of the continuation, whether it is greedy) of each (context, continuation)."""
        pairs = [self._pair(*request.args) for request in requests]
        found = likelihoods(self.llm, pairs, batch=self.batch_size)
        results = [(one.log_prob, one.is_greedy) for one in found]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each whole text."""
        pairs = [self._pair("", request.args[0]) for request in requests]
        results = [one.log_prob for one in likelihoods(self.llm, pairs, batch=self.batch_size)]
        for request, result in zip(requests, results, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The answer to each (context, generation options), up to the first of its ``until`` texts."""
        results: list[str] = []
        for first in range(0, len(requests), self.batch_size):
            group = requests[first : first + self.batch_size]
            prompts = [self._prompt(request.args[0]) for request in group]
            params = [
                sampling_params(request.args[1], self._seed + first + index) for index, request in enumerate(group)
            ]
            for request, completion in zip(group, self.llm.generate(prompts, params), strict=True):
                results.append(completion.text)
                self.cache_hook.add_partial("generate_until", request.args, completion.text)
        return results

    def _pair(self, context: str, continuation: str) -> Pair:
        return split_pair(self.llm.tokenizer.encode, context, continuation, self._begin_of(context))

    def _prompt(self, context: str) -> list[int]:
        begin = self._begin_of(context)
        return [*(() if begin is None else (begin,)), *self.llm.tokenizer.encode(context)]

    def _begin_of(self, context: str) -> int | None:
        if context.strip() or self._begin is not None:
            return self._begin
        return next(iter(self.llm.tokenizer.eos_ids), None)


def _batch_size(size: int | str, most: int | None) -> int:
    """A number from what lm-eval hands over: "auto" takes the default or its limit. Raises UsageError."""
    text = str(size).partition(":")[0]
    if text == "auto":
        return most or 64
    if not text.isdigit() or int(text) < 1:
        raise UsageError(f"batch_size must be a positive number or auto, got {size!r}")
    return int(text)


def sampling_params(options: dict[str, Any], seed: int) -> SamplingParams:
    """A task's generation options as SamplingParams; greedy unless ``do_sample`` or a temperature says otherwise.

    Raises UsageError for an option that kittiwake does not know.
    """
    rest = dict(options)
    until = rest.pop("until", None) or ()
    limits = [rest.pop(name) for name in _LIMITS if name in rest]
    do_sample, temperature = rest.pop("do_sample", None), rest.pop("temperature", None)
    passed = {name: rest.pop(name) for name in _PASSED_ON if name in rest}
    if rest:
        raise UsageError(f"generation options that kittiwake does not know: {', '.join(sorted(rest))}")
    if do_sample is None:
        do_sample = bool(temperature)
    if not do_sample or temperature == 0:
        return SamplingParams(
            max_tokens=int(limits[0]) if limits else MAX_GEN_TOKENS,
            temperature=0.0,
            stop=until,
            **{name: value for name, value in passed.items() if name.endswith("_penalty")},
        )
    return SamplingParams(
        max_tokens=int(limits[0]) if limits else MAX_GEN_TOKENS,
        temperature=float(1.0 if temperature is None else temperature),
        stop=until,
        seed=seed,
        **passed,
    )


def main() -> None:
    """lm-eval's own command line, with "kittiwake" among its models."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
