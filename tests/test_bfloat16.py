"""bfloat16 training against a plain loop with bfloat16 weights and float32 masters.

How the loss curve is judged: two plain loops, one in bfloat16 and one in float32, differ by bfloat16's own
noise. The streamed run must be closer to the plain bfloat16 loop than that, on average over 50 steps and
at the end. The plain loop rounds masters to nearest-even, the streamed run half-up, so that its masters
can be kept in 16 more bits; the two differ at exact ties only.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import small_config
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from greedysnake import AdamW, Trainer
from greedysnake.engine.batches import target_tokens
from greedysnake.engine.products import computing_products
from greedysnake.errors import ConfigError
from greedysnake.models.skeleton import decays
from greedysnake.optim import split_master

STEPS = 50
SETTINGS = AdamW(lr=3e-3, max_grad_norm=1.0)


def batches() -> list[list[dict[str, Tensor]]]:
    """Something to learn: each next token is three times the one before, plus one, with some noise."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        ids = torch.randint(0, 128, (8, 1), generator=generator)
        for _ in range(23):
            following = (3 * ids[:, -1:] + 1) % 128
            noise = torch.rand(following.shape, generator=generator) < 0.1
            ids = torch.cat([ids, torch.where(noise, torch.randint(0, 128, (8, 1), generator=generator), following)], 1)
        made.append([{"input_ids": part, "labels": part} for part in ids.split(2)])
    return made


def half_up(master: Tensor) -> Tensor:
    weights = torch.empty(master.shape, dtype=torch.bfloat16).flatten()
    split_master(master.clone().flatten(), weights, torch.empty_like(weights, dtype=torch.int16))
    return weights.view(master.shape)


def plain_losses(folder: Path, dtype: torch.dtype, rounding: Callable[[Tensor], Tensor]) -> tuple[list[float], dict]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).train()
    masters = {name: torch.nn.Parameter(p.detach().float()) for name, p in model.named_parameters()}
    groups: dict[bool, list] = {True: [], False: []}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            groups[decays(module, name, parameter)].append(masters[f"{module_name}.{name}"])
            parameter.grad_dtype = torch.float32
    optimizer = torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}],
        lr=SETTINGS.lr,
        betas=SETTINGS.betas,
        fused=True,
    )
    losses = []
    for batch in batches():
        count, total = torch.tensor(target_tokens(batch)), 0.0
        for part in batch:
            with computing_products("auto"):  # as the streamed run
                loss = model(**part, use_cache=False, num_items_in_batch=count).loss
                loss.backward()
            total += loss.item()
        for name, parameter in model.named_parameters():
            masters[name].grad = parameter.grad
        torch.nn.utils.clip_grad_norm_([masters[name] for name, _ in model.named_parameters()], 1.0)
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(rounding(masters[name].data))
            parameter.grad = None
        losses.append(total)
    return losses, model.state_dict()


def streamed_run(model, folder: Path, steps: int, **settings: Any) -> list[float]:
    with Trainer(
        model,
        folder / f"store{steps}",
        optimizer=SETTINGS,
        dtype="bfloat16",
        delayed_share=0.5,
        chunk_elements=8192,
        snake=False,
        **settings,
    ) as trainer:
        losses = [trainer.step(batch).loss for batch in batches()[:steps]]
        trainer.save_pretrained(folder / f"after{steps}")
    return losses


@pytest.fixture(scope="module")
def streamed(tmp_path_factory) -> tuple[Path, list[float], dict]:
    """Losses and weights of a run that began from the saved bfloat16 model in ``after0``."""
    folder = tmp_path_factory.mktemp("bf16")
    streamed_run(small_config("llama"), folder, 0)
    losses = streamed_run(folder / "after0", folder, STEPS)
    after = AutoModelForCausalLM.from_pretrained(folder / f"after{STEPS}", dtype=torch.bfloat16)
    return folder / "after0", losses, after.state_dict()


def test_the_loss_curve_is_within_bfloat16_noise_of_a_plain_loop(streamed):
    before, ours, _ = streamed
    plain, _ = plain_losses(before, torch.bfloat16, lambda master: master.bfloat16())
    exact, _ = plain_losses(before, torch.float32, lambda master: master)
    assert plain[-1] < plain[0] - 1  # it learnt something
    distance = lambda a, b: sum(abs(x - y) for x, y in zip(a, b, strict=True)) / len(a)  # noqa: E731
    noise = distance(plain, exact)
    assert distance(ours, plain) <= noise
    assert abs(sum(ours[-10:]) - sum(plain[-10:])) / 10 <= 2 * noise


def test_with_the_same_rounding_a_plain_loop_gives_the_same_bits(streamed):
    before, ours, ours_after = streamed
    plain, after = plain_losses(before, torch.bfloat16, half_up)
    assert ours == pytest.approx(plain, abs=1e-6)
    assert [key for key in after if not torch.equal(after[key], ours_after[key])] == []


def test_whole_masters_learn_the_same_bits_and_move_two_bytes_more_each_way(streamed, tmp_path):
    before, _, _ = streamed
    batch, losses, moved = batches()[:4], {}, {}
    for split in (True, False):
        folder = tmp_path / str(split)
        losses[split] = streamed_run(before, folder, 2, split_master=split)
        with Trainer.resume(folder / "store2") as trainer:
            results = [trainer.step(part) for part in batch[2:]]
            losses[split] += [result.loss for result in results]
            moved[split] = (results[-1].ssd_read_bytes, results[-1].ssd_write_bytes)
            trainer.save_pretrained(folder / "masters", dtype="float32")
            parameters = sum(slot.elements for layout in trainer.skeleton.layouts for slot in layout.parameters)
            assert trainer.settings.split_master == split
    assert losses[True] == losses[False]
    masters = {split: load_file(tmp_path / str(split) / "masters" / "model.safetensors") for split in (True, False)}
    assert [name for name in masters[True] if not torch.equal(masters[True][name], masters[False][name])] == []
    for split, whole in zip(moved[True], moved[False], strict=True):
        assert whole - split >= 2 * parameters
    with pytest.raises(ConfigError, match="split_master was False when the run began"):
        Trainer.resume(tmp_path / "False" / "store2", split_master=True)
