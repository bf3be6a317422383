"""Log lines of tasks in the driver's log: each once, with the node it came from first; repeats are counted."""

from __future__ import annotations

import logging

_MOST_LINES = 10_000


class LogLines:
    """Lines that have been logged, with the number of times they came again."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], int] = {}
        self._nodes: dict[tuple[str, int, str], set[str]] = {}
        self.lost = 0
        """Lines that were neither logged nor counted one by one."""

    def add(self, name: str, level: int, text: str, node: str, count: int = 1) -> None:
        """Log a line that is new; count one that is not."""
        key = (name, level, text)
        if key not in self._counts:
            if len(self._counts) >= _MOST_LINES:
                self.lost += count
                return
            logging.getLogger(name).log(level, "[%s] %s", node, text)
            self._counts[key], self._nodes[key] = 0, set()
            count -= 1
        self._counts[key] += count
        if len(self._nodes[key]) < _MOST_LINES // 100:
            self._nodes[key].add(node)

    def repeated(self) -> dict[str, int]:
        """Texts of lines that came again, with the number of times."""
        return {text: count for (_, _, text), count in self._counts.items() if count}

    def sum_up(self) -> None:
        """Log how often lines came again, and forget them."""
        for (name, level, text), count in self._counts.items():
            if count:
                nodes = len(self._nodes[name, level, text])
                where = f"on {nodes} nodes" if nodes > 1 else f"on {next(iter(self._nodes[name, level, text]))}"
                logging.getLogger(name).log(level, "%s more times, %s: %s", f"{count:,}", where, text)
        if self.lost:
            logging.getLogger(__name__).warning("%s more log lines of tasks were not shown", f"{self.lost:,}")
        self._counts, self._nodes, self.lost = {}, {}, 0
