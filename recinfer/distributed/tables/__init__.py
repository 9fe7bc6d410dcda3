"""The rows of a rank: tables that one kernel call looks up, on CPU and on GPUs, and their optimizers. See docs/explanation/request.md."""
