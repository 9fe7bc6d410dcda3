"""An archive on many machines: Kubernetes manifests from its plan."""
