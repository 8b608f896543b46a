"""A check of a broker's promises from outside: `malamute verify-promises`.

Owns clients that publish, send, ask, work and step under disturbances, a journal of what they were
promised, and the check of that journal afterwards. The rule: it uses the public client only, and
judges by its own journal, so that it can judge any broker.
"""
