"""The retriever's tokenizer: one token per UTF-8 byte, so any text can be read and any text can come out.

Token b is byte b for b < 256, then come BOS, EOS and PAD. It is an ordinary Hugging Face tokenizer (byte-level BPE
without merges), so nothing but the usual files is needed to load it.
"""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from saccade.models.reference import codes, rotary

# Messages one a line and nothing after the last: the last message is the beginning of the sentence to complete.
CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- message['content'] -}}"
    "{%- if not loop.last -%}{{- '\\n' -}}{%- endif -%}"
    "{%- endfor -%}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Adds BOS when encoding; decodes back to the same text byte for byte."""
    letters = bytes_to_unicode()
    vocabulary = {letters[byte]: byte for byte in range(codes.BYTES)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for _, text in sorted(codes.SPECIAL_TOKENS.items())]
    )
    bos = codes.SPECIAL_TOKENS[codes.BOS]
    backend.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, codes.BOS)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=codes.SPECIAL_TOKENS[codes.EOS],
        pad_token=codes.SPECIAL_TOKENS[codes.PAD],
        model_max_length=rotary.MAX_POSITION,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
