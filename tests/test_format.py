"""The EXL3 format: rates, markers, sizes, names, and every rule's refusal."""

from __future__ import annotations

import pytest
import torch

from exl3_triton import reference
from exl3_triton.format import (
    Codebook,
    ExpertProjection,
    ExpertWeights,
    FormatError,
    TrellisWeight,
    canonical_name,
    expand_signs,
    padded_size,
)

MCG, MUL1 = Codebook.MCG.marker, Codebook.MUL1.marker


def matrix(rows=128, columns=256, bits=3.0, marker="mcg", prefix="w.") -> dict[str, torch.Tensor]:
    """The tensors of a random quantized matrix."""
    tensors = {
        "trellis": torch.randint(-(1 << 15), 1 << 15, (rows // 16, columns // 16, int(16 * bits)), dtype=torch.int16),
        "suh": torch.randn(rows).half(),
        "svh": torch.randn(columns).half(),
    }
    if marker:
        value = {"mcg": MCG, "mul1": MUL1}[marker]
        tensors[marker] = torch.tensor(value - (1 << 32), dtype=torch.int32)
    return {prefix + name: tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("bits", "marker"), [*((k, "mcg") for k in range(1, 9)), *((k, "mul1") for k in (1.5, 2.5, 3.5)), (4, None)]
)
def test_from_tensors_takes_every_rate_from_the_tensor(bits, marker):
    weight = TrellisWeight.from_tensors(matrix(bits=bits, marker=marker), "w")
    assert weight.bits == bits
    assert weight.codebook.label == (marker or "3inst")
    assert (weight.in_features, weight.out_features) == (128, 256)


@pytest.mark.parametrize(
    "spelling",
    [
        torch.tensor(MCG - (1 << 32), dtype=torch.int32),
        torch.tensor([MCG - (1 << 32)], dtype=torch.int32),
        torch.tensor(MCG, dtype=torch.uint32),
        torch.tensor(MCG, dtype=torch.int64),
        torch.tensor([MCG - (1 << 32)], dtype=torch.int64),
        torch.tensor(MCG - (1 << 32), dtype=torch.int32).view(torch.float32),
    ],
    ids=["int32", "one element", "uint32", "int64", "negative int64", "float32 bits"],
)
def test_from_tensors_accepts_any_spelling_of_the_marker(spelling):
    assert TrellisWeight.from_tensors(matrix() | {"w.mcg": spelling}, "w").codebook is Codebook.MCG


def test_from_tensors_keeps_logical_sizes_and_bias():
    tensors = matrix(rows=384, columns=640) | {"w.bias": torch.randn(640)}
    weight = TrellisWeight.from_tensors(tensors, "w", in_features=300, out_features=576)
    assert (weight.in_features, weight.out_features, weight.padded_in, weight.padded_out) == (300, 576, 384, 640)
    assert weight.bias is not None
    assert weight.bias.dtype == torch.float16


def test_from_tensors_expands_legacy_signs():
    signs = torch.randint(0, 2, (128,)) * 2 - 1
    packed = sum(((signs.view(8, 16)[:, bit] < 0).int() << bit) for bit in range(16)).to(torch.int16)
    assert torch.equal(expand_signs(packed), signs.half())
    tensors = matrix()
    del tensors["w.suh"]
    assert torch.equal(TrellisWeight.from_tensors(tensors | {"w.su": packed}, "w").suh, signs.half())


def test_from_tensors_checks_headers_on_meta():
    meta = {name: tensor.to("meta") for name, tensor in matrix().items()}
    assert TrellisWeight.from_tensors(meta, "w").device.type == "meta"
    meta["w.trellis"] = meta["w.trellis"].to(torch.int32)
    with pytest.raises(FormatError, match=r"w\.trellis"):
        TrellisWeight.from_tensors(meta, "w")


def damage(**changes):
    return {f"w.{name}": value for name, value in changes.items()}


BAD = {
    "trellis of another dtype": (damage(trellis=torch.zeros(8, 16, 48, dtype=torch.int32)), r"w\.trellis.*int32.*int16"),
    "trellis of another rank": (damage(trellis=torch.zeros(8, 768, dtype=torch.int16)), r"w\.trellis.*rank 3"),
    "last dimension no rate": (damage(trellis=torch.zeros(8, 16, 50, dtype=torch.int16)), r"w\.trellis.*50.*rate"),
    "half rate without MUL1": (damage(trellis=torch.zeros(8, 16, 40, dtype=torch.int16)), r"w\.trellis.*2\.5.*mul1"),
    "K = 0": (damage(trellis=torch.zeros(8, 16, 0, dtype=torch.int16)), r"w\.trellis.*K = 0"),
    "K = 9": (damage(trellis=torch.zeros(8, 16, 144, dtype=torch.int16)), r"w\.trellis.*K = 9"),
    "both markers": (damage(mul1=torch.tensor(MUL1 - (1 << 32), dtype=torch.int32)), r"w\.mcg.*both"),
    "wrong marker value": (damage(mcg=torch.tensor(7, dtype=torch.int32)), r"w\.mcg.*0x7.*0xcbac1fed"),
    "the other marker's value": (damage(mcg=torch.tensor(MUL1 - (1 << 32), dtype=torch.int32)), r"w\.mcg.*0x83dcd12d"),
    "marker with two elements": (damage(mcg=torch.zeros(2, dtype=torch.int32)), r"w\.mcg.*scalar"),
    "marker of 16 bits": (damage(mcg=torch.tensor(7, dtype=torch.int16)), r"w\.mcg.*int16"),
    "suh of another length": (damage(suh=torch.ones(256).half()), r"w\.suh.*\[256\].*\[128\]"),
    "suh of another dtype": (damage(suh=torch.ones(128)), r"w\.suh.*float32.*float16"),
    "svh of another length": (damage(svh=torch.ones(128).half()), r"w\.svh.*\[128\].*\[256\]"),
    "svh of another dtype": (damage(svh=torch.ones(256).bfloat16()), r"w\.svh.*bfloat16.*float16"),
    "NaN in suh": (damage(suh=torch.full((128,), float("nan")).half()), r"w\.suh.*NaN"),
    "infinity in svh": (damage(svh=torch.full((256,), float("inf")).half()), r"w\.svh.*infinity"),
    "in no multiple of 128": (damage(trellis=torch.zeros(9, 16, 48, dtype=torch.int16)), r"w\.trellis.*in = 144.*128"),
    "out no multiple of 128": (damage(trellis=torch.zeros(8, 15, 48, dtype=torch.int16)), r"w\.trellis.*out = 240.*128"),
    "no rows": (damage(trellis=torch.zeros(0, 16, 48, dtype=torch.int16)), r"w\.trellis.*in = 0"),
    "suh and su": (damage(su=torch.zeros(8, dtype=torch.int16)), r"w\.suh.*both"),
    "bias of another length": (damage(bias=torch.zeros(255)), r"w\.bias.*255"),
}


@pytest.mark.parametrize("case", BAD, ids=BAD.keys())
def test_from_tensors_refuses(case):
    changes, message = BAD[case]
    with pytest.raises(FormatError, match=message):
        TrellisWeight.from_tensors(matrix() | changes, "w")


@pytest.mark.parametrize("name", ["trellis", "suh", "svh"])
def test_from_tensors_names_the_missing_tensor(name):
    tensors = matrix()
    del tensors[f"w.{name}"]
    with pytest.raises(FormatError, match=rf"w\.{name}: missing"):
        TrellisWeight.from_tensors(tensors, "w")


@pytest.mark.parametrize(
    ("axis", "size"), [("in_features", 129), ("in_features", 0), ("out_features", 128), ("out_features", 257)]
)
def test_from_tensors_refuses_logical_sizes_that_the_padding_rule_excludes(axis, size):
    with pytest.raises(FormatError, match="padded to 128"):
        TrellisWeight.from_tensors(matrix(), "w", **{axis: size})


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.3.mlp.gate.weight", "layers.3.mlp.gate.weight"),
        ("model.language_model.layers.0.x", "layers.0.x"),
        ("language_model.model.embed_tokens.weight", "embed_tokens.weight"),
        ("language_model.lm_head.trellis", "lm_head.trellis"),
        ("model.model.norm.weight", "norm.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_canonical_name(stored, canonical):
    assert canonical_name(stored) == canonical


def expert_tensors(rates=((3, "mcg"),) * 4, hidden=256, intermediate=128):
    tensors = {}
    for e, (bits, marker) in enumerate(rates):
        for name, rows, columns in (
            ("gate", hidden, intermediate),
            ("up", hidden, intermediate),
            ("down", intermediate, hidden),
        ):
            tensors |= matrix(rows, columns, bits, marker, prefix=f"experts.{e}.{name}_proj.")
    return tensors


def test_expert_weights_mix_rates_and_codebooks():
    rates = ((2, "mcg"), (3, "mul1"), (4, None), (2.5, "mul1"))
    tensors = expert_tensors(rates)
    weights = ExpertWeights.from_tensors(tensors, "experts", num_experts=4)
    for e, (bits, marker) in enumerate(rates):
        for name, projection in zip(("gate", "up", "down"), weights.projections):
            expert = projection.expert(e)
            assert (expert.bits, expert.codebook.label) == (bits, marker or "3inst")
            assert torch.equal(expert.trellis, tensors[f"experts.{e}.{name}_proj.trellis"])
            assert torch.equal(expert.suh, tensors[f"experts.{e}.{name}_proj.suh"])
    assert len(weights.gate.formats) == 4
    assert weights.gate.table.tolist() == [list(entry) for entry in weights.gate.layout]


def test_expert_weights_alias_a_slab_without_copies():
    slab = torch.randint(-(1 << 15), 1 << 15, (4, 16, 8, 48), dtype=torch.int16)
    tensors = expert_tensors()
    for e in range(4):
        tensors[f"experts.{e}.gate_proj.trellis"] = slab[e]
    weights = ExpertWeights.from_tensors(tensors, "experts", num_experts=4)
    assert weights.gate.words.data_ptr() == slab.data_ptr()
    assert torch.equal(weights.gate.expert(2).trellis, slab[2])


def test_expert_projection_allocate_is_filled_in_place():
    projection = ExpertProjection.allocate([(6, 1), (8, 2)], 256, 128, device="cpu")
    sources = [TrellisWeight.from_tensors(matrix(256, 128, bits, marker), "w") for bits, marker in ((3, "mcg"), (4, "mul1"))]
    for e, source in enumerate(sources):
        for name in ("trellis", "suh", "svh"):
            getattr(projection.expert(e), name).copy_(getattr(source, name))
    for e, source in enumerate(sources):
        expert = projection.expert(e)
        assert torch.equal(
            reference.decode(expert.trellis, expert.codebook), reference.decode(source.trellis, source.codebook)
        )


def test_expert_weights_name_the_missing_expert():
    tensors = expert_tensors()
    del tensors["experts.2.up_proj.trellis"]
    with pytest.raises(FormatError, match=r"experts\.2\.up_proj\.trellis: missing"):
        ExpertWeights.from_tensors(tensors, "experts", num_experts=4)


def test_expert_weights_refuse_unequal_sizes_and_bias():
    tensors = expert_tensors() | matrix(256, 256, prefix="experts.1.gate_proj.")
    with pytest.raises(FormatError, match="expert 1.*256 x 256.*256 x 128"):
        ExpertWeights.from_tensors(tensors, "experts", num_experts=4)
    tensors = expert_tensors() | {"experts.3.down_proj.bias": torch.zeros(256)}
    with pytest.raises(FormatError, match="bias"):
        ExpertWeights.from_tensors(tensors, "experts", num_experts=4)


def test_padded_size():
    assert [padded_size(n) for n in (1, 128, 129, 576, 2880)] == [128, 128, 256, 640, 2944]
