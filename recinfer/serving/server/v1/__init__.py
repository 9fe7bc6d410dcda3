"""TensorFlow Serving's and KServe's V1 protocol over HTTP: JSON rows or columns, converted to recinfer's messages and back."""
