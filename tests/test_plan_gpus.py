"""Several accelerators that share disks and host memory, as one larger."""

from dataclasses import replace

import pytest
from made_up_machines import GIB, MACHINES, SMALL, machine, query

from greedysnake.errors import ConfigError
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.gpus import as_one_device
from greedysnake.plan.roofline import baseline_seconds
from greedysnake.plan.search import search

ROOMY = machine(device_memory=8 * GIB)


def test_one_is_the_machine_itself():
    assert as_one_device(ROOMY, 1, SMALL) == ROOMY


def test_a_unit_is_on_each_device_and_the_rest_is_shared_out():
    four = as_one_device(ROOMY, 4, SMALL)
    assert ROOMY.device_memory < four.device_memory < 4 * ROOMY.device_memory
    assert four.compute["bfloat16"].matrix == 4 * ROOMY.compute["bfloat16"].matrix
    assert (four.disks, four.host_memory, four.optimizer) == (ROOMY.disks, ROOMY.host_memory, ROOMY.optimizer)


def test_a_machine_that_cannot_be_several_is_refused():
    with pytest.raises(ConfigError, match="has no accelerator"):
        as_one_device(MACHINES["cpu"], 2, SMALL)
    with pytest.raises(ConfigError, match="do not hold a unit's buffers"):
        as_one_device(machine(device_memory=GIB), 4, SMALL)


def test_more_accelerators_are_faster_and_no_more_than_so_many_times():
    """Each of four copies and zeroes a quarter of the weights, so what bounds them is one that is as quick at that."""
    one = search(query(ROOMY, micro_batches=4, rows=1, sequences=4))
    four = search(query(as_one_device(ROOMY, 4, SMALL), micro_batches=4, rows=4, sequences=16))
    quick = {name: 4 * getattr(ROOMY, name) for name in ("h2d", "d2h", "compute_memory")}
    quicker = search(query(ROOMY.model_copy(update=quick), micro_batches=4, rows=1, sequences=4))
    assert one.tokens_per_second <= four.tokens_per_second <= 4 * quicker.tokens_per_second


def test_the_baseline_loads_its_weights_no_faster_for_more_accelerators():
    """Its disks are busy all the time, so as many accelerators take as long for as many times the tokens."""
    slow = machine(device_memory=8 * GIB, disks=MACHINES["slow disk"].disks)
    batch = BatchShape(micro_batches=4, rows=1, tokens=1024)
    seconds = [
        baseline_seconds(query(hardware), replace(batch, rows=count), resident_weights=0.0)
        for count, hardware in ((1, slow), (4, as_one_device(slow, 4, SMALL)))
    ]
    assert seconds[1] == pytest.approx(seconds[0], rel=0.1)
