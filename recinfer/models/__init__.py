"""Reference models: DLRM and its variants."""
