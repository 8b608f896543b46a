"""Cursors: named positions in streams."""
