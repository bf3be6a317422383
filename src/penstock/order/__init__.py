"""Which rows make up step s: pure arithmetic, no I/O."""
