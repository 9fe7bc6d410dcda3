"""Code generated from proto/recinfer/v1/inference.proto by tools/gen_proto.py; never edited by hand."""
