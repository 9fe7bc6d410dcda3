"""Deploys an archive on a Ray cluster: Ray Serve runs the servers; requests go directly between servers over gRPC."""
