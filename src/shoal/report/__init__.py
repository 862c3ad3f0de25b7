"""Reading runs: plots, comparisons, exports."""
