"""Answers requests: the path of each request, the runs that requests share, and the served models and versions."""
