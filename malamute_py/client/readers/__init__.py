"""Readers: what the subscriptions, inboxes, members and cursors of both shells share.

Owns the place of a reader amid a batch, and what was handed to its caller. The rule: nothing here
waits or touches the link; a shell waits, and passes on what has come.
"""
