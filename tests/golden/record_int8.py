"""Record greedy tokens of every method over keys and values of 8 bits, on the reference backend, for
``tests/test_golden_int8.py``:

    PYTHONPATH=tests python -m golden.record_int8 --commit $(git rev-parse HEAD)

A prompt is kept where its tokens stay when each weight moves by about 2e-6 of itself and where the C++ kernels run.
That moves values over the border between two codes, so counts may change, and only tokens are kept.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from golden.replay import checkpoint, greedy, load, margin
from method_matrix import MATRIX
from tiny_models import random_ids

from saccade.methods.policy import Policy

FILE = Path(__file__).parent / "int8.json"
LENGTH, NEW_TOKENS, SEEDS, MARGIN = 160, 5, 20, 0.02


def tokens(llm: Any, policy: str, seed: int, logprobs: int | None = None) -> Any:
    """The output of the prompt of that seed."""
    (output,) = llm.generate([random_ids(LENGTH, seed)], greedy(NEW_TOKENS, logprobs), policy=policy)
    assert output.error is None, (policy, output.error)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True, help="the commit of the code that runs")
    options = parser.parse_args()
    torch.set_num_threads(1)
    stored = {"kv_dtype": "int8", "kv_rotate": True}
    with tempfile.TemporaryDirectory() as folder:
        plain = load(checkpoint("llama", Path(folder, "plain")), backend="reference", **stored)
        others = [
            load(checkpoint("llama", Path(folder, f"moved{seed}"), jitter=seed), **stored, **given)
            for seed, given in ((0, {}), (1, {"backend": "reference"}), (2, {}))
        ]
        cases = []
        for policy in dict.fromkeys(Policy.parse(case.methods()[0]).text for case in MATRIX):
            for seed in range(SEEDS):
                output = tokens(plain, policy, seed, logprobs=2)
                found = output.outputs[0].token_ids
                if margin(output) >= MARGIN and all(
                    tokens(llm, policy, seed).outputs[0].token_ids == found for llm in others
                ):
                    cases.append({"policy": policy, "seed": seed, "tokens": found})
                    break
            else:
                print(f"{policy}: no seed holds", flush=True)
    rows = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    FILE.write_text(f'{{"commit": "{options.commit}", "cases": [\n{rows}\n]}}\n')
    print(f"{len(cases)} cases in {FILE}")


if __name__ == "__main__":
    main()
