"""Token files of other programs, read in place as stores: one file a format, `lookup` recognises them."""
