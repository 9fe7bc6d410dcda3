"""A whole server from its configuration: the work of its role, from loading to the end."""
