"""The brokers that are measured: each has a folder, whose `server.py` gives `PEER`."""
