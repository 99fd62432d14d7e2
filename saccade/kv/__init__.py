"""Where keys and values live."""

from saccade.kv.pool import BlockPool
from saccade.kv.sequence import SequenceKV
from saccade.kv.view import KVView

__all__ = ["BlockPool", "KVView", "SequenceKV"]
