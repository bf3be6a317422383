"""Sources of token files and archives of other programs, one file a format."""
