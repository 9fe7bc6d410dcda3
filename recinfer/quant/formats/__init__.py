"""Row formats: how the elements of a row become bytes and back, one object for each precision of a table."""
