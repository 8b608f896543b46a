"""Batches: rows of one that a reader selects, and the frames that carry them."""
