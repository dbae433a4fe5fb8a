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
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from exl3_triton.kv_format import KV_FORMATS, latent_bytes
from exl3_triton.ops.tuning import Device

# by name: the package exports functions of the same names
MODULES = [
    importlib.import_module(f"exl3_triton.ops.{name}")
    for name in ("attention", "head_matmul", "indexer", "kv_cache", "norm", "prefill", "rope", "swiglu")
]
attention, head_matmul, indexer, kv_cache, norm, prefill, rope, swiglu = MODULES

TYPES = {torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.float32: "*fp32"}
TYPES |= {torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
GLM = {"latent": 512, "rope": 64, "heads": 16, "nope": 192, "value": 256, "index_heads": 32}
MODELS = {
    "glm": GLM,
    "glm_tp1": {**GLM, "heads": 64},
    "deepseek": {**GLM, "heads": 128, "nope": 128, "value": 128, "index_heads": 64},
}


class Recorder:
    """Stands in for a kernel in its module: a launch becomes a compilation, specialised as Triton would."""

    def __init__(self, kernel: JITFunction, architecture: int, found: dict) -> None:
        self.kernel, self.architecture, self.found = kernel, architecture, found

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *args, **kwargs):
        options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages", "maxnreg") if name in kwargs}
        values = dict(zip(self.kernel.arg_names, args)) | kwargs
        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value, aligned = values[parameter.name], False
            if parameter.is_constexpr:
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name], aligned = TYPES[value.dtype], not parameter.do_not_specialize_on_alignment
            elif isinstance(value, float):
                signature[parameter.name] = "fp32"
            elif value == 1 and not parameter.do_not_specialize:
                signature[parameter.name], constants[parameter.name] = "constexpr", 1
            else:
                signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                aligned = value % 16 == 0 and not parameter.do_not_specialize
            if aligned:
                attributes[(i,)] = [["tt.divisibility", 16]]
        key = f"{self.kernel.__name__} {sorted((n, c) for n, c in constants.items() if c is not None)} {options}"
        if key not in self.found:
            source = ASTSource(fn=self.kernel, signature=signature, constexprs=constants, attrs=attributes)
            compiled = triton.compile(source, target=GPUTarget("cuda", self.architecture, 32), options=options)
            self.found[key] = {
                "kernel": self.kernel.__name__,
                "shared": compiled.metadata.shared,
                **resources(compiled.asm["cubin"]),
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
    found: dict[str, dict] = {}
    device = Device("sm_90" if architecture == 90 else "cuda", 132)
    for module in MODULES:
        if hasattr(module, "device_of"):
            module.device_of = lambda _: device
        for name, kernel in list(vars(module).items()):
            if isinstance(kernel, JITFunction) and name.endswith("_kernel"):
                setattr(module, name, Recorder(kernel, architecture, found))
    launch(case)
    return found


if __name__ == "__main__":
    json.dump(compile_case(sys.argv[1], int(sys.argv[2])), sys.stdout)
