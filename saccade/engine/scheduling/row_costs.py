"""Measured times of prefill rows, and what they predict for the next ones."""

from __future__ import annotations

from dataclasses import dataclass

FORGET = 0.9  # weight of what was known, at each measurement


@dataclass
class RowCosts:
    """Seconds that the rows of a prefill take, as ``a * rows + b * rows * keys`` with the keys that they see on
    average: least squares over what was measured, older steps counting less."""

    rows2: float = 0.0
    both: float = 0.0
    pairs2: float = 0.0
    rows_y: float = 0.0
    pairs_y: float = 0.0

    def learn(self, rows: int, keys: float, seconds: float) -> None:
        pairs = rows * keys
        for name, value in (
            ("rows2", rows * rows),
            ("both", rows * pairs),
            ("pairs2", pairs * pairs),
            ("rows_y", rows * seconds),
            ("pairs_y", pairs * seconds),
        ):
            setattr(self, name, FORGET * getattr(self, name) + value)

    def seconds(self, rows: int, keys: float) -> float | None:
        """None before something was measured."""
        if not self.rows2:
            return None
        determinant = self.rows2 * self.pairs2 - self.both * self.both
        if determinant > 1e-6 * self.rows2 * self.pairs2:
            a = (self.rows_y * self.pairs2 - self.pairs_y * self.both) / determinant
            b = (self.pairs_y * self.rows2 - self.rows_y * self.both) / determinant
            if a >= 0 and b >= 0:
                return rows * (a + b * keys)
        return rows * max(self.rows_y / self.rows2, self.pairs_y / self.pairs2 * keys if self.pairs2 else 0.0)
