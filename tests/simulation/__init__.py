"""The deterministic simulator: core, journal and clients under one seed.

`python -m tests.simulation --seed N` replays a run; see __main__.py for the options, disk.py for
the fault model, model.py for the checks.
"""
