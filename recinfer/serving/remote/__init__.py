"""Tables on other hosts: shard servers that look up, and the transport with which a ranker asks them."""
