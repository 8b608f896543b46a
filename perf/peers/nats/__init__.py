"""NATS: its server, a Python client and a Go client."""
