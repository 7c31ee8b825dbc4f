"""Long lives for many objects: simulated schedules are kept by the hundred thousand operations."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Without the collector of cycles: there are none here, and it would walk all simulated operations ever again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
