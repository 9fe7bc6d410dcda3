"""The archive format: writing, reading, checking and patching archives and deltas; FORMAT.md and DELTA.md specify
it."""
