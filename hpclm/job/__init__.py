"""Jobs: what is asked of a scheduler, what is started here, and the record of both."""
