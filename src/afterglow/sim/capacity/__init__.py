"""What hardware a workload needs, and what it costs."""
