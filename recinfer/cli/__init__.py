"""See docs/tour.md."""
