"""Containers and bit tricks that know no word of a broker."""
