"""The archive format: writes, reads, checks and patches archives and deltas, as FORMAT.md and DELTA.md specify."""
