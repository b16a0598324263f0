"""Plots of the stored results."""
