"""``saccade bench recall``: what selections keep of the true attention, at what density and in what time."""
