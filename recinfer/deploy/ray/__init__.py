"""Deploys an archive on a Ray cluster: Ray places and restarts the servers; requests go directly between servers over
gRPC."""
