// How fast the bf16 dot product is here: processors of one name differ by a factor of four.
#pragma once

namespace hf_paged {

// Float32 operations per second of vdpbf16ps divided by those of FMA; call it only where the processor has both.
// Takes well under 2 ms: the shortest of several short runs of each, taken in turns.
double bf16_dot_speedup_avx512bf16();

}  // namespace hf_paged
