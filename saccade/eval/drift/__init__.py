"""Drift: how far policies lie from dense attention over a text, teacher-forced, beside bfloat16's rounding."""
