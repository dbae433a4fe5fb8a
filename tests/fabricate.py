"""Small `glm_moe_dsa` checkpoints with random weights, for tests to damage: in memory first, then written as files."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from exl3_triton.format import Codebook, padded_size

CONFIG = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "attention_bias": False,
    "eos_token_id": [0, 3],
    "first_k_dense_replace": 1,
    "head_dim": 999,  # never read for this family
    "hidden_act": "silu",
    "hidden_size": 128,
    "index_head_dim": 32,
    "index_n_heads": 4,
    "index_topk": 8,
    "indexer_types": ["full", "full", "shared"],
    "intermediate_size": 200,
    "kv_lora_rank": 64,
    "max_position_embeddings": 64,
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "moe_intermediate_size": 96,
    "n_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 2,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "v_head_dim": 32,
    "vocab_size": 160,
}
GQA = {
    "model_type": "glm4_moe", "vocab_size": 160, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 200, "moe_intermediate_size": 96, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "routed_scaling_factor": 1.0, "max_position_embeddings": 256, "attention_bias": True, "use_qk_norm": True,
}  # fmt: skip
SCALE_DTYPE = torch.float16


def exl3_matrix(prefix, in_features, out_features, bits=3, codebook=Codebook.MCG):
    """The tensors of one quantized matrix: every random bit pattern is a valid trellis."""
    rows, columns = padded_size(in_features), padded_size(out_features)
    tensors = {
        f"{prefix}.trellis": torch.randint(-(2**15), 2**15, (rows // 16, columns // 16, int(16 * bits)), dtype=torch.int16),
        f"{prefix}.suh": (torch.randn(rows).sign() * (0.02 + 0.01 * torch.rand(rows))).to(SCALE_DTYPE),
        f"{prefix}.svh": (torch.randn(columns).sign() * (0.5 + torch.rand(columns))).to(SCALE_DTYPE),
    }
    if codebook.marker is not None:
        tensors[f"{prefix}.{codebook.label}"] = torch.tensor(codebook.marker, dtype=torch.uint32).view(torch.int32)
    return tensors


class Fabricated:
    """A checkpoint in memory: `config` and `tensors` are free to be changed before `write`."""

    def __init__(self, *, quantized=True, bits=3, codebook=Codebook.MCG, dtype=torch.bfloat16, **config):
        self.config = {**json.loads(json.dumps(CONFIG)), **config}
        self.dtype, self.quantized, self.bits, self.codebook = dtype, quantized, bits, codebook
        self.files: dict[str, dict] = {}  # further JSON files
        self.tensors: dict[str, torch.Tensor] = {}
        c = self.config
        hidden, vocab = c["hidden_size"], c["vocab_size"]
        self.plain("model.embed_tokens.weight", vocab, hidden)
        self.plain("model.norm.weight", hidden)
        self.linear("lm_head", hidden, vocab)
        mtp = c["num_nextn_predict_layers"]
        kinds = c["mlp_layer_types"] + ["sparse"] * mtp
        indexers = c["indexer_types"] + ["full"] * mtp
        for layer, (kind, indexer) in enumerate(zip(kinds, indexers)):
            self.layer(f"model.layers.{layer}", kind, indexer == "full")
        if mtp:
            prefix = f"model.layers.{c['num_hidden_layers']}"
            for name in ("enorm", "hnorm", "shared_head.norm"):
                self.plain(f"{prefix}.{name}.weight", hidden)
            self.linear(f"{prefix}.eh_proj", 2 * hidden, hidden)

    def plain(self, name, *shape, dtype=None):
        self.tensors[name] = (0.1 * torch.randn(shape)).to(dtype or self.dtype)

    def linear(self, name, in_features, out_features):
        if self.quantized:
            self.tensors |= exl3_matrix(name, in_features, out_features, self.bits, self.codebook)
        else:
            self.plain(f"{name}.weight", out_features, in_features)

    def mlp(self, prefix, width):
        hidden = self.config["hidden_size"]
        self.linear(f"{prefix}.gate_proj", hidden, width)
        self.linear(f"{prefix}.up_proj", hidden, width)
        self.linear(f"{prefix}.down_proj", width, hidden)

    def layer(self, prefix, kind, indexer):
        c = self.config
        hidden, heads, rope = c["hidden_size"], c["num_attention_heads"], c["qk_rope_head_dim"]
        q_rank, kv_rank, nope, value = c["q_lora_rank"], c["kv_lora_rank"], c["qk_nope_head_dim"], c["v_head_dim"]
        self.plain(f"{prefix}.input_layernorm.weight", hidden)
        self.plain(f"{prefix}.post_attention_layernorm.weight", hidden)
        attention = f"{prefix}.self_attn"
        self.linear(f"{attention}.q_a_proj", hidden, q_rank)
        self.plain(f"{attention}.q_a_layernorm.weight", q_rank)
        self.linear(f"{attention}.q_b_proj", q_rank, heads * (nope + rope))
        self.linear(f"{attention}.kv_a_proj_with_mqa", hidden, kv_rank + rope)
        self.plain(f"{attention}.kv_a_layernorm.weight", kv_rank)
        self.plain(f"{attention}.kv_b_proj.weight", heads * (nope + value), kv_rank)
        self.linear(f"{attention}.o_proj", heads * value, hidden)
        if indexer:
            index_heads, index_dim = c["index_n_heads"], c["index_head_dim"]
            self.linear(f"{attention}.indexer.wq_b", q_rank, index_heads * index_dim)
            self.plain(f"{attention}.indexer.wk.weight", index_dim, hidden)
            self.plain(f"{attention}.indexer.k_norm.weight", index_dim)
            self.plain(f"{attention}.indexer.k_norm.bias", index_dim)
            self.plain(f"{attention}.indexer.weights_proj.weight", index_heads, hidden)
        if kind == "dense":
            self.mlp(f"{prefix}.mlp", c["intermediate_size"])
            return
        self.plain(f"{prefix}.mlp.gate.weight", c["n_routed_experts"], hidden)
        self.plain(f"{prefix}.mlp.gate.e_score_correction_bias", c["n_routed_experts"], dtype=torch.float32)
        self.mlp(f"{prefix}.mlp.shared_experts", c["moe_intermediate_size"] * c["n_shared_experts"])
        for expert in range(c["n_routed_experts"]):
            self.mlp(f"{prefix}.mlp.experts.{expert}", c["moe_intermediate_size"])

    def rank_slice(self, tp, *, bits=3, codebook=Codebook.MCG, shared_h=False):
        """Puts slices for `tp` ranks in the place of all routed experts, each with values of its own.

        bits: one rate; a list, of which the experts have one each in turn (`tier_bitmap.json` says so); or a dict by
        projection.
        """
        c = self.config
        hidden, width, experts = c["hidden_size"], c["moe_intermediate_size"] // tp, c["n_routed_experts"]
        last = c["num_hidden_layers"] + c["num_nextn_predict_layers"] - 1
        span = [c["mlp_layer_types"].index("sparse"), last]
        for name in self.matching(".mlp.experts."):
            del self.tensors[name]
        for layer in range(span[0], last + 1):
            prefix = f"model.layers.{layer}.mlp.experts"
            for projection in ("gate_proj", "up_proj", "down_proj"):
                sizes = (width, hidden) if projection == "down_proj" else (hidden, width)
                common = "svh" if projection == "down_proj" else "suh"
                for rank in range(tp):
                    for expert in range(experts):
                        rate = bits[projection] if isinstance(bits, dict) else bits
                        rate = rate[expert % len(rate)] if isinstance(rate, list) else rate
                        name = f"{prefix}.{expert}.{projection}.rank{rank}"
                        matrix = exl3_matrix(name, *sizes, rate, codebook)
                        if shared_h:
                            vector = matrix.pop(f"{name}.{common}")
                            self.tensors[f"{prefix}.shared_h.{projection}.rank{rank}.{common}"] = vector
                        self.tensors |= matrix
        section = {"format": "exl3-trellis", "bits": bits, "codebook": codebook.label, "experts_per_layer": experts}
        parts = f"{{trellis|suh|svh|{codebook.label}}}"
        section |= {"moe_layers": span, "tp": tp, "rotation_layout": "shared_h_v1" if shared_h else "per_expert_v1"}
        section["tensor_schema"] = f"model.layers.{{L}}.mlp.experts.{{E}}.{{gate_proj|up_proj|down_proj}}.rank{{r}}.{parts}"
        if shared_h:
            section["shared_h_tensor_schema"] = "model.layers.{L}.mlp.experts.shared_h.{proj}.rank{r}.{suh|svh}"
        if isinstance(bits, dict):
            section |= {"bits": "mixed_tensor", "k_values": sorted(set(bits.values()))}
        if isinstance(bits, list):
            section |= {"bits": "mixed", "k_values": sorted(set(bits)), "bits_per_expert": "tier_bitmap.json:k"}
            rates = [bits[expert % len(bits)] for expert in range(experts)]
            self.files["tier_bitmap.json"] = {str(layer): {"k": rates} for layer in range(span[0], last + 1)}
        self.config["hybrid_tr3_tail"] = section
        return self

    def matching(self, text):
        return [name for name in self.tensors if text in name]

    def write(self, directory: Path, shards: int = 1) -> Path:
        """config.json and one `model.safetensors`, or several shards with their index."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in {"config.json": self.config, **self.files}.items():
            (directory / name).write_text(json.dumps(content))
        names = sorted(self.tensors)
        if shards == 1:
            save_file(self.tensors, directory / "model.safetensors")
            return directory
        weight_map = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = names[shard::shards]
            save_file({name: self.tensors[name] for name in part}, directory / file)
            weight_map |= dict.fromkeys(part, file)
        write_index(directory, weight_map)
        return directory


def write_index(directory: Path, weight_map: dict) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_headers_only(path: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """A safetensors file of the right size whose data was never written (a sparse file), but for the codebook markers.

    tensors: name -> (dtype, shape); wide types come first, as safetensors itself orders them.
    """
    bits = {"I16": 16, "F16": 16, "BF16": 16, "I32": 32, "F32": 32}
    header, offset, markers = {}, 0, b""
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (item[1][0] != "I32", -bits[item[1][0]])):
        size = math.prod(shape) * bits[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
        if dtype == "I32":
            markers += struct.pack("<I", {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}[name.rpartition(".")[2]])
    write_raw(path, header, offset)
    with path.open("r+b") as file:
        file.seek(8 + struct.unpack("<Q", file.read(8))[0])
        file.write(markers)


def write_raw(path: Path, header: dict | bytes, data_bytes: int = 0) -> None:
    """A safetensors file with this header, right or wrong, followed by a hole of `data_bytes`."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(8 + len(encoded) + data_bytes)


def split_safetensors(path: Path) -> tuple[dict, bytes]:
    """Header and data of a safetensors file, to be changed and written back."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def large_checkpoint(directory: Path, *, layers=98, experts=256) -> int:
    """A header-only checkpoint of 300,000 tensors in eight shards; returns the number of tensors."""
    kinds, indexers = ["dense"] * 2 + ["sparse"] * (layers - 2), ["full"] + ["shared"] * (layers - 1)
    config = {**CONFIG, "num_hidden_layers": layers, "n_routed_experts": experts, "num_nextn_predict_layers": 0}
    config |= {"mlp_layer_types": kinds, "indexer_types": indexers, "moe_intermediate_size": 128}
    small = Fabricated(num_nextn_predict_layers=0, moe_intermediate_size=128)
    codes = {torch.int16: "I16", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32", torch.float32: "F32"}
    kinds_of = {name: (codes[tensor.dtype], tuple(tensor.shape)) for name, tensor in small.tensors.items()}
    kinds_of = {n: (d, (experts, *s[1:]) if ".mlp.gate." in n else s) for n, (d, s) in kinds_of.items()}
    tensors = {name: kind for name, kind in kinds_of.items() if ".layers." not in name}
    expert = {name.split(".experts.0.")[1]: kind for name, kind in kinds_of.items() if ".layers.1.mlp.experts.0." in name}
    for layer in range(layers):
        template = min(layer, 2) if layer != 1 else 0
        for name, kind in kinds_of.items():
            if f".layers.{template}." in name and ".experts." not in name and (layer == 0 or ".indexer." not in name):
                tensors[name.replace(f".layers.{template}.", f".layers.{layer}.")] = kind
        if layer >= 2:
            for index in range(experts):
                for name, kind in expert.items():
                    tensors[f"model.layers.{layer}.mlp.experts.{index}.{name}"] = kind
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names, weight_map = list(tensors), {}
    per_shard = -(-len(names) // 8)
    for shard in range(8):
        file, part = f"model-{shard + 1:05d}-of-00008.safetensors", names[shard * per_shard : (shard + 1) * per_shard]
        write_headers_only(directory / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    write_index(directory, weight_map)
    return len(tensors)
