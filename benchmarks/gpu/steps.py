"""The reference model on the GPU: milliseconds a decode step under each method, and a crowd of mixed methods beside the
same requests grouped by method."""

from __future__ import annotations

import os
import time

from harness import Results

from saccade import LLM, SamplingParams
from saccade.bench.ttft import prompt
from saccade.outputs import RequestOutput

POLICIES = os.environ.get(
    "POLICIES",
    "dense;streaming;quest(budget=512);arkvale(budget=512);psa(epsilon=0.9);lfps;lfps(blocks=0, least=1, rest=none);"
    "cis;cpe;loopserve;"
    "topk(k=256);snapkv(capacity=512);adakv(capacity=512);h2o(budget=512);double_sparsity(k=256, source=prompt);"
    "hshare(source=prompt);dense+psaw",
).split(";")
LENGTHS = (4096, 15872) if "rows" in os.environ.get("WANTED", "rows crowd") else ()
STEPS = 128
CROWD, CROWD_STEPS = 64, 64


def step_ms(output: RequestOutput) -> float:
    """Median of a request's own steps is not kept; first to last token over the steps between is."""
    metrics = output.metrics
    assert metrics is not None
    assert metrics.last_token_time is not None
    assert metrics.first_token_time is not None
    return 1000 * (metrics.last_token_time - metrics.first_token_time) / (metrics.num_generation_tokens - 1)


def main() -> None:
    results = Results("steps")
    llm = LLM("reference", device="cuda", max_model_len=16384, enable_prefix_caching=False)
    vocab = llm.model.spec.vocab_size
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
    for length in LENGTHS:
        dense = None
        for policy in POLICIES:

            def ask(policy: str = policy, length: int = length) -> float:
                ids = prompt(length, vocab)
                outputs = [llm.generate(ids, params, policy=policy)[0] for _ in range(3)]  # the first one compiles
                if outputs[-1].error is not None:
                    raise RuntimeError(outputs[-1].error)
                taken = min(map(step_ms, outputs[1:]))
                report = outputs[-1].report["decode"]
                results.add(
                    context=length,
                    policy=policy,
                    ms_per_step=taken,
                    x_dense=None if dense is None else taken / dense,  # noqa: B023
                    density=report["density"],
                    backends=str(report["backends"]),
                    notes=str(outputs[-1].report["notes"])[:160],
                )
                return taken

            taken = results.attempt(f"{policy} at {length}", ask)
            dense = taken if policy == "dense" else dense
    if "crowd" in os.environ.get("WANTED", "rows crowd"):
        results.attempt("crowd", lambda: crowd(llm, results))


def crowd(llm: LLM, results: Results) -> None:
    """Tokens a second of mixed requests at once, and of the same requests in one batch a method."""
    chosen = [policy for policy in POLICIES if "least=1" not in policy][:16]
    params = SamplingParams(temperature=0, max_tokens=CROWD_STEPS, ignore_eos=True)
    lengths = (512, 1024, 2048, 3072)
    asked = [
        (prompt(lengths[number // 16 % 4], llm.model.spec.vocab_size, seed=number), chosen[number % len(chosen)])
        for number in range(CROWD)
    ]

    def mixed() -> float:
        began = time.perf_counter()
        outputs = llm.generate([ids for ids, _ in asked], params, policy=[policy for _, policy in asked])
        assert all(one.error is None for one in outputs)
        return time.perf_counter() - began

    def grouped() -> float:
        began = time.perf_counter()
        for policy in chosen:
            llm.generate([ids for ids, own in asked if own == policy], params, policy=policy)
        return time.perf_counter() - began

    mixed(), grouped()  # which compile and record
    for number in range(3):
        together, apart = mixed(), grouped()
        results.add(
            what=f"crowd, pass {number + 1}",
            requests=CROWD,
            mixed_s=together,
            grouped_s=apart,
            mixed_over_grouped_tokens_per_s=apart / together,
        )


if __name__ == "__main__":
    main()
