"""The lm-eval adapter against values computed with plain transformers, and through lm-eval's own command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install 'saccade-llm[lm-eval]'")

import torch
from lm_eval.api.instance import Instance
from tiny_models import BOS, EOS, byte_tokenizer, oracle, oracle_greedy, oracle_logits, random_ids

from saccade.errors import RequestError, SaccadeError
from saccade.eval.harness import SaccadeLM, register

SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)"
LIMIT = 200
TOKENIZER = byte_tokenizer()
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def theirs(tiny_llama):
    return oracle(tiny_llama)


def load(folder, policy="dense", **options) -> SaccadeLM:
    settings = {"dtype": "float32", "kv_memory": "8MiB", "max_length": LIMIT, "prefill_chunk": 64, **options}
    return SaccadeLM(str(folder), policy, **settings)


@pytest.fixture(scope="module")
def dense(tiny_llama):
    return load(tiny_llama)


def asked(kind: str, *arguments) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]


def encode(words: str) -> list[int]:
    """One token a byte, whatever stands beside it."""
    return TOKENIZER.encode(words, add_special_tokens=False)


def text(length: int, seed: int) -> str:
    return bytes(32 + byte % 90 for byte in random_ids(length, seed)).decode()


def expected_score(theirs, ids: list[int], first: int) -> tuple[float, bool]:
    """Sum of log p(ids[i] | ids[:i]) for i >= first, in float64, and whether each is the argmax."""
    logits = oracle_logits(theirs, ids).double()
    rows = torch.log_softmax(logits, -1)
    logprob = sum(float(rows[i - 1, ids[i]]) for i in range(first, len(ids)))
    return logprob, all(int(logits[i - 1].argmax()) == ids[i] for i in range(first, len(ids)))


@pytest.mark.parametrize("protocol", ["prefill", "decode"])
def test_loglikelihood_equals_transformers(tiny_llama, theirs, protocol):
    lm = load(tiny_llama, protocol=protocol)
    contexts = [text(90, 1), text(30, 2) + "  ", "", text(300, 3)]  # spaces at the end belong to the continuation
    likely = TOKENIZER.decode(oracle_greedy(theirs, [BOS, *encode(contexts[0])], 1))
    pairs = [(context, continuation) for context in contexts for continuation in (" yes", "no, never", likely)]
    results = lm.loglikelihood(asked("loglikelihood", *pairs), disable_tqdm=True)
    assert len(results) == len(pairs)
    for (context, continuation), (logprob, greedy) in zip(pairs, results):
        ids = [BOS, *encode(context + continuation)]
        first = 1 + len(encode(context.rstrip()))
        kept = ids[-(LIMIT - 1) :]
        wanted, wanted_greedy = expected_score(theirs, kept, first - (len(ids) - len(kept)))
        assert logprob == pytest.approx(wanted, abs=2e-3)
        assert greedy == wanted_greedy
    info = lm.get_model_info()
    assert info["prefill_density"] == pytest.approx(1.0)
    assert info["decode_density"] == (None if protocol == "prefill" else pytest.approx(1.0))
    assert info["requests"] == len(pairs)


def test_the_likeliest_continuation_counts_as_greedy(dense, theirs):
    context = [BOS, *encode(text(50, 4))]
    best = oracle_greedy(theirs, context, 3)
    other = [*best[:-1], (best[-1] + 1) % 256]
    got = dense._loglikelihood_tokens([(None, context, best), (None, context, other), (None, context, [])], True)
    assert [greedy for _, greedy in got] == [True, False, True]
    assert got[0][0] > got[1][0]
    assert got[2][0] == 0.0


def test_rolling_scores_every_token_once_in_disjoint_windows(dense, theirs):
    words = text(450, 5)
    ids = encode(words)
    window = LIMIT - 2
    wanted = 0.0
    for i in range(len(ids)):  # what lm-eval's documentation says of context length 1
        if i < window:
            before = [BOS, *ids[:i]]
        else:
            end = min((i // window + 1) * window, len(ids))
            before = ids[end - window - 1 : i]
        wanted += float(torch.log_softmax(oracle_logits(theirs, before)[-1].double(), -1)[ids[i]])
    (got,) = dense.loglikelihood_rolling(asked("loglikelihood_rolling", (words,)), disable_tqdm=True)
    assert got == pytest.approx(wanted, abs=0.02)


def test_generate_until_equals_generate_and_stops(dense, theirs):
    context = text(60, 6)
    ids = oracle_greedy(theirs, [BOS, *encode(context)], 20)
    whole = dense.llm.tokenizer.decode(ids)
    stop = whole[7:9]
    requests = asked(
        "generate_until",
        (context, {"until": [], "max_gen_toks": 20}),
        (context, {"until": [stop], "max_new_tokens": 20, "do_sample": False, "temperature": 1.0}),
        (text(400, 7) + context, {"until": ["\n\n"], "max_gen_toks": 5}),  # too long: its end is kept
    )
    got = dense.generate_until(requests, disable_tqdm=True)
    assert got[:2] == [whole, whole[: whole.index(stop)]]
    kept = [BOS, *encode(text(400, 7) + context)][-(LIMIT - 5) :]
    assert got[2] == dense.llm.tokenizer.decode(oracle_greedy(theirs, kept, 5)).split("\n\n")[0]


def test_a_sparse_policy_is_really_used(tiny_llama):
    pair = (text(700, 8), " certainly")
    scores = {}
    for policy, protocol in (("dense", "prefill"), (SPARSE, "prefill"), (SPARSE, "decode")):
        lm = load(tiny_llama, policy, protocol=protocol, max_length=800)
        scores[policy, protocol] = lm.loglikelihood(asked("loglikelihood", pair), disable_tqdm=True)[0][0]
        info = lm.get_model_info()
        if policy == SPARSE:
            assert info["prefill_density"] < 0.8
            assert info["decode_density"] is None if protocol == "prefill" else info["decode_density"] < 0.8
    assert len({round(score, 4) for score in scores.values()}) == 3
    lm = load(tiny_llama, SPARSE, max_length=800)
    lm.generate_until(asked("generate_until", (pair[0], {"until": [], "max_gen_toks": 8})), disable_tqdm=True)
    info = lm.get_model_info()
    assert info["prefill_density"] < 0.8
    assert info["decode_density"] < 0.8
    assert "flexprefill" in info["policy"]


def test_bad_arguments_are_named(tiny_llama, dense):
    with pytest.raises(RequestError, match=r"protocol='both' is not one of prefill, decode"):
        load(tiny_llama, protocol="both")
    with pytest.raises(RequestError, match="gamma"):
        load(tiny_llama, gamma=0.5)
    with pytest.raises(SaccadeError, match="nonsense"):
        load(tiny_llama, "nonsense")
    with pytest.raises(RequestError, match="num_beams"):
        dense.generate_until(asked("generate_until", ("a", {"num_beams": 4})), disable_tqdm=True)
    with pytest.raises(RequestError, match=r"max_gen_toks=200 leaves no room"):
        dense.generate_until(asked("generate_until", ("a", {"max_gen_toks": LIMIT})), disable_tqdm=True)
    with pytest.raises(RequestError, match="no room for context"):
        dense._loglikelihood_tokens([(None, [BOS], [1] * LIMIT)], True)


def test_a_policy_with_commas_survives_an_argument_string(tiny_llama):
    lm = SaccadeLM.create_from_arg_string(
        f"pretrained={tiny_llama},policy=psa(epsilon=0.98,block_size=32),dtype=float32,max_length={LIMIT},kv_memory=8MiB",
        {"batch_size": 1, "max_batch_size": None, "device": None},
    )
    assert lm.llm.policy == load(tiny_llama, "psa(epsilon=0.98,block_size=32)").llm.policy
    assert lm.max_length == LIMIT


def test_chat_templates_and_special_tokens(dense):
    history = [{"role": "user", "content": "hello"}]
    assert dense.apply_chat_template(history) == "<bos><user>hello<assistant>"
    assert dense.tok_encode("<bos>a") == [BOS, *encode("a")]
    assert dense.tok_encode("a") == [BOS, *encode("a")]
    assert dense.tok_encode("a", add_special_tokens=False) == encode("a")
    assert (dense.prefix_token_id, dense.eot_token_id) == (BOS, EOS)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {data}
test_split: train
output_type: {kind}
doc_to_text: "{{{{question}}}}"
{rest}
"""


def write_tasks(folder: Path) -> list[dict]:
    records = [{"question": text(500, seed), "choices": [" left", " right"], "answer": seed % 2} for seed in range(6)]
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    choice = "doc_to_choice: choices\ndoc_to_target: answer\nmetric_list:\n  - metric: acc"
    free = 'doc_to_target: "x"\ngeneration_kwargs:\n  until: ["~"]\n  max_gen_toks: 6\n'
    free += "metric_list:\n  - metric: exact_match"
    for name, kind, rest in (("tiny_choice", "multiple_choice", choice), ("tiny_free", "generate_until", free)):
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, data=data, kind=kind, rest=rest))
    return records


def test_the_table_of_models_knows_the_name():
    from lm_eval.api.registry import get_model

    register()
    register()
    assert get_model("saccade") is SaccadeLM


@pytest.mark.slow
def test_command_line_with_local_tasks(tiny_llama, theirs, tmp_path):
    """``lm_eval --model saccade`` through the start-up hook: two tasks, one policy a phase."""
    records = write_tasks(tmp_path)
    start = "import saccade_lm_eval; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    policy = "psa(epsilon=0.4,block_size=16,microbatch=1)"
    command = [sys.executable, "-c", start, "--model", "saccade", "--model_args"]
    command += [f"pretrained={tiny_llama},policy={policy},dtype=float32,kv_memory=8MiB,max_length=800"]
    command += [
        "--include_path",
        str(tmp_path),
        "--tasks",
        "tiny_choice,tiny_free",
        "--output_path",
        str(tmp_path / "out"),
    ]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "plugins" / "lm_eval"), *sys.path]),
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(tmp_path / "home"),
    }
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    found = json.loads(file.read_text())
    right = 0
    for record in records:
        ids = [[BOS, *encode(record["question"].rstrip() + choice)] for choice in record["choices"]]
        scores = [expected_score(theirs, one, len(one) - len(c))[0] for one, c in zip(ids, record["choices"])]
        right += (scores[1] > scores[0]) == record["answer"]
    assert found["results"]["tiny_choice"]["acc,none"] == pytest.approx(right / len(records))
    assert "exact_match,none" in found["results"]["tiny_free"]
    assert found["config"]["policy"].startswith("psa(")  # prefill is dense where a policy names none
    assert found["config"]["requests"] == 18  # two choices and one answer for each of six records
    assert found["config"]["prefill_density"] == pytest.approx(1.0)
    assert found["config"]["decode_density"] < 0.8
