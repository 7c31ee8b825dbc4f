"""A bit that changed on a disk is found by whatever reads a snapshot: also by export and generate."""

import json
from contextlib import closing
from pathlib import Path

import pytest
from small_run import run_well, write_config
from stores import content, read, small_store
from test_bit_flips import flipped
from test_cli import command  # noqa: F401

from greedysnake.errors import StorageError
from greedysnake.storage import BLOCK_BYTES, Store


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """A run in bfloat16 that trains all, and one with adapters over a frozen model, of one step each."""
    folders = {}
    for name, lora in (("whole", None), ("adapters", {"r": 2, "alpha": 4})):
        base = tmp_path_factory.mktemp(name)
        training = {"steps": 1, "micro_batches": 1, "micro_batch_size": 1, "eval_every": None}
        model = {"config": {**json.loads(MODEL), "num_hidden_layers": 1}, "dtype": "bfloat16"}
        config = write_config(base, training=training, model=model, **({} if lora is None else {"lora": lora}))
        run_well("train", config)
        folders[name] = base / "run"
    return folders


MODEL = """{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
            "vocab_size": 258, "max_position_embeddings": 64}"""


def places(run: Path) -> dict[str, tuple[Path, int]]:
    """File and first byte of every chunk."""
    store = run / "store"
    manifest = json.loads((store / "manifest.json").read_text())
    found, start = {}, 0
    for (key, size), slot in zip(manifest["extents"], manifest["slots"], strict=True):
        found[key] = (store / f"slot{slot}.bin", start)
        start += size
    start = 0
    for key, size in manifest["fixed"]:
        found[key] = (store / "fixed.bin", start)
        start += size
    return found


@pytest.mark.parametrize(
    "case",
    [
        ("whole", "unit1.weights0", ("export", "{run}", "{out}")),
        ("whole", "unit1.state0", ("export", "{run}", "{out}", "--dtype", "float32")),
        ("whole", "unit1.weights0", ("generate", "{run}", "--prompt", "a", "--max-new-tokens", "1")),
        ("adapters", "unit1.frozen0", ("export", "{run}", "{out}", "--merge")),
        ("adapters", "unit1.weights0", ("export", "{run}", "{out}")),
        ("adapters", "unit1.frozen0", ("generate", "{run}", "--prompt", "a", "--max-new-tokens", "1")),
    ],
    ids=lambda case: "-".join((*case[:2], case[2][0])),
)
def test_commands_name_what_is_damaged_and_leave_nothing(case, runs, tmp_path, command):  # noqa: F811
    (name, key, arguments), out = case, tmp_path / "out"
    run = runs[name]
    path, at = places(run)[key]
    given = [argument.format(run=run, out=out) for argument in arguments]
    with flipped(path, at + 17, 3):
        status, _, output = command(*given)
    assert status == 1
    assert f"{path}, bytes {at:,} to " in output
    assert f"part of {key}: its checksum is" in output
    assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []
    status, _, output = command(*given)
    assert status == 0, output


def test_a_part_of_a_piece_is_read_whole_to_be_checked(tmp_path):
    """Stripes of two blocks: an extent's pieces are cut by them, and reads begin and end anywhere."""
    blocks = 7
    extents = {"a": BLOCK_BYTES, "b": blocks * BLOCK_BYTES}
    store = small_store(tmp_path, durable=extents, stripe_bytes=2 * BLOCK_BYTES)
    value = content(extents["b"], 3)
    store.write("b", [value]).wait()
    store.commit({})
    store.close()
    parts = [(first, last) for first in range(blocks) for last in range(first + 1, blocks + 1)]

    def read_part(store: Store, first: int, last: int) -> bytes:
        return read(store, "b", (last - first) * BLOCK_BYTES, first * BLOCK_BYTES)

    with closing(Store.open([tmp_path])[0]) as store:
        for first, last in parts:
            assert read_part(store, first, last) == bytes(value[first * BLOCK_BYTES : last * BLOCK_BYTES].numpy())
        damaged = 4
        start = places_in(tmp_path, "b")
        with flipped(tmp_path / "slot1.bin", start + damaged * BLOCK_BYTES, 0):
            (damage,) = store.verify()
            first_byte = damage.offset - start
            piece = range(first_byte // BLOCK_BYTES, (first_byte + damage.length) // BLOCK_BYTES)
            assert damaged in piece
            assert len(piece) == 2
            for first, last in parts:
                if first < piece.stop and last > piece.start:
                    with pytest.raises(StorageError, match="part of b: its checksum is"):
                        read_part(store, first, last)
                else:
                    read_part(store, first, last)


def places_in(folder: Path, key: str) -> int:
    """First byte of an extent in the files of its slots."""
    manifest = json.loads((folder / "manifest.json").read_text())
    start = 0
    for name, size in manifest["extents"]:
        if name == key:
            return start
        start += size
    raise KeyError(key)
