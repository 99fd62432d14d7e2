"""What a process takes beside weights and keys and values, policy by policy: one JSON object a line.

python tools/peak_memory.py MODEL --kv-memory 200MiB --tokens 2500,300 --policy dense --policy magicpig

``beyond``: MiB of resident memory at the highest, above what the interpreter takes with torch and transformers
imported, less the weights' and ``kv_memory``. ``after``: likewise, once the policy's requests have ended and the C
library has given back what it keeps of freed memory (which varies by MiB from run to run). Blocks of the pool that no
request has used yet are not resident: both figures grow by them, up to ``kv_memory``.
"""

from __future__ import annotations

import argparse
import gc
import json
import random

import transformers.models.llama.modeling_llama  # noqa: F401  (counted with the interpreter)

from saccade import LLM, SamplingParams
from saccade.machine import parse_bytes, peak_bytes, reset_peak, resident_bytes, trim_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kv-memory", default="200MiB")
    parser.add_argument("--tokens", default="2500,300", help="lengths of the prompts, one after another")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--policy", action="append", required=True)
    options = parser.parse_args()
    lengths, draw = [int(length) for length in options.tokens.split(",")], random.Random(0)
    gc.collect()
    begun = resident_bytes()
    llm = LLM(options.model, kv_memory=options.kv_memory, dtype=options.dtype, device="cpu")
    weights = {one.data_ptr(): one.nbytes for one in llm.model.runner.weights.values()}  # type: ignore[attr-defined]
    known = begun + sum(weights.values()) + parse_bytes(options.kv_memory)
    print(json.dumps({"loading": peak_bytes() - begun - sum(weights.values()) >> 20}), flush=True)
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    for policy in options.policy:
        reset_peak()
        for length in lengths:
            ids = [draw.randrange(1, min(256, llm.model.spec.vocab_size)) for _ in range(length)]
            llm.generate([ids], params, policy=policy)
        beyond = peak_bytes() - known >> 20
        gc.collect()
        trim_memory()
        found = {"beyond": beyond, "after": resident_bytes() - known >> 20}
        print(json.dumps({"policy": policy, **found}), flush=True)


if __name__ == "__main__":
    main()
