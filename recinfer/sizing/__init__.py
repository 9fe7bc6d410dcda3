"""How many hosts a model needs for a load: measured costs, a simulation of the queues, and a search over deployments."""
