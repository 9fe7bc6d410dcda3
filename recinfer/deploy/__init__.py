"""An archive on many machines: Kubernetes manifests from its plan, and Ray as the control plane of shards and rankers."""
