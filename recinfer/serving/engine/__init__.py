"""Answers requests: which way one takes, the runs that requests share, and the models and versions that there are."""
