"""The brokers that are measured: a folder each, whose `server.py` gives `PEER`."""
