"""Health: what is slow, stuck or not ready, judged by facts that the broker told.

Owns the judgements, which the HTTP side and the command line share. The rule: nothing here asks the
broker, reads a clock or prints; facts come in as arguments.
"""
