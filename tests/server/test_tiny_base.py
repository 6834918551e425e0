"""The tiny base: the same bytes from the same seed, and a checkpoint that loads and speaks."""

import hashlib
import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from lanewise.kernels.base import load_base
from lanewise.server.tiny_base import Architecture, write_tiny_base

ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return request.param


@pytest.fixture(scope="module")
def folder(architecture: Architecture, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_base(tmp_path_factory.mktemp("base"), architecture, seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


def test_the_same_seed_gives_the_same_bytes(folder: Path, architecture: Architecture, tmp_path: Path) -> None:
    expected = digests(folder)
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= expected.keys()
    assert digests(write_tiny_base(tmp_path / "again", architecture)) == expected
    other = digests(write_tiny_base(tmp_path / "other", architecture, seed=1))
    assert {name for name in expected if other[name] != expected[name]} == {"model.safetensors"}


def test_it_is_small_and_block_fp8_where_real_ones_are(folder: Path, architecture: Architecture) -> None:
    assert sum(file.stat().st_size for file in folder.iterdir()) < 6e6
    tensors = load_file(folder / "model.safetensors")
    fp8 = {name for name, tensor in tensors.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {f"{name}_scale_inv" for name in fp8} == {n for n in tensors if n.endswith("_scale_inv")}
    assert all(tensors[f"{name}_scale_inv"].dtype == torch.float32 for name in fp8)
    config = json.loads((folder / "config.json").read_text())
    if architecture in ("llama", "qwen2", "mixtral", "glm4_moe"):
        assert not fp8
        assert "quantization_config" not in config
        return
    linears = {n for n in tensors if n.endswith(("_proj.weight", "_with_mqa.weight", "in_proj_qkv.weight"))}
    assert fp8 >= linears - {n for n in linears if n.endswith("indexer.weights_proj.weight")}
    plain = {name for name in tensors if name.endswith(".weight")} - fp8
    kept = config["quantization_config"]["modules_to_not_convert"]
    assert {f"{name}.weight" for name in kept} == plain


def test_every_text_is_its_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "Kx7#mP2$ naïve 字 🙂\n\t <|im_end|>"
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode()) - len("<|im_end|>") + 1
    assert tokens[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(tokens) == text


def test_the_chat_template_is_chatml(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_it_speaks_varied_noise(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    config = json.loads((folder / "config.json").read_text())
    model = load_base(config, load_file(folder / "model.safetensors").items())
    tokens = torch.tensor([tokenizer.encode(f"Question {i}") for i in range(8)])
    start = tokens.shape[1]
    for _ in range(16):
        logits = model(tokens, use_cache=False).logits[:, -1]
        assert logits.softmax(-1).amax(-1).mean() > 0.3  # decisive
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)
    answers = tokens[:, start:]
    assert len({tuple(answer.tolist()) for answer in answers}) == 8
    assert len(answers.unique()) > 12
