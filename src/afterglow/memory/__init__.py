"""Host memory for large buffers: huge pages, reuse, and pages that exist before they are used. Knows bytes, not tensors."""
