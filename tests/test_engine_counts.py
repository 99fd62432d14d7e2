"""What decode steps leave to be counted later, and the likeliest tokens of many rows."""

import math
from types import SimpleNamespace

import torch

from saccade.engine.sampling.choosing import LEFT, likeliest
from saccade.engine.watch.device_counts import NOTED, LateCounts
from saccade.methods import parse_method


def test_rules_are_counted_whenever_somebody_asks():
    spec = SimpleNamespace(layers=2, heads=4, kv_heads=2, head_dim=16, windows=(None, None))
    plan = parse_method("psa(epsilon=0.4, block_size=16, microbatch=1)").device_plan(spec)
    counts, generator = LateCounts(plan, 4), torch.Generator().manual_seed(1)
    keys = torch.randint(0, 99, (2 * NOTED + 3, 2, 2), generator=generator)
    covered = torch.rand(len(keys), 2, 2, generator=generator)
    for at, (some, coverage) in enumerate(zip(keys, covered)):
        counts.add(1000 + at, "cpu")
        counts.note_rule(some, coverage)
    for layer, one in counts.take().layers.items():
        assert one.attended.tolist() == [int(keys[:, layer, head // 2].sum()) for head in range(4)]
        assert math.isclose(one.covered, covered[:, layer].double().sum(), rel_tol=1e-12)
        assert one.least_covered == covered[:, layer].min()
    counts.add(5000, "cpu")
    counts.note_rule(keys[0], covered[0])
    assert counts.take().layers[1].attended[::2].tolist() == keys[0, 1].tolist()  # nothing is counted twice


def test_the_likeliest_of_each_row():
    logits = torch.tensor([[1.0, 3.0, 3.0], [math.nan, 9.0, 1.0], [-math.inf, 2.0, -1.0], [0.0, math.inf, 1.0]])
    # The lowest of equals; none where the greatest is no finite number.
    assert likeliest(logits) == [1, LEFT, 1, LEFT]
    assert likeliest(logits[:0]) == []
    random = torch.Generator().manual_seed(3)
    for vocab in (1, 7, 500, 128_256):
        wide = torch.randn(5, vocab + 3, generator=random).bfloat16().float()[:, 1 : vocab + 1]  # of many equals
        assert likeliest(wide) == wide.argmax(-1).tolist() == [int(row.argmax()) for row in wide]
        wide[3, -1], wide[1] = math.nan, -math.inf
        assert [at for at, token in enumerate(likeliest(wide)) if token == LEFT] == [1, 3]
