"""How many hosts a model needs for a rate: capacity measured on a real server, ranks from the planner, prices."""
