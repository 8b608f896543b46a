"""Open transactions: batches that are put aside until a commit appends them to their streams."""
