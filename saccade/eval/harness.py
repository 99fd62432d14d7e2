"""Saccade as a model of EleutherAI's lm-evaluation-harness, so that its tasks run under any policy.

``python -m saccade.eval.harness --model saccade --model_args pretrained=PATH,policy=flexprefill+psa --tasks ...`` takes
lm-eval's arguments. lm-eval (0.4.13) finds models in a table of its own and has no entry points; for its own command
``pip install ./plugins/lm_eval`` adds a start-up hook that adds ``saccade`` to that table. This module needs the extra
``eval``; nothing else imports it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, handle_arg_string, make_disjoint_window
from tqdm import tqdm

from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest, RequestOutcome
from saccade.engine.sampling.params import SamplingParams
from saccade.errors import RequestError
from saccade.llm import LLM
from saccade.outputs import finished

NAME = "saccade"
TARGET = "saccade.eval.harness:SaccadeLM"
PROTOCOLS = ("prefill", "decode")
GROUP = 256  # requests handed to the engine at once; it batches them as memory allows
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed")

TokenPair = tuple[Any, list[int], list[int]]  # the texts (or None), context ids, continuation ids


class SaccadeLM(TemplateLM):
    """Scores and generates with ``LLM(pretrained, policy, ...)``; ``options`` are the other arguments of ``LLM``.

    ``protocol`` says how the scored tokens of a log-likelihood run: ``prefill`` (one teacher-forced prefill of context
    and continuation, under the policy's prefill method) or ``decode`` (the context is prefilled, the continuation
    forced one decode step a token, under the decode method). Generation uses both phases as the engine always does.
    ``max_gen_toks``: most new tokens where a task sets none. lm-eval's ``batch_size`` is ignored: the engine batches by
    itself, ``max_requests`` bounds it. ``add_bos_token``: whether prompts begin with the special tokens the tokenizer
    adds; by default they do unless the text brings its own. Raises SaccadeError for bad options.
    """

    def __init__(
        self,
        pretrained: str = "retriever",
        policy: str = "dense",
        *,
        protocol: str = "prefill",
        max_gen_toks: int = 256,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if protocol not in PROTOCOLS:
            raise RequestError(f"protocol={protocol!r} is not one of {', '.join(PROTOCOLS)}")
        if device is not None and (torch.cuda.is_available() or not device.startswith("cuda")):
            options["device"] = device  # lm-eval says cuda:0 unless told otherwise, on machines without one too
        if max_length is not None:
            options.setdefault("max_model_len", max_length)
        options.setdefault("enable_prefix_caching", False)  # costs are those of each request by itself
        try:
            self.llm = LLM(pretrained, str(policy), **options)
        except TypeError as error:  # an option that LLM does not have
            raise RequestError(f"model_args: {error}; the options are those of saccade.LLM") from None
        self.pretrained = str(pretrained)
        self.protocol = protocol
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        self.tokenizer = self.llm.tokenizer.hf
        self.requests = 0
        self.pairs = {"prefill": [0, 0], "decode": [0, 0]}  # (query, key) pairs attended and causal, over all requests
        self.notes: list[str] = []

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> SaccadeLM:
        """Like lm-eval's own, but commas inside parentheses belong to the policy."""
        pairs = [item.split("=", 1) for item in re.split(r",(?![^(]*\))", arg_string) if item]
        options = {pair[0].strip(): handle_arg_string(pair[1]) for pair in pairs if len(pair) == 2}
        return cls.create_from_arg_obj(options, additional_config)

    # --- what lm-eval asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        ends = self.llm.model.eos_token_ids
        if not ends:
            raise RequestError(f"{self.pretrained} names no end-of-sequence token, which this task needs")
        return min(ends)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has no context: the beginning-of-sequence token, or the end's."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        return self.pretrained.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            bos = getattr(self.tokenizer, "bos_token", None)
            own = bool(bos) and string.startswith(str(bos))
            add_special_tokens = not own if self.add_bos_token is None else self.add_bos_token
        return self.llm.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        if not self.llm.tokenizer.has_chat_template:
            raise RequestError(f"{self.pretrained} has no chat template; run without --apply_chat_template")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return getattr(self.tokenizer, "chat_template", None) or ""

    # --- the three kinds of request

    def _loglikelihood_tokens(
        self, requests: Sequence[TokenPair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = []
        for part in _groups(requests, "Scoring", disable_tqdm):
            queued = [self._score(context, continuation) for _, context, continuation in part]
            outcomes = iter(self._run([message for message in queued if message is not None]))
            for (texts, _, _), message in zip(part, queued):
                result = (0.0, True) if message is None else _scored(next(outcomes))
                results.append(result)
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Every token of a text given as many before it as fit, in disjoint windows."""
        results = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 2,  # a window has one token more, and the engine samples one
                context_len=1,
            )
            pairs: list[TokenPair] = [(None, *make_disjoint_window(window)) for window in windows]
            total = sum(logprob for logprob, _ in self._loglikelihood_tokens(pairs, disable_tqdm=True))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
            results.append(total)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        results = []
        for part in _groups(requests, "Generating", disable_tqdm):
            queued = [self._generate(*request.args) for request in part]
            for request, done in zip(part, self._run(queued)):
                results.append(done.text)
                self.cache_hook.add_partial("generate_until", request.args, done.text)
        return results

    # --- what really ran

    def get_model_info(self) -> dict[str, Any]:
        """For lm-eval's result file: the policy, and the densities measured over all requests so far."""
        density = {
            f"{phase}_density": attended / causal if causal else None
            for phase, (attended, causal) in self.pairs.items()
        }
        return {
            "policy": self.llm.policy.text,
            "protocol": self.protocol,
            "requests": self.requests,
            **density,
            "notes": self.notes,
        }

    def _score(self, context: list[int], continuation: list[int]) -> AddRequest | None:
        """A request that scores ``continuation``; of a context that is too long the end is kept."""
        most = self.max_length - 1  # the engine samples one more
        if not continuation:
            return None
        if len(continuation) >= most:
            raise RequestError(
                f"a continuation of {len(continuation)} tokens leaves no room for context; at most {most - 1} fit "
                f"max_model_len={self.max_length}"
            )
        ids = (context + continuation)[-most:]
        params = SamplingParams(
            temperature=0, max_tokens=1, prompt_logprobs=0, prompt_logprobs_start=len(ids) - len(continuation)
        )
        forced = len(continuation) if self.protocol == "decode" else 0
        return AddRequest(new_request_id(), ids, params, self.llm.policy, decoded=forced)

    def _generate(self, context: str, gen_kwargs: dict[str, Any]) -> AddRequest:
        """A request that completes ``context``; of one that is too long the end is kept."""
        options = dict(normalize_gen_kwargs(gen_kwargs, self.max_gen_toks))
        stop = [text for text in options.pop("until") if text]
        max_tokens = options.pop("max_gen_toks")
        if options.pop("do_sample") is False:
            options["temperature"] = 0.0
        if options.pop("num_beams", 1) != 1 or not set(options) <= set(_SAMPLING):
            raise RequestError(
                f"generation arguments {gen_kwargs!r} are not supported; known: until, max_gen_toks, do_sample, "
                f"{', '.join(_SAMPLING)}"
            )
        room = self.max_length - max_tokens
        if room < 1:
            raise RequestError(f"max_gen_toks={max_tokens} leaves no room in max_model_len={self.max_length}")
        params = SamplingParams(max_tokens=max_tokens, stop=stop, **options)
        return AddRequest(new_request_id(), self.tok_encode(context)[-room:], params, self.llm.policy)

    def _run(self, messages: list[AddRequest]) -> list[RequestOutcome]:
        with self.llm.loop.asked(messages) as streams:
            outcomes = finished(streams)
        for outcome in outcomes:
            if outcome.error is not None:
                raise RequestError(f"a request of {len(outcome.prompt)} tokens failed: {outcome.error}")
            self.requests += 1
            report = outcome.report
            for phase, total in self.pairs.items():
                total[0] += report[phase]["keys_attended"]
                total[1] += report[phase]["keys_causal"]
            self.notes += [note for note in report["notes"] if note not in self.notes]
        return outcomes


def _scored(outcome: RequestOutcome) -> tuple[float, bool]:
    """Sum of the scored tokens' log-probabilities, and whether each was the likeliest."""
    pairs = zip(outcome.prompt, outcome.prompt_logprobs or ())
    entries = [scores[token] for token, scores in pairs if scores is not None]
    return sum(entry.logprob for entry in entries), all(entry.rank == 1 for entry in entries)


def _groups(requests: Sequence[Any], what: str, quiet: bool) -> Iterator[Sequence[Any]]:
    with tqdm(total=len(requests), desc=what, disable=quiet) as bar:
        for start in range(0, len(requests), GROUP):
            part = requests[start : start + GROUP]
            yield part
            bar.update(len(part))


def register() -> None:
    """Add ``saccade`` to lm-eval's table of models, if it is not there."""
    import lm_eval.models  # noqa: F401  (fills the table)
    from lm_eval.api.registry import model_registry

    if NAME not in model_registry:
        model_registry.register(NAME, target=TARGET)


def main() -> None:
    """lm-eval's own command line, with this model in its table."""
    from lm_eval.__main__ import cli_evaluate

    register()
    cli_evaluate()


if __name__ == "__main__":
    main()
