"""Labels: a few channels of every key in a few bits, scored instead of the keys."""

from saccade.methods.labels.store import WHOLE_BITS, Labels, labels_note

__all__ = ["WHOLE_BITS", "Labels", "labels_note"]
