"""A transformers cache whose keys and values lie in saccade's KV pool, where its kernels and methods read them."""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from saccade.engine.core import new_request_id
from saccade.engine.memory.memories import Memories
from saccade.engine.memory.sequence import new_sequence_id
from saccade.engine.watch.report import Report
from saccade.errors import SaccadeError
from saccade.methods.policy import Policy, PolicyLike
from saccade.models.interface import LayerAttention
from saccade.transformers.padding import has_holes, places, whole_mask
from saccade.transformers.rows import Pass, Places, Row
from saccade.transformers.runtime import Runtime, runtime_of, text_config, usable


class _Given(threading.local):
    """What the last ``update`` of this thread took in: attention follows it at once. ``read``: by layer, what layers
    that come later in the pass read again."""

    last: tuple[SaccadeCache, int, Tensor] | None = None

    def __init__(self) -> None:
        self.read: dict[int, tuple[SaccadeCache, int, Tensor]] = {}


_given = _Given()


class SaccadeCache(Cache):
    """The keys, values and method states of a batch of sequences that ``model`` reads under ``policy`` (the model's own
    by default). ``generate`` makes one by itself; give one as ``past_key_values`` to a loop of your own.

    Padding is not stored, so lengths here count columns, as transformers does. PolicyError for a policy that
    transformers' loop cannot run; CapacityError where the pool has no room.
    """

    def __init__(self, model: nn.Module, policy: PolicyLike = None) -> None:
        self._begin(runtime_of(text_config(model)), policy)

    @classmethod
    def _of(cls, runtime: Runtime) -> SaccadeCache:
        """One of the model's own policy."""
        made = cls.__new__(cls)
        made._begin(runtime, None)
        return made

    def _begin(self, runtime: Runtime, policy: PolicyLike) -> None:
        super().__init__(layers=[])
        self.runtime = runtime
        self.policy = runtime.policy if policy is None else usable(Policy.parse(policy))
        self._rows: list[Row] = []
        self._checked: Policy | None = None  # the policy that rows run under
        self._columns = 0
        self._mask: Tensor | None = None  # bool [batch, columns] on the host; None: no column is padding
        self._prompt: tuple[int, Tensor | None] | None = None  # columns and mask of one that comes in chunks
        self._pass: Pass | None = None
        self._broken: str | None = None
        self._ids: set[int] = set()
        self._freed = weakref.finalize(self, _free, runtime.memories, self._ids)

    # --- what transformers asks of a cache ---------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in the new rows of a layer, [batch, kv_heads, rows, head_dim]. They are stored by the attention that
        follows, which knows which of them are padding; so what is returned are these rows, and no earlier ones."""
        _given.last = self, layer_idx, key_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._columns + query_length, 0

    @property
    def batch_size(self) -> int:
        return len(self._rows) or -1

    @property
    def is_linear(self) -> list[bool]:
        """That it holds keys: of a cache that does not, generate takes a prompt to be new whole."""
        return [False]

    @property
    def is_croppable(self) -> bool:
        return self.policy.decode.is_dense

    @torch.inference_mode()
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns. SaccadeError where what a method knows cannot go back."""
        self._check()
        tokens_to_remove = int(tokens_to_remove)  # some versions give a tensor
        if not -self._columns <= tokens_to_remove <= 0:
            raise SaccadeError(
                f"crop({tokens_to_remove}) must be from {-self._columns} to 0: minus the columns to remove of "
                f"{self._columns}"
            )
        if not tokens_to_remove:
            return
        columns = self._columns + tokens_to_remove
        for number, row in enumerate(self._rows):
            gone = -tokens_to_remove if self._mask is None else int(self._mask[number, columns:].sum())
            with self._breaking():
                row.cut(self.runtime, row.stored - gone)
        self._columns = columns
        self._mask = None if self._mask is None else self._mask[:, :columns]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with the sequences ``beam_idx`` int64 [batch]; one that is named twice shares its blocks."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sequences ``indices``, numbers or booleans, alone."""
        self._select(indices.nonzero()[:, 0].tolist() if indices.dtype == torch.bool else indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Have each sequence ``repeats`` times, side by side."""
        self._select([number for number in range(len(self._rows)) for _ in range(repeats)])

    def reset(self) -> None:
        """Forget everything, and give the memory back."""
        _free(self.runtime.memories, self._ids)
        self._rows, self._columns, self._mask, self._prompt, self._pass = [], 0, None, None, None
        self._broken = None

    # --- what generate and attention ask -----------------------------------------------------------------------------

    @property
    def reports(self) -> list[Report]:
        """Of the sequences, in the order of the batch."""
        return [row.report for row in self._rows]

    def expect(self, columns: int, mask: Tensor | None) -> None:
        """A prompt comes in chunks, after which there are so many ``columns``; ``mask`` [batch, columns]."""
        self._prompt = columns, None if mask is None else mask.bool().cpu()

    def ended(self, counted: Sequence[int]) -> None:
        """No token is to follow for now; so many were chosen for each sequence."""
        for row, tokens in zip(self._rows, counted):
            row.report.token()
            row.report.finish(tokens)

    @torch.inference_mode()
    def attend(self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, spec: LayerAttention) -> Tensor:
        """Store, unless they are an earlier layer's, and attend: [batch, rows, heads, head_dim]. ``module``: a layer's,
        of transformers. ``mask`` bool [batch, columns with these]."""
        layer: int = module.layer_idx
        with self._breaking():
            if self._pass is None:
                self._check()
                self._pass = self._planned(q, k, mask, spec)
            stores = self.runtime.source(layer) == layer
            if self.runtime.run_on(q, k).pool.format.turned:
                q, k, turn = q.clone(), k.clone() if stores else k, self.runtime.turn_of(module)
                for row in range(len(q)):
                    turn.turn(q[row], k[row] if stores else None)
            out = self._pass.run(layer, q, k if stores else None, v if stores else None, spec)
            if self._pass.over:
                self._pass.finish()
                self._pass, self._columns = None, self._columns + q.shape[2]
                _given.read.clear()
        return out

    def _planned(self, q: Tensor, k: Tensor, mask: Tensor | None, spec: LayerAttention) -> Pass:
        running, batch, columns = self.runtime.run_on(q, k), q.shape[0], q.shape[2]
        said = None
        if self.policy != self._checked:
            running.checks.policy(self.policy)
            self.policy, said = running.checks.located(self.policy)
            self._checked = self.policy
        if not self._rows:
            self._rows = [Row.new(self.runtime, running, self.policy) for _ in range(batch)]
            self._ids |= {row.id for row in self._rows}
            self.runtime.reports = self.reports
        for row in self._rows if said is not None else ():
            row.report.note(said or "")
        if batch != len(self._rows):
            raise SaccadeError(f"a batch of {batch} on a cache of {len(self._rows)} sequences; begin with a new cache")
        whole = whole_mask(mask, self._mask, batch, self._columns, columns)
        real: list[Places] = [range(columns)] * batch
        if whole is not None:
            real = [places(row[self._columns :]) for row in whole]
            if any(spec_window is not None for spec_window in running.model.spec.windows) and has_holes(whole):
                raise SaccadeError(
                    "attention_mask has padding between tokens, and this model's sliding windows count columns; pad on "
                    "the left alone"
                )
        self._mask = whole
        return Pass(self.runtime, running, self._rows, self.policy, columns, real, self._totals(columns, batch))

    def _totals(self, columns: int, batch: int) -> list[int] | None:
        """Tokens of each row's prompt that comes in chunks; None where what is given is all."""
        if self._prompt is None:
            return None
        total, mask = self._prompt
        if self._columns + columns >= total:
            self._prompt = None
        if mask is None:
            if self._mask is not None:
                raise SaccadeError("give attention_mask with prefill_chunk_size where some columns are padding")
            return [total] * batch
        counts = mask.sum(1)
        return counts.repeat_interleave(batch // len(counts)).tolist()

    @torch.inference_mode()
    def _select(self, order: Sequence[int]) -> None:
        self._check()
        memories, taken, chosen = self.runtime.memories, set[int](), list[Row]()
        with self._breaking():
            for number in order:
                row = self._rows[number]
                if number in taken:
                    made, counted = copy.copy(row), copy.copy(row.report)
                    counted.prefill, counted.decode = row.report.prefill.copied(), row.report.decode.copied()
                    made.id, made.request, made.report = new_sequence_id(), new_request_id(), copy.deepcopy(counted)
                    memories.fork(row.id, made.id)
                    self._ids.add(made.id)
                    row = made
                taken.add(number)
                chosen.append(row)
        left = {row.id for number, row in enumerate(self._rows) if number not in taken}
        self._ids -= left
        _free(memories, left)
        self._rows = chosen
        self._mask = None if self._mask is None else self._mask[list(order)]
        self.runtime.reports = self.reports

    def _check(self) -> None:
        if self._broken is not None:
            raise SaccadeError(
                f"this cache cannot go on, for a pass over it broke ({self._broken}); begin with a new one"
            )
        if self._pass is not None:
            raise SaccadeError("the last pass over this cache left layers out; begin with a new cache")

    def _breaking(self) -> _Breaking:
        return _Breaking(self)


class _Breaking:
    """What is half done when something is raised here is not gone on from."""

    def __init__(self, cache: SaccadeCache) -> None:
        self.cache = cache

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and self.cache._broken is None:
            self.cache._broken = str(error) or type(error).__name__


def taken_in(layer: int, k: Tensor) -> SaccadeCache | None:
    """The cache whose ``update`` has just taken in ``k`` of ``layer``, or took it in before, where later layers read
    it; None where there is none."""
    given, _given.last = _given.last, None
    if given is not None and given[1] == layer and given[2] is k:
        cache = given[0]
        if layer == 0:
            _given.read.clear()  # of a pass that broke
        if layer in cache.runtime.reads[layer + 1 :]:
            _given.read[layer] = given
        return cache
    before = _given.read.get(layer)
    return before[0] if before is not None and before[2] is k else None


def _free(memories: Memories, ids: set[int]) -> None:
    for one in ids:
        if one in memories:
            memories.free(one, closes=True)
    ids.clear()
