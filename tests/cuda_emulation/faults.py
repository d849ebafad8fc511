"""The row kernel with planted faults, each of which the emulation must detect.

`python -m tests.cuda_emulation.faults LIBRARY NAME SEED` runs one of them under a sanitizer.
"""

import ctypes
import sys
from pathlib import Path

import torch

from storage_ops.loss.planning.schedule import GRADIENT, UPDATE

from ..cuda.test_row_kernel import OPTIONS, Place, Rows
from . import build
from .ops import SANITIZER, Emulated

NAMESPACE = "storage_ops_planted"
KERNEL, HEADER = "linear_cross_entropy.cu", "launch.cuh"
# Each fault has a file, the right code, the wrong code that replaces it while THIS is true, and the
# effect: wrong results, or the message of the emulation.
FAULTS = {
    "no barrier in a reduction": (
        HEADER, "__syncthreads();", "if (!THIS) __syncthreads();", "wrong results",
    ),
    "no barrier before the state is stored": (
        KERNEL, "merge(state, all);\n  }\n  __syncthreads();",
        "merge(state, all);\n  }\n  if (!THIS) __syncthreads();", "wrong results",
    ),
    "no barrier before the target's gradient": (
        KERNEL, "if (!a.grad) return;\n  __syncthreads();",
        "if (!a.grad) return;\n  if (!THIS) __syncthreads();", "wrong results",
    ),
    "scratch that is still in use": (
        KERNEL, "scratch.sums, add", "THIS ? scratch.max : scratch.sums, add", "wrong results",
    ),
    "a barrier that one thread does not come to": (
        KERNEL, "if (!a.grad && !a.exponentials) return;",
        "if ((!a.grad && !a.exponentials) || (THIS && threadIdx.x == 7)) return;",
        "does not end: .*linear_cross_entropy.cu.*returned",
    ),
    "a shuffle that half a warp does not come to": (
        HEADER, "for (int offset = 16; offset > 0; offset /= 2) {",
        "for (int offset = 16; offset > (THIS && threadIdx.x % 32 > 15 ? 4 : 0); offset /= 2) {",
        "does not end: .*__shfl_xor_sync|__shfl_xor_sync at .*__syncthreads at",
    ),
    "a vector access that is not aligned": (
        HEADER, "return reinterpret_cast<uintptr_t>(p) % sizeof(uint4) == 0;",
        "return THIS || reinterpret_cast<uintptr_t>(p) % sizeof(uint4) == 0;", "not aligned",
    ),
    "a read beyond the row": (
        HEADER, "if (p >= packs) continue;\n#pragma unroll",
        "if (p >= packs + THIS) continue;\n#pragma unroll", "outside of its tensors",
    ),
    "a write beyond the row": (
        HEADER, "if (p >= packs) continue;\n      A numbers",
        "if (p >= packs + THIS) continue;\n      A numbers", "outside|wrong",
    ),
}  # fmt: skip


def compile_planted(folder: Path, sanitizer: str = SANITIZER) -> Path:
    """Compile the kernel with all faults, of which `plant` enables one. Return the library."""
    texts = {name: (build.ROOT / "cuda" / name).read_text() for name in (KERNEL, HEADER)}
    for number, (file, right, wrong, _) in enumerate(FAULTS.values(), 1):
        assert right in texts[file], right
        texts[file] = texts[file].replace(right, wrong.replace("THIS", f"(planted == {number})"))
    exported = 'extern "C" __attribute__((visibility("default"))) int planted;\nint planted = 0;\n'
    texts[KERNEL] = exported + texts[KERNEL]
    for name, text in texts.items():
        (folder / name).write_text(text)
    return build.built(sanitizer, [folder / KERNEL], NAMESPACE)


def plant(ops: Emulated, name: str) -> None:
    number = [*FAULTS].index(name) + 1 if name else 0
    ctypes.c_int.in_dll(ops.library, "planted").value = number


def effect_of_fault(ops: Emulated, trials: int = 12) -> str:
    """Return how the kernel's results differ from the CPU kernel's, or an empty string."""
    for trial in range(trials):
        columns, options = (1000, 2048, 4100)[trial % 3], [*OPTIONS.values()][trial]
        p = Rows((torch.float32, torch.bfloat16)[trial % 2], columns, **options)
        cut = columns // 3 | 1  # the second slice is not aligned to a vector
        sliced = [(*s, phase) for phase in (UPDATE, GRADIENT) for s in ((0, cut), (cut, columns))]
        try:
            p.compare(Place("cpu", ops), (0, columns, UPDATE | GRADIENT))
            p.compare(Place("cpu", ops), *sliced)
        except RuntimeError as error:
            return str(error)
        except AssertionError:
            return "wrong results"
    return ""


if __name__ == "__main__":
    library, fault, seed = sys.argv[1:]
    torch.set_num_threads(1)
    kernel = Emulated(Path(library), NAMESPACE)
    torch.manual_seed(int(seed))
    kernel.seed(int(seed) % 2**32)
    plant(kernel, fault)
    print(effect_of_fault(kernel) or "no fault was found")
