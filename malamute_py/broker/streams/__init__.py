"""Streams: the catalogue, publishing, producers, where readers start, retention, administration."""
