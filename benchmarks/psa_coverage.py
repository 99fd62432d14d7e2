"""Does a progressive method cover what it says? Of real attention, head by head and step by step.

A novel (or made prose) with planted facts is prefilled; then text is forced as decode steps that repeats a stretch of
it word for word, asks for facts and answers. Every step's true weight is taken in float64 from the queries and keys
that the engine used, over what it really read. Beside it stands what an oracle that knows the blocks' true weights
would have to read to cover epsilon: the fewest blocks of the same size, by the largest share of any head of a KV head.

    python benchmarks/psa_coverage.py smollm2 qwen2.5-coder gemma3-270m --length 1024 --length 4096 -f novel.txt
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from saccade import LLM
from saccade.engine.core import new_request_id
from saccade.engine.messages import AddRequest
from saccade.engine.observing import observing
from saccade.engine.sampling.params import SamplingParams
from saccade.engine.watch.observe import AttentionCall
from saccade.facts import make_facts, plant
from saccade.methods.policy import Policy
from saccade.outputs import finished
from saccade.prose import generate

STEPS, FACTS = 96, 8
OFF_STEP = 0.05


@dataclass
class Watch:
    """True weight read, and pairs read, of each (layer, head, step); what an oracle's blocks would take."""

    epsilon: float
    size: int
    weights: list[Tensor] = field(default_factory=list)  # [heads] of one layer and step
    read: list[float] = field(default_factory=list)
    needed: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)  # their layers

    def __call__(self, call: AttentionCall) -> None:
        if call.phase != "decode":
            return
        shape, spec = call.selection.shape, call.spec
        if spec.window is not None and spec.window < shape.k_len:  # the model's own window decides there
            return
        keys, q = call.kv.keys(0, shape.k_len).double(), call.q[:, -1].double()
        logits = q.unflatten(0, (keys.shape[0], -1)) @ keys.transpose(1, 2) * spec.scale
        if spec.softcap is not None:
            logits = spec.softcap * torch.tanh(logits / spec.softcap)
        share = torch.softmax(logits, -1)  # [kv_heads, group, keys]
        mask = call.selection.mask()[:, -1].to(share.device)
        self.weights.append((share.flatten(0, 1) * mask).sum(-1).cpu())
        self.read.append(float(mask.double().mean()))
        self.needed.append(self._oracle(share))
        self.places.append(call.layer)

    def _oracle(self, share: Tensor) -> float:
        """Share of the keys in the fewest blocks, by rank, that hold epsilon for all heads of each KV head."""
        n = share.shape[-1]
        padded = torch.nn.functional.pad(share, (0, -n % self.size)).unflatten(-1, (-1, self.size)).sum(-1)
        order = padded.amax(1).argsort(-1, descending=True)
        held = padded.gather(2, order[:, None].expand_as(padded)).cumsum(-1)
        blocks = (held < self.epsilon).sum(-1).amax(-1) + 1
        return float((blocks * self.size).clamp(max=n).double().mean()) / n


def passage(encode, length: int, text: str, seed: int) -> tuple[list[int], list[int]]:
    """Token ids of a context of about ``length - STEPS`` tokens, and those that are forced: half of them a stretch of
    the context again, then questions for its facts with their answers."""
    facts = make_facts(FACTS, seed)
    chars = int(4.6 * length)
    while True:
        body = plant(text[:chars], facts, seed)
        ids = encode(body, True)
        if len(ids) <= length - STEPS:
            break
        chars = int(chars * (length - STEPS) / len(ids)) - 16
    at = len(ids) // 3
    again = ids[at : at + STEPS // 2]
    asked: list[int] = []
    for fact in facts[::2]:
        asked += encode(f"\nQuestion: What is the {fact.subject}?\nAnswer: {fact.value}.", False)
    return ids, (again + asked)[:STEPS]


def measure(llm: LLM, ids: Sequence[int], forced: Sequence[int], policy: Policy, size: int) -> Watch:
    watch = Watch(policy.decode.epsilon, size)
    params = SamplingParams(temperature=0, max_tokens=1)
    message = AddRequest(new_request_id(), [*ids, *forced], params, policy, decoded=len(forced))
    with observing(llm.engine, watch), llm.loop.asked([message]) as streams:
        (outcome,) = finished(streams)
    if outcome.error is not None:
        raise SystemExit(outcome.error)
    return watch


def row(name: str, length: int, policy: str, watch: Watch) -> str:
    by_layer = [
        torch.stack([weights for weights, at in zip(watch.weights, watch.places) if at == layer])
        for layer in sorted(set(watch.places))
    ]
    over = torch.stack(by_layer)  # [layers, steps, heads]
    off = over - watch.epsilon
    worst = off.mean(1).min()  # the worst head's mean
    read, needed = sum(watch.read) / len(watch.read), sum(watch.needed) / len(watch.needed)
    below, least = 100 * float((off < -OFF_STEP).double().mean()), float(over.min())
    return (
        f"| {name} | {length} | `{policy}` | {watch.epsilon + float(worst):.4f} | {below:.3f} % | {least:.3f} "
        f"| {100 * read:.1f} % | {100 * needed:.1f} % | {read / needed:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--length", type=int, action="append")
    parser.add_argument("-f", "--file", type=Path, help="the text; made prose without it")
    parser.add_argument("--at", type=float, default=0.3, help="where in the text to begin, a share of it")
    parser.add_argument("-p", "--policy", action="append")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    policies = args.policy or [f"psa(epsilon={e})" for e in (0.9, 0.95, 0.98)]
    print("| model | length | policy | worst head's mean | below epsilon - 0.05 | least | read | oracle | ratio |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        longest = max(args.length or [4096])
        with LLM(
            name, dtype=args.dtype, device=args.device, enable_prefix_caching=True, max_model_len=longest + 8
        ) as llm:
            for length in args.length or [4096]:
                if args.file is None:
                    text = generate(8 * length, args.seed)
                else:
                    text = args.file.read_text(encoding="utf-8")
                    text = re.sub(r"\s+", " ", text[int(args.at * len(text)) :])
                ids, forced = passage(
                    lambda part, first: llm.tokenizer.encode(part, add_special_tokens=first), length, text, args.seed
                )
                for policy in policies:
                    chosen = Policy.parse(policy)
                    watch = measure(llm, ids, forced, chosen, getattr(chosen.decode, "block_size", 32))
                    print(row(Path(name).name, length, policy, watch), flush=True)


if __name__ == "__main__":
    main()
