"""``saccade tune``: which policy a checkpoint allows, and from which length that pays."""
