"""Files: listing, compression, atomic publishing, locks, caches, URLs."""
