"""What a streaming pipeline is made of: samples as batches and back, a dataset as a source, room and pace."""
