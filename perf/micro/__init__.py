"""Micro-benchmarks of the parts, one process, no sockets: `python -m perf.micro`.

`bench_*.py` are pytest-benchmark's, one a part; what they measure is made in `cores.py`,
`patterns.py` and `rings.py`. `comparing.py` says what differs from the recorded results.
"""
