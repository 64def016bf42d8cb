"""Several ranks. The only room that knows of `torch.distributed`."""
