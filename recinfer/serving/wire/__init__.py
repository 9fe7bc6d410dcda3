"""Both ends of a connection: messages and arrays, limits, statuses, addresses, event loops; imports no server and no client."""
