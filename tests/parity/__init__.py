"""Two roads to one answer: what recinfer does sharded, against the unsharded module."""
