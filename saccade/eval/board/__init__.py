"""The board: every method at equal keys read, at equal bytes and at equal recall, sorted by what a user loses."""
