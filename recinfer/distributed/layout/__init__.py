"""Rectangles of tables on ranks. See docs/explanation/request.md."""
