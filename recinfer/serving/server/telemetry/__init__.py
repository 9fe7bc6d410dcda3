"""Metrics, a log line and a span per request, and the status page of a server."""
