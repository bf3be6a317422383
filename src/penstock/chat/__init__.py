"""Conversations: from whatever a row holds to text with the spans that are trained on, and the checks on the way."""
