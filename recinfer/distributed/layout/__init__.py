"""Where the rectangles of tables lie on ranks. See docs/explanation/request.md."""
