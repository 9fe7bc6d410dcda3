"""How ids reach the ranks that have the rows, and how vectors and gradients come home. See docs/explanation/request.md."""
