"""Bytes at rest: finding files, opening them whatever their compression, publishing them whole."""
