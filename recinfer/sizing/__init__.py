"""Sizing: the hosts that a model needs for a request rate, from measured capacity, planned ranks, and prices."""
