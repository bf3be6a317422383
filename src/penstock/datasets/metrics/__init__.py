"""Metrics of competitions, by the names they have there: NumPy only; NaN and wrong shapes are refused."""

from penstock.datasets.metrics.metric import METRICS, Metric, get_metric

__all__ = ["METRICS", "Metric", "get_metric"]
