"""See docs/explanation/request.md."""
