"""Metrics where people watch them: TensorBoard, Weights & Biases. Both are optional packages.

They are a convenience: `metrics.jsonl` has everything, and a service that fails does not stop a run of days.
"""

import importlib.util
import json
import math
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

from greedysnake.errors import ConfigError
from greedysnake.report.metrics import write_json_atomic

TENSORBOARD_FOLDER = "tensorboard"
WANDB_NOTE = "wandb.json"
"""File of a run folder with the id of its run at Weights & Biases, so that a resumed run goes on with its curves."""

CURVES = {
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "loss_scale": "train/loss_scale",
    "epoch": "train/epoch",
    "tokens_seen": "train/tokens_seen",
    "target_tokens_seen": "train/target_tokens_seen",
    "seconds": "speed/step_seconds",
    "tokens_per_second": "speed/tokens_per_second",
    "eval_loss": "evaluation/loss",
    "eval_perplexity": "evaluation/perplexity",
}
"""Which metrics are sent, and under which names."""


class Backend(Protocol):
    """Takes curves."""

    name: str

    def write(self, step: int, curves: Mapping[str, float]) -> None:
        """Values at a step, by the curve's name."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files.

    Args:
        folder: of the event files.
        steps_done: of these files, what comes after this step is taken back: it is made again.
    """

    name = "TensorBoard"

    def __init__(self, folder: Path, steps_done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=steps_done + 1 if steps_done else None)

    def write(self, step: int, curves: Mapping[str, float]) -> None:
        """Values at a step, on their way to the disk before the next one."""
        for curve, value in curves.items():
            self._writer.add_scalar(curve, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()


class Wandb:
    """A run at Weights & Biases, the same one after a resume.

    Args:
        run: the run folder; what is sent is kept in it, and offline stays there for ``wandb sync``.
        project, name, mode: as `logging.wandb` in the settings; without a name, the run folder's.
        settings: the run's, to be shown there.

    Raises:
        ConfigError: it cannot be reached, or nobody is logged in.
    """

    name = "Weights & Biases"

    def __init__(
        self,
        run: Path,
        *,
        project: str,
        name: str | None,
        mode: Literal["online", "offline"],
        settings: Mapping[str, Any],
    ) -> None:
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project,
                name=name or run.resolve().name,
                mode=mode,
                id=_wandb_id(run),
                resume="allow" if mode == "online" else None,  # offline, the id alone joins the parts of a run
                dir=str(run),
                config=dict(settings),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"logging.wandb: Weights & Biases cannot be used: {error}. Log in with wandb login, or set "
                f"logging.wandb.mode=offline and send the run later with wandb sync, or logging.wandb=null"
            ) from error

    def write(self, step: int, curves: Mapping[str, float]) -> None:
        """Values at a step. Steps that were sent before a crash, and are made again, are the same and left out."""
        self._run.log(dict(curves), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Loggers:
    """All that a run's metrics are sent to.

    Args:
        backends: where to.
        say: told once if one of them fails; it is then left out.
    """

    def __init__(self, backends: list[Backend], say: Callable[[str], None]) -> None:
        self._backends = backends
        self._say = say

    def write(self, metrics: Mapping[str, Any]) -> None:
        """A line of the metrics file; of it, what `CURVES` names and is a number."""
        curves = {
            curve: float(value)
            for key, curve in CURVES.items()
            if isinstance(value := metrics.get(key), int | float) and math.isfinite(value)
        }
        self._with_each(lambda backend: backend.write(int(metrics["step"]), curves))

    def close(self) -> None:
        """Send what is left."""
        self._with_each(lambda backend: backend.close())
        self._backends = []

    def _with_each(self, act: Callable[[Backend], None]) -> None:
        for backend in list(self._backends):
            try:
                act(backend)
            except Exception as error:  # whatever a service's own client raises
                self._backends.remove(backend)
                self._say(f"{backend.name} gets no more metrics, as it failed: {error!r}. They are in metrics.jsonl.")


def missing_packages(*, tensorboard: bool, wandb: bool) -> list[str]:
    """What is wanted and not installed, a sentence each."""
    return [
        f"logging.{name}: the package {name} is not installed; install it with pip install 'greedysnake[{name}]', or "
        f"take logging.{name} out of the settings"
        for name, wanted in (("tensorboard", tensorboard), ("wandb", wandb))
        if wanted and importlib.util.find_spec(name) is None
    ]


@contextmanager
def open_loggers(
    run: Path, settings: Mapping[str, Any], *, steps_done: int, say: Callable[[str], None]
) -> Iterator[Loggers]:
    """What the settings name, until the run ends.

    Args:
        run: the run folder.
        settings: all of the run's, as plain values.
        steps_done: where the run goes on.
        say: tells the user something.

    Raises:
        ConfigError: one of them cannot be used.
    """
    wanted = settings["logging"]
    backends: list[Backend] = []
    loggers = Loggers(backends, say)
    try:
        if wanted["tensorboard"]:
            backends.append(TensorBoard(run / TENSORBOARD_FOLDER, steps_done))
        if wanted["wandb"] is not None:
            backends.append(Wandb(run, **wanted["wandb"], settings=settings))
        yield loggers
    finally:
        loggers.close()


def _wandb_id(run: Path) -> str:
    """The id of a run folder at Weights & Biases, made when it is first asked for."""
    path = run / WANDB_NOTE
    if path.is_file():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    name = uuid.uuid4().hex[:16]
    write_json_atomic(path, {"id": name})
    return name
