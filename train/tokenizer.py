"""The trained reference model's tokenizer, as the Hugging Face tokenizer that its checkpoint carries."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from saccade.models.reference import vocabulary as v

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Words of the list with one space before them are one token; everything else is spelled out byte by byte.

    A byte-level BPE without merges, whose lookup of whole pieces comes first; so any UTF-8 text comes back unchanged.
    """
    byte_symbol = bytes_to_unicode()
    ids = {name: index for index, name in enumerate(v.SPECIALS)}
    ids |= {byte_symbol[value]: v.BYTE + value for value in range(256)}
    ids |= {byte_symbol[0x20] + v.text([index])[1:]: index for index in range(v.ADJECTIVE, v.SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(" ?[a-z]+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in v.SPECIALS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{v.SPECIALS[v.BOS]} $A", special_tokens=[(v.SPECIALS[v.BOS], v.BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=v.SPECIALS[v.BOS],
        eos_token=v.SPECIALS[v.END],
        pad_token=v.SPECIALS[v.PAD],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
