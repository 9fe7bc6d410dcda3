"""What a server shows of itself: metrics, a log line and a span a request, the status page."""
