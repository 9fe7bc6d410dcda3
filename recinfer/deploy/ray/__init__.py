"""An archive on a Ray cluster: Ray places, watches and restarts; requests go by gRPC between the servers themselves."""
