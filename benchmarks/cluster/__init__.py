"""Several engines over one store: what they find, how fast it comes, and what that costs."""
