"""Memory: what a device has, what was used, and what counts as running out."""
