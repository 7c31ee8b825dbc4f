"""How long a matrix will take: the planner's simulation at first, corrected by what has been measured since."""

import statistics
from functools import cache

from greedysnake.bench.cells import Cell, Measured, Method, Setting
from greedysnake.bench.models import bench_config
from greedysnake.bench.systems import System
from greedysnake.plan.activations import BatchShape
from greedysnake.plan.describe import describe_model
from greedysnake.plan.given import simulate_given
from greedysnake.plan.hardware import Hardware, paced
from greedysnake.plan.query import PlanQuery
from greedysnake.plan.step_costs import unit_seconds

_START_SECONDS = 12.0
"""To load torch and transformers, and to build the model."""
_FIRST_WRITE_BYTES = 16
"""Bytes a parameter that a system writes to the disk before its first step, or reads into memory."""


class Estimator:
    """Seconds of cells.

    Args:
        hardware: the machine, unpaced.
        method: what all cells share.
    """

    def __init__(self, hardware: Hardware, method: Method) -> None:
        self._hardware, self._method = hardware, method
        self._factors: dict[str, list[float]] = {}
        self._workload = cache(lambda model: describe_model(bench_config(model, method.tokens), name=model))

    def seconds(self, cell: Cell, system: System) -> float:
        """What a cell will take."""
        own = self._factors.get(system.name)
        every = own or [factor for factors in self._factors.values() for factor in factors]
        return self._predicted(cell.setting, system) * (statistics.median(every) if every else 1.0)

    def learn(self, one: Measured, system: System) -> None:
        """Take in what a cell took; those that did not end well say nothing."""
        if one.outcome.status == "done":
            predicted = self._predicted(one.cell.setting, system)
            self._factors.setdefault(system.name, []).append(one.outcome.seconds / predicted)

    def _predicted(self, setting: Setting, system: System) -> float:
        workload = self._workload(setting.model)
        hardware = paced(self._hardware, setting.disk)
        setup = workload.parameters * _FIRST_WRITE_BYTES / hardware.disk_rates.write
        return _START_SECONDS + setup + self._method.steps * self._step(setting, system, hardware)

    def _step(self, setting: Setting, system: System, hardware: Hardware) -> float:
        workload, method = self._workload(setting.model), self._method
        if system.order == "torch":
            batch = BatchShape(micro_batches=setting.micro_batches, rows=method.rows, tokens=method.tokens)
            units = unit_seconds(hardware, workload, batch)
            computing = sum(unit.forward + unit.backward for unit in units)
            return setting.micro_batches * computing + workload.parameters / hardware.optimizer
        resident = 1.0 if setting.memory is None and system.settings.get("resident_state", 0.0) is None else 0.0
        query = PlanQuery(
            workload=workload,
            hardware=hardware,
            tokens=method.tokens,
            micro_batches=setting.micro_batches,
            rows=method.rows,
            clipping=method.max_grad_norm is not None,
            resident_weights=resident,
            resident_state=resident,
            schedule=system.order,
        )
        return simulate_given(query).step.seconds
