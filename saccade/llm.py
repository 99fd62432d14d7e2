"""The Python face: a model with its KV pool, ready to generate."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from saccade.engine.core import Engine, new_request_id
from saccade.engine.loop import AsyncEngine
from saccade.engine.messages import AddRequest, StepOutput
from saccade.engine.ranks.places import check_devices
from saccade.engine.sampling.params import SamplingParams, one_params
from saccade.engine.settings.config import SESSIONS, EngineConfig
from saccade.errors import RequestError, SaccadeError, shown, whole_number
from saccade.kv import BlockManager
from saccade.machine import folder_and_size, parse_bytes
from saccade.methods.policy import Policy, PolicyLike
from saccade.models.checkpoint import sampling_defaults
from saccade.models.folders import checkpoint_folder
from saccade.models.loader import load_model
from saccade.models.shards import Share, release
from saccade.models.target import checked_device
from saccade.models.tuned_heads import find_heads
from saccade.ops import cpu, fa4, triton
from saccade.outputs import RequestOutput, finished, request_output, warn_of_failures
from saccade.pools import make_pool
from saccade.prompts import Prompt, encode, prompt_list, text_of
from saccade.ranks import make_link, start_ranks
from saccade.session import Session
from saccade.sessions.durable import DurableSessions
from saccade.sessions.shared_store import SharedFileStore
from saccade.sessions.stores import BlockStore, FileStore


class LLM:
    """A model with its KV pool, ready to generate: a synchronous and an asyncio face of :class:`AsyncEngine`.

    Settings are those of :class:`EngineConfig`, by name, or a ``config`` of them. Every method may be called from any
    thread. ``engine`` and its parts may be looked at while nothing runs. ``memory_profile``: what a profiling run found
    (``kv_memory="profile"``). ``sessions``: those that survive, in
    ``session_dir`` or in a ``session_store`` of the caller's own. Raises SaccadeError with one line that says the way
    out.
    """

    def __init__(
        self,
        model: str | Path = "retriever",
        policy: PolicyLike = "dense",
        *,
        config: EngineConfig | None = None,
        session_store: BlockStore | None = None,
        **settings: Any,
    ) -> None:
        if config is None:
            config = EngineConfig.of(model=model, policy=policy, **settings)
        elif settings:
            raise SaccadeError(f"give a config or single settings ({', '.join(sorted(settings))}), not both")
        self.config = config
        most: int | None = None
        if session_store is None:  # before the model: another process may have the folder
            session_store, most = _session_store(config)
        self.policy = Policy.parse(config.policy)
        reason = fa4.why_not(checked_device(config.device)) if config.fa4 else None
        if reason is not None:
            raise SaccadeError(f"fa4=True cannot run: {reason}; leave it out")
        check_devices(config.device, config.tensor_parallel_size)
        folder = checkpoint_folder(config.model, config.revision)
        ranks, link, share = config.tensor_parallel_size, None, None
        if ranks > 1:
            link = make_link(ranks, checked_device(config.device))
            share = Share(0, ranks, link.joined, find_heads(folder, config.layers))
        self.model = load_model(folder, config.dtype, config.device, config.quantize, config.lora, config.layers, share)
        if share is not None:
            release(self.model.device)
        self.max_model_len = _model_length(config.max_model_len, self.model.spec.max_position)
        kernels = triton if self.model.device.type == "cuda" else cpu
        if config.backend == "auto" and not kernels.available():
            warnings.warn(kernels.why_unavailable(), stacklevel=2)
        exact = self.model.spec.dtype == torch.float32 if config.exact is None else config.exact
        pool, self.memory_profile = make_pool(config, self.model, self.max_model_len)
        self.model.runner.turn_keys(pool.format.turned)
        if link is not None:
            densities = None if share is None else share.densities
            start_ranks(link, config, pool, self.max_model_len, exact, densities)
        self.engine = Engine(config, self.model, pool, self.max_model_len, exact, link=link)
        self.engine.checks.policy(self.policy)
        self.loop = AsyncEngine(self.engine, config.max_waiting)
        self.sessions = None if session_store is None else DurableSessions(session_store, self.loop, most)

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def get_tokenizer(self) -> Any:
        """transformers' own tokenizer; None where the checkpoint has none."""
        return self.model.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """What requests without parameters use: the sampling settings of the checkpoint's generation_config.json, or
        none (see ``generation_config`` in EngineConfig), over SamplingParams' own."""
        chosen = self.config.generation_config
        if chosen == "none":
            return SamplingParams()
        return SamplingParams(**sampling_defaults(self.model.path if chosen == "auto" else Path(chosen)))

    def restore(self, path: str | Path, policy: PolicyLike = None, *, recompute: bool = False) -> Session:
        """The session that :meth:`Session.save` wrote to ``path``; its next turn goes on from there. ``policy`` for its
        turns, by default its own.

        Keys and values that are damaged or have no room are computed again by the next turn; ``Session.note`` then says
        so. RequestError for no such file, one whose text is damaged, and for another model's, unless ``recompute``
        takes over what was said alone.
        """
        return Session.restored(self, Path(path), None if policy is None else Policy.parse(policy), recompute)

    def reset_prefix_cache(self) -> None:
        """Give up what ``enable_prefix_caching`` keeps of ended requests."""
        self.loop.clear_prefixes()

    @property
    def pool(self) -> BlockManager:
        """Where keys and values lie."""
        return self.engine.pool

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: PolicyLike | Sequence[PolicyLike] = None,
        use_tqdm: bool | Callable[..., Any] = False,
    ) -> list[RequestOutput]:
        """Complete prompts (text, token ids, ``{"prompt": ...}`` or ``{"prompt_token_ids": ...}``, one or many);
        results in their order.

        ``sampling_params`` and ``policy`` are one for all or a list with one a prompt; without parameters,
        :meth:`get_default_sampling_params`. ``use_tqdm`` shows a bar of prompts, by tqdm or by what it is. Everything
        is checked before anything runs: RequestError, PolicyError or CapacityError name what is wrong. A request that
        fails while it runs ends with finish_reason ``error``; the others go on.
        """
        texts = prompt_list(prompts)
        default = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _params_list(default, len(texts))
        policies = [self._policy(one) for one in _policy_list(policy, len(texts))]
        encoded = [self.encode(prompt) for prompt in texts]
        for ids in encoded:
            self.engine.checks.prompt(ids)
        messages: list[AddRequest] = []
        for ids, one, chosen in zip(encoded, params, policies):
            first = new_request_id()
            messages.append(AddRequest(first, ids, one.for_sample(0), chosen))
            messages += [
                AddRequest(new_request_id(), ids, one.for_sample(index), chosen, shares=first)
                for index in range(1, one.n)
            ]
        with self.loop.asked(messages) as streams:
            outcomes = iter(finished(streams, use_tqdm))
        groups = [[next(outcomes) for _ in range(one.n)] for one in params]
        return [request_output(text_of(prompt), group) for prompt, group in zip(texts, groups)]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> Iterator[StepOutput]:
        """Complete one prompt step by step. Each item has ``new_text``, ``new_tokens`` and prefill progress since the
        one before; the last one is ``finished`` and has the ``outcome``. Leaving the loop early cancels the request."""
        message = self._message(prompt, sampling_params, policy, "streamed; use generate()")
        with self.loop.asked([message]) as (stream,):
            yield from self.loop.outputs(stream)

    async def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> AsyncIterator[StepOutput]:
        """:meth:`stream` for asyncio. Cancelling the task cancels the request."""
        async for output in self.loop.stream(self._message(prompt, sampling_params, policy, "streamed")):
            yield output

    async def agenerate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> RequestOutput:
        """Complete one prompt under asyncio, with one sample. Cancelling the task cancels the request."""
        outcome = None
        async for output in self.loop.stream(self._message(prompt, sampling_params, policy, "had of agenerate()")):
            outcome = output.outcome
        assert outcome is not None, "a stream ends with an outcome"
        warn_of_failures([outcome])
        return request_output(text_of(prompt), [outcome])

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: PolicyLike | Sequence[PolicyLike] = None,
        use_tqdm: bool | Callable[..., Any] = False,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template. ``chat_template_kwargs`` are
        variables of the template, ``{"enable_thinking": False}`` say. What reads like a control token in messages is
        text, unless ``allow_control_tokens``."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        many = messages if not isinstance(messages[0], Mapping) else [messages]
        prompts = [
            self.tokenizer.apply_chat_template(
                conversation, add_generation_prompt, chat_template_kwargs, allow_control_tokens
            )
            for conversation in many
        ]
        return self.generate(prompts, sampling_params, policy=policy, use_tqdm=use_tqdm)

    def session(self, policy: PolicyLike = None, *, name: str | None = None, recompute: bool = False) -> Session:
        """A conversation that keeps its keys, values and method state between turns.

        With ``name`` it goes on from what ``session_dir`` holds under that name, of this process or an earlier one, and
        is saved there behind every turn, in the background (``sessions.flush()`` waits for it). Without ``policy`` its
        turns use the one that it was saved with. RequestError where what is stored is another model's or damaged beyond
        use: ``recompute`` takes over what was said alone, ``sessions.forget(name)`` removes it.
        """
        if name is None:
            return Session(self, self._policy(policy))
        if self.sessions is None:
            raise RequestError(f"name={shown(name)}: sessions survive in a session_dir; give one to LLM(...)")
        if not isinstance(name, str) or not 1 <= len(name) <= 256:
            raise RequestError(f"name={shown(name)} must be a text of 1 to 256 characters")
        chosen = None if policy is None else self._policy(policy)
        restored = self.sessions.restore(name, recompute=recompute)
        if restored is None:
            return Session(self, self.policy if chosen is None else chosen, name)
        return Session.back(self, restored, chosen, name)

    def cache_report(self) -> dict[str, Any]:
        """What was not computed because it was there. ``prefixes`` (None without ``enable_prefix_caching``): prompt
        tokens looked up and found, their share, and the bytes that ended requests left; ``sessions`` (None without
        ``session_dir``): see ``DurableSessions.report``."""
        prefixes, format = self.engine.prefixes, self.pool.format
        token_bytes = self.pool.token_bytes * self.engine.model.part.parts  # of all heads
        found: dict[str, Any] | None = None
        if prefixes is not None:
            found = {
                "tokens": prefixes.queries,
                "tokens_found": prefixes.hits,
                "hit_rate": prefixes.hits / prefixes.queries if prefixes.queries else None,
                "kept_bytes": prefixes.kept_slots // self.pool.layers * token_bytes * format.block_size,
            }
        return {"prefixes": found, "sessions": None if self.sessions is None else self.sessions.report()}

    def close(self) -> None:
        """Save what is to be saved, cancel what runs and end the engine's thread. Nothing can be asked of this LLM
        afterwards."""
        if self.sessions is not None:
            self.sessions.close()
        self.loop.close()
        self.engine.masks.close()
        if self.engine.link is not None:
            self.engine.link.close()
        self.pool.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def encode(self, prompt: Prompt, first: bool = True) -> list[int]:
        """Token ids of a prompt. ``first``: it begins a context, so the tokenizer's special tokens join it."""
        return encode(self.tokenizer, prompt, first)

    def _message(self, prompt: Prompt, params: SamplingParams | None, policy: PolicyLike, what: str) -> AddRequest:
        params = self.get_default_sampling_params() if params is None else one_params(params)
        if params.n != 1:
            raise RequestError(f"n={params.n} cannot be {what}")
        return AddRequest(new_request_id(), self.encode(prompt), params, self._policy(policy))

    def _policy(self, policy: PolicyLike) -> Policy:
        chosen = self.policy if policy is None else Policy.parse(policy)
        self.engine.checks.policy(chosen)
        return chosen


def _session_store(config: EngineConfig) -> tuple[BlockStore | None, int | None]:
    """Where sessions survive, if anywhere, and the most bytes of it: ``session_dir``, or ``sessions`` beside what
    ``kv_disk`` holds, unless another process has that."""
    if config.session_dir is not None:
        folder, most = folder_and_size(config.session_dir, "session_dir", SESSIONS)
        return (SharedFileStore if config.session_shared else FileStore)(folder), most
    if config.kv_disk is not None:
        folder, most = folder_and_size(config.kv_disk, "kv_disk")
        if folder.is_dir():
            try:
                store = (SharedFileStore if config.session_shared else FileStore)(folder / "sessions")
                return store, min(most, parse_bytes(SESSIONS))
            except RequestError as error:
                warnings.warn(f"sessions of this process do not survive it: {error}", stacklevel=3)
    return None, None


def _model_length(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if not whole_number(wanted, 2, most):
        raise SaccadeError(f"max_model_len={shown(wanted)} must be an integer from 2 to {most}, the model's own limit")
    return wanted


def _params_list(value: Any, count: int) -> list[SamplingParams]:
    if isinstance(value, SamplingParams):
        return [value] * count
    if not isinstance(value, Sequence) or len(value) != count or not all(isinstance(o, SamplingParams) for o in value):
        raise RequestError(f"give one SamplingParams or a list of {count}, one a prompt, as sampling parameters")
    return list(value)


def _policy_list(policy: Any, count: int) -> list[Any]:
    if isinstance(policy, (list, tuple)):
        if len(policy) != count:
            raise RequestError(f"{len(policy)} policies for {count} prompts; give one for all or one a prompt")
        return list(policy)
    return [policy] * count
