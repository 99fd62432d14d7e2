"""The Python face: a model with its KV pool, ready to generate."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from saccade.engine.core import Engine
from saccade.engine.params import SamplingParams
from saccade.engine.request import StepOutput
from saccade.errors import CapacityError, ModelError, RequestError, SaccadeError
from saccade.kv.pool import BLOCK_SIZES, BlockPool
from saccade.kv.sequence import SequenceKV
from saccade.machine import available_bytes, check_threads, parse_bytes
from saccade.methods.policy import Policy, PolicyLike
from saccade.models.loader import load_model
from saccade.ops import cpu, triton
from saccade.ops.attend import BACKENDS
from saccade.outputs import RequestOutput, drain, request_output, steps
from saccade.session import Session

Prompt = str | Sequence[int]


class LLM:
    """A model with its KV pool, ready to generate.

    ``model``: a checkpoint folder, or ``"retriever"``, the model that is built in. ``policy``: the default for requests
    that name none (text, mapping or Policy). ``dtype``: ``auto``, ``float32``, ``bfloat16`` or ``float16``.
    ``max_model_len``: most tokens of one sequence, the model's own limit by default. ``kv_memory``: bytes or text such
    as ``"4GiB"`` for keys and values; by default 40 % of the free memory (85 % on a GPU), at most what
    ``max_requests`` full-length sequences need. ``prefill_chunk``: most prompt tokens of one request in one step.
    ``device``: ``cpu``, ``cuda`` or ``cuda:N``. ``backend``: ``auto``, ``cpu`` (C++ kernels or an error), ``triton``
    (GPU kernels or an error) or ``reference``. ``exact`` makes a result independent of its batch to the last bit, at
    the price of one pass over the weights per request; by default yes in float32 and no otherwise. ``cuda_graphs``
    records batched decode steps on a GPU and replays them; without it their kernels are launched one by one. Raises
    SaccadeError with one line that says the way out.
    """

    def __init__(
        self,
        model: str | Path = "retriever",
        policy: PolicyLike = "dense",
        *,
        dtype: str | torch.dtype = "auto",
        max_model_len: int | None = None,
        kv_memory: int | float | str | None = None,
        prefill_chunk: int = 4096,
        max_requests: int = 64,
        block_size: int = 32,
        backend: str = "auto",
        threads: int | None = None,
        exact: bool | None = None,
        device: str = "cpu",
        cuda_graphs: bool = True,
    ) -> None:
        self.policy = Policy.parse(policy)
        _positive("prefill_chunk", prefill_chunk)
        _positive("max_requests", max_requests)
        if block_size not in BLOCK_SIZES:
            raise SaccadeError(f"block_size={block_size!r} is not one of {BLOCK_SIZES}")
        if threads is not None:
            check_threads(threads)
        if backend not in BACKENDS:
            raise SaccadeError(f"backend={backend!r} is unknown; known: {', '.join(BACKENDS)}")
        self.model = load_model(checkpoint_folder(model), dtype=dtype, device=device)
        on_gpu = self.model.device.type == "cuda"
        spec = self.model.spec
        self.max_model_len = _model_length(max_model_len, spec.max_position)
        layers, heads, dim = spec.layers, spec.kv_heads, spec.head_dim
        kernels = triton if on_gpu else cpu
        if backend == "auto" and not kernels.available():
            warnings.warn(kernels.why_unavailable(), stacklevel=2)
        per_block = BlockPool.block_bytes(heads, dim, block_size, spec.dtype)
        if kv_memory is None:
            useful = max_requests * SequenceKV.blocks_for(self.max_model_len, layers, block_size)
            free = 0.85 * torch.cuda.mem_get_info(self.model.device)[0] if on_gpu else 0.4 * available_bytes()
            blocks = min(useful, int(free) // per_block)
        else:
            blocks = parse_bytes(kv_memory) // per_block
        if blocks < layers:
            raise CapacityError(
                f"kv_memory={kv_memory!r} holds {blocks} KV blocks of {per_block} bytes, but {layers} layers need one "
                f"each; give at least {layers * per_block} bytes"
            )
        pool = BlockPool(blocks, heads, dim, block_size=block_size, dtype=spec.dtype, device=self.model.device)
        self.engine = Engine(
            self.model,
            pool,
            max_model_len=self.max_model_len,
            chunk=prefill_chunk,
            max_requests=max_requests,
            backend=backend,
            threads=threads,
            exact=spec.dtype == torch.float32 if exact is None else exact,
            cuda_graphs=cuda_graphs,
        )
        self.engine.check_policy(self.policy)

    @property
    def tokenizer(self) -> Any:
        return self.model.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: PolicyLike | Sequence[PolicyLike] = None,
    ) -> list[RequestOutput]:
        """Complete prompts (text or token ids, one or many); results in their order.

        ``sampling_params`` and ``policy`` are one for all or a list with one a prompt. Everything is checked before
        anything runs: RequestError, PolicyError or CapacityError name what is wrong. A request that fails while it runs
        ends with finish_reason ``error``; the others go on.
        """
        texts = _prompt_list(prompts)
        params = _per_prompt(sampling_params, len(texts), "sampling parameters", SamplingParams)
        policies = [self._policy(one) for one in _policy_list(policy, len(texts))]
        encoded = [self._encode(prompt) for prompt in texts]
        for ids in encoded:
            self.engine.check(ids)
        samples = [[one.for_sample(i) for i in range(one.n)] for one in params]
        groups = [
            [self.engine.add(ids, sample, chosen) for sample in group]
            for ids, group, chosen in zip(encoded, samples, policies)
        ]
        drain(self.engine, [request for group in groups for request in group])
        return [
            request_output(text if isinstance(text, str) else None, ids, group)
            for text, ids, group in zip(texts, encoded, groups)
        ]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, policy: PolicyLike = None
    ) -> Iterator[StepOutput]:
        """Complete one prompt step by step. Each item has ``new_text``, ``new_tokens`` and prefill progress; the last
        one is ``finished``. Leaving the loop early cancels the request."""
        params = sampling_params or SamplingParams()
        if params.n != 1:
            raise RequestError(f"n={params.n} cannot be streamed; use generate()")
        request = self.engine.add(self._encode(prompt), params, self._policy(policy))
        yield from steps(self.engine, request)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        policy: PolicyLike | Sequence[PolicyLike] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, through the model's chat template."""
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise RequestError("messages must be a non-empty list of {'role': ..., 'content': ...}")
        many = messages if not isinstance(messages[0], Mapping) else [messages]
        prompts = [self.tokenizer.apply_chat_template(conversation) for conversation in many]
        return self.generate(prompts, sampling_params, policy=policy)

    def session(self, policy: PolicyLike = None) -> Session:
        """A conversation that keeps its keys, values and method state between turns."""
        return Session(self, self._policy(policy))

    def _policy(self, policy: PolicyLike) -> Policy:
        chosen = self.policy if policy is None else Policy.parse(policy)
        self.engine.check_policy(chosen)
        return chosen

    def _encode(self, prompt: Prompt, first: bool = True) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one token")
            return self.tokenizer.encode(prompt, add_special_tokens=first)
        listed: object = prompt
        if not isinstance(listed, Sequence) or isinstance(listed, (bytes, bytearray)):
            raise RequestError(f"a prompt must be text or a list of token ids, got {type(prompt).__name__}")
        return list(listed)


def checkpoint_folder(model: str | Path) -> Path:
    """The folder of a model given by name (one that is built in) or by path."""
    from saccade.models import reference

    if str(model) in reference.NAMES:
        return reference.checkpoint(str(model))
    if not isinstance(model, (str, Path)) or not str(model):
        raise ModelError(
            f"model={model!r} is no model; give a checkpoint folder or one of: {', '.join(reference.NAMES)}"
        )
    return Path(model).expanduser()


def _model_length(wanted: int | None, most: int) -> int:
    if wanted is None:
        return most
    if not isinstance(wanted, int) or isinstance(wanted, bool) or not 2 <= wanted <= most:
        raise SaccadeError(f"max_model_len={wanted!r} must be an integer from 2 to {most}, the model's own limit")
    return wanted


def _positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise SaccadeError(f"{name}={value!r} must be an integer >= 1")


def _prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be text, token ids or a list of those, got {type(prompts).__name__}")
    if len(prompts) == 0 or isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _per_prompt(value: Any, count: int, what: str, kind: type) -> list[Any]:
    if value is None:
        return [kind()] * count
    if isinstance(value, kind):
        return [value] * count
    if not isinstance(value, Sequence) or len(value) != count or not all(isinstance(one, kind) for one in value):
        raise RequestError(f"give one {kind.__name__} or a list of {count}, one a prompt, as {what}")
    return list(value)


def _policy_list(policy: Any, count: int) -> list[Any]:
    if isinstance(policy, (list, tuple)):
        if len(policy) != count:
            raise RequestError(f"{len(policy)} policies for {count} prompts; give one for all or one a prompt")
        return list(policy)
    return [policy] * count
