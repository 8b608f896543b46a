"""Batches: the rows that a reader selects, and the frames that carry them."""
