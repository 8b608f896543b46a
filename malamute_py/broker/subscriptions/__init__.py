"""Readers of streams: live, on demand, and what each of them selects."""
