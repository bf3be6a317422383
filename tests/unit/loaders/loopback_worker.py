"""Stand-in for a worker process: the same messages, answered by the calling thread."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import cloudpickle
import numpy as np
import orjson

from penstock.pipeline.array_worker import (
    Answer,
    PickledService,
    describe_error,
    dumped,
    raise_error,
    table_of,
    views_of,
)


class LoopbackWorker:
    """An `ArrayWorker` whose service runs here, as a copy, and answers at once."""

    pid = None

    def __init__(self, service: Any, slots: int = 1) -> None:
        self._setup = service.data if isinstance(service, PickledService) else cloudpickle.dumps(service)
        self._service: Any = None
        self._slots = [np.empty(0, np.uint8) for _ in range(slots)]
        self._answers: deque[bytes] = deque()

    @property
    def answered(self) -> bool:
        return bool(self._answers)

    @property
    def unread(self) -> int:
        return sum(1 for _ in takewhile(lambda answer: b'"traceback"' not in answer, self._answers))

    def start(self) -> None:
        if self._service is None:
            self._service = cloudpickle.loads(self._setup)

    def send(self, requests: Iterable[tuple[int, bytes]], *, supersede: bool = False) -> None:
        self.start()
        for slot, request in requests:
            try:
                answer = self._service.answer(request)
            except Exception as error:
                self._answers.append(dumped(describe_error(error, traceback.format_exc())))
                continue
            table, nbytes = table_of(answer.arrays)
            if len(self._slots[slot]) < nbytes:
                self._slots[slot] = np.empty(nbytes, np.uint8)
            for name, view in views_of(self._slots[slot], table).items():
                view[...] = answer.arrays[name]
            self._answers.append(dumped({"slot": slot, "notes": answer.notes, "arrays": table, "nbytes": nbytes}))

    def receive(self) -> Answer:
        notes = orjson.loads(self._answers.popleft())
        if "traceback" in notes:
            raise_error(notes)
        # A view, since the array itself stays when its views have gone.
        memory = np.frombuffer(memoryview(self._slots[notes["slot"]]), np.uint8)
        return Answer(notes["notes"], views_of(memory, notes["arrays"]))

    def restart(self) -> None:
        self.close()
        self._answers.clear()

    def close(self) -> None:
        service, self._service = self._service, None
        if service is not None:
            service.close()
