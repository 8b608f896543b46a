"""The tables that follow ring main, and what a start finds of both."""
