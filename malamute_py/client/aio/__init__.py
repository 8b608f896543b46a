"""The client for asyncio: its verbs as awaitables, and its link in an event loop.

Owns nothing by itself; the rooms below own what both shells share, and sync/ has the same files for
threads. The rule: a cancelled call leaves the link and all other calls as they were.
"""
