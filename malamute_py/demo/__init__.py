"""A year of real departures through the broker, each claim checked against the table.

Owns the demonstration that `make demo` runs and that tests/demo runs as an end-to-end
test. The rule: every figure that is compared is computed twice by routes that share no
code, once through the broker and once by SQL over the table's file.
"""
