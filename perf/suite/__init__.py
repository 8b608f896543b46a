"""The measuring suite: its works, how they are run, kept and shown."""
