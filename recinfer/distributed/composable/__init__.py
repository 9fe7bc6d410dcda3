"""Parameters of sharded modules, as objects of their own."""
