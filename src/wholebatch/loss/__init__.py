"""What a loss is a mean over: stated by the user, verified on the first batch, suggested by the error."""
