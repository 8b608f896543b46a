"""Streams: the catalogue, publishing, producers, start positions, retention, administration."""
