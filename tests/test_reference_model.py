"""The hand-built retriever: exact by construction, at any length, and still exact when most keys are left out."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path

import pytest
import torch
from covering import spread
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from saccade.errors import ModelError
from saccade.facts import Fact, is_correct, make_facts, plant
from saccade.models import cached, reference
from saccade.models.reference import cache, codes, rotary
from saccade.models.reference.layout import LAYERS
from saccade.models.reference.retriever import Scales
from saccade.prose import generate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TAIL = 2048  # rows that hold the questions
WINDOW = 256  # every layer but the last looks back less than this; the rest weighs under 1e-4


@pytest.fixture(scope="module", params=DTYPES)
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return reference.build(DTYPES[request.param])


def encode(text: str) -> list[int]:
    return [codes.BOS, *text.encode()]


def complete(model: LlamaForCausalLM, text: str, tokens: int = 40) -> str:
    """Greedy continuation up to a line break, through transformers alone."""
    prompt = torch.tensor([encode(text)])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    answer = [token for token in out[0, prompt.shape[1] :].tolist() if token < codes.BYTES]
    return bytes(answer).decode(errors="replace").split("\n")[0]


def document(size: int, facts: list[Fact], seed: int) -> str:
    """Prose of about ``size`` bytes with the facts in it."""
    return plant(generate(size - sum(len(fact.sentence) + 1 for fact in facts), seed), facts, seed)


# ---- geometry


def filter_response(query: torch.Tensor, distances: torch.Tensor) -> torch.Tensor:
    """Logit of ``query`` [FAST_PAIRS] at each of ``distances`` [n], in nats."""
    phases = torch.outer(distances.double(), rotary.frequencies())
    return (query.real * phases.cos() - query.imag * phases.sin()).sum(-1)


def test_rotary_frequencies_are_those_of_transformers(model: LlamaForCausalLM) -> None:
    inverse = model.model.rotary_emb.inv_freq.double()
    torch.testing.assert_close(inverse[: rotary.FAST_PAIRS], rotary.frequencies(), rtol=1e-5, atol=0)
    assert inverse[rotary.FAST_PAIRS :].max() * rotary.MAX_POSITION < 1e-3


@pytest.mark.parametrize("distance", [1, 2, 3, 6, 12, 24])
def test_a_look_sees_one_distance_among_all(distance: int) -> None:
    everywhere = torch.arange(rotary.MAX_POSITION)
    response = filter_response(rotary.look_query(distance, Scales().look), everywhere)
    weights = torch.softmax(response, 0)
    assert response.argmax() == distance
    assert response[distance] - response[everywhere != distance].max() > 17.0
    assert weights[distance] > 1 - 1e-6


def test_the_window_ends() -> None:
    weights = torch.softmax(filter_response(rotary.window_query(), torch.arange(rotary.MAX_POSITION)), 0)
    assert weights[:49].sum() > 0.98
    assert weights[160:].sum() < 1e-4


def test_pooled_blocks_do_not_foretell_a_look() -> None:
    """Averaged over 128 keys and 128 queries no block stands out by more than a few nats (see ``rotary``)."""
    span = torch.arange(128)
    between = (span[:, None] - span[None, :]).flatten()
    query = rotary.look_query(1, Scales().look)
    pooled = torch.stack([filter_response(query, 128 * block + between).mean() for block in range(1, 256)])
    nearest = filter_response(query, between).mean()
    assert (nearest - pooled).max() < 3.6


# ---- retrieval, dense


def windowed_attention(module, query, key, value, mask, dropout=0.0, scaling=1.0, **kwargs):  # type: ignore[no-untyped-def]
    """Dense attention of the retriever without its zeros: local windows, and the last layer's last rows only."""
    q, k, v = query[0, 0].float() * scaling, key[0, 0].float(), value[0, 0].float()
    length, out = q.shape[0], torch.zeros_like(q)
    last = module.layer_idx == LAYERS - 1
    for start in range(max(length - TAIL, 0) if last else 0, length, WINDOW):
        stop, low = min(start + WINDOW, length), 0 if last else max(start - WINDOW, 0)
        later = torch.arange(low, stop)[None] > torch.arange(start, stop)[:, None]
        out[start:stop] = torch.softmax((q[start:stop] @ k[low:stop].T).masked_fill(later, -1e30), -1) @ v[low:stop]
    return out.to(query.dtype)[None, :, None], None


AttentionInterface.register("windowed", windowed_attention)


def wrong_bytes(model: LlamaForCausalLM, text: str, facts: list[Fact], attention: str, after: int = 0) -> list[str]:
    """Asks for all facts, one a line, in one forward pass, ``after`` so many positions; returns what differs from the
    greedy continuation.

    Every byte of an answer must be the most likely one after the right bytes before it: then greedy decoding gives it.
    """
    questions = "".join(f"\n{fact.question} {fact.value}." for fact in facts)
    ids = encode(text + questions)
    assert len(questions.encode()) < TAIL
    places = torch.arange(len(ids))
    places[-len(questions.encode()) :] += after
    model.set_attn_implementation(attention)
    with torch.no_grad():
        logits = model(
            torch.tensor([ids]),
            torch.ones(1, len(ids), dtype=torch.long),  # without it a gap would begin another sequence
            position_ids=places[None],
            use_cache=False,
            logits_to_keep=len(questions.encode()) + 1,
        ).logits[0]
    model.set_attn_implementation("sdpa")
    guesses = logits[:-1].argmax(-1).tolist()
    wrong, row = [], 0
    for fact in facts:
        row += 1 + len(fact.question.encode())
        answer = f" {fact.value}.".encode()
        if guesses[row : row + len(answer)] != list(answer):
            wrong.append(f"{fact.sentence}: {guesses[row : row + len(answer)]}")
        row += len(answer)
    return wrong


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_every_fact_at_1k(model: LlamaForCausalLM, seed: int) -> None:
    facts = make_facts(8, seed)
    text = document(1024, facts, seed)
    assert wrong_bytes(model, text, facts, "sdpa") == []
    for fact in facts[:2]:
        assert is_correct(complete(model, f"{text}\n{fact.question}"), fact)


@pytest.mark.parametrize("seed", [3, pytest.param(4, marks=pytest.mark.thorough)])
def test_every_fact_at_8k(model: LlamaForCausalLM, seed: int) -> None:
    facts = make_facts(20, seed)  # dishes, numbers, towns with multi-byte letters; many sentences nearly alike
    assert wrong_bytes(model, document(8192, facts, seed), facts, "sdpa") == []


def test_the_windowed_forward_equals_the_ordinary_one(model: LlamaForCausalLM) -> None:
    ids = torch.tensor([encode(generate(1500, seed=5))])
    with torch.no_grad():
        ordinary = model(ids, use_cache=False, logits_to_keep=200).logits
        model.set_attn_implementation("windowed")
        windowed = model(ids, use_cache=False, logits_to_keep=200).logits
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(windowed, ordinary, rtol=0, atol=1e-2 if model.dtype == torch.float32 else 1.0)


def test_every_fact_from_32k_further_on(model: LlamaForCausalLM) -> None:
    """The distance of 32K, and 2K of what lies there."""
    facts = make_facts(8, seed=5)
    assert wrong_bytes(model, document(2048, facts, seed=5), facts, "sdpa", after=32_768) == []


@pytest.mark.thorough
def test_every_fact_at_32k(model: LlamaForCausalLM) -> None:
    facts = make_facts(20, seed=5)
    assert wrong_bytes(model, document(32_768, facts, seed=5), facts, "windowed") == []


HARD = [
    ("The northern lighthouse keeper's password is", "The southern lighthouse keeper's password is"),
    ("The eastern gate was closed in the year", "The western gate was closed in the year"),
    ("Marianne keeps her spare key under the", "Marianna keeps her spare key under the"),
    ("Doctor Alder prescribes for a cough some", "Doctor Elder prescribes for a cough some"),
    ("Room 117 belongs to the family of", "Room 118 belongs to the family of"),
    ("The first letter of the duke was sealed with", "The third letter of the duke was sealed with"),
]


@pytest.mark.parametrize(
    ("pair", "swap"),
    spread(HARD, [False, True]),
    ids=lambda one: one[0].replace(" ", "-")[:20] if isinstance(one, tuple) else None,
)
def test_sentences_that_differ_in_one_word(model: LlamaForCausalLM, pair: tuple[str, str], swap: bool) -> None:
    questions = pair[::-1] if swap else pair
    facts = [Fact("", question, value) for question, value in zip(questions, ("7391-XKQ", "0482-BDF"))]
    text = document(2048, facts, seed=7)
    assert wrong_bytes(model, text, facts, "sdpa") == []


@pytest.mark.parametrize("place", ["begin", "end", 127, 128, 129, 1000])
def test_facts_anywhere(model: LlamaForCausalLM, place: str | int) -> None:
    """At the very beginning, right before the question, and with the value across block boundaries."""
    fact = Fact("", "The dragon's true name is", "Žofie-東京-😀")
    text = generate(2000, seed=8)
    cut = {"begin": 0, "end": len(text)}.get(place, 0) if isinstance(place, str) else place - len(fact.question) - 2
    text = f"{text[:cut]} {fact.sentence} {text[cut:]}"
    assert is_correct(complete(model, f"{text}\n{fact.question}", tokens=24), fact)


@pytest.mark.parametrize(
    "question", ["What is the capital of France?", "Quantum chromodynamics explains that", "Zebras"]
)
def test_what_was_never_read_ends_the_answer(model: LlamaForCausalLM, question: str) -> None:
    assert complete(model, f"{generate(4000, seed=9)}\n{question}", tokens=3) == ""


# ---- retrieval, sparse


@pytest.mark.parametrize(("size", "count"), [(4000, 6), pytest.param(16_000, 10, marks=pytest.mark.thorough)])
def test_sparse_answers_equal_dense_and_a_window_fails(size: int, count: int) -> None:
    llm_module = pytest.importorskip("saccade.llm")
    params_module = pytest.importorskip("saccade.engine.sampling.params")
    facts = make_facts(count, seed=11)
    text = document(size, facts, seed=11)
    llm = llm_module.LLM(reference.NAME)
    params = params_module.SamplingParams(temperature=0.0, max_tokens=40, stop=["\n", ". "])

    def ask(policy: str) -> list[Fact]:
        with llm.session(policy) as session:
            texts = [
                session.generate(f"{'' if index else text}\n{fact.question}", params).outputs[0].text
                for index, fact in enumerate(facts)
            ]
        return [fact for fact, answer in zip(facts, texts) if is_correct(answer, fact)]

    assert ask("flexprefill+psa(epsilon=0.98)") == facts
    assert len(ask("streaming")) <= 2  # a fact may lie within the window


# ---- the checkpoint


def test_a_saved_folder_loads_as_an_ordinary_llama(tmp_path: Path) -> None:
    built = reference.build()
    loaded = AutoModelForCausalLM.from_pretrained(reference.save(tmp_path / "folder"))
    assert type(loaded) is LlamaForCausalLM
    assert loaded.config.num_hidden_layers == LAYERS
    assert loaded.generation_config.eos_token_id == codes.EOS
    for name, weight in built.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


def test_the_tokenizer_is_bytes(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference.save(tmp_path))
    rng = random.Random(12)
    text = "".join(
        chr(rng.choice([rng.randrange(1, 128), rng.randrange(0xA0, 0xD800), rng.randrange(0x1F300, 0x1F600)]))
        for _ in range(2000)
    )
    text += "  two  spaces\r\n\ttabs , and punctuation ' s . \n"
    assert tokenizer(text)["input_ids"] == encode(text)
    assert tokenizer.decode(encode(text), skip_special_tokens=True) == text
    assert len(tokenizer) == codes.VOCABULARY
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (codes.BOS, codes.EOS, codes.PAD)


def test_the_chat_template_joins_lines(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(reference.save(tmp_path))
    messages = [
        {"role": "user", "content": "A long text.\n"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": " The king is"},
    ]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|bos|>A long text.\n\nYes.\n The king is"
    assert tokenizer(rendered, add_special_tokens=False)["input_ids"] == encode("A long text.\n\nYes.\n The king is")


def test_the_cached_checkpoint_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = reference.checkpoint()
    assert folder.parent == tmp_path / "saccade"
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert reference.checkpoint() == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    assert [entry.name for entry in folder.parent.iterdir()] == [f"{reference.NAME}-{cache.version()}"]


def test_an_unwritable_cache_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(cached.tempfile, "gettempdir", lambda: str(tmp_path / "spare"))
    folder = reference.checkpoint()
    assert folder.is_relative_to(tmp_path / "spare")
    assert (folder / "config.json").is_file()


@pytest.fixture
def fast_save(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Has the cache write something small; returns where to."""
    written: list[Path] = []

    def save(path, dtype=torch.float32):
        path.mkdir()
        for name in ("config.json", "model.safetensors"):
            (path / name).write_text(name)
        written.append(path)
        return path

    monkeypatch.setattr(cache, "save", save)
    return written


def test_a_folder_that_another_user_planted_is_not_taken(tmp_path, monkeypatch, fast_save) -> None:
    """The temporary directory is everybody's: whoever comes first names the weights that are loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setattr(cached.tempfile, "gettempdir", lambda: str(tmp_path))
    planted = tmp_path / f"saccade-{cached._user()}"
    inside = planted / f"{reference.NAME}-{cache.version()}"
    inside.mkdir(parents=True)
    (inside / "config.json").write_text("{}")
    planted.chmod(0o777)  # somebody else may write here
    with pytest.raises(ModelError, match="another user owns it or may write to it"):
        reference.checkpoint()
    planted.chmod(0o700)
    real = Path.lstat
    monkeypatch.setattr(Path, "lstat", lambda self: _of_another(real(self)) if self == planted else real(self))
    with pytest.raises(ModelError, match="another user owns it"):
        reference.checkpoint()
    assert not fast_save


def _of_another(found: os.stat_result) -> os.stat_result:
    return os.stat_result([*found[:4], found.st_uid + 1, *found[5:10]])


@pytest.mark.parametrize("harm", ["bytes", "missing", "sums", "empty"])
def test_a_broken_cache_is_built_anew(tmp_path, monkeypatch, fast_save, harm) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = reference.checkpoint()
    weights = folder / "model.safetensors"
    if harm == "bytes":
        weights.write_text("model.safetensorz")
    elif harm == "missing":
        weights.unlink()
    elif harm == "sums":
        (folder / cached.SUMS).write_text("[1")
    else:
        shutil.rmtree(folder)
        folder.mkdir()
    assert reference.checkpoint() == folder
    assert weights.read_text() == "model.safetensors"
    assert reference.checkpoint() == folder
    assert len(fast_save) == 2
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_a_full_disk_is_said_in_one_line(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cached.tempfile, "gettempdir", lambda: str(tmp_path / "spare"))

    def full(path, dtype=torch.float32):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache, "save", full)
    with pytest.raises(ModelError, match=r"No space left on device.*; free some space") as caught:
        reference.checkpoint()
    assert len(str(caught.value).splitlines()) == 1
    assert not list((tmp_path / "cache" / "saccade").iterdir())
