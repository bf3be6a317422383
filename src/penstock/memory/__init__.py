"""Bytes: who may hold how many.

MemoryBudget            every batch in flight reserves its bytes here, and waits when there are none
BufferPool              raw blocks to read into; back by themselves when the last view of them is gone
slice_batch, compact    views of batches without copying, and a copy where a view would pin too much
MappedFile              a file as memory that the system may take back at any time
ResidentWatch           what allocators keep beyond that, held inside the budget too
MemoryPressureHandler   lowers the budget when the machine runs short, and gives it back
"""

from penstock._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
