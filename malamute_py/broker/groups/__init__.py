"""Groups: members that share the records of a stream."""
