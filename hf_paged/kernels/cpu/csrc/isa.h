// Which instructions this processor has, and which of them are used.
#pragma once

namespace hf_paged {

enum class Isa : int { none = 0, avx2 = 1, avx512 = 2, amx = 3 };

// The highest level that this processor and operating system can run; asks the kernel for AMX at the first call.
Isa detected_isa();

// The level in use: the detected one unless `set_isa` chose a lower one. A level that the machine lacks is ignored,
// so that no call can ever end in an illegal instruction; op_isa.cpp tells the user.
Isa current_isa();
void set_isa(Isa isa);

// Whether AVX-512 comes with the bf16 dot product (vdpbf16ps).
bool has_bf16_dot();

// Whether AVX-512 comes with the int8 dot product (vpdpbusd).
bool has_vnni();

// Whether the dot product is worth using: it was measured, at the first call, to do at least 1.3 times the float32
// operations of FMA. False without it and below the avx512 level.
bool prefers_bf16_dot();

// -1: as measured; 0: never; 1: wherever the processor has it. For tests and comparisons.
void set_bf16_dot(int choice);

}  // namespace hf_paged
