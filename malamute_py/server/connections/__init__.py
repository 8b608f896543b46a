"""Connections below the protocol: counted, watched, and cut where one costs too much."""
