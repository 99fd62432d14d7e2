"""Commands that the distribution saccade-eval adds to ``saccade``: saccade.cli.measuring finds them."""
