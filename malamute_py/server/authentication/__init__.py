"""Authentication of connections, and what an identity may do."""
