"""One model type, tried: trained from SSD beside plain PyTorch, loaded and exported, in a process of its own."""

import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import transformers
from architectures import random_batches
from plain import PlainTrainer
from safetensors.torch import load_file
from small_types import small_config_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, LearningRate, Trainer
from greedysnake.errors import ModelError

SECONDS = 180
"""Of processor time that a type may take."""
STEPS = 2
KEPT = 0.6
"""Share of the activations that are kept: all of the last layers', some of another's, none of the first's."""
TOLERANCE = 1e-3
"""Most mean difference of parameters, as a share of the mean change by training."""

BITWISE, CLOSE, REFUSED, UNTESTED, WRONG = "bitwise", "tolerance", "refused", "untested", "wrong"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a model type."""

    model_type: str
    result: str
    reason: str = ""


def try_type(model_type: str, folder: Path) -> Row:
    """Train, load and export a small model of a type."""
    try:
        config = small_config_of(model_type)
        model = AutoModelForCausalLM.from_config(config).float().train()
        batch = random_batches(1)[0][1]
        model(**batch, use_cache=False).loss.backward()
    except Exception as error:
        return Row(model_type=model_type, result=UNTESTED, reason=f"plain PyTorch fails: {_line(error)}")
    settings = AdamW(lr=2e-3, weight_decay=0.1, max_grad_norm=0.5)
    rate = LearningRate(peak=2e-3)
    try:
        trainer = Trainer(
            config,
            folder / "store",
            optimizer=settings,
            learning_rate=rate,
            dtype="float32",
            delayed_share=0.3,
            kept_activations=KEPT,
            chunk_elements=8192,
            seed=3,
        )
    except ModelError as error:
        return Row(model_type=model_type, result=REFUSED, reason=_line(error))
    with trainer:
        trainer.save_pretrained(folder / "before")
        model = AutoModelForCausalLM.from_config(config).float()  # what its constructor freezes is frozen
        model.load_state_dict(_whole(folder / "before"))
        plain = PlainTrainer(model, settings, seed=3, lr=rate.at)
        for batch in random_batches(STEPS):
            try:
                result = trainer.step(batch)
            except ModelError as error:
                return Row(model_type=model_type, result=REFUSED, reason=_line(error))
            loss = plain.step_as(trainer, batch)
            found = (parameter.grad for parameter in plain.model.parameters() if parameter.grad is not None)
            if result.skipped is not None and not all(gradient.isfinite().all() for gradient in found):
                return Row(model_type=model_type, result=UNTESTED, reason=f"plain PyTorch fails: {result.skipped}")
            if not abs(result.loss - loss) <= 1e-5 * abs(loss):
                return Row(model_type=model_type, result=WRONG, reason=f"loss {result.loss}, plain PyTorch {loss}")
        trainer.save_pretrained(folder / "after")
    plain.model.save_pretrained(folder / "plain")  # files, as some models' loading changes what it read
    before, ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("before", "after", "plain"))
    if ours.keys() != theirs.keys():
        return Row(model_type=model_type, result=WRONG, reason=f"exports {sorted(ours.keys() ^ theirs.keys())}")
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    if all(torch.equal(before[name], theirs[name]) for name in theirs):
        return Row(model_type=model_type, result=WRONG, reason="training changes nothing")
    if lost := _lost_by_loading(folder):
        return Row(model_type=model_type, result=WRONG, reason=f"loading and exporting changes {lost}")
    if not different:
        return Row(model_type=model_type, result=BITWISE)
    share = max(_difference(ours[name], theirs[name], before[name]) for name in different)
    reason = f"{len(different)} of {len(theirs)} tensors differ, by {share:.0e} of their change ({different[0]})"
    return Row(model_type=model_type, result=CLOSE if share < TOLERANCE else WRONG, reason=reason)


def _whole(folder: Path) -> dict[str, Tensor]:
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    if info["missing_keys"] or info["unexpected_keys"]:
        raise AssertionError(f"the export lacks {info['missing_keys']} and has {info['unexpected_keys']} besides")
    return model.state_dict()


def _difference(ours: Tensor, theirs: Tensor, before: Tensor) -> float:
    change = (theirs - before).abs().mean().item()
    return (ours - theirs).abs().mean().item() / change if change else float("inf")


def _lost_by_loading(folder: Path) -> list[str]:
    """Tensors that are not the same after a folder that transformers wrote was loaded and exported."""
    AutoModelForCausalLM.from_pretrained(folder / "before").save_pretrained(folder / "theirs")
    with Trainer(folder / "theirs", folder / "store2", dtype="float32", chunk_elements=8192) as trainer:
        trainer.save_pretrained(folder / "ours")
    ours, theirs = load_file(folder / "ours/model.safetensors"), load_file(folder / "theirs/model.safetensors")
    return sorted(
        name
        for name in ours.keys() | theirs.keys()
        if name not in ours or name not in theirs or not torch.equal(ours[name], theirs[name])
    )


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text if isinstance(error, ModelError) else f"{type(error).__name__}: {text}")[:300].strip()


def _child(model_type: str, folder: Path, answer: Connection, show: bool) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if not show:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    try:
        row = try_type(model_type, folder)
    except BaseException as error:
        if show:
            traceback.print_exc()
        row = Row(model_type=model_type, result=WRONG, reason=f"{type(error).__name__}: {_line(error)}")
    answer.send(asdict(row))


def in_a_process(model_type: str, *, show: bool = False) -> Row:
    """What comes of a type, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    memory = Path("/dev/shm")  # thousands of flushes would take their time on a disk
    folder = Path(tempfile.mkdtemp(prefix="greedysnake-coverage-", dir=memory if memory.is_dir() else None))
    process = context.Process(target=_child, args=(model_type, folder, theirs, show))
    process.start()
    theirs.close()
    try:
        return Row(**ours.recv())
    except EOFError:
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return Row(model_type=model_type, result=UNTESTED, reason=f"takes more than {SECONDS} s")
        return Row(model_type=model_type, result=WRONG, reason=f"its process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        shutil.rmtree(folder, ignore_errors=True)
