"""Who a connection is, and what its identity may do."""
