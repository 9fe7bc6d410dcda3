"""What a plan is made of: the hardware and its measured figures, what is known of each table, what a shard takes."""
