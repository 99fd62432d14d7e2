"""``python -m saccade``."""

from saccade.cli.main import main

main()
