"""Gradients: what was there before a batch, in which precision the new ones are summed."""
