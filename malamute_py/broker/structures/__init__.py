"""Containers and operations on bits that know no word of a broker."""
