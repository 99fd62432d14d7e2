"""The search for the sparsest setting that keeps enough of dense's score."""

from __future__ import annotations

import pytest

from saccade.errors import RequestError
from saccade.eval.target import Probe, bisect, grid, with_option


@pytest.mark.parametrize("falling", [False, True])
def test_bisection_finds_the_sparsest_value_that_keeps_enough(falling):
    """Against a linear scan, for every threshold and every number of values."""
    for count in range(2, 10):
        for first_good in range(count + 1):
            probed = []

            def probe(value: str, count=count, first_good=first_good, probed=probed) -> Probe:
                rank = count - 1 - int(value) if falling else int(value)
                probed.append(value)
                return Probe(value, f"m(o={value})", (1 + rank) / count, 0.0, 99.0 if rank >= first_good else 50.0, "")

            found = bisect([str(at) for at in range(count)], probe, 0.98)
            scanned = [str(count - 1 - rank if falling else rank) for rank in range(first_good, count)]
            assert (found.best and found.best.value) == (scanned[0] if scanned else None)
            assert len(probed) == len(set(probed)) <= 2 + count.bit_length()
            assert found.monotone
    odd = bisect(["0", "1", "2"], lambda v: Probe(v, v, 0.1 + int(v), 0, {"0": 99, "1": 50, "2": 98}[v], ""), 0.98)
    assert (odd.best.value, odd.monotone) == ("0", True)  # the middle was never looked at


def test_target_values_and_options():
    assert grid("0.5, 0.9") == ["0.5", "0.9"]
    assert grid("0.5:1:3") == ["0.5", "0.75", "1"]
    assert grid("16:64:4") == ["16", "32", "48", "64"]
    assert with_option("psa", "epsilon", "0.9") == "psa(epsilon=0.9)"
    assert with_option("psa(block_size=16)", "epsilon", "0.9") == "psa(block_size=16, epsilon=0.9)"
    for bad in ("1:0:3", "0:1:1", "0:1:x", "0:1"):
        with pytest.raises(RequestError, match="low:high:count"):
            grid(bad)
