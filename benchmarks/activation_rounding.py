"""What activations of 8 bits cost a quantised model on a CPU: perplexity, and KL from the same weights in float32.

    python benchmarks/activation_rounding.py model-Q4_K_M.gguf novel.txt [--tokens 20480] [--length 1024]

The text is cut into pieces of --length tokens. Each runs in float32, where activations are multiplied as they are; in
bfloat16 in passes of 16 rows, whose products take activations of 8 bits as decode does; and in bfloat16 in passes of
512 rows, whose products take them as they are. KL is that of the whole vocabulary, in nats, of every token's
distribution from float32's, with the standard error of its mean over pieces.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, scaled_dot_product_attention

from saccade.models.folders import checkpoint_folder
from saccade.models.interface import LayerAttention, Segment
from saccade.models.loader import LoadedModel, load_model

WAYS = (("float32", 16), ("bfloat16", 16), ("bfloat16", 512))


class DenseAttention:
    """Dense attention over keys and values that it keeps, of one sequence: a ``models.interface.AttentionContext``."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor, spec: LayerAttention) -> Tensor:
        """See ``AttentionContext``."""
        if spec.window is not None or spec.softcap is not None or spec.sinks is not None:
            raise SystemExit("models with windows, soft caps or sinks are not measured")
        if layer in self.kept:
            k, v = (torch.cat(pair, 1) for pair in zip(self.kept[layer], (k, v)))
        self.kept[layer] = k, v
        rows, length = q.shape[1], k.shape[1]
        mask = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        parts = (one.float()[None] for one in (q, k, v))
        return scaled_dot_product_attention(*parts, mask, scale=spec.scale, enable_gqa=True)[0].to(q.dtype)


def logits(model: LoadedModel, ids: list[int], rows: int) -> Tensor:
    """float32 [len(ids), vocab_size], in passes of ``rows`` rows."""
    context, made = DenseAttention(), []
    for first in range(0, len(ids), rows):
        part = torch.tensor(ids[first : first + rows])
        every = torch.arange(len(part))
        segments = [Segment(0, len(part), len(ids))]
        made.append(model.runner.run(part, every + first, context, segments=segments, logit_rows=every))
    return torch.cat(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=20480)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--skip", type=int, default=200_000, help="characters of the text that come before")
    args = parser.parse_args()
    models = {dtype: load_model(checkpoint_folder(args.model), dtype) for dtype, _ in WAYS}
    text = args.text.read_text(encoding="utf-8")[args.skip :]
    ids = models["float32"].tokenizer.encode(text[: 8 * args.tokens], add_special_tokens=False)[: args.tokens]
    losses: dict[tuple[str, int], list[float]] = {way: [] for way in WAYS}
    kl: dict[tuple[str, int], list[float]] = {way: [] for way in WAYS}
    for first in range(0, len(ids), args.length):
        piece = ids[first : first + args.length]
        true: Tensor | None = None
        for way in WAYS:
            found = log_softmax(logits(models[way[0]], piece, way[1])[:-1], -1)
            losses[way] += (-found.gather(1, torch.tensor(piece[1:])[:, None])[:, 0]).tolist()
            true = found if true is None else true
            kl[way].append(
                float(
                    sum((a.exp() * (a - b)).sum(-1).sum() for a, b in zip(true.split(64), found.split(64))) / len(true)
                )
            )
        for dtype, rows in WAYS:
            way = dtype, rows
            error = statistics.stdev(kl[way]) / len(kl[way]) ** 0.5 if len(kl[way]) > 1 else 0.0
            perplexity = torch.tensor(losses[way], dtype=torch.float64).mean().exp()
            print(
                f"{len(losses[way]):6} tokens {dtype:8} {rows:3} rows: perplexity {perplexity:.4f}, "
                f"KL {statistics.mean(kl[way]):.5f} +- {error:.5f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
