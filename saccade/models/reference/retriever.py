"""The hand-built retriever: a Llama checkpoint that completes any sentence whose beginning it has read before.

Nothing is trained. Eight layers of one head compute, for every position, a hash of the last 12 bytes and what else it
takes to tell equal endings apart, and the last layer attends to the place where the same bytes were read before and
copies the byte that followed (k-gram induction). See ``rotary`` for how a head looks an exact distance back, ``codes``
for the hashes, ``layout`` for where each quantity lives in the residual stream.

Two streams run in parallel: A hashes the bytes that end at a position (the query side) and B those that end one
before it (the key side), so that a key stands on the byte to be copied.

====== =============== ============================================================================================
layer  attention       MLP
====== =============== ============================================================================================
0      1 back          A: 2 bytes; B: the byte before
1      2 back          A, B: 3 bytes
2      3 back          A, B: 6 bytes
3      last 48, soft   bag: the average of A's 6-gram codes, clipped to [-1, 1]; keeps a 6-gram slot of A and of B
4      6 back          A, B: 12 bytes; another slot, 6 bytes back
5      12 back         the slots 12 and 18 bytes back
6      24 back         the slots 24, 30, 36 and 42 bytes back
7      match           (copies the matched byte's code to the output)
====== =============== ============================================================================================

Why not k heads that look back 1..k tokens and one match head (the textbook circuit): attention costs layers x heads x
head_dim, and doubling spans reach 48 bytes with seven cheap heads; a product of codes makes unmatched logits small and
alike, where a slot for each byte would leave every common word ending half matched; and position-free dimensions need
head_dim 128 (see ``rotary``).

The match must survive sparse attention, so its key has three parts. The 12-gram hash decides. The slots for the bytes
before, back to the beginning of the query's line, and the bag break ties towards the longest common context. The bag
is also the one part that neighbouring keys share: a method that ranks blocks by what their keys have in common (cuboid
means, block means) sees the bag and nothing else. Scales are small enough that blocks without a match weigh about the
same, and the sink at the beginning of the text, which catches whatever matches nothing, is no heavier than all of them
together: a method that stops reading once the rest is negligible (PSA) then goes on until it has found the match. The
price is that this one head is diffuse where nothing matches, in long texts nearly dense; real models have such heads.

A query that matches nothing attends to the sink and answers EOS: the retriever ends its turn where it knows nothing.
In texts of some 10,000 bytes and more the sink may be outweighed, and the answer is then arbitrary. Limits: a question
needs 12 bytes in common with the text (about 16 in a long text), and what tells two like sentences apart must stand
within 48 bytes of the question's end; bytes there that differ in one place only weigh 1 to 2 nats.

RMSNorm is the identity up to a constant: six constant dimensions outweigh all others by so much that the norm does not
depend on the text, and equals a power of two, so the normalised values are exact in bfloat16 too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from saccade.models.reference import codes, rotary
from saccade.models.reference.layout import (
    BAG,
    BAG_RAW,
    BYTE,
    CONSTANTS,
    HIDDEN,
    INTERMEDIATE,
    IS_BOS,
    LAYERS,
    ONE,
    OUT,
    SCRATCH_A,
    SCRATCH_B,
    SLOT_A,
    SLOT_B,
    STREAM_A,
    STREAM_B,
    Span,
    parts,
)


@dataclass(frozen=True)
class Scales:
    """The match head's logits in nats, and the output's. Changing any of them changes the checkpoint's version."""

    look: float = 165.0  # times rotary's gap of 0.104: 17 nats between the right distance and any other
    hash: float = 18.0  # equal 12-grams
    # The six 6-grams before, as far as they stand on the same line; falling, so that the longer context wins.
    slots: tuple[float, ...] = (2.2, 2.0, 1.8, 1.6, 1.4, 1.2)
    bag: float = 5.0  # about, for equal 48 bytes
    sink: float = 15.0
    bag_gain: float = 3.8  # an average of 48 signs has a standard deviation of 0.16: few are clipped
    output: float = 0.5  # token logits per agreeing code dimension


CONSTANT = 4096.0  # residual value of the constant dimensions
RMS = CONSTANT * (len(CONSTANTS) / HIDDEN) ** 0.5  # 512: exactly the RMS of every residual row, to 1e-5
SHARP = 16.0  # silu(SHARP * x) / SHARP is relu(x) to 1e-6 for whole x, and exact in bfloat16


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=codes.VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=rotary.HEAD_DIM,
        max_position_embeddings=rotary.MAX_POSITION,
        rope_parameters=dict(rotary.SCALING),
        tie_word_embeddings=False,
        bos_token_id=codes.BOS,
        eos_token_id=codes.EOS,
        pad_token_id=codes.PAD,
    )


@torch.no_grad()
def build(dtype: torch.dtype = torch.float32, scales: Scales | None = None) -> LlamaForCausalLM:
    """The retriever with its weights set, in evaluation mode. Takes well under a second."""
    scales = scales or Scales()
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.zero_()
    _write_norms(model)
    _write_embeddings(model, scales)
    _write_layers(model, scales)
    torch.nn.Module.to(model, dtype)
    # Its buffers are computed, and stay in float32 as when a checkpoint is loaded.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval().requires_grad_(False)


def _write_norms(model: LlamaForCausalLM) -> None:
    """Undo the constant RMS, and bring the constant dimensions to 1."""
    weight = torch.full((HIDDEN,), RMS)
    weight[list(CONSTANTS)] = RMS / CONSTANT
    norms = [model.model.norm]
    for layer in model.model.layers:
        norms += [layer.input_layernorm, layer.post_attention_layernorm]
    for norm in norms:
        norm.weight.copy_(weight)


def _write_embeddings(model: LlamaForCausalLM, scales: Scales) -> None:
    alphabet = _alphabet()
    table = model.model.embed_tokens.weight
    table[:, list(CONSTANTS)] = CONSTANT
    table[:, list(BYTE)] = alphabet
    table[:, list(STREAM_A)] = alphabet[:, : len(STREAM_A)]
    # The beginning of the text has no code: its key in the match layer is the sink and nothing else.
    table[codes.BOS, list(BYTE + STREAM_A)] = 0.0
    table[codes.BOS, IS_BOS] = 1.0
    model.lm_head.weight[:, list(OUT)] = scales.output * alphabet


def _alphabet() -> Tensor:
    """What a token adds to BYTE, and as far as it fits to STREAM_A: float32 [vocabulary, len(BYTE)]."""
    return codes.byte_codes(len(BYTE), mark=len(STREAM_A) - 1)


def _write_layers(model: LlamaForCausalLM, scales: Scales) -> None:
    layers = [LayerWriter(layer) for layer in model.model.layers]

    def look(index: int, distance: int) -> LayerWriter:
        layers[index].attend_by_distance(rotary.look_query(distance, scales.look))
        return layers[index]

    def bring(layer: LayerWriter, source: Span, scratch: Span, roll: int) -> None:
        for part, target in zip(parts(source), parts(scratch), strict=True):
            layer.copy(part, target, roll=roll)

    def double(layer: LayerWriter, distance: int) -> None:
        for stream, scratch in ((STREAM_A, SCRATCH_A), (STREAM_B, SCRATCH_B)):
            bring(layer, stream, scratch, roll=distance)
            layer.multiply(stream, scratch)
            layer.clear(scratch)

    byte = BYTE[: len(STREAM_A)]
    (mark,), (brought,) = parts(STREAM_A)[2], parts(SCRATCH_A)[2]
    layer = look(0, 1)
    layer.copy(byte, STREAM_B)
    bring(layer, byte, SCRATCH_A, roll=1)
    layer.multiply(STREAM_A, SCRATCH_A)
    layer.clear(SCRATCH_A)

    # B trails A by one byte, so what it multiplies by is A's bigram, not the byte.
    layer = look(1, 2)
    bring(layer, byte, SCRATCH_A, roll=2)
    bring(layer, STREAM_A, SCRATCH_B, roll=1)
    for stream, scratch in ((STREAM_A, SCRATCH_A), (STREAM_B, SCRATCH_B)):
        layer.multiply(stream, scratch)
        layer.clear(scratch)

    layer = look(2, 3)
    double(layer, 3)

    layer = layers[3]
    layer.attend_by_distance(rotary.window_query())
    layer.copy(STREAM_A[: len(BAG)], BAG_RAW, gain=scales.bag_gain)
    layer.clip(BAG_RAW, BAG)
    layer.clear(BAG_RAW)
    # A's slots end where the line begins: what stands on the line before a question agrees with nothing but by chance.
    # B's do not: a key of zeros would weigh less in its block's summary, whatever the query.
    layer.keep(parts(STREAM_A)[1], SLOT_A[0], factor=mark)
    layer.keep(parts(STREAM_B)[1], SLOT_B[0], factor=ONE)

    for index, distance, known in ((4, 6, 1), (5, 12, 2), (6, 24, 4)):
        layer = look(index, distance)
        for slots in (SLOT_A, SLOT_B):
            layer.copy(join(slots[:known]), join(slots[known : 2 * known]))
        for slot in SLOT_A[known : 2 * known]:
            layer.multiply(slot, (mark,) * len(slot))
    double(layers[4], 6)
    layers[5].copy((mark,), (brought,))
    layers[5].multiply((mark,), (brought,))
    layers[5].clear((brought,))

    layer = layers[7]
    layer.match(parts(STREAM_A)[0], parts(STREAM_B)[0], nats=scales.hash)
    for slot_a, slot_b, nats in zip(SLOT_A[2:], SLOT_B[2:], scales.slots, strict=True):
        layer.match(slot_a, slot_b, nats)
    layer.match(BAG, BAG, nats=scales.bag / 0.32)  # a clipped bag's mean square
    layer.match((ONE,), (IS_BOS,), nats=scales.sink)
    layer.copy(BYTE, OUT)
    # The sink's value is EOS: what a query gets that matches nothing.
    layer.attention.v_proj.weight[: len(BYTE), IS_BOS] = _alphabet()[codes.EOS]


def join(spans: tuple[Span, ...]) -> Span:
    return tuple(dim for span in spans for dim in span)


class LayerWriter:
    """Writes one decoder layer's circuits. Spans are tuples of residual dimensions."""

    def __init__(self, layer: LlamaDecoderLayer) -> None:
        self.attention, self.mlp = layer.self_attn, layer.mlp
        self.values = 0  # value dimensions used
        self.contents = 0  # position-free query and key dimensions used
        self.units = 0  # MLP units used

    def attend_by_distance(self, query: Tensor) -> None:
        """The same constant key everywhere, and ``query``, complex [FAST_PAIRS] in nats, to filter distances."""
        scaled = query * rotary.HEAD_DIM**0.5  # attention divides by sqrt(head_dim)
        self.attention.q_proj.weight[rotary.FAST_REAL, ONE] = scaled.real.float()
        self.attention.q_proj.weight[rotary.FAST_IMAG, ONE] = scaled.imag.float()
        self.attention.k_proj.weight[rotary.FAST_REAL, ONE] = 1.0

    def match(self, query: Span, key: Span, nats: float) -> None:
        """Adds ``nats`` to the logit where all of ``query`` equals ``key``, in proportion where part of it does."""
        dims = list(rotary.STILL[self.contents : self.contents + len(query)])
        self.contents += len(query)
        self.attention.q_proj.weight[dims, list(query)] = nats / len(query) * rotary.HEAD_DIM**0.5
        self.attention.k_proj.weight[dims, list(key)] = 1.0

    def copy(self, source: Span, target: Span, *, gain: float = 1.0, roll: int = 0) -> None:
        """Adds what the head attends to, ``source`` there, to ``target`` here, rolled by ``roll`` dimensions."""
        dims = list(range(self.values, self.values + len(source)))
        self.values += len(source)
        self.attention.v_proj.weight[dims, list(source)] = 1.0
        turned = [target[(i + roll) % len(target)] for i in range(len(target))]
        self.attention.o_proj.weight[turned, dims] = gain

    def multiply(self, stream: Span, factor: Span) -> None:
        """``stream *= factor`` for factors of -1, 0 and 1: add -(1 - factor) x stream."""
        for x, y in zip(stream, factor, strict=True):
            self._unit(gate={ONE: SHARP, y: -SHARP}, up={x: 1.0}, down={x: -1.0 / SHARP})

    def clip(self, source: Span, target: Span) -> None:
        """``target += min(max(source, -1), 1)``: relu(x + 1) - relu(x - 1) - 1."""
        for x, y in zip(source, target, strict=True):
            self._unit(gate={x: SHARP, ONE: SHARP}, up={ONE: 1.0}, down={y: 1.0 / SHARP})
            self._unit(gate={x: SHARP, ONE: -SHARP}, up={ONE: 1.0}, down={y: -1.0 / SHARP})
        self._unit(gate={ONE: SHARP}, up={ONE: 1.0}, down=dict.fromkeys(target, -1.0 / SHARP))

    def keep(self, source: Span, target: Span, factor: int) -> None:
        """``target += source * factor`` for a factor of 0 or 1."""
        for x, y in zip(source, target, strict=True):
            self._unit(gate={factor: SHARP}, up={x: 1.0}, down={y: 1.0 / SHARP})

    def clear(self, span: Span) -> None:
        """``span = 0``."""
        for x in span:
            self._unit(gate={ONE: SHARP}, up={x: 1.0}, down={x: -1.0 / SHARP})

    def _unit(self, gate: dict[int, float], up: dict[int, float], down: dict[int, float]) -> None:
        for weights, row in ((self.mlp.gate_proj.weight[self.units], gate), (self.mlp.up_proj.weight[self.units], up)):
            for dim, value in row.items():
                weights[dim] = value
        for dim, value in down.items():
            self.mlp.down_proj.weight[dim, self.units] = value
        self.units += 1
