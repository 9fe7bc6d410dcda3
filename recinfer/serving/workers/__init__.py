"""Several serving processes on one port, and the supervisor that starts and watches them."""
