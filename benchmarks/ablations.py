"""The ablations that papers print, as policies of ours: one option turned at a time (sweeps.py runs them)."""

from __future__ import annotations

from dataclasses import dataclass

SINGLE = ("single", "multikey", "multivalue", "vt", "words", "common", "span_copy", "update")
TURNS = ("three_turn_begin", "three_turn_middle", "three_turn_end")


@dataclass(frozen=True)
class Sweep:
    """``phase``: whose density is shown; ``protocol``: B decodes the question, A prefills it."""

    about: str
    phase: str
    policies: tuple[str, ...]
    tasks: tuple[str, ...] = SINGLE
    protocol: str = "A"
    recall: bool = False  # also the share of the true weight that is kept


def flex(*options: str) -> tuple[str, ...]:
    """With a floor that leaves something to choose at 2K. Published rows are of Alg. 4 as printed (see ``RETIRED``)."""
    return tuple(f"flexprefill({one})" for one in options)


RETIRED = {"flexprefill-rows"}  # published, of options that are gone: mode=paper, pattern_rows, index_rows
LOOP = ("prefill=loopserve(alpha={})", "prefill=dense,decode=loopserve(first=0,{})")
CIS = "cis(follow=none,{})"
SWEEPS = {
    "flexprefill-gamma": Sweep(
        "FlexPrefill, Table 5: gamma",
        "prefill",
        flex(*(f"min_budget=128,gamma={gamma}" for gamma in (0.97, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6))),
    ),
    "flexprefill-tau": Sweep(
        "FlexPrefill, Table 6: tau", "prefill", flex(*(f"min_budget=128,tau={tau}" for tau in (0.0, 0.1, 0.2, 0.3)))
    ),
    "flexprefill-blocks": Sweep(
        "FlexPrefill, Table 7: block size",
        "prefill",
        flex("min_budget=128,block_size=128", "min_budget=128,block_size=64"),
    ),
    "flexprefill-flatten": Sweep(
        "FlexPrefill, Table 9: flatten",
        "prefill",
        flex("min_budget=128,tau=0.3", "min_budget=128,tau=0.3,flatten=false"),
    ),
    "flexprefill-budget": Sweep(
        "FlexPrefill, Tables 10 and 11: minimum and maximum budget",
        "prefill",
        flex(
            *(f"gamma={gamma},min_budget={least}" for gamma in (0.95, 0.9) for least in (0, 128, 256, 512)),
            *(f"min_budget=128,max_budget={most}" for most in (512, 1024, 2048)),
        ),
    ),
    "flexprefill-peers": Sweep(
        "FlexPrefill, Table 1: beside MInference and StreamingLLM",
        "prefill",
        (
            *flex("min_budget=128"),
            "flexprefill",
            "minference(vertical=100,slash=300)",
            "minference(vertical=300,slash=900)",
            "streaming(sinks=4,window=1024)+dense",
        ),
        (*SINGLE, *TURNS),
    ),
    "minference-search": Sweep(
        "FlexPrefill, 4.1: MInference with its search by head (patterns of 512 keys, see docs/results/ablations.md)",
        "prefill",
        (
            "minference(vertical=64,slash=448)",
            "minference(vertical=256,slash=256)",
            "minference(vertical=448,slash=64)",
            "minference(pattern=block_sparse,blocks=8)",
            "minference(pattern=searched)",
        ),
    ),
    "loopserve-alpha": Sweep(
        "LoopServe, Fig. 8: alpha",
        "prefill",
        tuple(LOOP[0].format(alpha) for alpha in (0.955, 0.98, 0.985, 0.99, 0.995, 0.999)),
        (*SINGLE, *TURNS),
    ),
    "loopserve-budget": Sweep(
        "LoopServe, Fig. 9: B",
        "decode",
        tuple(LOOP[1].format(f"budget={budget}") for budget in (128, 256, 512, 1024)),
        (*SINGLE, *TURNS),
    ),
    "loopserve-interval": Sweep(
        "LoopServe, Fig. 10: n_d",
        "decode",
        tuple(LOOP[1].format(f"budget=256,n_d={interval}") for interval in (1, 4, 8, 16, 32, 64)),
        (*SINGLE, *TURNS),
    ),
    "loopserve-parts": Sweep(
        "LoopServe, Fig. 7: P, D, both",
        "decode",
        (
            "prefill=loopserve(alpha=0.955)",
            "prefill=dense,decode=loopserve(budget=256,first=0)",
            "loopserve(alpha=0.955,budget=256,first=0)",
        ),
        (*SINGLE, *TURNS),
    ),
    "loopserve-answer": Sweep(
        "LoopServe, Alg. 2: rows of the last answer among those looked at",
        "prefill",
        tuple(
            f"loopserve(alpha={alpha},samples=256,last_rows=0,answer_rows={rows})"
            for alpha in (0.955, 0.995)
            for rows in (0, 16)
        ),
        ("update", *TURNS),
    ),
    "lfps-epsilon": Sweep(
        "LFPS, Table 3: the bypass",
        "decode",
        tuple(
            f"lfps(blocks=0,least=1,rest=none,epsilon={epsilon})" for epsilon in (1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
        ),
    ),
    "lfps-a": Sweep(
        "LFPS, Table 4: keys scored by a",
        "decode",
        tuple(f"lfps(blocks=0,least=1,rest=none,epsilon=1,a={a})" for a in (0.1, 0.2, 0.3)),
    ),
    "lfps-peers": Sweep(
        "LFPS, Tables 1 and 2: 2 % of the keys",
        "decode",
        (
            "topk(k=0.02)",
            "lfps(blocks=0,least=1,rest=none)",
            "lfps(blocks=0,least=1,rest=none,a=0.3)",
            "lfps",
            "quest(budget=80,block_size=16,dense_layers=0)",
            "magicpig(bits=10,tables=150)",
            "prefill=dense,decode=streaming(sinks=4,window=80)",
        ),
    ),
    "lfps-unit": Sweep(
        "LFPS: one list a query head or a KV head",
        "decode",
        (
            "lfps(unit=q_head)",
            "lfps(unit=kv_head)",
            "lfps(unit=q_head,least=64,blocks=64)",
            "lfps(unit=kv_head,least=64,blocks=64)",
            "lfps(unit=kv_head,least=128,blocks=64)",
            "lfps(unit=q_head,least=128,blocks=96)",
            "lfps(unit=kv_head,least=128,blocks=96)",
            "lfps(unit=kv_head,least=192,blocks=128)",
            "lfps(unit=kv_head,least=384,blocks=128)",
        ),
        (*SINGLE, *TURNS),
        protocol="B",
        recall=True,
    ),
    "cis-table-6": Sweep(
        "PrHS, Table VI: s, tau and r",
        "decode",
        tuple(CIS.format(one) for one in ("s=4", "s=8,tau=0.7", "s=8,r=2", "s=32", "s=8", "s=16", "s=8,tau=0.4")),
        protocol="B",
    ),
    "cis-likeness": Sweep(
        "PrHS, Table VII: likeness of queries, keys or hidden states",
        "decode",
        tuple(CIS.format(f"s={s},by={by}") for by in ("query", "key", "hidden") for s in (8, 16)),
        protocol="B",
        recall=True,
    ),
    "cis-hshare": Sweep(
        "PrHS, Table II and Fig. 7: beside HShare at falling ratios",
        "decode",
        (
            *(CIS.format(f"tau={tau}") for tau in (0.8, 0.4, 0.2, 0.0)),
            *(f"hshare(source=exact,every={every})" for every in (1, 2, 4, 8)),
        ),
        protocol="B",
        recall=True,
    ),
    "windows": Sweep(
        "PrHS, Table VI: psaw, etf and cpe",
        "decode",
        (
            "dense+psaw(phi=0.5,alpha=1)",
            "dense+psaw(phi=0.7,alpha=1.5)",
            "dense+psaw(phi=0.7,alpha=1)",
            "dense+etf(psi=0.5,gamma=1.5)",
            "dense+etf(psi=0.4,gamma=1)",
            "dense+etf(psi=0.5,gamma=1)",
            "cpe",
            "cis",
        ),
    ),
}
