"""From tables to a placement: their options as arrays, the placement problem, and the search for a good one."""
