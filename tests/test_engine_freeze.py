"""Frozen rows and windows through the engine, against a Llama written out layer by layer and against transformers with
hooks: chunks, batches, turns, preemption, decode."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from engine_helpers import BLOCK_BYTES, GREEDY, tokens
from tiny_models import make_checkpoint, one_thread, oracle, random_ids  # noqa: F401
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from saccade import LLM, SamplingParams
from saccade.engine.observing import observing
from saccade.engine.rows.freezing import READ_ROWS
from saccade.errors import PolicyError
from saccade.methods.base import Method
from saccade.methods.policy import Policy
from saccade.selection import Dense

LAYERS = 6
ETF = "etf(psi=0.3, start_layer=2, sinks=3)"
KV = "etf(psi=0.3, start_layer=2, sinks=3, reuse=kv)"
PSAW = "psaw(phi=0.2, start_layer=2, sinks=3, local=4, block_size=16)"
LITERAL = "psaw(phi=0.2, start_layer=2, sinks=3, local=0, block_size=1)"
SPARSE = "flexprefill(gamma=0.5, block_size=64, min_budget=0)+psa(epsilon=0.4, block_size=16, microbatch=1)"
SCORED = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0, prompt_logprobs=0)


def frozen_from(length: int, layers: int = LAYERS, psi: float = 0.3, start: int = 2, sinks: int = 3) -> list[int]:
    """First layer (from 0) that each position of a prompt of ``length`` tokens skips: 5.5, layer by layer."""
    first = [layers] * length
    for layer in reversed(range(start, layers)):
        end = int(round((1 - psi ** ((layer + 1 - start) / (layers - start))) * length, 6))  # 0.7 of 90 is 63
        for position in range(sinks, end):
            first[position] = layer
    return first


def hidden_from(
    size: int, local: int, layers: int = LAYERS, phi: float = 0.2, start: int = 2, sinks: int = 3
) -> Callable[[int, int], tuple[int, int]]:
    """(layer, position) -> the positions a ..< b that a row does not see: 5.4, rounded outwards to ``size``."""

    def of(layer: int, position: int) -> tuple[int, int]:
        if layer < start:
            return 0, 0
        t = position // size * size + 1
        bound = int(round((1 - phi ** ((layer + 1 - start) / (layers - start))) * t, 6))
        bound = min(bound, t - local + 1)
        return -(-sinks // size) * size, max(0, bound - 1) // size * size

    return of


WINDOWS = {PSAW: hidden_from(16, 4), LITERAL: hidden_from(1, 0)}


@torch.inference_mode()
def slow_llama(
    model: Any, ids: Sequence[int], first: Sequence[int], hidden=None, copies: bool = False, masks=None
) -> torch.Tensor:
    """Log-distributions [n, vocab] of a Llama whose row p skips the layers from ``first[p]`` on. Rows read everything
    but what is ``hidden(layer, row)``, or ``masks[layer]``, bool [heads, n, n]."""
    decoder, n = model.model, len(ids)
    rows, places = torch.arange(n)[:, None], torch.arange(n)[None, :]
    h = decoder.embed_tokens(torch.tensor([list(ids)]))
    cos, sin = decoder.rotary_emb(h, torch.arange(n)[None])
    before = None
    for index, layer in enumerate(decoder.layers):
        skip, attention = torch.tensor(first) <= index, layer.self_attn
        x = layer.input_layernorm(h)
        q, k, v = (
            part(x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        if copies and bool(skip.any()):
            k[:, :, skip], v[:, :, skip] = before[0][:, :, skip], before[1][:, :, skip]
        before = k, v
        mask = places <= rows
        for p in range(n if hidden is not None else 0):
            a, b = hidden(index, p)
            mask[p, a:b] = False
        mask = mask if masks is None else masks[index]
        group = q.shape[1] // k.shape[1]
        scores = q @ k.repeat_interleave(group, 1).transpose(2, 3) * attention.scaling
        weights = torch.softmax(scores.masked_fill(~mask, -1e30), -1)  # a frozen row's may be empty
        out = (weights @ v.repeat_interleave(group, 1)).transpose(1, 2).flatten(2)
        after = h + attention.o_proj(out)
        after = after + layer.mlp(layer.post_attention_layernorm(after))
        h = torch.where(skip[None, :, None], h, after)
    return torch.log_softmax(model.lm_head(decoder.norm(h))[0].float(), -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep_llama")
    return make_checkpoint("llama", path, num_hidden_layers=LAYERS, max_position_embeddings=2048)


@pytest.fixture(scope="module")
def theirs(folder):
    return oracle(folder)


def make(folder, blocks: int = 600, chunk: int = 64, **options) -> LLM:
    return LLM(folder, dtype="float32", kv_memory=blocks * BLOCK_BYTES, prefill_chunk=chunk, **options)


@pytest.fixture(scope="module")
def llm(folder):
    return make(folder)


def check_against(output, logprobs: torch.Tensor, begin: int = 0) -> None:
    """A run with SCORED equals ``logprobs`` of prompt and answer: rows of the prompt from ``begin`` on, and greedy
    choices that are the oracle's, but for ties."""
    assert output.error is None
    prompt, answer = list(output.prompt_token_ids), output.outputs[0].token_ids
    ids = prompt + answer
    for place, entries in enumerate(output.prompt_logprobs, start=begin):
        if entries is not None:
            token = prompt[place - begin]
            assert entries[token].logprob == pytest.approx(float(logprobs[place - 1, token]), abs=2e-4), place
    for step, token in enumerate(answer):
        row = logprobs[begin + len(ids) - len(answer) + step - 1]
        assert output.outputs[0].logprobs[step][token].logprob == pytest.approx(float(row[token]), abs=2e-4)
        assert float(row.max() - row[token]) < 1e-3


POLICIES = {
    "hidden": (ETF, None, False),
    "kv": (KV, None, True),
    "window": (PSAW, WINDOWS[PSAW], False),
    "literal window": (LITERAL, WINDOWS[LITERAL], False),
    "both": (f"{PSAW}+{ETF}", WINDOWS[PSAW], False),
    "both, kv": (f"{LITERAL}+{KV}", WINDOWS[LITERAL], True),
}


@pytest.mark.parametrize("chunk", [7, 64, 2048])
@pytest.mark.parametrize("name", POLICIES)
def test_prefill_in_any_chunks_and_decode_equal_brute_force(folder, theirs, name, chunk):
    text, hidden, copies = POLICIES[name]
    ids = random_ids(130, seed=1)
    output = make(folder, chunk=chunk).generate(ids, SCORED, policy=text)[0]
    answer = tokens(output)
    first = frozen_from(130) if "etf" in text else [LAYERS] * 130
    logprobs = slow_llama(theirs, ids + answer, first + [LAYERS] * len(answer), hidden, copies)
    check_against(output, logprobs)
    plain = slow_llama(theirs, ids + answer, [LAYERS] * (130 + len(answer)))
    assert (logprobs - plain)[-1].abs().max() > 0.01, "the policy must matter"


COMPOSED = {
    "flexprefill, psa": (f"{SPARSE}+{PSAW}+{ETF}", PSAW),
    "literal, kv": (f"{SPARSE}+{LITERAL}+{KV}", LITERAL),
    "lines, topk": (f"loopserve(alpha=0.6, min_rows=8)+topk(k=20)+{PSAW}+{ETF}", PSAW),
    "bands": (f"streaming(sinks=2, window=40)+{LITERAL}+{ETF}", LITERAL),
    "tokens": (f"topk(k=24, prefill=true)+{PSAW}+{KV}", PSAW),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_compositions_equal_brute_force_over_what_they_read(folder, theirs, name):
    """Every layer of every row attends to exactly what was counted as read, all of it within the window."""
    text, window = COMPOSED[name]
    ids, llm = random_ids(230, seed=9), make(folder, chunk=100)
    n = len(ids) + SCORED.max_tokens
    masks = torch.zeros(LAYERS, 4, n, n, dtype=torch.bool)

    def watch(call):
        shape = call.selection.shape
        rows = slice(shape.q_start, shape.q_start + shape.q_len)
        assert not masks[call.layer, :, rows].any(), "rows attend once"
        masks[call.layer, :, rows, : shape.k_len] = call.selection.mask()

    with observing(llm.engine, watch):
        output = llm.generate(ids, SCORED, policy=text)[0]
    answer = tokens(output)
    first = frozen_from(230) + [LAYERS] * len(answer)
    check_against(output, slow_llama(theirs, ids + answer, first, None, "reuse=kv" in text, masks))
    emptied = 0
    for layer, p in itertools.product(range(LAYERS), range(n - 1)):
        read, (a, b) = masks[layer, :, p], WINDOWS[window](layer, p)
        assert bool(read.any(-1).all()) == (first[p] > layer), "frozen rows read nothing, others something"
        if window is LITERAL and "psa" in text and p >= 230:
            continue  # a ranked block stays whole
        assert not read[:, a:b].any()
        emptied += b > a
    assert emptied > 200
    causal = 230 * 231 / 2 * LAYERS
    assert output.report["prefill"]["density"] == pytest.approx(float(masks[:, :, :230].sum()) / 4 / causal, abs=1e-6)


def test_the_two_readings_differ(theirs):
    ids = random_ids(130, seed=1)
    hidden, copied = (slow_llama(theirs, ids, frozen_from(130), None, copies) for copies in (False, True))
    assert (hidden - copied)[-1].abs().max() > 0.01


@pytest.mark.parametrize("text", [ETF, KV, f"{PSAW}+{ETF}"])
@pytest.mark.parametrize("drop", [False, True], ids=["kept", "computed again"])
def test_later_turns_freeze_rows_of_their_own(folder, theirs, text, drop):
    """Turn 2 freezes by the length it reaches; what turn 1 stored stays, also when it has to be computed again."""
    llm = make(folder)
    turns, said, first = (random_ids(90, seed=2), random_ids(150, seed=3)), [], []
    with llm.session(text) as session:
        for turn in turns:
            begin = len(first)
            output = session.generate(turn, SCORED)
            prompt = said[len(first) :] + turn  # the last token of the answer before joins the turn
            said += turn + tokens(output)
            first += frozen_from(begin + len(prompt))[begin:] + [LAYERS] * (len(tokens(output)) - 1)
            hidden = WINDOWS[PSAW] if "psaw" in text else None
            logprobs = slow_llama(theirs, said, [*first, LAYERS], hidden, "reuse=kv" in text)
            check_against(output, logprobs, begin=len(said) - len(turn) - len(tokens(output)))
            if drop:
                session.sequence.drop_kv()
    assert any(layer < LAYERS for layer in first[98:]), "rows of turn 2 were frozen"


EVERY = ("dense", ETF, KV, PSAW, f"{SPARSE}+{PSAW}+{ETF}", f"topk(k=24, prefill=true)+{LITERAL}+{KV}", SPARSE)


@pytest.mark.parametrize("exact", [True, False])
def test_frozen_and_unfrozen_requests_share_steps(folder, exact):
    llm = make(folder, exact=exact)
    prompts = [random_ids(length, seed=length) for length in (130, 89, 157, 64, 170, 5, 120)]
    alone = [llm.generate(ids, SCORED, policy=policy)[0] for ids, policy in zip(prompts, EVERY)]
    together = llm.generate(prompts[::-1], SCORED, policy=list(EVERY[::-1]))[::-1]
    for one, other in zip(alone, together):
        assert tokens(one) == tokens(other)
        for a, b in zip(one.prompt_logprobs[1:], other.prompt_logprobs[1:]):
            assert a.keys() == b.keys()
            assert all(a[t].logprob == pytest.approx(b[t].logprob, abs=0 if exact else 2e-4) for t in a)
    assert len({tuple(tokens(llm.generate(prompts[0], GREEDY, policy=policy)[0])) for policy in EVERY}) > 4


@pytest.mark.parametrize("policy", [ETF, KV, f"{SPARSE}+{PSAW}+{ETF}"])
def test_preemption_changes_no_token(folder, policy):
    ids = [random_ids(length, seed=length) for length in (127, 125, 126)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=0)
    alone = [make(folder).generate(one, params, policy=policy)[0].outputs[0] for one in ids]
    outputs = make(folder, blocks=3 * LAYERS * 4 + LAYERS).generate(ids, params, policy=policy)
    assert [output.outputs[0].token_ids for output in outputs] == [one.token_ids for one in alone]
    assert [output.outputs[0].logprobs for output in outputs] == [one.logprobs for one in alone]
    assert sum(output.report["preemptions"] for output in outputs) > 0


def test_a_session_that_was_cut_back_is_computed_again_as_it_was(folder):
    """What was frozen hung on the length of the turn; a shorter span must not change it when keys come back."""
    turn, more = random_ids(200, seed=4), random_ids(20, seed=5)
    answers = []
    for drop in (False, True):
        llm = make(folder, chunk=2048)
        with llm.session(ETF) as session:
            session.generate(turn, GREEDY)
            session.sequence.truncate(120)
            if drop:
                session.sequence.drop_kv()
            answers.append(session.generate(more, SCORED))
    for a, b in zip(*(answer.prompt_logprobs for answer in answers)):
        assert [entry.logprob for entry in (a or {}).values()] == pytest.approx(
            [entry.logprob for entry in (b or {}).values()], abs=1e-4
        )
    assert tokens(answers[0]) == tokens(answers[1])


OFF = ("psaw(alpha=0)", "psaw(phi=1.0)", "etf(gamma=0)", "etf(psi=1.0, reuse=kv)", "psaw(start_layer=6)+etf(gamma=0)")


@pytest.mark.parametrize("off", OFF)
@pytest.mark.parametrize("methods", ["dense", SPARSE])
def test_dense_limits(llm, off, methods):
    ids = random_ids(150, seed=6)
    with_it = llm.generate(ids, SCORED, policy=f"{methods}+{off}")[0]
    without = llm.generate(ids, SCORED, policy=methods)[0]
    assert with_it.prompt_logprobs == without.prompt_logprobs
    assert with_it.outputs[0].logprobs == without.outputs[0].logprobs
    assert with_it.report["prefill"]["density"] == without.report["prefill"]["density"]
    assert sum("as it is" in note for note in with_it.report["notes"]) == off.count("(")


def test_three_layers_are_left_alone_and_the_report_says_so(tiny_llama):
    llm = make(tiny_llama)
    output = llm.generate(random_ids(100, seed=1), GREEDY, policy="psaw+etf")[0]
    assert tokens(output) == tokens(llm.generate(random_ids(100, seed=1), GREEDY)[0])
    assert output.report["notes"] == [f"'{name}' leaves a model of 3 layers as it is" for name in ("psaw", "etf")]


def test_the_report_counts_what_was_done(folder):
    ids, n = random_ids(130, seed=1), 130
    first = frozen_from(n)
    report = make(folder, chunk=50).generate(ids, GREEDY, policy=f"{LITERAL}+{ETF}")[0].report
    frozen = [sum(one <= index for one in first) for index in range(LAYERS)]
    assert report["prefill"]["rows_frozen"] == sum(frozen) > 100
    assert report["prefill"]["rows_frozen_per_layer"] == frozen
    assert report["decode"]["rows_frozen"] == 0
    causal = n * (n + 1) // 2
    read = []
    for index in range(LAYERS):
        live = [p for p in range(n) if first[p] > index]
        if index == LAYERS - 1:
            unread = [p for p in live if p < n - READ_ROWS]
            live = live[len(unread) :]
        spans = [WINDOWS[LITERAL](index, p) for p in live]
        read.append(sum(p + 1 - max(0, b - a) for p, (a, b) in zip(live, spans)))
    assert report["prefill"]["rows_unread"] == len(unread) == 2
    ran = [causal] * (LAYERS - 1) + [causal - sum(p + 1 for p in unread)]
    assert report["prefill"]["keys_causal"] == sum(ran)
    assert report["prefill"]["keys_attended"] == sum(read)
    shares = [pairs / most for pairs, most in zip(read, ran)]
    assert report["prefill"]["density_per_layer"] == pytest.approx(shares, abs=1e-6)
    assert report["policy"] == f"{LITERAL}+{ETF}"


@dataclass(frozen=True)
class Tails(Method):
    """Reads everything and keeps the tails it was given."""

    name: ClassVar[str] = "tails"
    phases: ClassVar[tuple[str, ...]] = ("decode",)
    tail_rows: ClassVar[int] = 70
    log: list = field(default_factory=list, compare=False)

    def begin(self, segment):
        self.log.append((segment.layer, segment.shape.q_start, segment.shape.k_len, segment.q.clone()))

    def select_decode(self, query, state):
        return Dense(query.shape)


@pytest.mark.parametrize("chunk", [20, 64, 2048])
def test_a_decode_method_gets_the_last_live_rows(folder, chunk):
    """Rows of a tail follow each other: the sinks before a frozen stretch never pass for its neighbours."""
    tails = Tails()
    policy = Policy(decode=tails, freeze=Policy.parse("etf(psi=0.1, start_layer=2, sinks=30)").freeze)
    make(folder, chunk=chunk).generate(random_ids(130, seed=1), GREEDY, policy=policy)
    first = frozen_from(130, psi=0.1, sinks=30)
    assert [layer for layer, *_ in tails.log] == list(range(LAYERS))
    for layer, start, length, q in tails.log:
        live = [p for p in range(130) if first[p] > layer]
        after = [p for p in live if all(first[r] > layer for r in range(p, 130))]
        assert (start, length) == (130 - min(70, len(after)), 130)
        assert q.shape[1] == min(70, len(after))


def test_copied_keys_need_layers_that_rotate_alike(tmp_path):
    path = make_checkpoint("smollm3", tmp_path / "smollm3", num_hidden_layers=3)
    llm = make(path)
    prompts = [random_ids(20, seed=1), random_ids(30, seed=2)]
    with pytest.raises(PolicyError, match="smollm3 layers do not rotate keys all alike; use 'etf\\(reuse=hidden\\)'"):
        llm.generate(prompts, GREEDY, policy=["dense", KV])
    assert not llm.engine.busy
    with pytest.raises(PolicyError, match="rotate"):
        make(path, policy=KV)
    with llm.session() as session, pytest.raises(PolicyError, match="rotate"):
        session.generate(prompts[0], GREEDY, policy=KV)
    assert tokens(llm.generate(prompts[0], GREEDY, policy="etf(start_layer=1)")[0])


# One of each way to make keys: biases, norms of q and k, fused projections, no input norm, rotations by layer type or
# not at all, partial ones, attention and MLP side by side, sinks, experts, sliding windows.
FAMILIES = (
    "qwen3",
    "phi3",
    "olmo2",
    "gemma3_text",
    "smollm3",
    "cohere2",
    "gpt_oss",
    "mixtral",
    "phi",
    "mistral",
    "glm4",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_against_transformers_with_hooks(family, tmp_path):
    """transformers' own layers with frozen rows put back after each, and the window cut out of every layer's mask."""
    path = make_checkpoint(family, tmp_path / family)
    text = "psaw(phi=0.3, start_layer=1, sinks=2, local=1, block_size=1)+etf(psi=0.3, start_layer=1, sinks=2)"
    ids = random_ids(60, seed=7)
    output = make(path, chunk=25).generate(ids, SCORED, policy=text)[0]
    answer = tokens(output)
    n = len(ids) + len(answer)
    first = torch.tensor(frozen_from(60, layers=3, start=1, sinks=2) + [3] * len(answer))
    hidden = hidden_from(1, 1, layers=3, phi=0.3, start=1, sinks=2)
    model = oracle(path)

    def narrow(index):
        def hook(module, args, kwargs):
            mask = kwargs["attention_mask"].clone()
            for p in range(n):
                a, b = hidden(index, p)
                mask[..., p, a:b] = False if mask.dtype == torch.bool else torch.finfo(mask.dtype).min
            return args, {**kwargs, "attention_mask": mask}

        return hook

    def restore(index):
        def hook(module, args, kwargs, out):
            before = args[0] if args else kwargs["hidden_states"]
            skip = (first <= index)[None, :, None]
            if isinstance(out, tuple):
                return torch.where(skip, before, out[0]), *out[1:]
            return torch.where(skip, before, out)

        return hook

    for index, layer in enumerate(model.get_decoder().layers):
        layer.register_forward_pre_hook(narrow(index), with_kwargs=True)
        layer.register_forward_hook(restore(index), with_kwargs=True)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([ids + answer]), use_cache=False).logits[0].float()
    check_against(output, torch.log_softmax(logits, -1))


@pytest.mark.parametrize("policy", ["dense", "lfps", "streaming(sinks=2, window=40)", ETF])
def test_rows_that_nobody_reads_skip_the_last_layer_alone(folder, policy):
    """In chunks or whole, and whether every row's logits are wanted or only the last one's: the same tokens."""
    ids = random_ids(300, seed=3)
    cut, whole = make(folder, chunk=100), make(folder, chunk=400)
    outputs = [llm.generate(ids, GREEDY, policy=policy)[0] for llm in (cut, whole)]
    assert all(output.report["prefill"]["rows_unread"] > 0 for output in outputs)
    scored = SamplingParams(temperature=0, max_tokens=GREEDY.max_tokens, ignore_eos=True, prompt_logprobs=0)
    outputs.append(whole.generate(ids, scored, policy=policy)[0])
    assert outputs[-1].report["prefill"]["rows_unread"] == 0
    assert tokens(outputs[0]) == tokens(outputs[1]) == tokens(outputs[2])
