"""Malamute: our broker and its asyncio client."""
