"""Micro-benchmarks of the parts, one process, no sockets: `python -m perf.micro`.

`bench_*.py` are pytest-benchmark's, one for each part; `cores.py`, `patterns.py` and `rings.py`
make what they measure. `comparing.py` compares with the recorded results.
"""
