"""FlexPrefill's algorithms as the paper prints them, and the choice of its published code, in loops over float64.

Query heads in pairs: head h reads the keys of KV head h // 2. ``q`` [heads, n, d], ``k`` [kv_heads, n, d]; the chunk is
the last ``rows`` positions, and the block grid begins at position 0.
"""

from __future__ import annotations

import math

import torch


def weights_of(q, k, head: int, rows: int) -> torch.Tensor:
    """Softmax of the last ``rows`` rows of a head, float64 [rows, n]."""
    n = k.shape[1]
    scores = q[head, n - rows :].double() @ k[head // 2].double().T / math.sqrt(q.shape[-1])
    for row in range(rows):
        scores[row, n - rows + row + 1 :] = -math.inf
    return torch.softmax(scores, -1)


def distance_sums(weights: torch.Tensor) -> list[float]:
    rows, n = weights.shape
    sums = [0.0] * n
    for row, entries in enumerate(weights.tolist()):
        for key in range(n - rows + row + 1):
            sums[n - rows + row - key] += entries[key]
    return sums


def fewest(sums: list[float], gamma: float) -> list[int]:
    """The fewest entries, heaviest first, whose share reaches gamma."""
    chosen, got = [], 0.0
    for at in sorted(range(len(sums)), key=lambda at: -sums[at]):
        if got >= gamma * sum(sums):
            break
        chosen.append(at)
        got += sums[at]
    return chosen


def pooled_pairs(q, k, head: int, rows: int, size: int) -> list[tuple[float, int, int]]:
    """(share, query block, key block) of every causal pair of blocks: Alg. 4's softmax, for each query block, of its
    mean query with mean keys."""
    n, keys, pairs = k.shape[1], [part.double().mean(0) for part in k[head // 2].split(size)], []
    for i in range((n - rows) // size, len(keys)):
        mean = q[head, max(n - rows, i * size) : (i + 1) * size].double().mean(0)
        shares = torch.softmax(torch.stack([mean @ key for key in keys[: i + 1]]) / math.sqrt(q.shape[-1]), 0)
        pairs += [(float(share), i, j) for j, share in enumerate(shares)]
    return pairs


def published_blocks(q, k, head: int, rows: int, gamma: float, tau: float, size: int, least: int, most: int):
    """What the published code reads: whether the head is query-aware, and a set of (query block, key block).

    A head that needs T columns (distances) for gamma gets ``T // 128 + 1`` blocks, whatever the block size; distances
    are grouped from the far end, and a group becomes one block diagonal, though it straddles two; budgets hold for
    columns and distances apart; a query-aware head leaves out the block that crosses gamma, and adds columns and
    distances of the least budget.
    """
    n = k.shape[1]
    looked_at, blocks, first = min(rows, size), math.ceil(n / size), (n - rows) // size
    weights = weights_of(q, k, head, looked_at)
    vertical = [float(column) / looked_at for column in weights.sum(0)]
    slash = [mass / looked_at for mass in distance_sums(weights)]

    def granted(line: list[float]) -> int:
        cumulative, tokens = 0.0, 0
        for mass in sorted(line, reverse=True):
            cumulative += mass
            tokens += cumulative <= gamma
        return min(max((tokens + 1) // 128 + 1, least), most)

    column_mass = [sum(vertical[b * size : (b + 1) * size]) for b in range(blocks)]
    group_mass = [0.0] * blocks
    for distance in range(n):
        group_mass[(n - 1 - distance) // size] += slash[distance]

    keys = [part.double().mean(0) for part in k[head // 2].split(size)]
    last = q[head, n - looked_at :].double().mean(0)
    guess = torch.softmax(torch.stack([last @ key for key in keys]) / math.sqrt(q.shape[-1]), 0).tolist()
    divergence = 0.0
    for p, r in zip(guess, column_mass):
        divergence += 0.5 * (p * math.log(2 * p / (p + r)) + r * math.log(2 * r / (p + r)))
    aware = math.sqrt(divergence) < tau

    columns = sorted(range(blocks), key=lambda b: (b != 0, -column_mass[b]))
    groups = sorted(range(blocks), key=lambda g: (g != blocks - 1, -group_mass[g]))
    columns = columns[: least if aware else granted(vertical)]
    diagonals = {blocks - 1 - g for g in groups[: least if aware else granted(slash)]}
    chosen = {(i, j) for i in range(first, blocks) for j in range(i + 1) if j in columns or i - j in diagonals}
    if aware:
        cumulative = 0.0
        for share, i, j in sorted(pooled_pairs(q, k, head, rows, size), reverse=True):
            cumulative += share
            if cumulative > gamma * (blocks - first):
                break
            chosen.add((i, j))
    return aware, chosen
