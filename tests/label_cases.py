"""Rows of many sequences whose keys have labels (methods/labels), laid out as recorded steps find them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from helpers import generator
from torch import Tensor

from saccade.kv.view import KVView
from saccade.methods.base import Query
from saccade.methods.labels import Labels
from saccade.methods.psa import PSA
from saccade.methods.psa.estimates import keys_in_few_bits
from saccade.ops.triton.batch import Pages
from saccade.selection.forms import LABELS, Rule, Summarized
from saccade.selection.readings import Choice

PAGE = 32


@dataclass
class LabelledRows:
    """A row for each of ``lengths`` (0: padding), whose labels were begun after as many keys as ``prompts`` says and
    know all keys but the last. Words, tables and queries lie in the middle of larger tensors."""

    method: PSA
    lengths: list[int]
    prompts: list[int]
    heads: int
    kv_heads: int
    dim: int
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        rng, rows, longest = generator(self.seed), len(self.lengths), max(self.lengths)
        blocks = -(-longest // PAGE)
        k = torch.randn(rows, self.kv_heads, blocks * PAGE, self.dim, generator=rng)
        k[..., 3] = 12 + 3 * k[..., 3]
        k[..., -2] *= 6
        q = torch.randn(rows, self.heads, 2 * self.dim, generator=rng)
        q[..., 3] *= 0.2
        k = k.to(self.device, self.dtype)
        self.q = q.to(self.device, self.dtype)[..., : self.dim]  # not contiguous
        pool = torch.full((rows * blocks, self.kv_heads, PAGE, self.dim), torch.nan).to(self.device, self.dtype)
        slots = torch.randperm(rows * blocks, generator=rng).to(torch.int32).view(rows, 1, blocks).to(self.device)
        self.views: list[KVView] = []
        self.labels: list[Labels | None] = []
        words = torch.full((rows + 2, 32), -1, dtype=torch.int64)
        for row, (length, prompt) in enumerate(zip(self.lengths, self.prompts)):
            for page in range(-(-length // PAGE)):
                there = min(PAGE, length - page * PAGE)  # the rest of a page holds NaN
                pool[slots[row, 0, page], :, :there] = k[row, :, page * PAGE : page * PAGE + there]
            view = KVView.from_tensors(k[row, :, :length], k[row, :, :length]) if length else None
            labels = None
            if view is not None:
                labels = keys_in_few_bits(view.upto(prompt), self.method.bits)
                labels.extend(view.upto(max(prompt, length - 1)))
                labels.reserve(length + 40)
                said = labels.words()._replace(k=-1, sinks=-1, local=-1, every=-1, sets=-1)
                words[row + 1, : len(said)] = torch.tensor(said)
            self.views.append(view)
            self.labels.append(labels)
        tables = torch.cat([slots[:1] * 0, slots, slots[:1] * 0])[1:-1]
        self.words = words.to(self.device)[1:-1]
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        self.pages = Pages(pool, pool.clone(), tables, lengths, blocks * PAGE)

    @property
    def choice(self) -> Choice:
        own = self.method
        rule = Rule(own.epsilon, own.microbatch, own.rest, own.stop, 0.5 if own.margin is None else own.margin)
        source = Summarized(own.block_size, LABELS, own.bits)
        return Choice(source, self.kv_heads, 2, 1, own.dense_upto, rule=rule)

    @property
    def dense_upto(self) -> Tensor:
        return torch.full((len(self.lengths),), self.method.dense_upto, dtype=torch.int32, device=self.device)

    def query(self, row: int, scale: float, softcap: float | None = None) -> Query:
        """The row as the host's path has it."""
        return Query.of(self.q[row][:, None], self.views[row], scale, softcap=softcap)

    def host_labels(self, row: int) -> Labels:
        """The labels of all keys, the last one among them, as the host makes them."""
        before = self.labels[row]
        assert before is not None
        labels = Labels(before.channels, before.bits, frame=before.frame)
        labels.extend(self.views[row])
        return labels


def same_labels(own: Labels, other: Labels, length: int) -> None:
    """Codes, least values and steps of the first ``length`` keys are equal to the last bit."""
    for name in ("_codes", "_range"):
        parts = [getattr(one, name)[:, : -(-length // 16)].transpose(2, 3).flatten(1, 2) for one in (own, other)]
        assert torch.equal(parts[0][:, :length], parts[1][:, :length]), name
