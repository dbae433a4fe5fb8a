"""Compile what a launcher would launch, for a GPU that need not be there: run it on meta tensors and record its kernels.

    python tests/compile_only.py CASE ARCHITECTURE      (prints JSON: kernel -> shared bytes, registers, spilled bytes)

A process of its own, without TRITON_INTERPRET, which turns kernels into Python functions when they are defined.
"""

import importlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver

from autotune.record import recording
from exl3_triton.kv_format import KV_FORMATS, latent_bytes
from exl3_triton.ops.tuning import Device

# by name: the package exports functions of the same names
MODULES = [
    importlib.import_module(f"exl3_triton.ops.{name}")
    for name in ("attention", "head_matmul", "indexer", "kv_cache", "norm", "prefill", "rope", "swiglu")
]
attention, head_matmul, indexer, kv_cache, norm, prefill, rope, swiglu = MODULES

GLM = {"latent": 512, "rope": 64, "heads": 16, "nope": 192, "value": 256, "index_heads": 32}
MODELS = {
    "glm": GLM,
    "glm_tp1": {**GLM, "heads": 64},
    "deepseek": {**GLM, "heads": 128, "nope": 128, "value": 128, "index_heads": 64},
}


def resources(cubin: bytes) -> dict[str, int]:
    tool = Path(driver.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {"registers": int(re.search(r"REG:(\d+)", text)[1]), "spilled": int(re.search(r"STACK:(\d+)", text)[1])}


def launch(case: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """The launches of one attention layer of a model."""
    model = MODELS[case]
    latent, width, heads, nope, value = (model[name] for name in ("latent", "rope", "heads", "nope", "value"))

    def meta(*shape, kind=dtype):
        return torch.empty(shape, dtype=kind, device="meta")

    def place(tokens):
        return meta(8, 2048, kind=torch.int32), meta(tokens, kind=torch.int32), meta(tokens, kind=torch.int64)

    cache, index_cache = meta(1000, 64, latent + width), meta(1000, 64, 128)
    w_kv, table = meta(heads, nope + value, latent), meta(131072, width, kind=torch.float32)
    w_uk, w_uv = w_kv[:, :nope], w_kv[:, nope:]
    for tokens in (4, 32, 300):  # one a regime
        block_table, sequence, positions = place(tokens)
        q = meta(tokens, heads, nope + width)
        rope._launch_rope(q, positions, table, True, nope)
        q_latent = head_matmul._launch_head_matmul(q[..., :nope], w_uk)
        args = (q_latent, q[..., nope:], cache, block_table, sequence, positions)
        attention._launch_mla_decode(*args, None, 0.1, 131072)
        attention._launch_mla_decode(*args, meta(tokens, 2048, kind=torch.int32), 0.1, 131072)
        head_matmul._launch_head_matmul(q_latent, w_uv.transpose(1, 2))
        index_q = meta(tokens, model["index_heads"], 128)
        prefill._launch_mla_prefill(q, cache, w_uk, w_uv, block_table, sequence, positions, 0.1, 131072)
        for kv in KV_FORMATS[1:]:
            packed = meta(1000, 64, latent_bytes(kv, latent, width), kind=torch.uint8)
            attention._launch_mla_decode(q_latent, q[..., nope:], packed, *place(tokens), None, 0.1, 131072)
            if kv == "fp8":
                tile = attention.DecodeTile(16, 32, 8, 3, words=True)
                attention._launch_mla_decode(q_latent, q[..., nope:], packed, *place(tokens), None, 0.1, 131072, tile=tile)
            prefill._launch_mla_prefill(q, packed, w_uk, w_uv, *place(tokens), 0.1, 131072)
            written = (meta(tokens, latent + width), meta(latent), 1e-6, positions, positions, table, packed, True)
            kv_cache._launch_mla_kv_write(*written)
        for index_keys in (meta(1000, 64, 132, kind=torch.uint8), index_cache):
            key = (meta(tokens, 128), meta(128), meta(128), 1e-6, positions, positions, table)
            kv_cache._launch_index_k_write(*key, index_keys, True)
            weights = meta(tokens, model["index_heads"], kind=torch.float32)
            for context in (4096, 131072):
                indexer._launch_index_select(index_q, weights, index_keys, *place(tokens), 2048, context)
        norm._launch_rms_norm(meta(tokens, 6144), meta(6144), 1e-6, dtype)
        norm._launch_rms_norm(meta(tokens, 6144), meta(6144), 1e-6, dtype, meta(tokens, 6144))
        swiglu._launch_swiglu(meta(tokens, 2048), meta(tokens, 2048), None, dtype)
        slots = positions
        kv_cache._launch_mla_kv_write(meta(tokens, latent + width), meta(latent), 1e-6, positions, slots, table, cache, True)


def compile_case(case: str, architecture: int) -> dict[str, dict]:
    device = Device("sm_90" if architecture == 90 else "cuda", 132)
    with recording(MODULES, GPUTarget("cuda", architecture, 32), device) as found:
        launch(case)
    return {
        key: {"kernel": name, "shared": compiled.metadata.shared, **resources(compiled.asm["cubin"])}
        for key, (name, compiled) in found.items()
    }


if __name__ == "__main__":
    json.dump(compile_case(sys.argv[1], int(sys.argv[2])), sys.stdout)
