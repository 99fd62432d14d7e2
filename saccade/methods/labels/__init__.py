"""Labels: a few channels of every key in a few bits, scored instead of the keys (Double Sparsity, HShare,
InfiniGen)."""

from saccade.methods.labels.channels import (
    CALIBRATION,
    CHANNELS_BY,
    PROMPT_ROWS,
    SOURCES,
    around,
    heaviest_channels,
    top_tokens,
)
from saccade.methods.labels.store import WHOLE_BITS, Labels, labels_note

__all__ = [
    "CALIBRATION",
    "CHANNELS_BY",
    "PROMPT_ROWS",
    "SOURCES",
    "WHOLE_BITS",
    "Labels",
    "around",
    "heaviest_channels",
    "labels_note",
    "top_tokens",
]
