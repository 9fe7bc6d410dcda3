"""What there is to plan: the hardware and its measured figures, the tables, their options, and what a shard takes."""
