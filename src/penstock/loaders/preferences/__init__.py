"""Preferences: their batch, and the engine that gathers both sides of a pair."""
