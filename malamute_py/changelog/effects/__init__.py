"""The effect of each record of the change log on the tables, a file for each kind of thing."""
