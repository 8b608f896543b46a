"""The checkpoint of the queues: SQLite tables that follow the change log.

Owns the form that mailboxes, service queues, cursors and groups have on disk beside the log. The
rule: the tables have nothing that is not durable in the log, and record the position that they have
reached. Source: docs/design.md, Queues and the checkpoint.
"""
