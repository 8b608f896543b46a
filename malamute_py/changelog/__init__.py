"""The change log: every durable change as plain data, and the one function that applies it.

Owns the records, the tables that they make, and the settings in them. The rule: nothing here has
side effects, so that the broker core, the checkpoint and a replica share it and reach the same
tables. Source: docs/design.md (Journal; Queues and the checkpoint).
"""
