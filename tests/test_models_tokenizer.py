"""Text in and out: whole characters only, the spaces a whole decode gives, one-line errors for what is no text."""

from __future__ import annotations

import random
import sys

import pytest
from tiny_models import BOS, EOS, PAD, SPECIALS, byte_tokenizer
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from saccade.errors import RequestError
from saccade.models import templates
from saccade.models.tokenizer import TextStream, Tokenizer, load_tokenizer

TEXT = "Smørrebrød, naïve café — 東京は夜 🙂👩‍👩‍👧 Ωmega.\n\tend  two  spaces"


@pytest.fixture(scope="module")
def by_bytes() -> Tokenizer:
    return Tokenizer(byte_tokenizer())


@pytest.fixture(scope="module")
def by_pieces() -> Tokenizer:
    """Like Llama 2's: words carry their leading space, unknown characters fall back to byte tokens."""
    words = ["▁the", "▁ca", "t", "▁sat", "▁", "s", ".", "▁on", "é", "▁mat"]
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocab |= {word: len(vocab) + i for i, word in enumerate(words)}
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>"))


def pieces(tokenizer: Tokenizer, ids, skip_special_tokens: bool = True) -> list[str]:
    stream = tokenizer.stream(skip_special_tokens)
    return [stream.step(token) for token in ids] + [stream.flush()]


def test_encode_adds_the_tokenizers_own_special_tokens(by_bytes):
    ids = by_bytes.encode(TEXT)
    assert ids[0] == BOS
    assert ids[1:] == by_bytes.encode(TEXT, add_special_tokens=False)
    assert by_bytes.decode(ids) == TEXT
    assert by_bytes.decode(ids, skip_special_tokens=False) == "<bos>" + TEXT


def test_sizes_and_ends(by_bytes):
    assert by_bytes.vocab_size == 256 + len(SPECIALS)
    assert by_bytes.eos_token_ids == (EOS,)


def test_stream_never_emits_half_a_character(by_bytes):
    ids = by_bytes.encode(TEXT)
    parts = pieces(by_bytes, ids)
    assert "".join(parts) == TEXT
    assert not any("\ufffd" in part for part in parts)
    emoji = by_bytes.encode("🙂", add_special_tokens=False)
    assert pieces(by_bytes, emoji) == ["", "", "", "🙂", ""]


def test_stream_flushes_an_unfinished_character(by_bytes):
    ids = by_bytes.encode("a🙂", add_special_tokens=False)[:-1]
    assert pieces(by_bytes, ids) == ["a", "", "", "", "\ufffd"]


def test_stream_keeps_spaces_between_word_pieces(by_pieces):
    piece = by_pieces.hf.convert_tokens_to_ids
    ids = piece(["▁the", "▁ca", "t", "s", "▁sat", "▁on", "▁", "▁the", "▁mat", "."])
    assert pieces(by_pieces, ids)[:4] == ["the", " ca", "t", "s"]
    assert "".join(pieces(by_pieces, ids)) == by_pieces.decode(ids) == "the cats sat on  the mat."


def test_stream_with_byte_fallback(by_pieces):
    ids = by_pieces.encode("the é 🙂🙂 cat")
    parts = pieces(by_pieces, ids)
    assert "".join(parts) == by_pieces.decode(ids)
    assert "\ufffd" not in "".join(parts)
    assert by_pieces.decode(ids).endswith("é 🙂🙂 cat")


def test_stream_equals_decode_on_random_text(by_bytes, by_pieces):
    rng = random.Random(0)
    alphabet = "abc .\n" + "éßЖ東🙂\u0301"
    for _ in range(40):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(0, 40)))
        for tokenizer in (by_bytes, by_pieces):
            ids = tokenizer.encode(text)
            assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


def test_stream_survives_bytes_that_are_no_text(by_bytes, by_pieces):
    """A random model writes such bytes. They come out as U+FFFD, in bounded time, and good text after them is whole."""
    for tokenizer, first in ((by_bytes, 0), (by_pieces, 1)):
        bad = [first + 0xFF if first else tokenizer.hf.convert_tokens_to_ids("ÿ")] * 200
        good = tokenizer.encode("the cat", add_special_tokens=False)
        stream = tokenizer.stream()
        parts = [stream.step(token) for token in bad + good]
        assert any(parts[:100])
        assert (("".join(parts)) + stream.flush()).endswith("cat")


def test_stream_equals_decode_where_the_checkpoint_asks_to_tidy_spaces():
    hf = byte_tokenizer()
    hf.clean_up_tokenization_spaces = True
    tokenizer, text = Tokenizer(hf), "I do n't know . Do you ?"
    ids = tokenizer.encode(text)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == text


def test_stream_skips_special_tokens_or_shows_them(by_bytes):
    ids = [BOS, 65 - 33, EOS, PAD]
    assert pieces(by_bytes, ids) == ["", by_bytes.decode([65 - 33]), "", "", ""]
    assert "".join(pieces(by_bytes, ids, skip_special_tokens=False)) == by_bytes.decode(ids, skip_special_tokens=False)


def test_chat_template(by_bytes):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hé"}]
    ids = by_bytes.apply_chat_template(messages)
    assert by_bytes.decode(ids, skip_special_tokens=False) == "<bos><system>be brief<user>hé<assistant>"
    assert ids.count(BOS) == 1
    without = by_bytes.apply_chat_template(messages, add_generation_prompt=False)
    assert without == ids[: len(without)] != ids
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert by_bytes.apply_chat_template(parts) == by_bytes.apply_chat_template([{"role": "user", "content": "a\nb"}])


@pytest.mark.parametrize(
    ("messages", "word"),
    [
        ([], "empty"),
        ("hello", "list"),
        ({"role": "user", "content": "a"}, "list"),
        (["hello"], "message 0"),
        ([{"content": "a"}], "message 0"),
        ([{"role": "user"}], "text content"),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "message 1"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "of type 'image_url'"),
        ([{"role": "wizard", "content": "a"}], "unknown role"),
    ],
    ids=str,
)
def test_malformed_messages(by_bytes, messages, word):
    with pytest.raises(RequestError, match=word) as caught:
        by_bytes.apply_chat_template(messages)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "does not come to an end"),
        (
            "{% set ns = namespace(x=[0]) %}{% for a in range(9999) %}{% for b in range(9999) %}"
            "{{ range(9999) | map('string') | list | length }}{% endfor %}{% endfor %}",
            "does not come to an end",
        ),
        ("{{ 9 ** 9 ** 9 ** 9 }}", r"computes a power \(\*\*\)"),
        ("{{ 'ab' * 60 }}", "makes a prompt of 120 letters"),
        ("{% for %}", "rejects these messages"),
    ],
)
def test_a_template_that_loops_or_grows_is_stopped(monkeypatch, template, word):
    """It ran for ever, and held the caller's thread."""
    tokenizer = Tokenizer(byte_tokenizer())
    tokenizer.hf.chat_template = template
    monkeypatch.setattr(templates, "SECONDS", 0.2)
    monkeypatch.setattr(templates, "MOST_TEXT", 100)
    tracer = sys.gettrace()
    with pytest.raises(RequestError, match=word):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    assert sys.gettrace() is tracer


def test_no_chat_template(by_pieces):
    assert not by_pieces.has_chat_template
    with pytest.raises(RequestError, match="no chat template"):
        by_pieces.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("prompt", ["lone \ud800 surrogate", 3, None, b"bytes"], ids=repr)
def test_what_is_no_text_is_a_request_error(by_bytes, prompt):
    with pytest.raises(RequestError):
        by_bytes.encode(prompt)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    nothing = load_tokenizer(tmp_path)
    assert not nothing.available
    assert nothing.vocab_size == 0
    assert nothing.eos_token_ids == ()
    assert nothing.decode([1, 2]) == ""
    assert isinstance(nothing.stream(), TextStream)
    assert pieces(nothing, [1, 2]) == ["", "", ""]
    with pytest.raises(RequestError, match="no tokenizer; give token ids"):
        nothing.encode("a")
    with pytest.raises(RequestError, match="no tokenizer"):
        nothing.apply_chat_template([{"role": "user", "content": "a"}])


def test_long_text_does_not_warn(tmp_path, recwarn, caplog):
    byte_tokenizer().save_pretrained(tmp_path)
    assert len(load_tokenizer(tmp_path).encode("a" * 5000)) == 5001
    assert not caplog.records


def test_decode_gives_what_transformers_gives(by_bytes, by_pieces):
    """Whatever way it takes, special tokens shown and skipped."""
    rng = random.Random(5)
    for tokenizer in (by_bytes, by_pieces):
        for skip in (True, False):
            ids = [rng.randrange(tokenizer.vocab_size) for _ in range(200)]
            for part in (ids, ids[:1], []):
                want = tokenizer.hf.decode(part, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert tokenizer.decode(part, skip_special_tokens=skip) == want


def test_a_tokenizer_that_decodes_in_its_own_way_keeps_it():
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper()

    core = Core(models.WordLevel({"<unk>": 0, "some": 1}, unk_token="<unk>"))
    assert Tokenizer(Own(tokenizer_object=core, unk_token="<unk>")).decode([1]) == "SOME"
