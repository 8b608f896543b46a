"""The checkpoint: the tables that follow ring main, and the state that a start finds."""
