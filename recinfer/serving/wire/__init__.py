"""Messages: protobuf and arrays, limits, statuses, and the Open Inference Protocol's tensors; knows no server and no client."""
