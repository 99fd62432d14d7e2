"""Device plans as data: forms and numbers, what a reading is known to cost, and what is refused."""

from __future__ import annotations

import pytest

from saccade.errors import SaccadeError
from saccade.methods.policy import parse_method
from saccade.selection.forms import Rule, Summarized, bucket
from saccade.selection.levels import Levels
from saccade.selection.plan import DevicePlan
from saccade.selection.readings import Choice, Ends, Everything


class Spec:
    layers, heads, kv_heads, head_dim, windows = 4, 8, 2, 64, (None, None, None, None)


class Sliding(Spec):
    windows = (None, 64, None, 64)


def form(policy: str):
    return parse_method(policy).device_plan(Spec).form


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        ("psa(epsilon=0.2)", "psa(epsilon=0.97)", True),
        ("psa(microbatch=2)", "psa(microbatch=4)", False),
        ("psa(rest=min)", "psa(rest=last_max)", False),
        ("arkvale(budget=2048)", "arkvale(budget=1500)", True),
        ("arkvale(budget=2048)", "arkvale(budget=2049)", False),  # its list needs a longer buffer
        ("arkvale(budget=2048)", "arkvale(budget=2048, sinks=3)", False),
        ("quest(budget=1024)", "quest(budget=1024, dense_layers=1)", False),
        ("streaming(sinks=4, window=1000)", "streaming(sinks=1, window=520)", True),
        ("streaming(sinks=4, window=1000)", "streaming(sinks=1, window=500)", False),
    ],
)
def test_plans_of_one_form_differ_in_numbers_alone(left, right, alike):
    assert (form(left) == form(right)) == alike


@pytest.mark.parametrize("policy", ["streaming(sinks=3, window=70)", "arkvale(budget=1500)", "quest", "psa"])
def test_a_form_bounds_what_its_plans_need_and_is_its_own_form(policy):
    (reading,) = set(parse_method(policy).device_plan(Spec).layers) - {Everything()}
    assert reading.form.form == reading.form
    assert reading.form.longest >= reading.longest
    assert reading.form.longest == bucket(reading.longest)


def test_layers_whose_window_rules_read_it_and_methods_decide_in_the_others():
    plan = parse_method("dense").device_plan(Sliding)
    assert plan.layers == (Everything(), Ends(0, 64), Everything(), Ends(0, 64))
    for name in ("streaming", "arkvale", "psa", "topk"):
        (own,) = set(parse_method(name).device_plan(Spec).layers)
        assert parse_method(name).device_plan(Sliding).layers == (own, Ends(0, 64), own, Ends(0, 64))
    assert parse_method("quest(dense_layers=2)").device_plan(Sliding).layers[:2] == (Everything(), Ends(0, 64))


def test_a_row_is_of_the_level_of_the_windows_that_it_outgrows():
    levels = Levels((None, 64, 512, 64))
    assert [levels.of(length) for length in (1, 64, 65, 512, 513)] == [0, 0, 1, 1, 2]
    assert [levels.acting(level) for level in range(3)] == [(0, 1, 2, 3), (0, 2), (0,)]
    assert [levels.windows_at(level) for level in range(3)] == [(None,) * 4, (None, 64, None, 64), (None, 64, 512, 64)]
    assert Levels((None, None)).of(1 << 20) == 0


def test_what_lengths_alone_tell_of_the_cost():
    assert Everything().cost(7)[:3] == ("dense", 7, 0)
    assert [Ends(4, 10).cost(n)[:3] for n in (14, 15)] == [("dense", 14, 0), ("band", 14, 0)]
    best = Choice(Summarized(16, "minmax"), 2, 1, 1, 64, take=2)
    assert [best.cost(n)[:3] for n in (64, 65, 80)] == [("dense", 64, 0), ("blocks", 49, 3), ("blocks", 64, 3)]
    ranked = Choice(Summarized(16, "cuboid"), 2, 2, 1, 79, rule=Rule(0.5, 1, "min", "all"))
    assert [ranked.cost(n)[:3] for n in (79, 80, 81)] == [("dense", 79, 0), ("blocks", 48, 2), ("blocks", 49, 2)]


def test_what_no_kernel_could_follow_is_refused():
    with pytest.raises(SaccadeError, match="at least 64"):
        Choice(Summarized(16, "minmax"), 2, 1, 1, 63, take=2)
    with pytest.raises(SaccadeError, match="at least 63"):
        Choice(Summarized(16, "cuboid"), 2, 2, 1, 62, rule=Rule(0.5, 1, "min", "all"))
    with pytest.raises(SaccadeError, match="window >= 1"):
        Ends(4, 0)
    one, other = (Choice(Summarized(size, "minmax"), 2, 0, 1, 200, take=2) for size in (16, 32))
    with pytest.raises(SaccadeError, match="share one kind"):
        DevicePlan("x", "x", (one, other))
