"""The oracle: what one pass over the whole batch gives by plain torch, and tiny models of many kinds to ask about."""
