"""saccade tune over several texts, and what its command says of texts that do not do."""

from __future__ import annotations

import shlex
from dataclasses import replace

import pytest
from drift_texts import TEXT, passage
from tiny_models import make_checkpoint, one_thread  # noqa: F401
from tune_helpers import FAR, NEAR, TRIED, config, found_of, own_cache, quick_times  # noqa: F401

from saccade.cli.main import main
from saccade.eval.drift.measure import run
from saccade.eval.tune import study, trial
from saccade.eval.tune.ladders import Ladder
from saccade.eval.tune.study import tune
from saccade.eval.tune.trial import Limits
from saccade.passage import Passage, made_passage


def flat(llm):
    """A text of one token, at which every policy attends to the same value."""
    return Passage((7,) * 213, 200)


def test_what_holds_over_one_text_has_to_hold_over_the_others(tiny_llama, cache):
    """Over a text of one token any policy does; over the other text the worst counts, and is named."""
    options = {"ladders": (Ladder("decode", (NEAR, FAR)),), "bound": 0.02, "rounding": False}
    alone = tune(config(tiny_llama), lambda llm: ("flat", flat(llm)), **options)
    assert [one.why for one in alone.tried] == [None, None]
    found = tune(
        config(tiny_llama),
        lambda llm: ("flat", flat(llm)),
        also=[lambda llm: ("a text", passage(llm))],
        **options,
    )
    near, far = found.tried
    assert near.why is None
    assert far.why is not None
    assert far.why.endswith("(a text)")
    assert far.kl == pytest.approx(found_of(tiny_llama, bound=0.02).tried[2].kl, rel=1e-4)
    assert near.kl >= alone.tried[0].kl
    assert (found.tuned.policy, found.tuned.text) == (NEAR, "flat and a text")


def test_no_other_text_is_run_where_the_first_says_no(tiny_llama, monkeypatch):
    ran = []
    monkeypatch.setattr(Limits, "why_not", lambda *drift: "too far")
    monkeypatch.setattr(
        trial, "run", lambda llm, text, *rest, **more: ran.append(text) or run(llm, text, *rest, **more)
    )
    found = found_of(tiny_llama, also=[lambda llm: ("flat", flat(llm))], ladders=(Ladder("decode", (NEAR,)),))
    assert len(ran) == 1
    assert found.tried[0].why == "too far (a text)"


def test_rounding_of_each_text_is_the_yardstick_there(tiny_llama, monkeypatch):
    asked = []
    monkeypatch.setattr(Limits, "why_not", lambda limits, *drift: asked.append(limits.rounding))
    options = {"also": [lambda llm: ("flat", flat(llm))], "ladders": (Ladder("decode", (NEAR,)),), "rounding": True}
    found = found_of(tiny_llama, **options)
    assert list(found.roundings) == ["a text", "flat"]
    assert asked == list(found.roundings.values())
    assert found.tuned.rounding == min(asked)


@pytest.mark.parametrize(("least", "tried"), [(201, [NEAR, "psa"]), (400, ["psa"])])
def test_over_a_short_text_the_preset_alone_is_tried(tiny_llama, least, tried):
    """There others read nearly all, and say nothing of a longer one."""
    ladders = (Ladder("decode", (NEAR,)), Ladder("decode", ("psa",)))
    said: list[str] = []
    found = found_of(tiny_llama, ladders=ladders, least=least, note=said.append)
    assert [one.policy for one in found.tried] == tried
    assert any("of 201 tokens others than the preset read nearly all" in line for line in said) == (least > 201)


def test_a_context_without_room_for_more_is_no_short_text(tiny_llama):
    small = replace(config(tiny_llama), max_model_len=1100)
    options = {"ladders": (Ladder("decode", (NEAR,)),), "bound": 0.05, "rounding": False, "least": 4096}

    def text(llm):
        return "long", made_passage(llm.encode, 1090, 12, 0)

    assert [one.policy for one in tune(small, text, **options).tried] == [NEAR]


def command(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["tune", *args])
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_holds_a_file_and_the_made_text(capsys, tiny_llama, tmp_path):
    """A length beyond the context is said to be, and what is measured in its place."""
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 40)
    asked = ["-f", str(file), "--length", "30000", "--tokens", "12", "--seconds", "1", "--max-model-len", "1100"]
    code, out, err = command(capsys, str(tiny_llama), *asked, "--bound", "9", "--kv-memory", "64MiB")
    assert code == 0
    assert "30,000 tokens and one to be predicted: the context has room for 1,100 (--max-model-len gives up to" in err
    assert "1,099 are measured" in err
    assert "12 forced tokens tell shares that agree apart by 8.3 points; give 67 or more" in err
    assert "rounding (text.txt)" in out
    assert "rounding (made prose with facts)" in out
    assert "| `psa` |" in out
    kept = next((line.split("`")[1] for line in out.splitlines() if line.endswith("| kept |")), None)
    told = [line for line in out.splitlines() if line.startswith("Over other texts: ")]
    assert [shlex.split(line)[-1] for line in told] == [kept] * (kept is not None)
    assert all(f" eval drift -m {tiny_llama} -f TEXT -p " in line for line in told)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (" \n", "text.txt is empty; give a text of 4097 tokens"),
        ("few words", "tokens, and --length 4096 takes 4097, the last to be predicted; give a longer text"),
    ],
)
def test_a_text_that_is_too_short_is_named(capsys, tmp_path, text, says):
    folder = make_checkpoint("llama", tmp_path / "model", max_position_embeddings=8192)
    file = tmp_path / "text.txt"
    file.write_text(text)
    code, _, err = command(capsys, str(folder), "-f", str(file))
    assert code == 2
    assert says in err


def test_an_interrupt_says_what_it_leaves(capsys, tiny_llama, monkeypatch, cache):
    def run(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run", run)
    code, _, err = command(capsys, str(tiny_llama), "--length", "1000", "--kv-memory", "64MiB")
    assert code == 130
    assert "interrupted: nothing is kept" in err
    assert not cache.exists()
