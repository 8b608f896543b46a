"""One program a client: a driver that plays the roles of a measurement."""
