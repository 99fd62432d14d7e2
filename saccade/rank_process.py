"""A rank's process, ``python -m saccade.rank_process``: it ends with the first rank's from its beginning on, since
importing what it computes with takes seconds."""

from __future__ import annotations

import select
import sys

from saccade.parent import end_with_parent


def first_is_gone() -> bool:
    """Whether the first rank has closed its end of the pipe."""
    waiting = select.poll()
    waiting.register(sys.stdin.fileno(), 0)  # no more than that it is closed
    return bool(waiting.poll(0))


if __name__ == "__main__":
    end_with_parent(first_is_gone)
    from saccade.ranks import main

    main()
