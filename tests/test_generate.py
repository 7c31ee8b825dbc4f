"""Generated text is what transformers generates with the same weights, in memory or streamed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from architectures import random_batches, small_config
from small_run import run_well, write_config
from test_cli import command  # noqa: F401
from torch import Tensor
from transformers import AutoModelForCausalLM, Cache, PreTrainedModel

from greedysnake import AdamW, Trainer
from greedysnake.cli.generating import GenerationRequest, generate_text
from greedysnake.cli.prompts import encode_prompts, read_prompts
from greedysnake.data import load_tokenizer
from greedysnake.engine.devices import make_device
from greedysnake.engine.inference import GenerationSize, Generator, loading_bytes_of, place_weights
from greedysnake.engine.products import computing_products
from greedysnake.errors import ConfigError, DataError, MemoryBudgetError, ModelError, StorageInUseError
from greedysnake.models.skeleton import build_skeleton
from greedysnake.storage import Store

NEW = 12
SIZE = GenerationSize(rows=3, prompt_tokens=7, new_tokens=NEW)


def prompts() -> tuple[Tensor, Tensor]:
    """Three prompts of 7, 4 and 6 tokens, padded on the left."""
    ids = torch.randint(3, 128, (3, 7), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :1] = 0
    return torch.where(mask.bool(), ids, 0), mask


def expected(model: PreTrainedModel, seed: int | None = None, **options) -> Tensor:
    """What transformers gives, with the same products of matrices."""
    ids, mask = prompts()
    if seed is not None:
        torch.manual_seed(seed)
    with computing_products("auto"):
        return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **options)


def trained(name: str, folder: Path, dtype: str = "float32") -> Trainer:
    """A model that has made a step, so that it is not what it was made as; its delayed updates wait."""
    trainer = Trainer(small_config(name), folder, optimizer=AdamW(lr=2e-2), dtype=dtype)
    trainer.step(random_batches(1)[0])
    return trainer


@pytest.mark.parametrize("name", ["llama", "llama_tied", "qwen3", "gemma2", "gemma3_text", "mixtral", "ernie4_5_moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_are_those_of_transformers(name, dtype, tmp_path):
    ids, mask = prompts()
    state = torch.get_rng_state()
    with trained(name, tmp_path / "store", dtype) as trainer:
        greedy = trainer.generate(ids, mask, max_new_tokens=NEW, do_sample=False)
        drawn = trainer.generate(ids, mask, max_new_tokens=NEW, do_sample=True, temperature=2.0, seed=3)
        trainer.save_pretrained(tmp_path / "model")
    assert torch.equal(torch.get_rng_state(), state)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model.config.output_router_logits = False  # transformers cannot have it with a cache
    assert torch.equal(greedy, expected(model, do_sample=False))
    assert torch.equal(drawn, expected(model, seed=3, do_sample=True, temperature=2.0))
    with Generator.of_run([tmp_path / "store"], SIZE) as generator:
        assert torch.equal(generator.generate(ids, mask, max_new_tokens=NEW, do_sample=False), greedy)
    with Generator.of_folder(tmp_path / "model", SIZE) as generator:
        assert torch.equal(generator.generate(ids, mask, max_new_tokens=NEW, do_sample=False), greedy)


def test_a_row_ends_at_its_own_stop_token(tmp_path):
    with trained("llama", tmp_path / "store") as trainer:
        plain = trainer.generate(*prompts(), max_new_tokens=NEW, do_sample=False)
        stop = int(plain[0, 7 + 3])  # some row meets it, not necessarily every one
        stopped = trainer.generate(*prompts(), max_new_tokens=NEW, do_sample=False, eos_token_id=stop, pad_token_id=0)
        trainer.save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(stopped, expected(model, do_sample=False, eos_token_id=stop, pad_token_id=0))
    first = stopped[0, 7:].tolist()
    assert not any(first[first.index(stop) + 1 :])


@pytest.mark.parametrize(
    ("name", "device", "tied", "sizes"),
    [
        ("llama", "cpu", False, {}),
        ("llama", "emulated", True, {}),
        ("ernie4_5_moe", "cpu", False, {"moe_intermediate_size": 1024}),
    ],
)
def test_weights_that_do_not_fit_are_read_for_every_token(name, device, tied, sizes, tmp_path):
    config = small_config(
        name, hidden_size=512, intermediate_size=4096, num_hidden_layers=6, tie_word_embeddings=tied, **sizes
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        if not parameter.requires_grad:  # what is not trained counts too
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "model")
    skeleton = build_skeleton(config, dtype=torch.float32)
    weights = sum(layout.weight_bytes for layout in skeleton.layouts)
    made, scratch = make_device(device, None), tmp_path / "scratch"
    scratch.mkdir()
    ids, mask = prompts()
    with Generator.of_folder(tmp_path / "model", SIZE, scratch=scratch, device=device) as generator:
        whole = generator.generate(ids, mask, max_new_tokens=5, do_sample=False)
        assert generator.read_bytes == 0
    loading = loading_bytes_of(skeleton)
    memory = place_weights(skeleton, SIZE, made, None, loading_bytes=loading).expected_bytes - weights // 4
    with Generator.of_folder(tmp_path / "model", SIZE, scratch=scratch, device=device, host_memory=memory) as generator:
        resident = [generator.placement.resident(unit) for unit in range(len(skeleton.layouts))]
        assert set(resident) == {True, False}
        units = [layout.weight_bytes for layout in skeleton.layouts]
        streamed = sum(size for size, stays in zip(units, resident, strict=True) if not stays)
        got = generator.generate(ids, mask, max_new_tokens=5, do_sample=False)
        assert generator.read_bytes >= 5 * streamed
    assert torch.equal(got, whole)
    assert torch.equal(got, model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False))
    assert not list(scratch.iterdir())
    with pytest.raises(MemoryBudgetError, match="--host-memory"):
        Generator.of_folder(tmp_path / "model", SIZE, host_memory=2**20)


def test_a_model_that_takes_no_cache_goes_without_one(tmp_path, caplog):
    def refuse_cache(module, args, kwargs) -> None:
        if any(isinstance(value, Cache) for value in kwargs.values()):
            raise RuntimeError("no cache here")

    with trained("llama", tmp_path / "store") as trainer:
        cached = trainer.generate(*prompts(), max_new_tokens=NEW, do_sample=False)
        trainer.skeleton.structure.layers[0].register_forward_pre_hook(refuse_cache, with_kwargs=True)
        assert torch.equal(trainer.generate(*prompts(), max_new_tokens=NEW, do_sample=False), cached)
    assert "without a cache: " in caplog.text
    assert "no cache here" in caplog.text


def test_generating_changes_nothing_of_the_training(tmp_path):
    def weights(folder: Path, between: Callable[[Trainer], object]) -> dict[str, Tensor]:
        with Trainer(small_config("gpt2_dropout"), folder, optimizer=AdamW(lr=2e-3), dtype="float32") as trainer:
            for batch in random_batches(3):
                trainer.step(batch)
                between(trainer)
            trainer.save_pretrained(folder.with_suffix(".out"))
        return AutoModelForCausalLM.from_pretrained(folder.with_suffix(".out")).state_dict()

    plain = weights(tmp_path / "plain", lambda trainer: None)
    sampled = weights(tmp_path / "sampled", lambda t: t.generate(*prompts(), max_new_tokens=4, do_sample=True, seed=1))
    assert all(torch.equal(plain[key], sampled[key]) for key in plain)


def test_wrong_prompts_and_options_get_one_message(tmp_path):
    ids, mask = prompts()
    with trained("llama", tmp_path / "store") as trainer:
        with pytest.raises(DataError, match="vocabulary has 128"):
            trainer.generate(ids + 100, mask)
        with pytest.raises(DataError, match="on the left"):
            trainer.generate(ids, mask.flip(1))
        with pytest.raises(DataError, match="int64"):
            trainer.generate(ids[0])
        with pytest.raises(DataError, match="no options temprature"):
            trainer.generate(ids, mask, temprature=2.0)
        with pytest.raises(DataError, match="cannot be done like this"):
            trainer.generate(ids, mask, do_sample=True, temperature=-1.0)


# The command line


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A finished run with samples, and the same run without beside it."""
    folder = tmp_path_factory.mktemp("run")
    samples = {"sample_every": 3, "sample_prompts": ["the quick", "a"], "sample_tokens": 5}
    run_well("train", write_config(folder, training=samples))
    other = tmp_path_factory.mktemp("plain")
    run_well("train", write_config(other))
    run_well("export", folder / "run", folder / "model")
    run_well("export", other / "run", folder / "plain")
    return folder / "run"


def test_a_run_with_samples_is_bitwise_one_without(run):
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 3, 4, 4]
    assert {line["prompt"] for line in lines} == {"the quick", "a"}
    assert all(1 <= len(line["token_ids"]) <= 5 for line in lines)
    with_samples = AutoModelForCausalLM.from_pretrained(run.parent / "model").state_dict()
    without = AutoModelForCausalLM.from_pretrained(run.parent / "plain").state_dict()
    assert all(torch.equal(with_samples[key], without[key]) for key in without)


def test_samples_that_cannot_be_are_told_before_the_first_step(tmp_path, command):  # noqa: F811
    path = write_config(tmp_path)
    settings = yaml.safe_load(path.read_text())
    settings["model"]["config"]["max_position_embeddings"] = 10**7
    settings["training"] |= {"sample_every": 1, "sample_prompts": ["the quick", "a"], "sample_tokens": 2, "steps": 1}
    path.write_text(yaml.safe_dump(settings))
    many = ["training.sample_tokens=9000000", "engine.host_memory=3GiB"]
    status, _, errors = command("train", path, *many)
    assert status == 1
    assert "training.sample_tokens: 9,000,000 new tokens for 2 prompts of up to 9 tokens need" in errors
    assert "Lower training.sample_tokens" in errors
    assert not (tmp_path / "run").exists()
    assert command("train", path)[0] == 0
    status, _, errors = command("resume", tmp_path / "run", "training.steps=2", *many)
    assert status == 1
    assert "training.sample_tokens: 9,000,000" in errors
    status, _, errors = command("resume", tmp_path / "run", "training.steps=2")
    assert status == 0, errors
    path = write_config(tmp_path, run=str(tmp_path / "other"))
    long = f"training.sample_prompts=[{'a' * 64}]"
    status, _, errors = command("train", path, "training.sample_every=1", long)
    assert status == 1
    assert "a prompt has 64 tokens, and the model has 64 positions" in errors


@pytest.mark.parametrize("source", ["run", "model"])
def test_the_command_gives_what_transformers_gives(source, run, capsys):
    run_well(
        "generate",
        run.parent / source,
        "--prompt",
        "the quick",
        "--prompt",
        "fox",
        "--max-new-tokens",
        9,
        "--greedy",
        "--json",
    )
    report = json.loads(capsys.readouterr().out)
    model = AutoModelForCausalLM.from_pretrained(run.parent / "model")
    tokenizer = load_tokenizer(run.parent / "model")
    for completion in report["completions"]:
        ids = torch.tensor([tokenizer(completion["prompt"])["input_ids"]])
        new = model.generate(ids, max_new_tokens=9, do_sample=False, eos_token_id=tokenizer.eos_token_id)[
            0, ids.shape[1] :
        ]
        assert completion["token_ids"] == new.tolist()
        assert completion["text"] == tokenizer.decode(new, skip_special_tokens=True)
    assert report["new_tokens"] == sum(len(c["token_ids"]) for c in report["completions"])


def test_one_prompt_is_printed_while_its_text_comes(run, capsys):
    run_well("generate", run, "--prompt", "the quick", "--max-new-tokens", 9, "--greedy", "--json")
    text = json.loads(capsys.readouterr().out)["completions"][0]["text"]
    run_well("generate", run, "--prompt", "the quick", "--max-new-tokens", 9, "--greedy")
    assert capsys.readouterr().out == f"{text}\n"


def test_mistakes_are_told_in_one_message(run, tmp_path):
    from rich.console import Console

    def refusal(kind: type[Exception], source: Path, prompts: list[str], **request) -> str:
        with pytest.raises(kind) as error:
            generate_text(source, prompts, GenerationRequest(**request), Console(stderr=True), live=False)
        return str(error.value)

    assert "no prompt" in refusal(ConfigError, run, [])
    assert "temperature" in refusal(ConfigError, run, ["a"], greedy=True, temperature=1.0)
    assert "does not exist" in refusal(ConfigError, tmp_path / "nothing", ["a"])
    assert "neither a run folder" in refusal(ConfigError, tmp_path, ["a"])
    assert "chat template" in refusal(DataError, run, ["a"], chat=True)
    assert "64 positions" in refusal(DataError, run, ["a" * 64])
    assert "--host-memory" in refusal(ConfigError, run, ["a"], host_memory="lots")
    assert "tokenizer" in refusal(ModelError, run, ["a"], tokenizer=str(tmp_path))
    store, _ = Store.open([run / "store"])
    try:
        assert "sample_every" in refusal(StorageInUseError, run, ["a"])
    finally:
        store.close()


def test_prompts_from_files_and_chats(tmp_path):
    (tmp_path / "lines.txt").write_text("one\n\ntwo words\n")
    (tmp_path / "lines.jsonl").write_text('"one\\nline"\n{"prompt": "two"}\n')
    (tmp_path / "wrong.jsonl").write_text('"one"\n\n{"text": "two"}\n')
    assert read_prompts(tmp_path / "lines.txt") == ["one", "two words"]
    assert read_prompts(tmp_path / "lines.jsonl") == ["one\nline", "two"]
    with pytest.raises(ConfigError, match=r"wrong\.jsonl, line 3 is neither a string"):
        read_prompts(tmp_path / "wrong.jsonl")
    (tmp_path / "separators.jsonl").write_text('"one\u2028two\x85three"\r\n', newline="")
    assert read_prompts(tmp_path / "separators.jsonl") == ["one\u2028two\x85three"]
    (tmp_path / "binary.txt").write_bytes(b"ab\xff\x00")
    with pytest.raises(ConfigError, match=r"binary\.txt cannot be read: it is not text in UTF-8 \(byte 2\)"):
        read_prompts(tmp_path / "binary.txt")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")
    tokenizer = load_tokenizer("bytes")
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    assert bytes(encode_prompts(tokenizer, ["hi"], chat=True)[0]) == b"<user>hi<assistant>"
    assert encode_prompts(tokenizer, [""], chat=False) == [[tokenizer.eos_token_id]]
    tokenizer.chat_template = "{{ raise_exception('begin with the system') }}"
    with pytest.raises(DataError, match=r"does not take the prompt 'hi'.*begin with the system"):
        encode_prompts(tokenizer, ["hi"], chat=True)


def test_samples_that_a_kill_cut_short_are_written_after_a_resume(tmp_path):
    samples = {"sample_every": 2, "sample_prompts": ["the quick", "a"], "sample_tokens": 5}
    run_well("train", write_config(tmp_path, training=samples))
    path = tmp_path / "run" / "samples.jsonl"
    whole = path.read_text()
    assert [json.loads(line)["step"] for line in whole.splitlines()] == [2, 2, 4, 4]
    (tmp_path / "run" / "summary.json").unlink()  # as if it had been killed after its last snapshot
    path.write_text("".join(whole.splitlines(keepends=True)[:3]))
    run_well("resume", tmp_path / "run")
    assert path.read_text() == whole
    run_well("resume", tmp_path / "run", "training.steps=5")
    lines = path.read_text().splitlines(keepends=True)
    assert "".join(lines[:4]) == whole
    assert [json.loads(line)["step"] for line in lines[4:]] == [5, 5]
