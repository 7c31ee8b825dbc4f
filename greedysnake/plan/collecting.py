"""Long lives for many objects: loaded libraries, and simulated schedules of hundreds of thousands of operations."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collecting() -> Iterator[None]:
    """Without the collector of cycles: there are few here, and it would walk all that is kept ever again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
