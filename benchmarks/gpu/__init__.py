"""What this package does on a GPU, part by part: `benchmarks/gpu.sh`, or `python -m benchmarks.gpu`."""
