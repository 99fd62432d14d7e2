"""The gated delta rule over prompts on a GPU, 64 tokens at a time.

Within a chunk the updates of its tokens are a triangular system (the WY form: Yang et al., "Parallelizing Linear
Transformers with the Delta Rule", NeurIPS 2024). A first launch solves all chunks' systems side by side; a second goes
through the chunks of each head with the state at hand, by products of the tensor cores. States and sums are float32;
products take operands in the activations' type, float32 ones as three tf32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from saccade.ops.slots import Slots
from saccade.ops.triton.common import pad, precision
from saccade.ops.triton.delta_rule import NORM, step

CHUNK = 64  # tokens
BLOCK = 16  # rows of a chunk whose system is solved row by row
WIDTH = 32  # channels of a value head that a program takes through the chunks
SYSTEM_WARPS, SCAN_WARPS, SCAN_STAGES = 4, 4, 2
MOST_BYTES = 512  # of a key head's row: two stages of chunks of wider ones exceed a multiprocessor's shared memory


def prompt(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Slots, normed: bool) -> Tensor:
    """Outputs [sequences, tokens, value heads, d_v] in the dtype of ``q``, of any number of tokens.

    ``q``, ``k`` [sequences, tokens, key heads, d_k], ``v`` as the outputs; ``g`` (the logarithm of the decay) and
    ``beta`` [sequences, tokens, value heads]; states float32 [slots, value heads, d_k, d_v], read before the first
    token and written after the last. With ``normed`` queries and keys are divided by their length first.
    """
    sequences, tokens, key_heads, d_k = k.shape
    heads, d_v = v.shape[-2:]
    if pad(d_k) * q.element_size() > MOST_BYTES:
        return _by_steps(q, k, v, g, beta, slots, normed)
    q, k, v = (one if one.stride(-1) == 1 else one.contiguous() for one in (q, k, v))
    chunks, device = triton.cdiv(tokens, CHUNK), q.device
    solved, weights = torch.empty(2, sequences, chunks, heads, CHUNK, CHUNK, dtype=q.dtype, device=device)
    # By row: the decay since the chunk began (its logarithm), and what the row of queries and keys is multiplied by.
    factors = torch.empty(sequences, chunks, heads, 3, CHUNK, dtype=torch.float32, device=device)
    shape = {
        "HEADS": heads, "GROUP": heads // key_heads, "D_K": d_k, "K_PAD": pad(d_k), "CHUNK": CHUNK,
        "PRECISION": precision(q.dtype),
    }  # fmt: skip
    _systems[(chunks, heads, sequences)](
        q, k, g, beta, solved, weights, factors, tokens, d_k**-0.5, *q.stride()[:3], *k.stride()[:3], *g.stride(),
        *beta.stride(), **shape, BLOCK=BLOCK, NORMED=normed, NORM=NORM, num_warps=SYSTEM_WARPS,
    )  # fmt: skip
    out = torch.empty(sequences, tokens, heads, d_v, dtype=q.dtype, device=device)
    width = min(WIDTH, pad(d_v))
    _scan[(triton.cdiv(d_v, width), heads, sequences)](
        q, k, v, beta, solved, weights, factors, out, slots.pool, slots.reads, slots.writes, tokens, *q.stride()[:3],
        *k.stride()[:3], *v.stride()[:3], *beta.stride(), slots.pool.stride(0), **shape, D_V=d_v, WIDTH=width,
        STAGES=SCAN_STAGES, num_warps=SCAN_WARPS,
    )  # fmt: skip
    return out


def _by_steps(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, slots: Slots, normed: bool) -> Tensor:
    outs = []
    for at in range(q.shape[1]):
        own = slice(at, at + 1)
        outs.append(step(q[:, own], k[:, own], v[:, own], g[:, own], beta[:, own], slots, normed))
        slots = Slots(slots.pool, slots.writes, slots.writes)  # where the next token finds what this one left
    return torch.cat(outs, 1)


@triton.jit(do_not_specialize=["tokens"])
def _systems(
    q, k, g, beta, solved, weights, factors, tokens, scale, q_sequence, q_token, q_head, k_sequence, k_token, k_head,
    g_sequence, g_token, g_head, beta_sequence, beta_token, beta_head, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr,
    NORMED: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One chunk of one value head: the inverse of its system, and what its queries weigh its keys by."""
    chunk, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row, dim = tl.arange(0, CHUNK), tl.arange(0, K_PAD)
    token = chunk * CHUNK + row
    there = token < tokens
    wanted = there[:, None] & (dim < D_K)[None, :]
    at = token.to(tl.int64)
    base = (sequence * tl.num_programs(0) + chunk) * HEADS + head
    keys = tl.load(
        k + sequence * k_sequence + at[:, None] * k_token + (head // GROUP) * k_head + dim[None, :],
        mask=wanted, other=0.0,
    )  # fmt: skip
    queries = tl.load(
        q + sequence * q_sequence + at[:, None] * q_token + (head // GROUP) * q_head + dim[None, :],
        mask=wanted, other=0.0,
    )  # fmt: skip
    decay = tl.load(g + sequence * g_sequence + at * g_token + head * g_head, mask=there, other=0.0).to(tl.float32)
    rate = tl.load(beta + sequence * beta_sequence + at * beta_token + head * beta_head, mask=there, other=0.0)
    rate = rate.to(tl.float32)
    total = tl.cumsum(decay, 0)
    by_key, by_query = tl.full([CHUNK], 1.0, tl.float32), tl.full([CHUNK], 1.0, tl.float32) * scale
    if NORMED:
        x = keys.to(tl.float32)
        by_key = tl.rsqrt(tl.sum(x * x, 1) + NORM)
        x = queries.to(tl.float32)
        by_query = tl.rsqrt(tl.sum(x * x, 1) + NORM) * scale
    tl.store(factors + base * 3 * CHUNK + row, total)
    tl.store(factors + base * 3 * CHUNK + CHUNK + row, by_key)
    tl.store(factors + base * 3 * CHUNK + 2 * CHUNK + row, by_query)
    turned = tl.trans(keys)
    past = row[:, None] - row[None, :]
    fading = tl.exp(tl.where(past >= 0, total[:, None] - total[None, :], 0.0)) * by_key[None, :]
    tile = base * CHUNK * CHUNK + row[:, None] * CHUNK + row[None, :]
    weighed = tl.dot(queries, turned, input_precision=PRECISION) * (fading * by_query[:, None])
    tl.store(weights + tile, tl.where(past >= 0, weighed, 0.0).to(weights.dtype.element_ty))
    system = tl.dot(keys, turned, input_precision=PRECISION) * (fading * (by_key * rate)[:, None])
    system = tl.where(past > 0, system, 0.0)
    # The blocks on the diagonal, side by side, a row of all after the other.
    near = row[:, None] // BLOCK == row[None, :] // BLOCK
    inner = tl.where(near, system, 0.0)
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    beside = tl.sum(tl.reshape(inner, [BLOCKS, BLOCK, CHUNK]), 0)
    line, column = tl.arange(0, BLOCK)[:, None], row[None, :] % BLOCK
    made = tl.where(line == column, 1.0, 0.0)
    for turn in tl.range(1, BLOCK):
        known_by = tl.reshape(tl.sum(tl.where(line == turn, beside, 0.0), 0), [BLOCKS, BLOCK])
        each = tl.broadcast_to(tl.trans(known_by)[:, :, None], [BLOCK, BLOCKS, BLOCK])
        next_line = -tl.sum(tl.reshape(each, [BLOCK, CHUNK]) * made, 0)
        made = tl.where((line == turn) & (column < turn), next_line[None, :], made)
    wide = tl.broadcast_to(made[None, :, :], [BLOCKS, BLOCK, CHUNK])
    inverse = tl.where(near, tl.reshape(wide, [CHUNK, CHUNK]), 0.0)
    # What is left of it below them is nilpotent: as many terms as there are blocks.
    kind = solved.dtype.element_ty
    rest = tl.dot(inverse.to(kind), (system - inner).to(kind), input_precision=PRECISION)
    term = inverse
    for _turn in tl.static_range(1, CHUNK // BLOCK):
        term = -tl.dot(rest.to(kind), term.to(kind), input_precision=PRECISION)
        inverse += term
    tl.store(solved + tile, inverse.to(solved.dtype.element_ty))


@triton.jit(do_not_specialize=["tokens"])
def _scan(
    q, k, v, beta, solved, weights, factors, out, memory, reads, writes, tokens, q_sequence, q_token, q_head,
    k_sequence, k_token, k_head, v_sequence, v_token, v_head, beta_sequence, beta_token, beta_head, slot_size,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D_K: tl.constexpr, K_PAD: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr, D_V: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some channels of one value head of one sequence, through all its chunks."""
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel, dim, row = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH), tl.arange(0, K_PAD), tl.arange(0, CHUNK)
    real, known = channel < D_V, dim < D_K
    inner = (head * D_K + dim)[:, None] * D_V + channel[None, :]
    both = known[:, None] & real[None, :]
    state = tl.load(memory + tl.load(reads + sequence) * slot_size + inner, mask=both, other=0.0).to(tl.float32)
    q += sequence * q_sequence + (head // GROUP) * q_head
    k += sequence * k_sequence + (head // GROUP) * k_head
    v += sequence * v_sequence + head * v_head
    beta += sequence * beta_sequence + head * beta_head
    out += (sequence * tokens * HEADS + head) * D_V
    chunks = tl.cdiv(tokens, CHUNK)
    square = row[:, None] * CHUNK + row[None, :]
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        token = (chunk * CHUNK + row).to(tl.int64)
        there = token < tokens
        wanted = there[:, None] & known[None, :]
        base = (sequence * chunks + chunk) * HEADS + head
        keys = tl.load(k + token[:, None] * k_token + dim[None, :], mask=wanted, other=0.0)
        queries = tl.load(q + token[:, None] * q_token + dim[None, :], mask=wanted, other=0.0)
        shown = there[:, None] & real[None, :]
        values = tl.load(v + token[:, None] * v_token + channel[None, :], mask=shown, other=0.0).to(tl.float32)
        rate = tl.load(beta + token * beta_token, mask=there, other=0.0).to(tl.float32)
        total = tl.load(factors + base * 3 * CHUNK + row)
        by_key = tl.load(factors + base * 3 * CHUNK + CHUNK + row)
        by_query = tl.load(factors + base * 3 * CHUNK + 2 * CHUNK + row)
        whole = tl.load(factors + base * 3 * CHUNK + CHUNK - 1)
        faded = tl.exp(total)
        held = state.to(keys.dtype)
        known_of = tl.dot(keys, held, input_precision=PRECISION) * (by_key * rate * faded)[:, None]
        wrong = (values * rate[:, None] - known_of).to(keys.dtype)
        inverse = tl.load(solved + base * CHUNK * CHUNK + square)
        new = tl.dot(inverse, wrong, input_precision=PRECISION)
        weighed = tl.load(weights + base * CHUNK * CHUNK + square)
        y = tl.dot(queries, held, input_precision=PRECISION) * (by_query * faded)[:, None]
        y = tl.dot(weighed, new.to(keys.dtype), y, input_precision=PRECISION)
        tl.store(out + token[:, None] * HEADS * D_V + channel[None, :], y.to(out.dtype.element_ty), mask=shown)
        written = (new * (by_key * tl.exp(whole - total))[:, None]).to(keys.dtype)
        state = tl.dot(tl.trans(keys), written, state * tl.exp(whole), input_precision=PRECISION)
    after = memory + tl.load(writes + sequence) * slot_size
    tl.store(after + inner, state.to(memory.dtype.element_ty), mask=both)
