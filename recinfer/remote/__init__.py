"""Archives and model stores behind a URL, read through fsspec and kept in a cache folder."""
