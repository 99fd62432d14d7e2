"""An engine's process whose next step hangs once a file says how: ``sleep`` or ``spin``. Its path is in
``STUCK_ENGINE``."""

import os
import sys
import time
from pathlib import Path

from saccade.engine.core import Engine
from saccade.server.engine_process import main

real, file = Engine.step, Path(os.environ["STUCK_ENGINE"])


def step(engine):
    while (how := hangs()) is not None:
        if how == "sleep":
            time.sleep(0.02)
    return real(engine)


def hangs():
    try:
        return file.read_text()
    except FileNotFoundError:
        return None


if __name__ == "__main__":
    Engine.step = step
    main(int(sys.argv[1]))
