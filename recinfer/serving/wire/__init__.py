"""Messages: protobuf and arrays, limits, statuses, and the Open Inference Protocol's tensors; imports no server and no client."""
