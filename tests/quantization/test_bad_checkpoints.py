"""What is wrong with a quantized checkpoint is said at once: the tensor, what was expected, what is there."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_paged import AutoPagedModelForCausalLM, CheckpointError, NotSupportedError, PagedConfig
from tests.quantization import packers
from tests.quantization.test_formats import CASES, CT, PROMPT, gptq_config, relative_error, scheme

DOWN = "model.layers.1.mlp.down_proj"


@pytest.fixture
def folder(tmp_path) -> Path:
    packers.write_checkpoint(tmp_path, gptq_config(4, 32), packers.gptq(4, 32))
    return tmp_path


def load(folder: Path):
    return AutoPagedModelForCausalLM.from_pretrained(folder, paged_config=PagedConfig(num_blocks=32))


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Writes the tensors of `DOWN` anew, or leaves them out."""
    file = folder / "model.safetensors"
    held = load_file(file)
    for name, tensor in tensors.items():
        held.pop(f"{DOWN}.{name}")
        if tensor is not None:
            held[f"{DOWN}.{name}"] = tensor
    save_file(held, file, {"format": "pt"})


def change_config(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(fields)
    (folder / "config.json").write_text(json.dumps(config))


def refused(folder: Path, *words: str, error: type[Exception] = CheckpointError) -> None:
    with pytest.raises(error) as raised:
        load(folder)
    for word in words:
        assert word in str(raised.value)


def test_missing_tensor(folder):
    change(folder, scales=None)
    refused(folder, f"{DOWN}.scales", "qweight")


def test_wrong_shape(folder):
    change(folder, qweight=torch.zeros(5, 64, dtype=torch.int32))
    refused(folder, f"{DOWN}.qweight", "[5, 64]", "[12, 64]")


def test_wrong_dtype(folder):
    change(folder, scales=torch.zeros(3, 64, dtype=torch.int32))
    refused(folder, f"{DOWN}.scales", "torch.int32", "torch.float16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scale_that_is_no_number(folder, value):
    scales = torch.full((3, 64), 0.01, dtype=torch.float16)
    scales[1, 7] = value
    change(folder, scales=scales)
    refused(folder, f"{DOWN}.scales", "NaN")


@pytest.mark.parametrize("group", [-1, 3])
def test_group_index_that_points_nowhere(folder, group):
    index = torch.arange(96, dtype=torch.int32) // 32
    index[50] = group
    change(folder, g_idx=index)
    refused(folder, f"{DOWN}.g_idx", str(group))


@pytest.mark.parametrize("fields", [{"bits": 8}, {"group_size": 16}, {"group_size": -1}])
def test_configuration_that_contradicts_the_tensors(folder, fields):
    change_config(folder, **fields)
    refused(folder, "q_proj.", "config.json")


@pytest.mark.parametrize("bits", [5, 16, "4", True])
def test_number_of_bits_that_is_not_built_names_those_that_are(folder, bits):
    change_config(folder, bits=bits)
    refused(folder, "bits", "[2, 3, 4, 8]", error=NotSupportedError)


@pytest.mark.parametrize("size", [0, -2, "32", None, 1.5])
def test_group_size_that_is_no_number(folder, size):
    change_config(folder, group_size=size)
    refused(folder, "group_size")


def test_truncated_file(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    refused(folder, "model.safetensors", "truncated")


def test_checkpoint_without_packed_tensors(folder):
    packers.write_checkpoint(folder, gptq_config(4, 32), lambda name: None)
    refused(folder, "no packed tensor")


def test_unknown_method_lists_the_known_ones(folder):
    change_config(folder, quant_method="abc")
    refused(folder, "'abc'", "gptq", "awq", "compressed-tensors", "bitsandbytes", error=NotSupportedError)


def test_unknown_combination_of_compressed_tensors(tmp_path):
    packers.write_checkpoint(tmp_path, scheme("int-quantized", num_bits=3, strategy="channel"), packers.int8())
    refused(tmp_path, "group_0", "3 bits", "pack-quantized", error=NotSupportedError)


def test_awq_of_another_layout(tmp_path):
    packers.write_checkpoint(
        tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, packers.awq(32)
    )
    refused(tmp_path, "version", "gemv", "gemm", error=NotSupportedError)


def test_pickled_weights_are_refused_unless_asked_for(folder):
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(OSError, match="use_safetensors=False"):
        load(folder)
    model = AutoPagedModelForCausalLM.from_pretrained(
        folder, paged_config=PagedConfig(num_blocks=32), use_safetensors=False
    )
    assert model.generate(PROMPT, max_new_tokens=4).shape == (1, 12)


class NotATensor:
    """What a pickle file of weights must not hold."""


@pytest.mark.parametrize("damage", ["truncated", "empty", "junk", "flipped", "object"])
def test_damaged_pickles(folder, damage):
    file = folder / "model.safetensors"
    weights = load_file(file)
    file.unlink()
    pickled = folder / "pytorch_model.bin"
    torch.save({**weights, "more": NotATensor()} if damage == "object" else weights, pickled)
    held = pickled.read_bytes()
    if damage != "object":
        pickled.write_bytes(
            {
                "truncated": held[: len(held) // 2],
                "empty": b"",
                "junk": b"hello world" * 30,
                "flipped": held[:100] + b"\xff" * 50 + held[150:],
            }[damage]
        )
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin` is truncated or damaged, or holds more than tensors"
    ):
        AutoPagedModelForCausalLM.from_pretrained(folder, use_safetensors=False)


# ---------------------------------------------------------------------- linears that are left dense


def mixed(folder: Path, config: dict, packer, dense: str):
    """A checkpoint of which one linear, by the end of its name, is dense."""
    return packers.write_checkpoint(folder, config, lambda name: None if name.endswith(dense) else packer)


@pytest.mark.parametrize(
    "config, packer",
    [
        ({**CASES["awq"][0], "modules_to_not_convert": ["mlp.down_proj"]}, packers.awq(32)),
        ({**CASES["packed int4"][0], "ignore": ["lm_head", "re:.*down_proj"]}, packers.packed(4, 32)),
        ({**CASES["packed int4"][0], "ignore": ["lm_head", "down_proj.linear"]}, packers.packed(4, 32)),
        ({**CASES["fp8 of fbgemm"][0], "modules_to_not_convert": ["lm_head", "down_proj"]}, CASES["fp8 of fbgemm"][1]),
        (gptq_config(4, 32, dynamic={r"-:.*\.down_proj": {}}), packers.gptq(4, 32)),
        (gptq_config(4, 32), packers.gptq(4, 32)),  # the files say it
    ],
    ids=["awq", "regular expression", "wrapped linear", "fp8", "dynamic", "unsaid"],
)
def test_linear_that_is_left_dense_is_read_as_it_is(config, packer, tmp_path):
    """casper-hansen/AutoAWQ#589, vllm-project/vllm#48508, sgl-project/sglang#24927."""
    dense = mixed(tmp_path, config, packer, "down_proj")
    model = load(tmp_path)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    assert type(model.model.layers[0].mlp.up_proj) is not torch.nn.Linear
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < 1e-5


def test_packed_linear_that_the_configuration_leaves_dense(tmp_path):
    packers.write_checkpoint(tmp_path, {**CASES["awq"][0], "modules_to_not_convert": ["down_proj"]}, packers.awq(32))
    refused(tmp_path, "model.layers.0.mlp.down_proj", "qweight")


def test_linears_of_different_bits(tmp_path):
    config = gptq_config(4, 32, dynamic={r"+:.*\.down_proj": {"bits": 8, "group_size": 16}})
    eight, four = packers.gptq(8, 16), packers.gptq(4, 32)
    dense = packers.write_checkpoint(tmp_path, config, lambda name: eight if name.endswith("down_proj") else four)
    with torch.no_grad():
        assert relative_error(load(tmp_path)(PROMPT).logits, dense(PROMPT).logits) < 1e-5


def test_targets_may_name_a_single_module(tmp_path):
    """vllm-project/vllm#12617: a group of its own for one linear; the others have none."""
    config = scheme("pack-quantized", num_bits=4, strategy="group", group_size=32)
    config["config_groups"]["group_0"]["targets"] = [f"re:{re.escape(DOWN)}$"]
    four = packers.packed(4, 32)
    dense = packers.write_checkpoint(tmp_path, config, lambda name: four if name == DOWN else None)
    model = load(tmp_path)
    assert type(model.model.layers[0].mlp.down_proj) is torch.nn.Linear
    with torch.no_grad():
        assert relative_error(model(PROMPT).logits, dense(PROMPT).logits) < 1e-5


def test_group_without_weights_is_refused(tmp_path):
    packers.write_checkpoint(tmp_path, {**CT, "config_groups": {"group_0": {"targets": ["Linear"]}}}, packers.int8())
    refused(tmp_path, "config_groups.group_0.weights")
