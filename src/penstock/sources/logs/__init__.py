"""Sources of messages: logs with partitions and offsets, one adapter a broker."""
