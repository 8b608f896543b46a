"""The client for asyncio: the verbs as awaitables, its link in the event loop.

Owns nothing by itself: each file has the name of its twin in sync/; session/, engine/ and readers/
own what both shells share. The rule: a cancelled call leaves the link and all other calls as they
were. `make sync-client` makes sync/ from these files, link and handlers excepted; the comments that
begin with `sync:` and `asyncio only` are for it, and tools/sync_client.py explains them.
"""
