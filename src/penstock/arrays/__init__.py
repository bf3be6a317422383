"""Arrays of rows of different lengths."""
