"""Prometheus metrics and recorded traces."""
