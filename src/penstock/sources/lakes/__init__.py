"""Tables of lakes as sources: Delta and Iceberg, at a version."""
