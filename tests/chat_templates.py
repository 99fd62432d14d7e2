"""Chat templates in the manner of well-known families, and tokenizers that know their control tokens."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "qwen3": (
        "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
        "{% for m in messages %}{% set content = m.content %}"
        "{% if m.role == 'assistant' and '</think>' in content %}"
        "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
        "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ content }}\n</tool_response><|im_end|>\n"
        "{% else %}{{ '<|im_start|>' + m.role + '\n' + content }}"
        '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
        "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else 'user' %}"
        "<start_of_turn>{{ role }}\n{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
    ),
    "llama2": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content.strip() }} {{ eos_token }}"
        "{% else %}{{ bos_token }}[INST] {{ m.content.strip() }} [/INST]{% endif %}{% endfor %}"
    ),
    "mistral": (
        "{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{{ eos_token }}"
        "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
    ),
    "phi": (
        "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "zephyr": (
        "{% for m in messages %}{{ '<|' + m.role + '|>' }}\n{{ m.content + eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    ),
    "deepseek": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if '</think>' in m.content %}{% set said = m.content.split('</think>')[-1] %}"
        "{% else %}{% set said = m.content %}{% endif %}<｜Assistant｜>{{ said }}{{ eos_token }}"
        "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
    ),
    "smollm3": (
        "{% for m in messages %}{% if m.role == 'system' %}<|im_start|>system\n"
        "{{ m.content.replace('/no_think', '').replace('/think', '').rstrip() }}<|im_end|>\n"
        "{% elif m.content.startswith('!') %}<|im_start|>user\n{{ m.content[1:] | upper }}<|im_end|>\n"
        "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "parts": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}"
        "{% for line in m.content.split('\n') %}{{ line }}{% if not loop.last %}\n{% endif %}{% endfor %}"
        "{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    ),
    "ascii": (
        "{% for m in messages %}<|im_start|>{{ {'role': m.role, 'text': m.content} | tojson(ensure_ascii=True) }}"
        "<|im_end|>\n{% endfor %}"
    ),
}

SPECIALS = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "<|user|>", "<|system|>", "<|assistant|>", "<|end|>",
)  # fmt: skip
MARKS = ("<｜User｜>", "<｜Assistant｜>")  # added, and not called special
PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # added, and ordinary


def _finished(core: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    core.add_tokens([AddedToken(text, special=False, normalized=False) for text in PLAIN])
    core.add_tokens([AddedToken(text, special=False, normalized=True) for text in MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def byte_level(template: str = "") -> PreTrainedTokenizerFast:
    """Byte-level BPE with a few merges, words split as GPT-2's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("<", "|"), ("Ġ", "<"), ("i", "m"), ("|", ">"), ("ð", "Ł"), ("Ġ", "ðŁ"), ("Ġ", "he")]
    for one, other in merges:
        vocab[one + other] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _finished(core, template)


def by_pieces(template: str = "", strips: bool = True) -> PreTrainedTokenizerFast:
    """In the manner of sentencepiece: spaces are letters, one stands before a text, bytes stand in for what is unknown;
    control tokens are in its vocabulary, too. ``strips``: the space before a text is no text."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": byte + 3 for byte in range(256)}}
    for text in ("▁", "▁the", "t", "h", "e", "th", "the", "▁c", "a", "c", "s", "<", ">", "/", "|", "i", "m", "é", "."):
        vocab.setdefault(text, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "c")]
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    core.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strips else parts)
    return _finished(core, template)


def by_weights(template: str = "") -> PreTrainedTokenizerFast:
    """A unigram vocabulary, which has control tokens as pieces: it would find them in any text."""
    letters = [chr(code) for code in range(32, 127)] + ["\n", "｜", "▁"]
    pieces = [("<unk>", 0.0), *[(text, 0.0) for text in SPECIALS], *[(letter, -5.0) for letter in letters]]
    core = Tokenizer(models.Unigram(pieces, unk_id=0))
    core.decoder = decoders.Fuse()
    return _finished(core, template)
