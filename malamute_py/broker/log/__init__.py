"""The way into the journal: steps, what is visible, bodies, and the answers that wait for it."""
