"""The console: pages for people, served by the HTTP side.

Owns what a person sees and does in a browser. The rules: each person logs in as a user of the
broker and has a link of their own, so that the broker's permissions decide and this process adds no
power; every text of a client (subjects, bodies, names) is hostile input and is escaped; every list,
buffer and session is bounded; pages work without scripts, which only refresh and draw. Source:
ARCHITECTURE.md, "The console".
"""
