// Detection by CPUID and XGETBV, and the choices made on top of it. Compiled for plain x86-64: it must run anywhere.
#include "isa.h"

#include <cpuid.h>
#include <stdint.h>

#include <atomic>

#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "isa_probe.h"

namespace hf_paged {
namespace {

struct Leaf {
  unsigned a = 0, b = 0, c = 0, d = 0;
  Leaf(unsigned leaf, unsigned sub) {
    if (!__get_cpuid_count(leaf, sub, &a, &b, &c, &d)) a = b = c = d = 0;
  }
};

bool bit(unsigned word, int n) { return word >> n & 1; }

uint64_t enabled_state() {  // XCR0: which registers the operating system saves
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (uint64_t)high << 32 | low;
}

bool amx_granted() {
#ifdef __linux__
  const int request_permission = 0x1023, tile_data = 18;
  return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
  return false;
#endif
}

Isa detect() {
  const Leaf one(1, 0), seven(7, 0);
  if (!bit(one.c, 27)) return Isa::none;  // OSXSAVE
  const uint64_t state = enabled_state();
  const bool avx2 = bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5) && (state & 0x6) == 0x6;  // FMA, F16C, AVX2
  if (!avx2) return Isa::none;
  const bool avx512 = bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) && bit(seven.b, 31);  // F DQ BW VL
  if (!avx512 || (state & 0xe6) != 0xe6) return Isa::avx2;
  const bool amx = bit(seven.d, 24) && bit(seven.d, 22) && (state & 0x60000) == 0x60000;  // TILE, BF16
  return amx && has_bf16_dot() && amx_granted() ? Isa::amx : Isa::avx512;
}

// Below `none`: nothing was chosen, the detected level is used.
std::atomic<int> chosen{-1};
std::atomic<int> bf16_dot_choice{-1};

bool measured_bf16_dot() {
  static const bool faster = bf16_dot_speedup_avx512bf16() >= 1.3;
  return faster;
}

}  // namespace

Isa detected_isa() {
  static const Isa isa = detect();
  return isa;
}

Isa current_isa() {
  const int isa = chosen.load(std::memory_order_relaxed);
  return isa < 0 ? detected_isa() : (Isa)isa;
}

void set_isa(Isa isa) {
  if (isa <= detected_isa()) chosen = (int)isa;
}

bool has_bf16_dot() {
  static const bool found = bit(Leaf(7, 0).b, 16) && bit(Leaf(7, 1).a, 5);
  return found;
}

bool has_vnni() {
  static const bool found = bit(Leaf(7, 0).b, 16) && bit(Leaf(7, 0).c, 11);
  return found;
}

bool prefers_bf16_dot() {
  if (current_isa() < Isa::avx512 || !has_bf16_dot()) return false;
  const int choice = bf16_dot_choice.load(std::memory_order_relaxed);
  return choice < 0 ? measured_bf16_dot() : choice > 0;
}

void set_bf16_dot(int choice) { bf16_dot_choice = choice; }

}  // namespace hf_paged
