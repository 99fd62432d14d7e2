"""Many questions about one document: time to the first token of the first one, and of those that share its prefix.

    python benchmarks/prefixes.py [--model random] [--tokens 32768] [--questions 64] [--question-tokens 64]
        [--policy dense ...] [--compare 2] [--device cpu] [--warm 0]

One after the other, as users ask; a second engine without shared prefixes answers the first and the last question, or
``--compare`` of them, so that what is saved is seen in one run, and that the answers are equal. Times are the engine's
own (``metrics``). ``--policy`` may be given often; ``every-prefill`` is one of each prefill method. ``--warm``: so many
questions about other documents come first, so that no kernel is compiled in what is timed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import torch

from saccade import LLM, SamplingParams
from saccade.bench.cli import model_folder
from saccade.bench.ttft import prompt
from saccade.outputs import RequestOutput

PREFILLS = {  # names that stand for several policies
    "every-prefill": (
        "dense",
        "flexprefill",
        "minference",
        "xattention",
        "streaming",
        "loopserve",
        "topk(prefill=true)",
        "dense+psaw",
    )
}


def first_token_ms(output: RequestOutput) -> float:
    assert output.metrics is not None
    assert output.metrics.first_token_latency is not None
    return 1000 * output.metrics.first_token_latency


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="random")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--question-tokens", type=int, default=64)
    parser.add_argument("--policy", action="append")
    parser.add_argument("--compare", type=int, default=2)
    parser.add_argument("--prefill-chunk", type=int, default=4096)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--warm", type=int, default=0)
    options = parser.parse_args()
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    length = options.tokens + options.question_tokens + params.max_tokens
    with tempfile.TemporaryDirectory() as scratch:
        model = model_folder(options.model, Path(scratch), getattr(torch, options.dtype), length)
        engines = [
            LLM(
                model,
                dtype=options.dtype,
                device=options.device,
                max_model_len=length,
                prefill_chunk=options.prefill_chunk,
                enable_prefix_caching=sharing,
            )
            for sharing in (True, False)
        ]
    vocab = engines[0].model.spec.vocab_size
    document = prompt(options.tokens, vocab)
    asked = [document + prompt(options.question_tokens, vocab, seed=1 + number) for number in range(options.questions)]
    count = min(max(1, options.compare), len(asked))
    compared = sorted({round(at * (len(asked) - 1) / max(1, count - 1)) for at in range(count)} | {len(asked) - 1})
    for policy in [one for given in options.policy or ["dense"] for one in PREFILLS.get(given, (given,))]:
        for number in range(options.warm):
            other = prompt(options.tokens, vocab, seed=-1 - number)
            for engine in engines:
                engine.generate(other + asked[0][options.tokens :], params, policy=policy)
                engine.generate(other + asked[-1][options.tokens :], params, policy=policy)
        shared = [engines[0].generate(ids, params, policy=policy)[0] for ids in asked]
        alone = {at: engines[1].generate(asked[at], params, policy=policy)[0] for at in compared}
        times = [first_token_ms(one) for one in shared]
        print(f"{options.tokens} tokens, {policy}; time to first token, ms")
        print(f"first question      {times[0]:10.1f}")
        print(f"questions after it  {statistics.median(times[1:]):10.1f} (median), {max(times[1:]):.1f} (most)")
        print(f"share of the first  {100 * statistics.median(times[1:]) / times[0]:10.2f} % (median)")
        print(f"without sharing     {first_token_ms(alone[len(asked) - 1]):10.1f} (last question)")
        equal = sum(shared[at].outputs[0].token_ids == one.outputs[0].token_ids for at, one in alone.items())
        print(f"answers equal to those without sharing: {equal} of {len(alone)}", flush=True)
        engines[0].reset_prefix_cache()


if __name__ == "__main__":
    main()
