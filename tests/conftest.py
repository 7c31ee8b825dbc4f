"""Settings for every test."""

import os

import pytest

# One thread a process: the models are tiny, and spinning OpenMP threads would only slow each other down.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture(autouse=True)
def _quiet_transformers():
    from transformers.utils import logging

    logging.disable_progress_bar()
