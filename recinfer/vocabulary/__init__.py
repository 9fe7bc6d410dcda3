"""Vocabularies: which row of a table each raw 64-bit id reads, as data, as an index in an archive, and as an id step."""
