"""Filesystem queue compared with torch.save and plain copying: `python benchmarks/queue.py --help`; see handover.py.

Scripts in this directory find this file before the standard module `queue`. An import therefore loads the standard one.
"""

from __future__ import annotations

import importlib.util
import sys
import sysconfig
from pathlib import Path

if __name__ == "__main__":
    from handover import main

    main()
else:
    spec = importlib.util.spec_from_file_location(__name__, Path(sysconfig.get_path("stdlib"), "queue.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
