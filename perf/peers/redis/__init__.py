"""Redis: its server, a Python client and a C client."""
