"""Data sets, the endless sample order, and batches."""
