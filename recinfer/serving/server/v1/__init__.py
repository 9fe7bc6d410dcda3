"""TensorFlow Serving's and KServe's V1 protocol over HTTP: JSON rows or columns, turned into our messages and back."""
