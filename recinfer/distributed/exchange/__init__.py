"""Exchange of ids, vectors and gradients between the ranks that read and the ranks that hold rows. See
docs/explanation/request.md."""
