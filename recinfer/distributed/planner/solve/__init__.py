"""Search for a placement of tables: their options as arrays, the placement problem, and the search."""
