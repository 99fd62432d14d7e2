"""Where keys and values live."""

from saccade.kv.blocks import BlockManager
from saccade.kv.format import BLOCK_SIZES, KVFormat
from saccade.kv.paged import Paged
from saccade.kv.saved import SavedKV
from saccade.kv.sequence import SequenceKV
from saccade.kv.storage import KVStorage
from saccade.kv.view import KVView

__all__ = ["BLOCK_SIZES", "BlockManager", "KVFormat", "KVStorage", "KVView", "Paged", "SavedKV", "SequenceKV"]
