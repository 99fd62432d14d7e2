"""``saccade demo``: what it says sparsity saved, and that the policies it shows by default are worth showing."""

from __future__ import annotations

import re

import pytest

from saccade.cli.main import main
from saccade.eval_cli.demo import CHARACTERS, POLICIES, Row, show, verdict


def row(policy: str, correct: int, seconds: float) -> Row:
    return Row(policy, correct, [], seconds)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row("dense", 10, 9.0)], ""),
        ([row("psa", 10, 9.0), row("lfps", 10, 2.0)], ""),
        (
            [row("dense", 10, 9.0), row("streaming", 0, 1.0), row("psa", 10, 3.0), row("lfps", 10, 2.0)],
            "saved: lfps answered 10 of 10 (dense: 10) in 2.0 s instead of 9.0 s, 4.5 times as fast",
        ),
        ([row("dense", 9, 9.0), row("streaming", 8, 1.0)], "no other policy answered as many as dense did (9 of 10)"),
        (
            [row("dense", 10, 2.0), row("psa", 10, 2.5), row("streaming", 9, 1.0)],
            "no policy that answered as many as dense did was faster: at this length reading less saves nothing here",
        ),
    ],
)
def test_what_was_saved_is_said_of_policies_that_answer_as_many(rows, said):
    assert verdict(rows, 10) == said


def test_policies_are_compared_with_dense_attention(capsys):
    policies = ["dense", "streaming(window=100)"]
    given = ["--characters", "3000", "--facts", "2", *(word for one in policies for word in ("-p", one))]
    with pytest.raises(SystemExit) as ended:
        main(["demo", *given])
    assert ended.value.code in (0, None)
    out = capsys.readouterr().out
    assert re.search(r"2 facts in 3,\d{3} tokens \(text made from seed 1\)", out)
    rows = {policy: next(line.split("│") for line in out.splitlines() if f" {policy} " in line) for policy in policies}
    assert rows["dense"][2].strip() == "2/2"
    assert rows["dense"][-2].strip() == "1.00x"


def test_the_table_has_dense_attention_s_time_over_each_policy_s(capsys):
    show([row("dense", 10, 9.0), row("psa", 10, 3.0), row("lfps", 9, 12.0)], 10)
    out = capsys.readouterr().out
    assert [re.sub(r"\s", "", one) for one in re.findall(r"│([^│]*x) │\n", out)] == ["1.00x", "3.00x", "0.75x"]
    show([row("psa", 10, 3.0)], 10)
    assert "x │" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.thorough
def test_what_it_shows_by_default_reads_little_and_answers(capsys):
    """At its own length: two policies answer all ten facts, by a tenth of dense attention's pairs at most."""
    assert CHARACTERS >= 2**16
    chosen = [policy for policy in POLICIES if policy.startswith("flexprefill")]
    with pytest.raises(SystemExit):
        main(["demo", *(word for one in chosen for word in ("-p", one))])
    out = capsys.readouterr().out
    for policy in chosen:
        _, _, correct, prefill, decode, *_ = next(line.split("│") for line in out.splitlines() if f" {policy} " in line)
        assert correct.strip() == "10/10"
        assert max(float(share.strip(" %")) for share in (prefill, decode)) < 10
