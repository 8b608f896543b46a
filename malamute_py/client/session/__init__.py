"""The sans-IO session: the client's half of the protocol, for any shell.

Owns everything that follows from messages and the time alone: the link's state, what was opened
under a number, what leaves and waits for its confirm. The rule: no file here has a socket, a clock,
a random source, a thread or a log; all of them come in as arguments, as messages and as wishes.
Source: SPEC.md, sections 2, 4 and 8.
"""
