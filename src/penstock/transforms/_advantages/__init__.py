"""What `penstock.transforms.advantages` is made of: presets, checks, sums over groups and over time, estimators."""
