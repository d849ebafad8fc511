"""The row kernel with planted faults, each of which the emulation must detect.

`python -m tests.cuda_emulation.faults LIBRARY NAME SEED` runs one of them under a sanitizer.
"""

import ctypes
import sys
from pathlib import Path

import torch

from storage_ops.loss.planning.schedule import GRADIENT, UPDATE

from ..cuda.test_row_kernel import OPTIONS, STREAMED, Place, Rows
from . import build
from .ops import SANITIZER, Emulated

NAMESPACE = "storage_ops_planted"
KERNEL, HEADER, STREAM = "linear_cross_entropy.cu", "launch.cuh", "streamed_rows.cuh"
FILES = (KERNEL, HEADER, STREAM, "rows.cuh")
# Each fault has a file, the right code, the wrong code that replaces it while THIS is true, and the
# effect: wrong results of a race, other wrong results, or the message of the emulation.
RACE, UNLANDED = "wrong results", "wrong|without waiting for its copies"
FAULTS = {
    "no barrier in a reduction": (
        HEADER, "__syncthreads();", "if (!THIS) __syncthreads();", RACE,
    ),
    "no barrier before the state is stored": (
        KERNEL, "merge(state, all);\n  }\n  __syncthreads();",
        "merge(state, all);\n  }\n  if (!THIS) __syncthreads();", RACE,
    ),
    "no barrier before the target's gradient": (
        KERNEL, "if (!a.grad) return;\n  __syncthreads();",
        "if (!a.grad) return;\n  if (!THIS) __syncthreads();", RACE,
    ),
    "scratch that is still in use": (
        KERNEL, "scratch.sums, add", "THIS ? scratch.max : scratch.sums, add", RACE,
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
    "a piece that has not landed": (
        STREAM, "wait_for_copies<kSlots - 1>();",
        "if (THIS) wait_for_copies<kSlots>(); else wait_for_copies<kSlots - 1>();", UNLANDED,
    ),
    "a group that is missing": (
        STREAM, "wait_for_copies<kSlots - 1>();\n      end_group_of_copies();",
        "wait_for_copies<kSlots - 1>();\n      if (!THIS) end_group_of_copies();", UNLANDED,
    ),
    "a slot that is filled too early": (
        STREAM, "if (is_full(piece)) {\n        overwrite_piece",
        "if (THIS) copy_next(slot_of(piece));\n"
        "if (is_full(piece)) {\n        overwrite_piece", "wrong",
    ),
    "copies that no thread waits for": (
        STREAM, "const bool exists = next_row_ < a_.rows;",
        "const bool exists = THIS ? next_row_ < a_.rows + rows_between_ : next_row_ < a_.rows;",
        "without waiting|outside",
    ),
    "a copy beyond the row": (
        STREAM, "if (left > 0) copy_async(",
        "if (THIS) copy_async(&slot(free_slot, u), next_from_ + u * blockDim.x);\n"
        "if (left > 0) copy_async(", "outside",
    ),
    "a write of a whole pack at the end of a row": (
        STREAM, "if (count >= kPack<T>) {", "if (count >= kPack<T> || (THIS && count > 0)) {",
        "outside|wrong",
    ),
    "letters of two rows in one mailbox": (
        STREAM, "scratch.results[number % 2]", "scratch.results[THIS ? 0 : number % 2]",
        "does not end|before the last round|not expected|wrong",
    ),
    "letters that are read before they arrive": (
        STREAM, "results.wait(number / 2 % 2);",
        "if (!THIS || threadIdx.x == 0) results.wait(number / 2 % 2);", RACE,
    ),
    "a block that gets no letter": (
        STREAM, "if (threadIdx.x < d.blocks) {", "if (threadIdx.x < d.blocks - THIS) {",
        "does not end: .*Mailbox::wait",
    ),
    "letters before all blocks have begun": (
        STREAM, "    cluster_barrier();", "    if (!THIS) cluster_barrier();", "may not have begun",
    ),
}  # fmt: skip


def compile_planted(folder: Path, sanitizer: str = SANITIZER) -> Path:
    """Compile the kernel with all faults, of which `plant` enables one. Return the library."""
    texts = {name: (build.ROOT / "cuda" / name).read_text() for name in FILES}
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
        streamed = Rows(p.logits.dtype, columns + 3, phases=STREAMED, upstream=[1.0, 0.0, -0.5])
        try:
            streamed.compare(Place("cpu", ops), (0, columns + 3, UPDATE | GRADIENT))
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
