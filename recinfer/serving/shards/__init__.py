"""Tables on other hosts: shard servers that look up, and the ranker's side that calls them."""
