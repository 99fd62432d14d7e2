"""Which sizes of models a machine has memory for."""

from __future__ import annotations

from typing import NamedTuple

from saccade.machine import show_bytes


class ModelShape(NamedTuple):
    """A model that many know: its weights, and the numbers of a token's keys and values."""

    name: str
    weights: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values, in 16 bits."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


SHAPES = (
    ModelShape("0.5B (Qwen2.5)", 0.49e9, 24, 2, 64),
    ModelShape("1.7B (Qwen3)", 2.03e9, 28, 8, 128),
    ModelShape("4B (Qwen3)", 4.02e9, 36, 8, 128),
    ModelShape("8B (Llama 3.1)", 8.03e9, 32, 8, 128),
    ModelShape("14B (Qwen3)", 14.8e9, 40, 8, 128),
    ModelShape("32B (Qwen3)", 32.8e9, 64, 8, 128),
    ModelShape("70B (Llama 3.1)", 70.6e9, 80, 8, 128),
)
BYTES = {"bfloat16": 2.0, "8 bits": 1.07, "4 bits (Q4_K_M, int4)": 0.6}  # of a weight, with scales
LEAST_TOKENS = 8192  # of keys and values beside the weights, or it does not fit
BESIDE = 0.1  # of the memory: for activations, the program and others


def fits(memory: int) -> dict[str, str]:
    """By how weights are stored, the largest of ``SHAPES`` that runs in so many bytes, and the tokens that it has room
    for then."""
    room, found = (1 - BESIDE) * memory, {}
    for kind, each in BYTES.items():
        able = [(one, (room - one.weights * each) / one.token_bytes) for one in SHAPES]
        able = [(one, tokens) for one, tokens in able if tokens >= LEAST_TOKENS]
        if not able:
            found[kind] = f"none: the smallest takes {show_bytes(int(SHAPES[0].weights * each))}"
            continue
        one, tokens = able[-1]
        weights = show_bytes(int(one.weights * each))
        found[kind] = f"up to {one.name}: {weights} of weights, and room for {_thousands(tokens)} tokens"
    return found


def _thousands(tokens: float) -> str:
    """Rounded down, for it is an estimate."""
    return f"{int(tokens // 1000) * 1000:,}"
