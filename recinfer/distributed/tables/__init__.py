"""A rank's rows: groups of tables that one kernel call looks up, on CPU and GPU, and their optimizers. See
docs/explanation/request.md."""
