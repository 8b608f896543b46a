"""The checkpoint of the queues: SQLite tables that follow the change log.

Owns what mailboxes, service queues, cursors and groups look like on disk behind the log. The rule:
the tables never run ahead of what is durable in the log, and say how far they came. Source:
docs/design.md, Queues and the checkpoint.
"""
