"""Fuzzers of the broker and of its libraries.

`python -m tests.fuzz --help` runs hostile messages through the core, `tests.fuzz.contents` hostile
contents through broker and consumer, `tests.fuzz.live` messages and raw connections against a
broker's process, `tests.fuzz.guided` coverage-guided inputs through one decoder.
"""
