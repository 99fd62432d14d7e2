"""What a request may ask of sampling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from saccade.errors import RequestError, finite_number, shown, whole_number

LARGEST = 2**63 - 1  # of whole numbers without a bound of their own

MOST_STOPS = 256  # stop strings and bad words, which every token is held against
LONGEST_STOP = 1024  # letters of each

MOST_BIAS = 1e9  # of logit_bias: far beyond any logit, and finite in float32


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when generation ends. ``temperature=0`` is greedy.

    ``logprobs=k`` returns, for every token, the log-probabilities of the ``k`` likeliest tokens and of the chosen one,
    from the model's distribution before any processing. ``prompt_logprobs=k`` does so for the prompt's own tokens, each
    given those before it, from prompt index ``prompt_logprobs_start`` on; a token that nothing computed in this turn
    predicts (the first of all, say) has None. ``stop`` strings (at most 256 of up to 1024 characters) end generation
    and are not part of the text, unless ``include_stop_str_in_output``. ``max_tokens=None`` means up to the model's
    length. Raises RequestError for values out of range.

    What is done to the logits, in vLLM's order: ``bad_words`` are never completed (with or without a space before
    them); no end token comes, and no stop string counts, before ``min_tokens`` tokens; ``logit_bias`` is added by token
    id; ``repetition_penalty`` acts on tokens of prompt and answer, then ``frequency_penalty`` subtracts so much for
    each time that a token stands in the answer and ``presence_penalty`` once; then temperature, top-k, top-p, min-p.

    A draw depends on ``seed``, ``sample`` and the token's place in the sequence alone (see ``saccade.randomness``).
    Of ``n`` samples the first is number ``sample`` and the others follow. Without a seed every request draws its own.

    ``audit``: the share (0 to 1) of decode attention that is held against true attention; ``audit_steps``: of decode
    steps that are replayed densely; ``target``: agreement with dense to hold by moving the method's dial
    (docs/audit.md). None leaves them to the engine. ``certify=(epsilon, delta)``: of a policy that can, have each
    head's error in each decode step stay below ``epsilon`` with probability 1 - ``delta``, and say how. ``bounds``: in
    this share of decode steps, what PrHS's certificates say of each head, and what is true.
    """

    n: int = 1
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] = field(default_factory=tuple)
    seed: int | None = None
    sample: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    audit: float | None = None
    audit_steps: float | None = None
    target: float | None = None
    certify: tuple[float, float] | None = None
    bounds: float | None = None

    def __post_init__(self) -> None:
        _whole("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1, None)
        _number("temperature", self.temperature, 0.0, None)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        if isinstance(self.top_k, int) and self.top_k == -1:  # vLLM's spelling of "all"
            object.__setattr__(self, "top_k", 0)
        _whole("top_k", self.top_k, 0, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**63 - 1)
        _whole("sample", self.sample, 0, 2**31 - self.n)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, 100)
        if self.prompt_logprobs is not None:
            _whole("prompt_logprobs", self.prompt_logprobs, 0, 100)
        _whole("prompt_logprobs_start", self.prompt_logprobs_start, 0, None)
        stops = [self.stop] if isinstance(self.stop, str) else [] if self.stop is None else self.stop
        if not _is_list(stops) or any(not isinstance(stop, str) or not stop for stop in stops):
            raise RequestError(f"stop={shown(self.stop)} must be one or more non-empty strings")
        _few("stop", stops)
        object.__setattr__(self, "stop", tuple(stops))
        ends = () if self.stop_token_ids is None else self.stop_token_ids
        if not _is_list(ends) or any(not isinstance(token, int) or isinstance(token, bool) for token in ends):
            raise RequestError(f"stop_token_ids={shown(ends)} must be a list of token ids")
        object.__setattr__(self, "stop_token_ids", tuple(ends))
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2.0, 2.0)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        words = [] if self.bad_words is None else self.bad_words
        if not _is_list(words) or any(not isinstance(word, str) or not word.strip() for word in words):
            raise RequestError(f"bad_words={shown(self.bad_words)} must be a list of strings that are not blank")
        _few("bad_words", words)
        object.__setattr__(self, "bad_words", tuple(words))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        for name in ("audit", "audit_steps", "target", "bounds"):
            if getattr(self, name) is not None:
                _number(name, getattr(self, name), 0.0, 1.0)
        if self.certify is not None:
            pair = self.certify if _is_list(self.certify) else ()
            if len(pair) != 2 or not all(finite_number(one) and 0 < one < 1 for one in pair):
                raise RequestError(
                    f"certify={shown(self.certify)} must be (epsilon, delta), two numbers between 0 and 1"
                )
            object.__setattr__(self, "certify", (float(pair[0]), float(pair[1])))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name}={shown(getattr(self, name))} must be True or False")

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5  # smaller ones overflow the logits, and are greedy in all but name

    def for_sample(self, index: int) -> SamplingParams:
        """Parameters of sample ``index`` of ``n``: the seed's own draws for each, so that sample 0 equals the n=1 run.
        The prompt is scored once, by sample 0."""
        if self.n == 1 and index == 0:
            return self
        prompt_logprobs = None if index else self.prompt_logprobs
        return replace(self, n=1, sample=self.sample + index, prompt_logprobs=prompt_logprobs)


def _biases(value: object) -> dict[int, float]:
    """``logit_bias`` by token id; ids may be text, as JSON has them."""
    if not isinstance(value, Mapping):
        raise _no_biases(value)
    biases: dict[int, float] = {}
    for token, bias in value.items():
        if isinstance(token, str) and token.isdecimal() and len(token) < 20:
            token = int(token)
        fits = isinstance(bias, (int, float)) and not isinstance(bias, bool) and abs(bias) <= MOST_BIAS
        if not isinstance(token, int) or isinstance(token, bool) or token < 0 or not fits:
            raise _no_biases(value)
        biases[token] = float(bias)
    return biases


def _no_biases(value: object) -> RequestError:
    return RequestError(
        f"logit_bias={shown(value)} must map token ids (integers >= 0) to numbers from -{MOST_BIAS:g} to {MOST_BIAS:g}"
    )


def one_params(value: object) -> SamplingParams:
    """The sampling parameters of one request, the defaults for None. RequestError for anything else."""
    if value is not None and not isinstance(value, SamplingParams):
        raise RequestError(f"sampling_params={shown(value)} must be a SamplingParams")
    return SamplingParams() if value is None else value


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple, set, frozenset))


def _few(name: str, texts: Sequence[str]) -> None:
    """Refuse so many or so long texts that looking for them would take longer than the model."""
    if len(texts) > MOST_STOPS or any(len(text) > LONGEST_STOP for text in texts):
        longest = max(len(text) for text in texts)
        raise RequestError(
            f"{name} holds {len(texts)} strings of up to {longest} characters; at most {MOST_STOPS} strings of up to "
            f"{LONGEST_STOP} characters are looked for"
        )


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    if not whole_number(value, low, LARGEST if high is None else high):
        allowed = f"an integer >= {low} and below 2**63" if high is None else f"an integer from {low} to {high}"
        raise RequestError(f"{name}={shown(value)} must be {allowed}")


def _number(name: str, value: object, low: float, high: float | None, open_low: bool = False) -> None:
    fits = finite_number(value) and (value > low if open_low else value >= low)  # type: ignore[operator]
    if not fits or (high is not None and value > high):  # type: ignore[operator]
        left = f"above {low:g}" if open_low else f"at least {low:g}"
        raise RequestError(
            f"{name}={shown(value)} must be a number {left}" + ("" if high is None else f" and at most {high:g}")
        )
