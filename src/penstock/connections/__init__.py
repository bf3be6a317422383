"""Clients of databases and brokers, shared by sources, sinks and caches. Imported where they are used."""
