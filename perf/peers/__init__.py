"""The brokers that are measured, each a module that gives `PEER`."""
