"""Fixtures: where the kernels run (a GPU, or Triton's interpreter on the CPU), test data, poisoned scratch."""

import importlib.util
import os
import pathlib

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU and importlib.util.find_spec("triton"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported

DATA = pathlib.Path(__file__).parent / "data"


def pytest_collection_modifyitems(config, items):
    gpus = torch.cuda.device_count() if HAS_GPU else 0
    for item in items:
        if "gpu" in item.keywords and gpus < 1:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
        if "multi_gpu" in item.keywords and gpus < 2:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(scope="session")
def testdata() -> pathlib.Path:
    """The larger test sets: $EXL3_TRITON_TESTDATA, or ../shared beside the repository; skips where neither is."""
    default = pathlib.Path(__file__).parents[2] / "shared"
    path = pathlib.Path(os.environ.get("EXL3_TRITON_TESTDATA", default))
    if not (path / "golden").is_dir():
        pytest.skip(f"needs the larger test data: set EXL3_TRITON_TESTDATA (looked in {path})")
    return path


@pytest.fixture
def device() -> str:
    """Where kernels run in this process: "cuda", or "cpu" with Triton's interpreter."""
    if not HAS_GPU and not importlib.util.find_spec("triton"):
        pytest.skip("needs triton (interpreter) or a GPU")
    return "cuda" if HAS_GPU else "cpu"


def products_in_bf16():
    """Teaches Triton's interpreter products of bf16, which it keeps as integers and would multiply as such."""
    from triton.language import bfloat16, float32
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    create_dot = InterpreterBuilder.create_dot

    def widened(x):
        if x.dtype.scalar != bfloat16:
            return x
        return TensorHandle((x.data.astype("uint32") << 16).view("float32"), float32)

    def create(self, a, b, *rest):
        return create_dot(self, widened(a), widened(b), *rest)

    InterpreterBuilder.create_dot = create


if not HAS_GPU and importlib.util.find_spec("triton"):
    products_in_bf16()


@pytest.fixture
def triton_backend():
    """CPU tensors go to the Triton kernels too, so that the interpreter runs what a GPU would."""
    from exl3_triton.ops._dispatch import override_backend

    with override_backend("triton"):
        yield


@pytest.fixture(autouse=True)
def poisoned_scratch(monkeypatch):
    """`torch.empty` and friends return NaN (or a large integer): reading what nothing wrote shows up as a wrong result."""

    def poison(function):
        def poisoned(*args, **kwargs):
            tensor = function(*args, **kwargs)
            tracing = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
            if tracing or tensor.device.type == "meta" or tensor.numel() == 0:
                return tensor
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return tensor
            if tensor.dtype.is_floating_point:
                return tensor.fill_(float("nan"))
            if tensor.dtype != torch.bool:
                return tensor.fill_(torch.iinfo(tensor.dtype).max // 3)
            return tensor

        return poisoned

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
