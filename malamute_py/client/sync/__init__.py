"""The client for threads: the verbs of aio/ as blocking calls, its link in a thread of its own.

Owns nothing by itself: each file has the name of its twin in aio/; session/, engine/ and readers/
own what both shells share. The rule: any thread may call any of the verbs. `make sync-client` makes
the files that say so in their first lines from their twins; link and handlers are written by hand.
"""
