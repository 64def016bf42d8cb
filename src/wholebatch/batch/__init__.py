"""Batches: what their fields are, how they are cut by rows, and how a loader's batches become whole ones."""
