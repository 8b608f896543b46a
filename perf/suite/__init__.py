"""The measuring suite: what is measured, how it is run, kept and shown."""
