"""Several accelerators in one machine, as one larger one.

Each of n accelerators computes micro-batches of its own, and has 1/n of weights and state, which it loads from the
disks and host memory that all share, copies in over its own link, and all-gathers over a fast link between them
(NVLink), whose time is left out; gradients are reduce-scattered likewise (ZeRO-3). So disks, host memory and the
optimizer do in a step what they do for one accelerator, and all n together are one accelerator of n times the
computation and copies, whose micro-batches have n times the sequences. Only device memory is not n times as much:
each accelerator has the buffers of whole units, which are counted once here and so taken off n - 1 times. Traffic with
that memory keeps the rate of one, as each clears and reads whole units.
"""

from greedysnake.errors import ConfigError
from greedysnake.plan.hardware import Hardware
from greedysnake.plan.slots import DEEP
from greedysnake.plan.workload import Workload


def as_one_device(machine: Hardware, count: int, workload: Workload) -> Hardware:
    """A machine with ``count`` accelerators like its one, in the terms of a machine with one.

    Args:
        machine: with one accelerator.
        count: of accelerators.
        workload: the model, whose largest unit each accelerator has buffers for; a decoder layer a unit.

    Raises:
        ConfigError: the machine has no accelerator, or their memory does not hold the buffers of a unit.
    """
    if machine.device_memory is None or machine.h2d is None or machine.d2h is None:
        raise ConfigError(f"{machine.name} has no accelerator, so there cannot be {count}")
    weights = max(part.weight_bytes for part in workload.parts)
    gradients = max(part.gradient_bytes for part in workload.parts)
    # beside the buffers, a gradient in its own type while it is added to them
    each = DEEP.weight_slots * weights + DEEP.gradient_slots * gradients + gradients
    memory = count * machine.device_memory - (count - 1) * each
    if memory <= 0:
        raise ConfigError(
            f"{machine.name}: {count} accelerators of {machine.device_memory:,} bytes do not hold a unit's buffers, "
            f"{each:,} bytes on each"
        )
    return machine.model_copy(
        update={
            "name": machine.name if count == 1 else f"{count} x {machine.name}",
            "device_memory": memory,
            "h2d": count * machine.h2d,
            "d2h": count * machine.d2h,
            "compute": {
                dtype: rates.model_copy(update={"matrix": count * rates.matrix})
                for dtype, rates in machine.compute.items()
            },
            "layer_times": (),
        }
    )
