"""The engine: a session over a real socket, for both shells.

Owns what the links of asyncio and of threads share: the socket, the turn, the clients' logs, and
the sentences of their Timeouts. The rule: whatever needs a socket, a clock or the system's random
source is here or in a shell, and nothing here knows which shell it is. Source: SPEC.md, section 2.
"""
