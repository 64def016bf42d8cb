"""The `train` recipe: the settings, the text, the loop, and what it shows while it runs."""
